"""TLS and mutual TLS: each wrong certificate is one line at start, and nothing falls back to plain."""

import contextlib
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node.users import User
from tests.servers import CLUSTER_OPTIONS, Server, free_ports, must, redis_binary, running_server
from tests.tiers.admission import OPTIONS, PASSWORD, Refused, round_trip, unanswered, works
from tests.tiers.authority import Authority, Issued

from kvferry.addresses import Address
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import UnreachableError, dial
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.tls import Tls
from kvferry.tiers.valkey.url import parse_url
from kvferry.values import TlsFiles

needs_redis = pytest.mark.skipif(
    redis_binary() is None, reason="no redis-server here: ./test names the missing check and fails in CI"
)


class TlsServer:
    """A server whose certificate and demands can be changed while it runs."""

    def __init__(self, server: Server, port: int, authority: Authority, directory: Path) -> None:
        self.server = server
        self.port = port
        self.authority = authority
        self.directory = directory

    def present(self, issued: Issued, *, clients: str = "no") -> None:
        """Use that certificate from now on; clients: ``yes`` asks them for theirs."""
        must(
            self.server.ask(
                *("CONFIG", "SET", "tls-cert-file", str(issued.cert), "tls-key-file", str(issued.key)),
                *("tls-auth-clients", clients),
            )
        )

    def url(self, *, ca: Path | None = None, client: Issued | None = None, host: str = "127.0.0.1") -> str:
        """With the good authority unless told otherwise."""
        files = [f"ca={ca or self.authority.ca}"]
        if client is not None:
            files += [f"cert={client.cert}", f"key={client.key}"]
        return f"valkeys://{host}:{self.port}/0?{'&'.join(files)}"


@pytest.fixture(scope="module")
def started_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory)
    good = authority.issue("server")
    port = free_ports(1)[0]
    files = ("--tls-cert-file", str(good.cert), "--tls-key-file", str(good.key))
    files += ("--tls-ca-cert-file", str(authority.ca))
    with running_server("--tls-port", str(port), *files, *OPTIONS, binary=redis_binary()) as server:
        yield TlsServer(server, port, authority, directory)


@pytest.fixture
def tls(started_tls: TlsServer) -> TlsServer:
    """With a good certificate, asking clients for nothing."""
    directory = started_tls.directory
    started_tls.present(Issued(directory / "server.cert.pem", directory / "server.key.pem"))
    return started_tls


@needs_redis
def test_tls_and_mutual_tls_carry_parts(tls: TlsServer) -> None:
    works(tls.url())
    good = tls.authority.issue("client")
    tls.present(tls.authority.issue("server2"), clients="yes")
    works(tls.url(client=good))


@needs_redis
def test_a_wrong_certificate_of_the_server_is_named(tls: TlsServer, refused: Refused) -> None:
    tls.present(tls.authority.issue("expired", first_day=-5, last_day=-1))
    assert "certificate has expired" in refused(tls.url())
    tls.present(tls.authority.issue("early", first_day=1))
    assert "not valid yet" in refused(tls.url())
    tls.present(tls.authority.issue("elsewhere", host="valkey.example"))
    assert "is for another host" in refused(tls.url())
    tls.present(tls.authority.issue("named", host="localhost"))
    assert "is for another host" in refused(tls.url())
    works(tls.url(host="localhost"))


@needs_redis
def test_a_server_of_another_authority_is_refused(tls: TlsServer, refused: Refused) -> None:
    other = Authority(tls.directory, "another authority")
    line = refused(tls.url(ca=other.ca))
    assert "not of an authority that" in line
    assert str(other.ca) in line
    assert "this system knows" in refused(tls.url().partition("?")[0])


@needs_redis
def test_a_client_certificate_that_is_missing_or_bad_is_named(tls: TlsServer, refused: Refused) -> None:
    tls.present(tls.authority.issue("server3"), clients="yes")
    assert "wants a client certificate and was given none" in refused(tls.url())
    expired = tls.authority.issue("old-client", last_day=-1)
    line = refused(tls.url(client=expired))
    assert "has expired" in line
    assert str(expired.cert) in line
    foreign = Authority(tls.directory, "foreign authority").issue("foreign-client")
    assert "does not know the authority" in refused(tls.url(client=foreign))


