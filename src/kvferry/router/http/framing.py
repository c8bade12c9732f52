"""Where the body of a message ends (RFC 9112, section 6). Pure: bytes are looked at, and stay as they are."""

from typing import Protocol

from kvferry.errors import CorruptError

GOES_ON = -1
MAX_CHUNK_LINE_BYTES = 256  # of a size with its extensions
MAX_TRAILER_BYTES = 8 << 10
_HEXADECIMAL = frozenset(b"0123456789abcdefABCDEF")
_MAX_SIZE_DIGITS = 15


class Body(Protocol):
    """Follows one body."""

    def feed(self, data: bytes, into: list[bytes] | None = None) -> int:
        """Where in data the body ends, GOES_ON if it does not. into: gets the content, without framing.

        Raises CorruptError where the framing is none.
        """
        ...

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is that of the body."""
        ...

    @property
    def between_pieces(self) -> bool:
        """Whether a chunk of one's own could be put in here, after what is not unsure."""
        ...

    @property
    def unsure(self) -> bytes:
        """The last bytes that were fed, which may turn out to be no framing: not to be passed on yet."""
        ...


class Sized:
    """Content-Length. Of 0 bytes: it ends where it begins."""

    __slots__ = ("_left",)
    ends_with_connection = False
    between_pieces = False
    unsure = b""

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes, into: list[bytes] | None = None) -> int:
        """See ``Body``."""
        size = len(data)
        if size < self._left:
            self._left -= size
            if into is not None and data:
                into.append(data)
            return GOES_ON
        end, self._left = self._left, 0
        if into is not None and end:
            into.append(data[:end])
        return end


class UntilClosed:
    """Neither length nor chunks: what comes until the connection ends."""

    __slots__ = ()
    ends_with_connection = True
    between_pieces = True
    unsure = b""

    def feed(self, data: bytes, into: list[bytes] | None = None) -> int:
        """See ``Body``."""
        if into is not None:
            into.append(data)
        return GOES_ON


class Chunked:
    """``Transfer-Encoding: chunked``.

    ╭─► SIZE ──n > 0──► DATA ──► DATA_END ─╮
    ╰──────────────────────────────────────╯
          ╰──0──► TRAILER ──empty line──► the end
    """

    __slots__ = ("_data_left", "_held", "_state", "_trailer_bytes")
    ends_with_connection = False

    _SIZE, _DATA, _DATA_END, _TRAILER, _OVER = range(5)

    def __init__(self) -> None:
        self._state = self._SIZE
        self._held = b""  # of a line that is not whole yet
        self._data_left = 0
        self._trailer_bytes = 0

    @property
    def between_pieces(self) -> bool:
        """See ``Body``."""
        return self._state == self._SIZE

    @property
    def unsure(self) -> bytes:
        """See ``Body``."""
        return self._held if self._held and self._state in (self._SIZE, self._TRAILER) else b""

    def feed(self, data: bytes, into: list[bytes] | None = None) -> int:
        """See ``Body``."""
        held = len(self._held)
        if held:
            data = self._held + data
            self._held = b""
        at, size = 0, len(data)
        while at < size:
            if self._state == self._DATA:
                taken = min(self._data_left, size - at)
                if into is not None:
                    into.append(data[at : at + taken])
                at += taken
                self._data_left -= taken
                if not self._data_left:
                    self._state = self._DATA_END
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._hold(data[at:])
                return GOES_ON
            if self._line(data, at, end):
                return end + 2 - held
            at = end + 2
        return GOES_ON

    def _hold(self, rest: bytes) -> None:
        if len(rest) > (MAX_TRAILER_BYTES if self._state == self._TRAILER else MAX_CHUNK_LINE_BYTES):
            raise CorruptError("a line between chunks is too long")
        if self._state == self._DATA_END and rest != b"\r":
            raise CorruptError("a chunk is longer than it said")
        if self._state == self._SIZE and not _HEXADECIMAL.issuperset(rest[:1]):
            raise CorruptError("a chunk has no size")
        if b"\n" in rest:
            raise CorruptError("a line between chunks has no end")
        self._held = rest

    def _line(self, data: bytes, at: int, end: int) -> bool:
        """Whether it was the last."""
        if self._state == self._SIZE:
            self._data_left = _chunk_size(data[at:end])
            self._state = self._DATA if self._data_left else self._TRAILER
        elif self._state == self._DATA_END:
            if end != at:
                raise CorruptError("a chunk is longer than it said")
            self._state = self._SIZE
        else:
            if data.find(b"\n", at, end) >= 0 or data.find(b"\r", at, end) >= 0:
                raise CorruptError("a line of the trailer has no end")
            self._trailer_bytes += end - at
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise CorruptError("the trailer is too long")
            if end == at:
                self._state = self._OVER
                return True
        return False


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].rstrip(b" \t") if b";" in line else line
    if not 0 < len(digits) <= _MAX_SIZE_DIGITS or not _HEXADECIMAL.issuperset(digits):
        raise CorruptError("a chunk has no size")
    if len(line) > MAX_CHUNK_LINE_BYTES or b"\n" in line or b"\r" in line:
        raise CorruptError("a chunk's size has no end")
    return int(digits, 16)
