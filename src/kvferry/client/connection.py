"""A connection to a node that is kept up by a background thread and never blocks its callers.

Any thread may send, and any thread may read what has arrived (``pump``), so that an answer costs no
hop between threads. The background thread alone shakes hands and closes; others shut down, or knock.

The thread tries again at growing intervals. A call does not wait for the next of them: it *knocks*. Where
nobody listens that is known in microseconds; where somebody does, the socket goes to the thread, and the
call is sent once the node has welcomed it. So a restarted node is noticed by the first call after it
listens. A node that listens and stays silent costs the calls that wait then their bound, and opens the
breaker, which spares later ones.
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
from kvferry.client.forks import fork_safe_lock
from kvferry.client.handshake import READ_BYTES, Handshake, Identity, open_socket
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.frames import FrameBuffer
from kvferry.node.framing import decode_from_node, encode
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
        """A node accepted us, and what is sent now reaches it. The descriptor is closed after this call."""

    def message(self, message: FromNode) -> None:
        """Something arrived."""

    def disconnected(self, reason: Reason) -> None:
        """All that was under way, or waited for a connection, is lost. May come without a connection."""


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
        self.lock = fork_safe_lock()
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
        self._knocked: socket.socket | None = None  # opened by a call, for the thread to shake hands on
        self._greeting = False  # the thread is shaking hands
        self._refused = False  # the last node did not want us
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

    def knock(self) -> bool:
        """Someone wants the node and there is no connection: whether one is being made now.

        If so, ``connected_to`` or ``disconnected`` follows; the caller bounds its wait, and tells ``silent``.
        """
        if os.getpid() != self._pid:
            return False
        with self.lock:
            if self._sock is not None or self._knocked is not None:
                return True
            coming = self._greeting
            if not (coming or self._closing or self._refused or self.breaker.is_open):
                with contextlib.suppress(KvferryError):
                    self._knocked = open_socket(self._path, 0.0, group=self._identity.group)
                    coming = True
            self._signal()  # a long wait before the next attempt is cut short in any case
            return coming and not self.breaker.is_open

    def vouched(self) -> None:
        """Another connection has an answer of the node: earlier silence on this one counts no more."""
        with self.lock:
            self.breaker.heard()

    def suspect(self) -> None:
        """Something that the node should have sent did not come: ask whether it lives, wait for nothing."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self._sock is not None:
                self.breaker.suspect(self._clock())
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
            self._forget_knock()
            self._listener.disconnected(Reason.CLOSED)  # for calls that waited for the connection to come
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
            self._gone()
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
                self._gone()
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
        self._listener.disconnected(reason)
        self._signal()

    def _forget_knock(self) -> None:
        sock, self._knocked = self._knocked, None
        if sock is not None:
            sock.close()

    def _gone(self) -> None:
        """The other end is closed: no silence, so the next call may knock."""
        self.breaker.heard()
        self._lose(Reason.NODE_DOWN)

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
            self._refused = isinstance(error, RefusedError)
            if isinstance(error, RetryError):
                self.breaker.unanswered(self._clock())
            elif isinstance(error, ClosedError):
                self.breaker.heard()
            if self._knocked is None:  # else calls wait for that one
                self._listener.disconnected(Reason.NODE_DOWN)
        if str(error) != self.last_error:
            self.last_error = str(error)
            known = isinstance(error, KvferryError)
            log.warning(
                "kvferry: %s; requests are computed without it", error, exc_info=None if known else error
            )

    def _connect(self) -> None:
        sock = self._opened()
        handshake = Handshake(sock, self._identity, timeout_s=HANDSHAKE_S)
        try:
            welcome = handshake.run()
            sock.settimeout(0.0)
            with self.lock:
                self._welcomed(sock, welcome, handshake.descriptor)
            if self.last_error:
                log.warning("kvferry: connected to the node at %s", self._path)
            self.last_error = ""
        except BaseException:
            sock.close()
            raise
        finally:
            self._greeting = False
            handshake.close_descriptor()

    def _opened(self) -> socket.socket:
        """The socket that a call knocked with, or a new one."""
        with self.lock:
            sock, self._knocked = self._knocked, None
            self._greeting = sock is not None
        if sock is None:
            sock = open_socket(self._path, HANDSHAKE_S, group=self._identity.group)
            self._greeting = True
        return sock

    def _welcomed(self, sock: socket.socket, welcome: Welcome, descriptor: int | None) -> None:
        """Under the lock."""
        if self._closing:
            raise ClosedError("the client was closed")
        self._forget_knock()  # came while another socket was being opened
        self._greeting = False
        self._sock = sock
        self._frames = FrameBuffer()
        self._unsent.clear()
        self._refused = False
        self.breaker.heard()
        self.connects += 1
        try:
            self._listener.connected_to(welcome, descriptor)
        except BaseException:
            self._sock = None
            raise

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
                self.breaker.look(now)
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
        """Sit out a backoff; a call shortens it to the first one, or ends it where a node listens."""
        until = self._clock() + seconds
        earliest = self._clock() + FIRST_BACKOFF_S
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._closing and self._knocked is None and (now := self._clock()) < until:
            if poll.poll((until - now) * 1000):
                self._drain()
                until = min(until, max(earliest, self._clock()))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
