"""A connection to a node that is kept up by a background thread and never blocks its callers.

Any thread may send, and any thread may read what has arrived (``pump``), so that an answer costs no
hop between threads. The socket is made and closed by the background thread alone; others shut it down.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvferry.client.breaker import Breaker
from kvferry.client.handshake import READ_BYTES, Handshake, Identity, open_socket
from kvferry.errors import ClosedError, KvferryError, RefusedError
from kvferry.node.framing import FrameBuffer, decode_from_node, encode
from kvferry.node.wire import (
    FromNode,
    Message,
    Ping,
    Reason,
    Refusal,
    Welcome,
)

HANDSHAKE_S = 2.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
REFUSED_BACKOFF_S = 10.0
MAX_UNSENT_BYTES = 8 << 20
JOIN_S = 5.0

log = logging.getLogger("kvferry.client")


class Listener(Protocol):
    """What a connection tells its client; each call holds the connection's lock."""

    def connected_to(self, welcome: Welcome, descriptor: int | None) -> None:
        """A node accepted us. The descriptor is closed after this call."""

    def message(self, message: FromNode) -> None:
        """Something arrived."""

    def disconnected(self, reason: Reason) -> None:
        """All that was under way on this connection is lost."""


class NodeConnection:
    """``lock`` guards it and its client; it is held only for moments."""

    def __init__(
        self,
        socket_path: Path,
        identity: Identity,
        listener: Listener,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.breaker = Breaker()
        self.connects = 0
        self.last_error = ""
        self._path = socket_path
        self._identity = identity
        self._listener = listener
        self._clock = clock
        self._pid = os.getpid()
        self._sock: socket.socket | None = None  # not None: connected and attached
        self._dying: socket.socket | None = None  # shut down, to be closed by the thread
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{identity.role}", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Connected, in the process that made it (a fork's child must not use its parent's socket)."""
        return self._sock is not None and os.getpid() == self._pid

    def send(self, message: Message) -> bool:
        """Send, or queue what the socket does not take. False when there is no connection."""
        if os.getpid() != self._pid:  # before the lock, which may have been held when this process forked
            return False
        frame = encode(message)
        with self.lock:
            if not self.is_up:
                return False
            self._unsent += frame
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self._lose(Reason.NODE_DOWN)
                return False
            self._flush()
            if self._unsent:
                self._signal()
            return self._sock is not None

    def pump(self) -> None:
        """Handle what has arrived, without waiting; nothing when another thread is at it."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._read()
        finally:
            self.lock.release()

    def pump_all(self) -> None:
        """The same, but waits for the other thread to be done: before a call gives up."""
        with self.lock:
            self._read()

    def silent(self) -> None:
        """A call's wait has ended without an answer."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            self.breaker.unanswered(self._clock())
            self._signal()

    def kick(self) -> None:
        """Someone wants the node: do not sit out a long wait before the next attempt."""
        self._signal()

    def close(self) -> None:
        """Disconnect and join the thread. Idempotent. In a fork's child it only lets go."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self._closing:
                return
            self._closing = True
            self._lose(Reason.CLOSED)
            self._signal()
        self._thread.join(JOIN_S)
        with self.lock:
            os.close(self._wake)
            self._wake = -1

    # ---- under the lock

    def _flush(self) -> None:
        if self._sock is None or not self._unsent:
            return
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._lose(Reason.NODE_DOWN)
            return
        del self._unsent[:sent]

    def _read(self) -> None:
        while self._sock is not None and os.getpid() == self._pid:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose(Reason.NODE_DOWN)
                return
            self.breaker.heard()
            try:
                for payload in self._frames.feed(data):
                    message = decode_from_node(payload)
                    if isinstance(message, Refusal):
                        log.warning("kvferry: the node ended the connection: %s", message.message)
                    else:
                        self._listener.message(message)
            except RefusedError as error:
                log.warning("kvferry: the node is not understood: %s", error)
                self._lose(Reason.REFUSED)
                return
            if len(data) < READ_BYTES:
                return

    def _lose(self, reason: Reason) -> None:
        """The connection is over. Streams and calls end now; the thread closes the socket."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._dying = sock
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self._unsent.clear()
        self.breaker.heard()
        self._listener.disconnected(reason)
        self._signal()

    def _signal(self) -> None:
        if os.getpid() != self._pid:
            return
        with self.lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- the background thread

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closing:
            try:
                self._connect()
                backoff_s = FIRST_BACKOFF_S
                self._serve()
            except KvferryError as error:
                self._failed(error)
                self._pause(REFUSED_BACKOFF_S if isinstance(error, RefusedError) else backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            except Exception as error:  # noqa: BLE001 (top of the driver)
                self._failed(error)
                self._pause(MAX_BACKOFF_S)
            finally:
                self._bury()

    def _failed(self, error: Exception) -> None:
        """No connection, or a defect on one: calls go unserved until the next attempt."""
        with self.lock:
            self._lose(Reason.NODE_DOWN)
        if str(error) != self.last_error:
            self.last_error = str(error)
            known = isinstance(error, KvferryError)
            log.warning(
                "kvferry: %s; requests are computed without it", error, exc_info=None if known else error
            )

    def _connect(self) -> None:
        sock = open_socket(self._path, HANDSHAKE_S)
        handshake = Handshake(sock, self._identity, timeout_s=HANDSHAKE_S)
        try:
            welcome = handshake.run()
            sock.settimeout(0.0)
            with self.lock:
                if self._closing:
                    raise ClosedError("the client was closed")
                self._listener.connected_to(welcome, handshake.descriptor)
                self._sock = sock
                self._frames = FrameBuffer()
                self._unsent.clear()
                self.breaker.heard()
                self.connects += 1
            if self.last_error:
                log.warning("kvferry: connected to the node at %s", self._path)
            self.last_error = ""
        except BaseException:
            sock.close()
            raise
        finally:
            handshake.close_descriptor()

    def _serve(self) -> None:
        """Until the connection is lost."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self.lock:
            sock = self._sock
        if sock is None:
            return
        while True:
            with self.lock:
                if self._sock is not sock:
                    return
                now = self._clock()
                if self.breaker.given_up(now):
                    self._lose(Reason.NODE_DOWN)
                    return
                if self.breaker.ping_due(now):
                    self._unsent += encode(Ping())
                    self._flush()
                look = self.breaker.next_look()
                events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll.register(sock, events)
            wait_ms = None if look is None else max(1.0, (look - now) * 1000)
            poll.poll(wait_ms)
            self._drain()
            with self.lock:
                if self._sock is sock:
                    self._flush()
                    self._read()

    def _bury(self) -> None:
        with self.lock:
            sock, self._dying = self._dying, None
        if sock is not None:
            sock.close()

    def _pause(self, seconds: float) -> None:
        """Sit out a backoff; a kick shortens it to the first one."""
        until = self._clock() + seconds
        earliest = self._clock() + FIRST_BACKOFF_S
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._closing and (now := self._clock()) < until:
            if poll.poll((until - now) * 1000):
                self._drain()
                until = min(until, max(earliest, self._clock()))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
