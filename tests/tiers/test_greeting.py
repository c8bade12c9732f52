"""The start-up check: wrong servers and wrong settings are one clear line; TLS and sockets work."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import Server, free_ports, running_server

from kvferry.errors import MisconfiguredError
from kvferry.identity.names import DOMAIN_TAG_BYTES, PartKey, PartRef
from kvferry.testing.servers import redis_binary, running_tls_server
from kvferry.testing.tier_contract import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.acl import setuser
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

NAMESPACE = bytes(range(16))


def refusal(text: str, *, timeout_s: float = 3.0) -> str:
    """The one line that connecting to ``text`` fails with."""
    with pytest.raises(MisconfiguredError) as caught:
        ValkeyTier.connect(ValkeySettings(parse_url(text)), timeout_s=timeout_s)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _ref(nbytes: int) -> PartRef:
    key = some_ref(nbytes, nbytes).key
    return PartRef(PartKey(NAMESPACE, key.chunk, key.part), nbytes)


def round_trip(text: str) -> None:
    tier = ValkeyTier.connect(ValkeySettings(parse_url(text)))
    try:
        parts = [(_ref(size), some_bytes(size, size)) for size in (1000, 3 << 20)]
        assert store_all(tier, parts) == [Outcome.OK] * 2
        for (_, data), (result, memory) in zip(parts, fetch_all(tier, [r for r, _ in parts]), strict=True):
            assert result.outcome is Outcome.OK
            assert memory == data
    finally:
        tier.close()


@pytest.fixture
def impostor() -> Iterator[int]:
    """Something that answers every connection as a web server does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.recv(4096)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

    thread = threading.Thread(target=answer)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_only_of_a_port_is_it_asked_whether_it_speaks_tls(tmp_path: Path) -> None:
    assert "TLS" not in refusal(f"unix://{tmp_path}/none.sock")
    assert "does it speak TLS" in refusal(f"valkey://127.0.0.1:{free_ports(1)[0]}")


def test_nobody_listening_is_unreachable() -> None:
    port = free_ports(1)[0]
    message = refusal(f"valkey://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in message
    assert "connection refused" in message


def test_a_server_of_another_kind_is_named_as_such(impostor: int) -> None:
    assert "does not answer like Valkey" in refusal(f"valkey://127.0.0.1:{impostor}")


def test_a_stopped_server_is_unreachable_in_bounded_time(server: Server) -> None:
    server.pause()
    try:
        began = time.monotonic()
        assert "unreachable" in refusal(server.url, timeout_s=0.5)
        assert time.monotonic() - began < 10
    finally:
        server.resume()


def test_passwords_are_checked_and_never_shown() -> None:
    with running_server(
        "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru", password="right"
    ) as server:
        wrong = refusal(f"valkey://:wrong-secret@127.0.0.1:{server.port}")
        assert "password" in wrong
        assert "wrong-secret" not in wrong
        assert "wants a password" in refusal(server.url)
        round_trip(f"valkey://:right@127.0.0.1:{server.port}")


def test_the_documented_permissions_are_enough(server: Server) -> None:
    text = Path(__file__).parents[2].joinpath("docs/spec/valkey-keys.md").read_text()
    line = next(line for line in text.splitlines() if "ACL SETUSER" in line)
    tag = NAMESPACE[:DOMAIN_TAG_BYTES]
    line = line.strip().replace("TAG", tag.hex())
    assert line == setuser("kvferry", tag)  # what kvferry flags valkey prints
    assert server.ask(*line.split()) == b"OK"
    try:
        round_trip(f"valkey://kvferry:PASSWORD@127.0.0.1:{server.port}")
    finally:
        server.ask("ACL", "DELUSER", "kvferry")


def test_a_single_server_is_no_cluster_if_one_was_asked_for(server: Server) -> None:
    assert "Cluster" in refusal(f"valkey+cluster://127.0.0.1:{server.port}")


def test_a_policy_under_which_values_are_lost_at_random_is_warned_of() -> None:
    with running_server("--maxmemory", "100mb", "--maxmemory-policy", "volatile-random") as server:
        tier = ValkeyTier.connect(server.settings())
        assert "volatile-random" in tier.statistics().detail["warning"]
        tier.close()


def test_a_unix_socket_carries_parts() -> None:
    with running_server("--unixsocket", "v.sock") as server:
        directory = server.ask("CONFIG", "GET", "dir")
        assert isinstance(directory, list)
        assert isinstance(directory[1], bytes)
        round_trip(f"unix://{directory[1].decode()}/v.sock")


@pytest.mark.skipif(
    redis_binary() is None or shutil.which("openssl") is None,
    reason="no redis-server and openssl here: ./test names the missing check and fails in CI",
)
def test_tls_verifies_the_server_and_carries_parts() -> None:
    with running_tls_server() as (server, url):
        round_trip(url)
        assert "certificate" in refusal(f"valkeys://127.0.0.1:{server.tls_port}")
        assert "unreachable" in refusal(f"valkeys://127.0.0.1:{server.port}")
