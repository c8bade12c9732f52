"""What comes in one piece with the first words is heard like what comes after them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.feed.following import Following

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.feed.framing import encode
from kvferry.feed.wire import MAX_HELLO_BYTES, PROTOCOL, Held, Known, KnownEnd, Level, Welcome
from kvferry.frames import LENGTH
from kvferry.identity.names import DIGEST_BYTES
from kvferry.testing.expectations import WAIT_S, eventually

SLICE = b"".join(number.to_bytes(DIGEST_BYTES, "big") for number in range(1000))


@contextmanager
def saying(data: bytes) -> Iterator[Address]:
    """A node's feed that answers each hello with these bytes, all at once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    sock, _ = listening.accept()
                    held.append(sock)
                    sock.recv(1 << 16)
                    sock.sendall(data)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*listening.getsockname()[:2])
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        for sock in held:
            sock.close()


def test_a_large_piece_of_a_snapshot_may_come_together_with_welcome() -> None:
    welcome = Welcome(protocol=PROTOCOL, version=__version__, node="n", epoch=1, next=1, snapshot=True)
    known = Known((Held(Level.MEMORY, 0, 1, SLICE),))
    assert len(SLICE) > MAX_HELLO_BYTES
    with saying(encode(welcome) + encode(known) + encode(KnownEnd())) as address:
        following = Following(address)
        try:
            following.followed()
            eventually(lambda: following.state.events == 1, "the snapshot")
        finally:
            following.close()


def test_a_large_frame_instead_of_welcome_is_refused_before_it_is_whole() -> None:
    with saying(LENGTH.pack(4 << 20) + bytes(4 * MAX_HELLO_BYTES)) as address:
        following = Following(address)
        try:
            eventually(lambda: following.state.state == "refused", "refused")
            assert "before Welcome" in following.state.error
        finally:
            following.close()