@needs_redis
def test_older_protocols_are_told_apart(tls: TlsServer, refused: Refused) -> None:
    must(tls.server.ask("CONFIG", "SET", "tls-protocols", "TLSv1.2"))
    try:
        works(tls.url())
        tls.present(tls.authority.issue("server5"), clients="yes")
        assert "does it want a client certificate" in refused(tls.url())
        must(tls.server.ask("CONFIG", "SET", "tls-protocols", "TLSv1.1"))
        assert "no TLS 1.2 or later" in refused(tls.url())
    finally:
        must(tls.server.ask("CONFIG", "SET", "tls-protocols", ""))


@needs_redis
def test_a_cluster_over_tls_is_used_by_the_names_in_its_map(tmp_path: Path, refused: Refused) -> None:
    authority = Authority(tmp_path)
    named = authority.issue("named", host="localhost")
    port = free_ports(1)[0]
    options = ("--tls-cert-file", str(named.cert), "--tls-key-file", str(named.key), "--tls-port", str(port))
    options += ("--tls-ca-cert-file", str(authority.ca), "--tls-auth-clients", "no", "--tls-cluster", "yes")
    options += ("--cluster-announce-ip", "127.0.0.1", "--cluster-announce-hostname", "localhost")
    url = f"valkeys://localhost:{port}?ca={authority.ca}"
    with running_server(*CLUSTER_OPTIONS, *options, binary=redis_binary()) as server:
        must(server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383"))
        give_up = time.monotonic() + 60
        while not _whole(server):
            assert time.monotonic() < give_up
            time.sleep(0.02)
        line = refused(url)  # the map has addresses
        assert "a shard of localhost:" in line
        assert "certificate is for another host" in line
        must(server.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname"))
        works(url)
        must(server.ask("CONFIG", "SET", "cluster-announce-tls-port", str(server.port)))
        assert "where nobody answers" in refused(url)


def _whole(server: Server) -> bool:
    info = must(server.ask("CLUSTER", "INFO"))
    return isinstance(info, bytes) and b"cluster_state:ok" in info


@needs_redis
def test_client_files_that_cannot_be_used_are_named(tls: TlsServer, refused: Refused) -> None:
    one, two = tls.authority.issue("one"), tls.authority.issue("two")
    line = refused(tls.url(client=Issued(one.cert, two.key)))
    assert f"key={two.key} is not the key of cert={one.cert}" in line
    two.key.chmod(0o644)
    assert f"chmod 600 {two.key}" in refused(tls.url(client=two))
    locked = tls.authority.issue("locked", passphrase="secret")
    assert "encrypted" in refused(tls.url(client=locked))
    missing = tls.directory / "none.pem"
    assert f"there is no file key={missing}" in refused(tls.url(client=Issued(one.cert, missing)))
    assert f"there is no file ca={missing}" in refused(tls.url(ca=missing))
    nothing = tls.directory / "nothing.pem"
    nothing.write_text("nothing")
    assert f"ca={nothing}" in refused(tls.url(ca=nothing))
    assert f"cert={nothing}" in refused(tls.url(client=Issued(nothing, one.key)))


@needs_redis
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_key_that_the_user_may_not_read_is_named(tmp_path: Path) -> None:
    place = Path("/tmp") / f"kvferry-key-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        authority = Authority(place)
        client = authority.issue("client")
        url = f"valkeys://127.0.0.1:1?ca={authority.ca}&cert={client.cert}&key={client.key}"
        node = ("kvferry", "node", "--valkey", url, "--socket", str(place / "s"), "--pool", "64MiB")
        code, _, err = User(54001, 54001).run(*node)
        assert (code, len(err.splitlines())) == (2, 1)
        assert f"cannot read key={client.key}: Permission denied" in err
    finally:
        shutil.rmtree(place)


@needs_redis
def test_the_other_scheme_is_offered_and_never_taken(tls: TlsServer) -> None:
    """Not refused for ever: a server that is just starting ends connections so too."""
    assert "valkeys://" in unanswered(f"valkey://127.0.0.1:{tls.port}", PASSWORD)
    assert "TLS" in unanswered(f"valkeys://127.0.0.1:{tls.server.port}?ca={tls.authority.ca}", PASSWORD)


def test_a_server_without_tls_never_sees_the_password(refused: Refused) -> None:
    heard = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    heard.extend(client.recv(1 << 16))
                    client.sendall(b"-ERR unknown command\r\n")

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        line = refused(f"valkeys://kvferry@127.0.0.1:{listener.getsockname()[1]}", PASSWORD)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert "does not speak TLS" in line
    assert heard[:2] == b"\x16\x03"  # a TLS handshake, and nothing else
    assert PASSWORD.encode() not in heard


@pytest.mark.parametrize("rude", [False, True])
def test_a_server_that_goes_while_it_shakes_hands_is_down_and_not_misconfigured(
    tmp_path: Path, rude: bool
) -> None:
    """One that is being restarted, or a balancer in front of none: the next attempt may succeed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1 << 16)
            if rude:  # a reset instead of an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=listen)
    thread.start()
    address = Address("127.0.0.1", listener.getsockname()[1])
    tls = Tls(TlsFiles(ca=str(Authority(tmp_path).ca)))
    try:
        with pytest.raises(UnreachableError, match="is that a TLS port"):
            dial(address, tls=tls, timeout_s=60.0, stall_s=60.0)
    finally:
        thread.join()
        listener.close()


def test_a_server_that_repeats_what_it_hears_does_not_put_the_password_into_a_message(
    refused: Refused,
) -> None:
    """A test service, or a trap: each command comes back as if it were the reply."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    while data := client.recv(1 << 16):
                        client.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        refused(f"valkey://kvferry@127.0.0.1:{listener.getsockname()[1]}", PASSWORD)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


class Rotating:
    """A client's certificate and key under fixed names, replaced as a tool for certificates would."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.files = Issued(directory / "cert.pem", directory / "key.pem")

    def replace(self, target: Path, source: Path) -> None:
        """At once."""
        shutil.copy(source, self._directory / "new")
        (self._directory / "new").replace(target)

    def use(self, issued: Issued) -> None:
        """Both of them."""
        self.replace(self.files.cert, issued.cert)
        self.replace(self.files.key, issued.key)


def _reconnected(tls: TlsServer, tier: ValkeyTier, *, seed: int) -> None:
    """Ends all connections; new ones carry parts."""
    must(tls.server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    give_up = time.monotonic() + 60
    while True:
        with contextlib.suppress(AssertionError):
            round_trip(tier, seed=seed)
            return
        assert time.monotonic() < give_up


@needs_redis
def test_new_connections_read_replaced_certificates(tls: TlsServer, tmp_path: Path) -> None:
    mine = Rotating(tmp_path)
    old = Authority(tls.directory, "old authority")
    mine.use(old.issue("first-client"))
    must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(old.ca)))
    tls.present(tls.authority.issue("server4"), clients="yes")
    tier = ValkeyTier.connect(ValkeySettings(parse_url(tls.url(client=mine.files))))
    try:
        round_trip(tier, seed=1)
        must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(tls.authority.ca)))
        mine.use(tls.authority.issue("second-client"))
        _reconnected(tls, tier, seed=2)
    finally:
        tier.close()
        must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(tls.authority.ca)))


@needs_redis
def test_half_a_replacement_leaves_the_pair_before_in_use(
    tls: TlsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Rotating(tmp_path)
    mine.use(tls.authority.issue("pair-one"))
    tls.present(tls.authority.issue("server6"), clients="yes")
    tier = ValkeyTier.connect(ValkeySettings(parse_url(tls.url(client=mine.files))))
    try:
        two = tls.authority.issue("pair-two")
        mine.replace(mine.files.cert, two.cert)
        _reconnected(tls, tier, seed=1)
        _reconnected(tls, tier, seed=2)
        (line,) = [record.getMessage() for record in caplog.records if "stay in use" in record.getMessage()]
        assert "is not the key of" in line
        caplog.set_level("INFO")
        mine.replace(mine.files.key, two.key)
        _reconnected(tls, tier, seed=3)
        assert any("were replaced and are in use" in record.getMessage() for record in caplog.records)
    finally:
        tier.close()
