"""Connections of a node: accepting, authenticating, framing, and sending within bounds."""

import errno
import fcntl
import hmac
import os
import selectors
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvferry import __version__
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.node.framing import FrameBuffer, decode_from_client, encode, hello_mismatch
from kvferry.node.loop import Loop, Timer
from kvferry.node.wire import FromClient, Hello, Message, Refusal, Welcome

MAX_CONNECTIONS = 256
MAX_UNSENT_BYTES = 32 << 20
MAX_SOCKET_PATH_BYTES = 107
HELLO_TIMEOUT_S = 5.0
READ_BYTES = 1 << 18
BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")


class Handler(Protocol):
    """What the node does with connections. Raising RefusedError refuses or closes the connection."""

    def welcome(self, connection: "Connection", hello: Hello) -> Welcome:
        """A client said hello. Returns the answer."""
        ...

    def message(self, connection: "Connection", message: FromClient) -> None:
        """A message of an accepted connection."""

    def closed(self, connection: "Connection") -> None:
        """An accepted connection is gone: release all it owns."""

    def refused(self, cause: str) -> None:
        """Count a connection that was refused or cut off."""


def peer_uid(sock: socket.socket) -> int:
    """The user on the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


class Connection:
    """One client. Everything here runs on the loop's thread."""

    def __init__(self, sock: socket.socket, *, number: int, server: "Server") -> None:
        self.number = number
        self.hello: Hello | None = None  # set once accepted
        self._sock = sock
        self._server = server
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._closed = False
        self._timer: Timer = server.loop.at(server.loop.clock() + HELLO_TIMEOUT_S, self._hello_late)
        server.loop.watch(sock, selectors.EVENT_READ, self)

    def send(self, message: Message) -> None:
        """Queue for the end of this turn. A client that does not read is cut off, not waited for."""
        if self._closed:
            return
        self._unsent += encode(message)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close("slow-reader")
            return
        self._server.unsent.add(self)

    def send_now(self, message: Message, descriptor: int) -> None:
        """Send with a descriptor. The client waits for it, so that its socket has room."""
        self.flush()
        if self._closed:
            return
        frame = encode(message)
        try:
            sent = 0 if self._unsent else socket.send_fds(self._sock, [frame], [descriptor])
        except OSError:
            sent = 0
        if sent != len(frame):
            self.close("gone")

    def flush(self) -> None:
        """Send what is queued, as much as the socket takes."""
        if self._closed or not self._unsent:
            return
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close("gone")
            return
        del self._unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._server.loop.watch(self._sock, events, self)

    def ready(self, events: int) -> None:
        """See ``loop.Watcher``."""
        if events & selectors.EVENT_WRITE:
            self.flush()
        if events & selectors.EVENT_READ and not self._closed:
            self._read()

    def crashed(self) -> None:
        """See ``loop.Watcher``."""
        self.close("defect")

    def refuse(self, message: str, cause: str) -> None:
        """Tell the client why, in one line, and close."""
        if not self._closed:
            self._unsent += encode(Refusal(message=message, version=__version__))
            self.flush()
            self.close(cause)

    def close(self, cause: str) -> None:
        """Release the socket and, through the handler, all the connection owns. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._server.loop.unwatch(self._sock)
        self._sock.close()
        self._unsent.clear()
        self._server.forget(self, cause)

    def _hello_late(self) -> None:
        self.refuse(f"no hello within {HELLO_TIMEOUT_S:.0f} s", "no-hello")

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close("gone")
            return
        try:
            for payload in self._frames.feed(data):
                if self._closed:
                    return
                if self.hello is None:
                    self._accept(payload)
                else:
                    self._server.handler.message(self, decode_from_client(payload))
        except KvferryError as error:
            self.refuse(str(error), "refused" if isinstance(error, RefusedError) else "broken-rule")

    def _accept(self, payload: bytes) -> None:
        mismatch = hello_mismatch(payload, version=__version__)
        if mismatch is not None:
            self.refuse(mismatch, "version")
            return
        hello = decode_from_client(payload)
        if not isinstance(hello, Hello):
            raise RefusedError(f"the first message must be Hello, not {type(hello).__name__}")
        if not hmac.compare_digest(hello.token.encode(), self._server.token.encode()):
            self.refuse(
                "the token does not match the node's; set KVFERRY_TOKEN or KVFERRY_TOKEN_FILE as there",
                "token",
            )
            return
        welcome = self._server.handler.welcome(self, hello)
        self.hello = hello
        self._timer.cancel()
        self.send(welcome)


class Server:
    """The listening socket and all connections."""

    def __init__(
        self,
        socket_path: Path,
        *,
        loop: Loop,
        handler: Handler,
        token: str = "",
        uid_of: Callable[[socket.socket], int] = peer_uid,
    ) -> None:
        self.loop = loop
        self.handler = handler
        self.token = token
        self.connections: dict[int, Connection] = {}
        self.unsent: set[Connection] = set()
        self._uid_of = uid_of
        self._numbers = 0
        self._path = socket_path
        self._lock = _lock(socket_path)
        try:
            self._sock = _listen(socket_path)
        except BaseException:
            os.close(self._lock)
            raise
        loop.watch(self._sock, selectors.EVENT_READ, self)

    def flush(self) -> None:
        """Send everything that this turn has queued."""
        while self.unsent:
            self.unsent.pop().flush()

    def ready(self, events: int) -> None:
        """Accept one connection per call; the loop calls again while more wait."""
        del events
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.handler.refused("descriptors")
                self._pause()
            return
        sock.settimeout(0.0)
        self._numbers += 1
        connection = Connection(sock, number=self._numbers, server=self)
        self.connections[connection.number] = connection
        uid = self._uid_of(sock)
        if uid != os.getuid():
            connection.refuse(f"this node serves user {os.getuid()}, not user {uid}", "foreign-user")
        elif len(self.connections) > MAX_CONNECTIONS:
            connection.refuse(f"this node has {MAX_CONNECTIONS} connections already", "too-many")

    def crashed(self) -> None:
        """See ``loop.Watcher``. A failed accept costs that connection alone."""

    def forget(self, connection: Connection, cause: str) -> None:
        """A connection has closed."""
        self.connections.pop(connection.number, None)
        self.unsent.discard(connection)
        if connection.hello is not None:
            self.handler.closed(connection)
        if connection.hello is None or cause != "gone":
            self.handler.refused(cause)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for connection in list(self.connections.values()):
            connection.close("gone")
        self.loop.unwatch(self._sock)
        self._sock.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _pause(self) -> None:
        """Out of descriptors: a pending connection would wake the loop for ever. Look again later."""
        self.loop.unwatch(self._sock)
        self.loop.at(self.loop.clock() + 1.0, lambda: self.loop.watch(self._sock, selectors.EVENT_READ, self))


def _lock(path: Path) -> int:
    """A descriptor whose lock says that a node lives at this path; the kernel drops it at death."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise MisconfiguredError(
            f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        )
    _private_directory(path.parent)
    if os.path.lexists(path) and not path.is_socket():
        raise MisconfiguredError(f"{path} exists and is not a socket; choose another --socket")
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise MisconfiguredError(
            f"cannot write {lock_path}: {error.strerror}; choose another --socket"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise MisconfiguredError(
            f"a node already runs at {path}; stop it, or choose another --socket"
        ) from error
    return lock


def _private_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except OSError as error:
        raise MisconfiguredError(
            f"cannot use the directory {path}: {error.strerror}; choose another --socket"
        ) from error
    if not stat.S_ISDIR(state.st_mode):
        raise MisconfiguredError(f"{path} is not a directory; choose another --socket")
    if state.st_uid != os.getuid():
        raise MisconfiguredError(
            f"{path} belongs to user {state.st_uid}; choose a --socket in a directory of your own"
        )
    if state.st_mode & 0o022:
        hint = "" if state.st_mode & stat.S_ISVTX else "chmod 700 it or "  # /tmp is meant to be shared
        raise MisconfiguredError(
            f"other users can write to {path}; {hint}choose a --socket in a directory of your own"
        )


def _listen(path: Path) -> socket.socket:
    """The lock is ours, so a socket file that is there is a dead node's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket():
            path.unlink()
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise MisconfiguredError(
            f"cannot listen at {path}: {error.strerror}; choose another --socket"
        ) from error
    return sock
