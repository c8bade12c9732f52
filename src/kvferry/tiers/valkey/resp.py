"""RESP2: commands out, replies in. https://valkey.io/topics/protocol/

Replies are read from a small buffer; a value's payload never passes through it (``connection.py``).
"""

import enum
from collections.abc import Sequence

from kvferry.errors import KvferryError
from kvferry.tiers.valkey.stream import DroppedError, Patience, Stream

BUFFER_BYTES = 64 << 10
MAX_LINE_BYTES = 8 << 10
MAX_REPLY_BYTES = 16 << 20  # of a whole reply with all that it holds
ELEMENT_BYTES = 64  # what an element costs besides its bytes
MAX_ARRAY = 1 << 16
MAX_DEPTH = 8


class ErrorKind(enum.Enum):
    """What an error reply asks of us."""

    OUT_OF_MEMORY = "out_of_memory"
    NOT_ALLOWED = "not_allowed"
    MOVED = "moved"
    ASK = "ask"
    READ_ONLY = "read_only"
    WRONG_TYPE = "wrong_type"
    UNAVAILABLE = "unavailable"  # loading, busy, no quorum, resharding: passes by itself
    OTHER = "other"


_KINDS = {
    "OOM": ErrorKind.OUT_OF_MEMORY,
    "NOPERM": ErrorKind.NOT_ALLOWED,
    "NOAUTH": ErrorKind.NOT_ALLOWED,
    "WRONGPASS": ErrorKind.NOT_ALLOWED,
    "DENIED": ErrorKind.NOT_ALLOWED,
    "MOVED": ErrorKind.MOVED,
    "ASK": ErrorKind.ASK,
    "READONLY": ErrorKind.READ_ONLY,
    "WRONGTYPE": ErrorKind.WRONG_TYPE,
    "LOADING": ErrorKind.UNAVAILABLE,
    "BUSY": ErrorKind.UNAVAILABLE,
    "TRYAGAIN": ErrorKind.UNAVAILABLE,
    "CLUSTERDOWN": ErrorKind.UNAVAILABLE,
    "MASTERDOWN": ErrorKind.UNAVAILABLE,
    "MISCONF": ErrorKind.UNAVAILABLE,
    "NOREPLICAS": ErrorKind.UNAVAILABLE,
}


class ServerError(KvferryError):
    """An error reply. It is a whole reply: the stream goes on behind it."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line.partition(" ")[0]
        self.kind = _KINDS.get(self.code, ErrorKind.OTHER)


class ProtocolError(DroppedError):
    """The other side does not speak RESP, or exceeded a limit. The connection cannot be used further."""


Reply = bytes | int | None | ServerError | list["Reply"]


def command(*words: bytes) -> bytes:
    """A command as the array of bulk strings it is sent as."""
    head = b"*%d\r\n" % len(words)
    return head + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def value_command(words: Sequence[bytes], value_bytes: int) -> bytes:
    """The start of a command whose last word, of ``value_bytes`` bytes, follows (then CRLF)."""
    head = b"*%d\r\n" % (len(words) + 1)
    return (
        head + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]) + b"$%d\r\n" % value_bytes
    )


def info_facts(info: bytes) -> dict[str, str]:
    """What ``INFO`` says, by name."""
    pairs = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


class Reader:
    """Replies from a stream, through a buffer that holds little more than what was asked for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._memory = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._owed = False
        self._room = 0

    @property
    def buffered(self) -> int:
        """Bytes received but not consumed."""
        return self._end - self._start

    @property
    def unread(self) -> bytes:
        """What was received but not consumed: to tell what kind of thing has answered."""
        return bytes(self._view[self._start : self._end])

    def _fill(self, patience: Patience, most: int) -> None:
        """Receive at least one and at most ``most`` more bytes."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end + most > BUFFER_BYTES:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = min(most, BUFFER_BYTES - self._end)
        self._end += self._stream.receive(self._view[self._end : self._end + room], patience)

    def line(self, patience: Patience, *, most: int = BUFFER_BYTES // 2) -> bytes:
        """One line without its CRLF; at most ``most`` bytes are taken off the stream at a time."""
        if self._owed:
            self._take_owed(patience, most)
        searched = self._start
        while True:
            at = self._memory.find(b"\r\n", searched, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self.buffered > MAX_LINE_BYTES:
                raise ProtocolError(
                    f"reply line longer than {MAX_LINE_BYTES} bytes: is this a Valkey server?"
                )
            have = self.buffered
            self._fill(patience, most)
            searched = self._start + max(0, have - 1)

    def small(self, count: int, patience: Patience) -> bytes:
        """Exactly ``count`` bytes, no more taken off the stream."""
        while self.buffered < count:
            self._fill(patience, count - self.buffered)
        data = bytes(self._view[self._start : self._start + count])
        self._start += count
        return data

    def into(self, target: memoryview, patience: Patience) -> None:
        """Fill ``target``: from the buffer what is there, the rest straight from the socket."""
        have = min(self.buffered, target.nbytes)
        if have:
            target[:have] = self._view[self._start : self._start + have]
            self._start += have
        if have < target.nbytes:
            self._stream.receive_exactly(target[have:], patience)

    def end_of_bulk(self, patience: Patience) -> None:
        """The CRLF behind a value."""
        if self.small(2, patience) != b"\r\n":
            raise ProtocolError("a value is not followed by CRLF")

    def owe_end_of_bulk(self) -> None:
        """Take that CRLF off the stream with the next reply: a system call less for each value."""
        self._owed = True

    def _take_owed(self, patience: Patience, most: int) -> None:
        self._owed = False
        while self.buffered < 2:
            self._fill(patience, most + 2 - self.buffered)
        self.end_of_bulk(patience)

    def reply(self, patience: Patience) -> Reply:
        """One reply of any kind. Error replies are returned, not raised."""
        self._room = MAX_REPLY_BYTES
        return self._element(patience, depth=0)

    def _element(self, patience: Patience, *, depth: int) -> Reply:
        line = self.line(patience)
        self._spend(len(line) + ELEMENT_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        if kind == b"_":
            return None
        if kind not in (b":", b"$", b"*"):
            raise ProtocolError(f"unexpected reply {line[:40]!r}: is this a Valkey server?")
        number = parse_number(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$":
            return self._bulk(number, patience)
        if depth >= MAX_DEPTH or not 0 <= number <= MAX_ARRAY:
            raise ProtocolError(f"array of {number} elements at depth {depth} exceeds the limits")
        return [self._element(patience, depth=depth + 1) for _ in range(number)]

    def _bulk(self, count: int, patience: Patience) -> bytes:
        self._spend(count)
        data = bytearray()
        while len(data) < count:  # memory follows what arrives, not what is announced
            piece = bytearray(min(count - len(data), BUFFER_BYTES))
            self.into(memoryview(piece), patience)
            data += piece
        self.end_of_bulk(patience)
        return bytes(data)

    def _spend(self, nbytes: int) -> None:
        """Take what an element needs from the reply's allowance, before it is allocated."""
        if not 0 <= nbytes <= self._room:
            raise ProtocolError(f"a reply exceeds {MAX_REPLY_BYTES} bytes: is this a Valkey server?")
        self._room -= nbytes


def parse_number(text: bytes) -> int:
    """A decimal integer as RESP writes it."""
    if not text.removeprefix(b"-").isdigit() or len(text) > 20:
        raise ProtocolError(f"expected a number, found {text[:40]!r}")
    return int(text)
