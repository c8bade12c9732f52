"""A keeper's connections: who may come in, what they ask, and the answers, within bounds.

One loop has them all. The work is ``Keeping``'s, whose threads only post what became of it.
"""

import errno
import hmac
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry import __version__
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.identity.header import KEY_ID_BYTES
from kvferry.keeper.framing import decode_to_keeper, hello_mismatch
from kvferry.keeper.link import Link
from kvferry.keeper.requests import Keeping, Requests
from kvferry.keeper.wire import PROTOCOL, Hello, Refusal, Role, Welcome
from kvferry.loop import Loop, Timer
from kvferry.tiers.valkey.url import Address

MAX_CONNECTIONS = 1024
MAX_STRANGERS = 64
"""Connections without a hello yet: one more, and the oldest makes room. A node says hello at once."""
MAX_HELD_BYTES = 256 << 20
"""Of all connections together, half-received and unsent: beyond it, the one that holds most is cut off."""
HELLO_TIMEOUT_S = 5.0
"""From accepting to hello, the handshake of TLS included."""
BACKLOG = 128
JOIN_S = 10.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds and probes: after so long the connection of a host that is gone ends."""

log = logging.getLogger("kvferry.keeper")


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Who is connected. asked: questions under way."""

    node: str
    address: str
    role: str
    version: str
    asked: int


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """refused: connections, by cause. defects: errors that the server survived."""

    peers: tuple[PeerStatus, ...]
    refused: dict[str, int]
    defects: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Whom to let in: name goes into every welcome. tls: makes a context for the next connection."""

    name: str = ""
    token: str = ""
    tls: Callable[[], ssl.SSLContext] | None = None
    key_ids: tuple[bytes, ...] = ()

    def objection(self, hello: Hello) -> tuple[str, str] | None:
        """A line for people and a cause, unless this peer is welcome."""
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return _token_complaint(shown=bool(hello.token), wanted=bool(self.token)), "token"
        if hello.role is Role.NODE and (complaint := self._keys_complaint(hello.key_ids)):
            return complaint, "keys"
        return None

    def _keys_complaint(self, shown: bytes) -> str:
        current = shown[:KEY_ID_BYTES]
        if not current and not self.key_ids:
            return ""
        if not current:
            return (
                "this keeper keeps encrypted parts and the node does not encrypt; give the node its "
                "--encryption-key-file, or start the keeper without --encryption-key-ids"
            )
        if current not in self.key_ids:
            known = ",".join(key_id.hex() for key_id in self.key_ids) or "none"
            return (
                f"the node encrypts with key {current.hex()} and the keeper knows {known}; "
                "add it to the keeper's --encryption-key-ids"
            )
        return ""


class Connection:
    """One peer. Everything here runs on the loop's thread."""

    def __init__(self, sock: socket.socket, peer: str, *, number: int, server: "Server") -> None:
        self.number = number
        self.peer = peer
        self.hello: Hello | None = None  # set once accepted
        self._server = server
        self.link = Link(sock, loop=server.loop, owner=self)
        self.requests = Requests(
            self.link.send,
            keeping=server.keeping,
            loop=server.loop,
            status=server.status,
            slowly=server.slowly,
        )
        self._timer: Timer = server.loop.at(server.loop.clock() + HELLO_TIMEOUT_S, self._hello_late)

    def opened(self, link: Link) -> None:
        """See ``link.LinkOwner``."""

    def payload(self, link: Link, payload: bytes) -> None:
        """See ``link.LinkOwner``."""
        if self.hello is None:
            self._accept(payload)
        else:
            self.requests.message(decode_to_keeper(payload), self.hello.role)

    def held(self, more_bytes: int) -> None:
        """See ``link.LinkOwner``."""
        self._server.hold(more_bytes)

    def broken(self, link: Link, error: KvferryError) -> None:
        """See ``link.LinkOwner``."""
        self.refuse(str(error), "refused" if isinstance(error, RefusedError) else "broken-rule")

    def lost(self, link: Link, cause: str, error: OSError | None) -> None:
        """See ``link.LinkOwner``."""
        if cause == "tls" and error is not None:
            log.info("no TLS with %s: %s", self.peer, getattr(error, "reason", None) or error)
        self._timer.cancel()
        self.requests.close()
        self._server.forget(self, cause)

    def refuse(self, message: str, cause: str) -> None:
        """Tell the peer why, in one line, and close."""
        self.link.end(Refusal(message=message, version=__version__), cause)

    def _hello_late(self) -> None:
        self.refuse(f"no hello within {HELLO_TIMEOUT_S:.0f} s", "no-hello")

    def _accept(self, payload: bytes) -> None:
        mismatch = hello_mismatch(payload)
        if mismatch is not None:
            self.refuse(mismatch, "version")
            return
        hello = decode_to_keeper(payload)
        if not isinstance(hello, Hello):
            raise RefusedError(f"the first message must be Hello, not {type(hello).__name__}")
        objection = self._server.admission.objection(hello)
        if objection is not None:
            self.refuse(*objection)
        elif len(self._server.connections) >= MAX_CONNECTIONS:
            self._server.too_many(self)
        else:
            self.hello = hello
            self.link.trust()
            self._timer.cancel()
            self._server.accepted(self)
            self.link.send(Welcome(protocol=PROTOCOL, version=__version__, name=self._server.admission.name))


