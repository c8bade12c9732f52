"""A socket whose every wait is bounded, reading into and writing from memory the caller owns.

The socket stays blocking, so that one system call moves as much as it can with the GIL free, but the
kernel's own send and receive time-outs (SO_RCVTIMEO, SO_SNDTIMEO) bring it back every TICK_S to look at
the deadline. Python's settimeout would instead add a poll() before every call. TLS sockets must use it,
since OpenSSL retries an interrupted read by itself.
"""

import contextlib
import errno
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from kvferry.addresses import Address
from kvferry.errors import ClosedError, KvferryError, RetryError
from kvferry.tiers.valkey.resolve import connect, time_left
from kvferry.tiers.valkey.tls import Tls

TICK_S = 0.02
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))
_MAX_BUFFERS = 64


class DroppedError(ClosedError):
    """The connection broke, or could not be made."""


class UnreachableError(DroppedError):
    """No connection could be made at all."""


class StalledError(RetryError):
    """The server took a request and then nothing moved for the stall time."""


class ExpiredError(RetryError):
    """The deadline passed or the caller cancelled; nothing had moved for the last ``still_s`` seconds."""

    def __init__(self, message: str, *, still_s: float) -> None:
        super().__init__(message)
        self.still_s = still_s


class Patience(Protocol):
    """How long a wait may last: until ``deadline`` (monotonic seconds), or until cancelled."""

    deadline: float

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer wants the result."""
        ...


class Until:
    """Patience with a deadline alone."""

    __slots__ = ("deadline",)
    cancelled = False

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline


class Stream:
    """One connected socket. Used by one thread; ``abort`` may be called by any."""

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        self._socket = sock
        self._stall_s = stall_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        self.progress_at = time.monotonic()

    def send(self, buffers: Sequence[bytes | memoryview], patience: Patience) -> None:
        """Send all of ``buffers``. Raises Dropped, Stalled or ExpiredError; the stream is then unusable."""
        queue = [memoryview(buffer) for buffer in buffers]
        while queue:
            try:
                if self._tls:
                    sent = self._socket.send(queue[0])
                else:
                    sent = self._socket.sendmsg(queue[:_MAX_BUFFERS])
            except (BlockingIOError, TimeoutError):
                self._idle(patience)
                continue
            except OSError as error:
                raise DroppedError(f"connection lost while sending: {error}") from error
            self._moved(patience)
            while queue and sent >= queue[0].nbytes:
                sent -= queue.pop(0).nbytes
            if sent:
                queue[0] = queue[0][sent:]

    def receive(self, view: memoryview, patience: Patience, flags: int = 0) -> int:
        """Receive at least one byte into ``view``; the number received."""
        while True:
            try:
                count = self._socket.recv_into(view, 0, flags)
            except (BlockingIOError, TimeoutError):
                self._idle(patience)
                continue
            except OSError as error:
                raise DroppedError(f"connection lost while receiving: {error}") from error
            if not count:
                raise DroppedError("the server closed the connection")
            self._moved(patience)
            return count

    def receive_exactly(self, view: memoryview, patience: Patience) -> None:
        """Fill ``view``, with as few system calls as the kernel allows."""
        flags = 0 if self._tls else socket.MSG_WAITALL
        done = 0
        while done < view.nbytes:
            done += self.receive(view[done:], patience, flags)

    def rest(self) -> None:
        """Call before sending the first request after idling, so that idleness is not taken for a stall."""
        self.progress_at = time.monotonic()

    def _moved(self, patience: Patience) -> None:
        now = time.monotonic()
        self.progress_at = now
        if now >= patience.deadline:
            raise ExpiredError("deadline passed during a transfer", still_s=0.0)

    def _idle(self, patience: Patience) -> None:
        now = time.monotonic()
        still_s = now - self.progress_at
        if now >= patience.deadline or patience.cancelled:
            raise ExpiredError("no reply before the deadline", still_s=still_s)
        if still_s >= self._stall_s:
            raise StalledError(f"nothing moved for {still_s:.2f} s")

    def abort(self) -> None:
        """Wake a thread that waits on this stream; it gets DroppedError."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def dial(address: Address, *, tls: Tls | None, timeout_s: float, stall_s: float) -> Stream:
    """Connect within ``timeout_s``, the name's resolution and the TLS handshake included.

    Raises DroppedError, or MisconfiguredError for a certificate refused.
    """
    until = time.monotonic() + timeout_s
    try:
        sock = connect(address, until) if address.port else _connect_unix(address, until)
    except OSError as error:
        raise UnreachableError(f"{address}: cannot connect: {reason(error)}") from error
    if tls is not None:
        sock.settimeout(time_left(until))
        try:
            wrapped = tls.wrap(sock, address)
        except OSError as error:
            raise UnreachableError(
                f"{address}: TLS handshake failed: {reason(error)}: is that a TLS port?"
            ) from error
        wrapped.settimeout(TICK_S)
        return Stream(wrapped, stall_s=stall_s)
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
    return Stream(sock, stall_s=stall_s)


def _connect_unix(address: Address, until: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(time_left(until))
        sock.connect(address.host)
    except OSError:
        sock.close()
        raise
    return sock


def reason(error: OSError | ValueError | KvferryError) -> str:
    """An error in a few words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    code = getattr(error, "errno", None)
    if code == errno.ECONNREFUSED:
        return "connection refused"
    return str(getattr(error, "strerror", None) or error)
