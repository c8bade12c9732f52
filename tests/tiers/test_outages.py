"""A server that goes or misleads: the log says so once, and nothing of it stays."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers import start_server

from kvferry.addresses import Address
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_contract import fetch_all, some_ref
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.shard import Shard
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl


def _lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def test_a_server_that_goes_and_comes_back_is_two_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvferry")
    server = start_server(tmp_path)
    tier = ValkeyTier.connect(server.settings())
    try:
        ref = some_ref(1000, 1)

        def outcome() -> Outcome:
            return fetch_all(tier, [ref])[0][0].outcome

        assert outcome() is Outcome.MISS
        server.stop()
        eventually(lambda: outcome() is Outcome.REFUSED, "the server is left out")
        for _ in range(20):
            outcome()
        server = start_server(tmp_path, port=server.port)
        eventually(lambda: outcome() is Outcome.MISS, "the server is asked again")
        eventually(lambda: len(_lines(caplog, f":{server.port} answers again")) == 1, "the return is told")
        gone = _lines(caplog, "is left out until")
        assert len(gone) == 1
        assert f":{server.port} " in gone[0]
    finally:
        tier.close()
        server.stop()


def test_an_outage_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvferry")
    address = Address("127.0.0.1", 1)
    shard = Shard(address, ValkeySettings(ValkeyUrl((address,))), tls=None, routes=_Nowhere())
    for _ in range(100):
        shard.failed(3, f"{address}: one\ntwo\x1b[31m")
        shard.succeeded()
    assert _lines(caplog, "Valkey at") == [
        "Valkey at 127.0.0.1:1 is left out until it answers again: one?two?[31m",
        "Valkey at 127.0.0.1:1 answers again",
    ]


class _Nowhere:
    """Routes of a shard without work."""

    def attention(self) -> None:
        """Nobody looks."""

    def dispatch(self, job: object) -> None:
        """There is no job."""

    def retry(self, job: object) -> None:
        """There is no job."""

    def redirect(self, job: object, error: object) -> None:
        """There is no job."""


def test_a_single_server_cannot_send_us_elsewhere() -> None:
    with _misleading_server() as (port, misleads):
        tier = ValkeyTier.connect(ValkeySettings(ValkeyUrl((Address("127.0.0.1", port),))))
        try:
            refs = [some_ref(1000, seed) for seed in range(8)]
            for kind in (b"MOVED", b"ASK"):
                misleads[:] = [b"-%s 5 127.0.0.1:1\r\n" % kind]
                assert {result.outcome for result, _ in fetch_all(tier, refs)} == {Outcome.FAILED}
            misleads.clear()
            assert {result.outcome for result, _ in fetch_all(tier, refs)} == {Outcome.MISS}
            assert tier.statistics().failed == {"redirects": 16}
        finally:
            tier.close()


@contextmanager
def _misleading_server() -> Iterator[tuple[int, list[bytes]]]:
    """Says what an empty single server says; to GET, the first of the given replies, if there is one."""
    replies: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=_serve, args=(sock, replies)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield listener.getsockname()[1], replies
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def _serve(sock: socket.socket, replies: list[bytes]) -> None:
    info = b"redis_version:7.0.0\r\ncluster_enabled:0\r\n"
    with sock, sock.makefile("rb") as requests:
        try:
            while line := requests.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(requests.read(int(requests.readline()[1:])))
                    requests.read(2)
                match words[0].upper():
                    case b"INFO":
                        sock.sendall(b"$%d\r\n%s\r\n" % (len(info), info))
                    case b"GET":
                        sock.sendall(replies[0] if replies else b"$-1\r\n")
                    case b"SET":
                        sock.sendall(b"$-1\r\n")
                    case b"CLUSTER":
                        sock.sendall(b"-ERR This instance has cluster support disabled\r\n")
                    case b"TOUCH" | b"UNLINK":
                        sock.sendall(b":0\r\n")
                    case _:
                        sock.sendall(b"+OK\r\n")
        except OSError:
            return  # the other end is gone
