"""The two ends of a connection to a keeper, byte by byte: a peer that says anything, a keeper that does."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.frames import FrameBuffer
from kvferry.keeper.framing import decode_from_keeper, decode_to_keeper, encode
from kvferry.keeper.wire import PROTOCOL, FromKeeper, Hello, Message, Ping, Pong, Role, ToKeeper, Welcome
from kvferry.testing.expectations import WAIT_S

HELLO = Hello(protocol=PROTOCOL, version=__version__, node="raw")
ADMIN = Hello(protocol=PROTOCOL, version=__version__, node="raw", role=Role.ADMIN)


class RawPeer:
    """A blocking socket to a keeper."""

    def __init__(self, address: Address, hello: Hello | None = HELLO) -> None:
        self.sock = socket.create_connection(address, timeout=WAIT_S)
        self._frames = FrameBuffer()
        self._payloads: list[bytes] = []
        if hello is not None:
            self.send(hello)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, message: Message) -> None:
        self.sock.sendall(encode(message))

    def receive(self) -> FromKeeper | None:
        """The next message; None at the end."""
        while not self._payloads:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._payloads = self._frames.feed(data)
        return decode_from_keeper(self._payloads.pop(0))

    def ended(self) -> list[FromKeeper]:
        """All that still comes until the keeper hangs up."""
        messages = []
        while (message := self.receive()) is not None:
            messages.append(message)
        return messages


class RawKeeper:
    """Welcomes, then gives every message to ``answer``, whose result is sent as it is.

    mute: from then on it reads nothing and says nothing; cleared, it goes on.
    """

    def __init__(
        self,
        answer: Callable[[ToKeeper], bytes] | None = None,
        *,
        welcome: bytes | None = None,
        port: int = 0,
    ) -> None:
        self._answer = answer or _pong
        self._welcome = welcome
        self.heard: list[ToKeeper] = []
        self.open = threading.Event()
        self.open.set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = Address(*self._listener.getsockname()[:2])
        self._socks: list[socket.socket] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self.open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        self._listener.close()
        self._thread.join(WAIT_S)

    def hang_up(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def of(self, kind: type[ToKeeper]) -> list[ToKeeper]:
        return [message for message in list(self.heard) if isinstance(message, kind)]

    def _run(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            with sock, contextlib.suppress(OSError):
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        frames = FrameBuffer()
        while data := sock.recv(1 << 16):
            for payload in frames.feed(data):
                self.open.wait(WAIT_S)
                message = decode_to_keeper(payload)
                self.heard.append(message)
                if isinstance(message, Hello):
                    welcome = Welcome(protocol=PROTOCOL, version="raw", name="raw")
                    sock.sendall(encode(welcome) if self._welcome is None else self._welcome)
                else:
                    sock.sendall(self._answer(message))


def _pong(message: ToKeeper) -> bytes:
    return encode(Pong()) if isinstance(message, Ping) else b""


@contextlib.contextmanager
def raw_keeper(
    answer: Callable[[ToKeeper], bytes] | None = None, *, welcome: bytes | None = None
) -> Iterator[RawKeeper]:
    """One that is closed."""
    keeper = RawKeeper(answer, welcome=welcome)
    try:
        yield keeper
    finally:
        keeper.close()
