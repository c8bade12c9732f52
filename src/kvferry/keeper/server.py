"""A keeper's connections: who may come in, what they ask, and the answers, within bounds.

One loop has them all. The work is ``Keeping``'s, whose threads only post what became of it.
"""

import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.errors import RefusedError
from kvferry.identity.header import KEY_ID_BYTES
from kvferry.keeper.framing import SPEECH, decode_to_keeper, hello_mismatch
from kvferry.keeper.requests import Keeping, Requests
from kvferry.keeper.wire import PROTOCOL, Hello, Refusal, Role, Welcome
from kvferry.listening import Guest, Listener
from kvferry.loop import Loop

JOIN_S = 10.0


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


class Connection(Guest):
    """One peer. Everything here runs on the loop's thread."""

    def __init__(
        self, sock: socket.socket, peer: str, *, number: int, listener: Listener, server: "Server"
    ) -> None:
        self.hello: Hello | None = None  # set once accepted
        self._server = server
        super().__init__(sock, peer, number=number, listener=listener)
        self.requests = Requests(
            self.link.send,
            keeping=server.keeping,
            loop=server.loop,
            status=server.status,
            slowly=server.slowly,
        )

    def greeted(self, payload: bytes) -> None:
        """See ``listening.Guest``."""
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
        elif self.accept():
            self.hello = hello
            self.link.send(Welcome(protocol=PROTOCOL, version=__version__, name=self._server.admission.name))

    def said(self, payload: bytes) -> None:
        """See ``listening.Guest``."""
        if self.hello is not None:
            self.requests.message(decode_to_keeper(payload), self.hello.role)

    def gone(self) -> None:
        """See ``listening.Guest``."""
        self.requests.close()

    def refusal(self, message: str) -> Refusal:
        """See ``listening.Guest``."""
        return Refusal(message=message, version=__version__)


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
        self._closed = False
        self.loop = Loop(after_turn=lambda: None, clock=clock)
        try:
            self._listener = Listener(
                listen,
                loop=self.loop,
                speech=SPEECH,
                guest=partial(Connection, server=self),
                name="keeper",
                tls=admission.tls,
            )
        except BaseException:
            self.loop.close()
            raise
        self.address = self._listener.address
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-keeper-slow")
        self._thread = threading.Thread(target=self.loop.run, name="kvferry-keeper-server", daemon=True)

    @property
    def connections(self) -> list[Connection]:
        """Those that said a good hello; from any thread."""
        return [guest for guest in list(self._listener.guests.values()) if isinstance(guest, Connection)]

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
            for connection in self.connections
            if connection.hello is not None
        ]
        return ServerStatistics(tuple(peers), dict(self._listener.refused), self.loop.defects)

    def _end(self) -> None:
        self._listener.close()
        self.loop.stop()


def _token_complaint(*, shown: bool, wanted: bool) -> str:
    """Which of the two ends lacks the token or has another one; never the token."""
    if not wanted:
        return "the node shows a token, but this keeper was started without one; start it with --token-file"
    what = "the token does not match the keeper's" if shown else "this keeper wants a token, none was shown"
    return f"{what}; give the node the same one with --keeper-token-file or KVFERRY_KEEPER_TOKEN"
