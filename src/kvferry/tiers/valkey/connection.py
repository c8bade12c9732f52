"""One greeted connection to one server: small commands, and values straight to and from pool memory."""

import contextlib
import time

from kvferry.addresses import Address
from kvferry.errors import CorruptError
from kvferry.identity.header import HEADER_BYTES
from kvferry.tiers.valkey.login import check_replies, first_commands, why_lost
from kvferry.tiers.valkey.protection import Guard, Outgoing, Received, ValueName
from kvferry.tiers.valkey.resp import (
    ProtocolError,
    Reader,
    Reply,
    ServerError,
    command,
    parse_number,
    value_command,
)
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import (
    DroppedError,
    ExpiredError,
    Patience,
    Stream,
    UnreachableError,
    Until,
    dial,
)
from kvferry.tiers.valkey.tls import Tls


class Connection:
    """Used by one thread; ``abort`` may be called by any. After any exception, close it."""

    def __init__(self, stream: Stream, guard: Guard) -> None:
        self._stream = stream
        self._reader = Reader(stream)
        self._guard = guard

    @classmethod
    def open(
        cls, address: Address, settings: ValkeySettings, *, tls: Tls | None, deadline: float
    ) -> "Connection":
        """Connect and authenticate before ``deadline``.

        Raises DroppedError, StalledError or ExpiredError, or MisconfiguredError when the server refuses us.
        """
        began = time.monotonic()
        until = min(deadline, began + settings.connect_s)
        timeout_s = max(until - began, 0.001)
        try:
            stream = dial(address, tls=tls, timeout_s=timeout_s, stall_s=settings.stall_s)
        except UnreachableError as error:
            now = time.monotonic()
            if now >= deadline:  # the request had little time left: that says nothing about the server
                raise ExpiredError(str(error), still_s=now - began) from error
            raise
        connection = cls(stream, settings.protection.guard())
        try:
            connection._greet(address, settings, tls=tls, patience=Until(until))
        except ExpiredError as error:
            stream.close()
            if time.monotonic() < deadline:  # it is the greeting that took too long, not the request
                raise UnreachableError(f"{address}: no greeting within {settings.connect_s} s") from error
            raise
        except BaseException:
            stream.close()
            raise
        return connection

    def _greet(
        self, address: Address, settings: ValkeySettings, *, tls: Tls | None, patience: Patience
    ) -> None:
        commands = first_commands(settings)
        replies: list[Reply] = []
        try:
            with contextlib.suppress(DroppedError):  # the server may have said why: reading tells
                self._stream.send([b"".join(commands)], patience)
            while len(replies) < len(commands):
                replies.append(self._reader.reply(patience))
        except DroppedError as error:
            check_replies(address, settings.url, replies)
            told = why_lost(address, error, tls=tls, unread=self._reader.unread)
            if told is None:
                raise
            raise told from error
        check_replies(address, settings.url, replies)

    def request(self, *words: bytes, patience: Patience) -> Reply:
        """Send one small command and wait for its reply."""
        self.send_commands(command(*words), patience)
        return self._reader.reply(patience)

    def send_commands(self, commands: bytes, patience: Patience) -> None:
        """Send one or more small commands."""
        self._stream.send([commands], patience)

    def protected(self, name: ValueName, *, payload: memoryview, checksum: bytes) -> Outgoing:
        """The value to store for a payload; good until the next call."""
        return self._guard.sending(name, payload=payload, checksum=checksum)

    def send_value(self, words: bytes, value: Outgoing, patience: Patience) -> None:
        """Send a command that ends in a value, the payload straight from its memory."""
        self._stream.send([words + value.header, value.payload, b"\r\n"], patience)

    def rest(self) -> None:
        """Call before the first request after idling."""
        self._stream.rest()

    @property
    def still_s(self) -> float:
        """Seconds since bytes last moved."""
        return time.monotonic() - self._stream.progress_at

    def reply(self, patience: Patience) -> Reply:
        """The next reply, of a command that returns little."""
        return self._reader.reply(patience)

    def value(
        self, name: ValueName, into: memoryview, patience: Patience, *, version: int = 0
    ) -> Received | ServerError | None:
        """The next reply, of a GET: its payload into ``into``, and whether it is what its header promises.

        None if the key is absent. version: which of the protection's suffixes the key has. Length and header
        are verified before ``into`` is written; CorruptError then leaves the payload unread. That the value
        ends where it should is seen with the next reply.
        """
        stored_bytes = HEADER_BYTES + name.stripe.nbytes
        expected = b"$%d" % stored_bytes
        line = self._reader.line(patience, most=len(expected) + 2 + HEADER_BYTES)
        if line != expected:
            return self._no_value(line, stored_bytes)
        header = self._reader.small(HEADER_BYTES, patience)
        intake = self._guard.receiving(header, name, version=version, into=into)
        for piece in intake.pieces():
            self._reader.into(piece, patience)
        self._reader.owe_end_of_bulk()
        return intake.result()

    def _no_value(self, line: bytes, stored_bytes: int) -> ServerError | None:
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        if kind == b"_" or line == b"$-1":
            return None
        if kind != b"$":
            raise ProtocolError(f"unexpected reply {line[:40]!r} to GET")
        raise CorruptError(f"stored value has {parse_number(rest)} bytes, expected {stored_bytes}")

    def abort(self) -> None:
        """Wake the thread that waits on this connection; it gets DroppedError."""
        self._stream.abort()

    def close(self) -> None:
        """Close the socket: replies that are still due are given up with it."""
        with contextlib.suppress(OSError):
            self._stream.close()


def set_command(key: bytes, stored_bytes: int, *, life_ms: int | None = None) -> bytes:
    """The start of a SET of a value of ``stored_bytes`` bytes. life_ms: after which it expires, if ever."""
    words = (b"SET", key) if life_ms is None else (b"PSETEX", key, b"%d" % life_ms)
    return value_command(words, stored_bytes)
