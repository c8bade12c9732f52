"""Connections of a node: accepting, authenticating, framing, and sending within bounds."""

import errno
import hmac
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvferry import __version__, socketfile
from kvferry.errors import KvferryError, RefusedError
from kvferry.frames import FrameBuffer
from kvferry.loop import Loop, Timer
from kvferry.node.framing import decode_from_client, encode, hello_mismatch
from kvferry.node.peers import Access, Peer, peer_of
from kvferry.node.wire import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FromClient, Hello, Message, Refusal, Welcome

MAX_CONNECTIONS = 256
MAX_STRANGERS = 32
"""Connections without a hello yet: one more, and the oldest makes room. A client says hello at once."""
MAX_UNSENT_BYTES = 32 << 20
MAX_HELD_BYTES = 256 << 20
"""Of all connections together, half-received and unsent: beyond it, the one that holds most is cut off."""
HELLO_TIMEOUT_S = 5.0
READ_BYTES = 1 << 14  # larger ones leave the allocator's heap in pieces that add up


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


class Connection:
    """One client. Everything here runs on the loop's thread."""

    def __init__(self, sock: socket.socket, *, number: int, server: "Server") -> None:
        self.number = number
        self.hello: Hello | None = None  # set once accepted
        self._sock = sock
        self._server = server
        self._frames = FrameBuffer(limit=MAX_HELLO_BYTES)
        self._unsent = bytearray()
        self._held_bytes = 0
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
        self._account()

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
        self._account()
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
        self._frames.clear()
        self._account()
        self._server.forget(self, cause)

    @property
    def held_bytes(self) -> int:
        """Memory that this client makes the node hold: half a frame, and what it does not read."""
        return self._held_bytes

    def _account(self) -> None:
        now = len(self._unsent) + self._frames.held_bytes
        self._server.hold(now - self._held_bytes)
        self._held_bytes = now

    def _hello_late(self) -> None:
        self.refuse(f"no hello within {HELLO_TIMEOUT_S:.0f} s", "no-hello")

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES if self.hello is not None else MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close("gone")
            return
        try:
            payloads = self._frames.feed(data)
            self._account()
            for payload in payloads:
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
            self.refuse(_token_complaint(shown=bool(hello.token), wanted=bool(self._server.token)), "token")
            return
        if len(self._server.connections) >= MAX_CONNECTIONS:
            self._server.too_many(self)
            return
        welcome = self._server.handler.welcome(self, hello)
        self.hello = hello
        self._frames.limit = MAX_FRAME_BYTES
        self._timer.cancel()
        self._server.accepted(self)
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
        group: int | None = None,
        peer_of: Callable[[socket.socket], Peer] = peer_of,
    ) -> None:
        """token: what clients must show, if not empty. group: whose members are served as the own user is."""
        self.loop = loop
        self.handler = handler
        self.token = token
        self.connections: dict[int, Connection] = {}  # those that said a good hello
        self.unsent: set[Connection] = set()
        self._strangers: dict[int, Connection] = {}  # oldest first
        self._held_bytes = 0
        self._access = Access(group)
        self._peer_of = peer_of
        self._numbers = 0
        self._path = socket_path
        self._lock = socketfile.lock(socket_path, group=group)
        try:
            self._sock = socketfile.listen(socket_path, group=group)
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
        self._strangers[connection.number] = connection
        self._screen(connection, sock)

    def _screen(self, connection: Connection, sock: socket.socket) -> None:
        """Refuse whom the kernel says should not be here, and what is too much."""
        try:
            peer = self._peer_of(sock)
        except OSError:
            connection.close("gone")
            return
        if not self._access.admits(peer):
            connection.refuse(f"this node serves {self._access}, not user {peer.uid}", "foreign-user")
        elif len(self.connections) >= MAX_CONNECTIONS:
            self.too_many(connection)
        elif len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            oldest.refuse(f"{MAX_STRANGERS} later connections wait to say hello", "crowded-out")

    def crashed(self) -> None:
        """See ``loop.Watcher``. A failed accept costs that connection alone."""

    def too_many(self, connection: Connection) -> None:
        """There is no room for this one."""
        connection.refuse(f"this node has {MAX_CONNECTIONS} connections already", "too-many")

    def hold(self, more_bytes: int) -> None:
        """A connection holds so much more memory, or less. Cuts off who holds most when it is too much."""
        self._held_bytes += more_bytes
        if more_bytes > 0 and self._held_bytes > MAX_HELD_BYTES:
            self.loop.post(self._shed)

    def _shed(self) -> None:
        if self._held_bytes > MAX_HELD_BYTES and self.connections:
            max(self.connections.values(), key=lambda connection: connection.held_bytes).close("holds-most")

    def accepted(self, connection: Connection) -> None:
        """A connection has said a good hello."""
        self.connections[connection.number] = self._strangers.pop(connection.number)

    def forget(self, connection: Connection, cause: str) -> None:
        """A connection has closed."""
        self.connections.pop(connection.number, None)
        self._strangers.pop(connection.number, None)
        self.unsent.discard(connection)
        if connection.hello is not None:
            self.handler.closed(connection)
        if connection.hello is None or cause != "gone":
            self.handler.refused(cause)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for connection in [*self.connections.values(), *self._strangers.values()]:
            connection.close("gone")
        self.loop.unwatch(self._sock)
        self._sock.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _pause(self) -> None:
        """Out of descriptors: a pending connection would wake the loop for ever. Look again later."""
        self.loop.unwatch(self._sock)
        self.loop.at(self.loop.clock() + 1.0, lambda: self.loop.watch(self._sock, selectors.EVENT_READ, self))


def _token_complaint(*, shown: bool, wanted: bool) -> str:
    """Which of the two ends lacks the token or has another one; never the token."""
    if not wanted:
        return "the client shows a token, but this node was started without one; start it with --token-file"
    what = (
        "the token does not match the node's" if shown else "this node wants a token, the client shows none"
    )
    return f"{what}; set KVFERRY_TOKEN or KVFERRY_TOKEN_FILE (for an engine also token_file) as there"