class Server:
    """The listening socket, its loop and thread, and all connections."""

    def __init__(
        self,
        listen: Address,
        *,
        keeping: Keeping,
        admission: Admission,
        status: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """status: the keeper's as JSON. Raises MisconfiguredError when the address cannot be had."""
        self.keeping = keeping
        self.admission = admission
        self.status = status
        self.connections: dict[int, Connection] = {}  # those that said a good hello
        self._strangers: dict[int, Connection] = {}  # oldest first
        self._refused: Counter[str] = Counter()
        self._held_bytes = 0
        self._numbers = 0
        self._closed = False
        self.loop = Loop(after_turn=lambda: None, clock=clock)
        try:
            self._sock = _listening(listen)
        except BaseException:
            self.loop.close()
            raise
        host, port = self._sock.getsockname()[:2]
        self.address = Address(host, port)
        self.loop.watch(self._sock, selectors.EVENT_READ, self)
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-keeper-slow")
        self._thread = threading.Thread(target=self.loop.run, name="kvferry-keeper-server", daemon=True)

    def start(self) -> None:
        """Serve, on a thread of its own."""
        self._thread.start()

    def slowly(self, work: Callable[[], None]) -> None:
        """Run what may take a moment, on a thread for such things."""
        self._slow.submit(work)

    def close(self) -> None:
        """Close every connection and join the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self.loop.post(self._end)
            self._thread.join(JOIN_S)
        else:
            self._end()
        self._slow.shutdown(cancel_futures=True)
        self.loop.close()

    def statistics(self) -> ServerStatistics:
        """A snapshot, from any thread."""
        peers = [
            PeerStatus(
                connection.hello.node,
                connection.peer,
                connection.hello.role.value,
                connection.hello.version,
                len(connection.requests),
            )
            for connection in list(self.connections.values())
            if connection.hello is not None
        ]
        return ServerStatistics(tuple(peers), dict(self._refused), self.loop.defects)

    def ready(self, events: int) -> None:
        """Accept one connection per call; the loop calls again while more wait."""
        del events
        try:
            sock, peer = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refused["descriptors"] += 1
                self._pause()
            return
        self._numbers += 1
        shown = str(Address(*peer[:2]))
        try:
            sock = self._prepared(sock)
        except OSError:
            sock.close()
            self._refused["gone"] += 1
            return
        connection = Connection(sock, shown, number=self._numbers, server=self)
        self._strangers[connection.number] = connection
        connection.link.start()
        if len(self.connections) >= MAX_CONNECTIONS:
            self.too_many(connection)
        elif len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            oldest.refuse(f"{MAX_STRANGERS} later connections wait to say hello", "crowded-out")

    def crashed(self) -> None:
        """See ``loop.Watcher``. A failed accept costs that connection alone."""

    def too_many(self, connection: Connection) -> None:
        """There is no room for this one."""
        connection.refuse(f"this keeper has {MAX_CONNECTIONS} connections already", "too-many")

    def hold(self, more_bytes: int) -> None:
        """A connection holds so much more memory, or less. Cuts off who holds most when it is too much."""
        self._held_bytes += more_bytes
        if more_bytes > 0 and self._held_bytes > MAX_HELD_BYTES:
            self.loop.post(self._shed)

    def accepted(self, connection: Connection) -> None:
        """A connection has said a good hello."""
        self.connections[connection.number] = self._strangers.pop(connection.number)

    def forget(self, connection: Connection, cause: str) -> None:
        """A connection has closed."""
        self.connections.pop(connection.number, None)
        self._strangers.pop(connection.number, None)
        if connection.hello is None or cause != "gone":
            self._refused[cause] += 1

    def _prepared(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(0.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self.admission.tls is None:
            return sock
        return self.admission.tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _shed(self) -> None:
        if self._held_bytes > MAX_HELD_BYTES and self.connections:
            max(self.connections.values(), key=lambda connection: connection.link.held_bytes).link.close(
                "holds-most"
            )

    def _pause(self) -> None:
        """Out of descriptors: a pending connection would wake the loop for ever. Look again later."""
        self.loop.unwatch(self._sock)
        self.loop.at(self.loop.clock() + 1.0, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self.loop.watch(self._sock, selectors.EVENT_READ, self)

    def _end(self) -> None:
        self.loop.unwatch(self._sock)
        self._sock.close()
        for connection in [*self.connections.values(), *self._strangers.values()]:
            connection.link.close("gone")
        self.loop.stop()


def _listening(listen: Address) -> socket.socket:
    """Raises MisconfiguredError."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
        sock.listen(BACKLOG)
        sock.settimeout(0.0)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise MisconfiguredError(
                f"{listen.host} is no address of this machine; choose another --listen"
            ) from error
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise MisconfiguredError(f"{listen} {why}; choose another --listen") from error
    return sock


def _token_complaint(*, shown: bool, wanted: bool) -> str:
    """Which of the two ends lacks the token or has another one; never the token."""
    if not wanted:
        return "the node shows a token, but this keeper was started without one; start it with --token-file"
    what = "the token does not match the keeper's" if shown else "this keeper wants a token, none was shown"
    return f"{what}; give the node the same one with --keeper-token-file or KVFERRY_KEEPER_TOKEN"
