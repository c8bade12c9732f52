"""What stands between a node and Valkey: passwords, permissions, certificates. Each mistake is one line."""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.node.users import User
from tests.servers import Cluster, Server, free_ports, must, redis_binary, running_server
from tests.tiers.authority import Authority, Issued

from kvferry.cli.main import main
from kvferry.testing.tier_contract import fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.acl import COMMANDS
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import parse_url

PASSWORD = "mark-of-a-password"
OPTIONS = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
needs_redis = pytest.mark.skipif(
    redis_binary() is None, reason="no redis-server here: ./test names the missing check and fails in CI"
)

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs ``kvferry node`` with such a URL; returns the one line that it ends with."""

    def run(url: str, password: str = "") -> str:
        if password:
            monkeypatch.setenv("KVFERRY_VALKEY_PASSWORD", password)
        node = ["node", "--valkey", url, "--socket", str(tmp_path / "s"), "--pool", "64MiB"]
        code = main([*node, "--metrics-port", "0"])
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert PASSWORD not in err
        assert not (tmp_path / "s").exists()
        return err

    return run


def works(url: str, password: str | None = None) -> None:
    """Connects, stores and loads."""
    tier = ValkeyTier.connect(ValkeySettings(parse_url(url, password=password)))
    try:
        _round_trip(tier)
    finally:
        tier.close()


def _round_trip(tier: ValkeyTier, *, seed: int = 1) -> None:
    ref, data = some_ref(1000, seed), some_bytes(1000, seed)
    assert store_all(tier, [(ref, data)]) == [Outcome.OK]
    ((result, memory),) = fetch_all(tier, [ref])
    assert (result.outcome, memory) == (Outcome.OK, data)


# ---- passwords and users


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with a password, and a user of each kind."""
    with running_server(*OPTIONS, password=PASSWORD) as server:
        must(server.ask("ACL", "SETUSER", "kvferry", "on", f">{PASSWORD}", "~kvf1:*", "+@all"))
        must(server.ask("ACL", "SETUSER", "disabled", "off", f">{PASSWORD}", "~kvf1:*", "+@all"))
        yield server


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("", "", ("wants a password", "KVFERRY_VALKEY_PASSWORD")),
        ("", "wrong", ("the default user", "WRONGPASS")),
        ("kvferry@", "wrong", ("'kvferry'", "WRONGPASS")),
        ("kvferry@", "", ("'kvferry'", "without a password")),
        ("nobody@", PASSWORD, ("'nobody'", "check the user")),
        ("disabled@", PASSWORD, ("'disabled'", "check the user")),
    ],
    ids=["none given", "wrong", "wrong of a user", "none of a user", "unknown user", "disabled user"],
)
def test_a_wrong_login_is_named(
    guarded: Server, refused: Refused, user: str, password: str, words: tuple[str, ...]
) -> None:
    line = refused(f"valkey://{user}127.0.0.1:{guarded.port}", password)
    assert f"127.0.0.1:{guarded.port}" in line
    assert not [word for word in words if word not in line]


def test_a_password_that_nobody_asked_for_is_named(server: Server, refused: Refused) -> None:
    assert "the default user has none" in refused(server.url, PASSWORD)


def test_a_mistake_is_tried_once(guarded: Server, refused: Refused) -> None:
    def connections() -> int:
        info = must(guarded.ask("INFO", "stats"))
        assert isinstance(info, bytes)
        return int(info.split(b"total_connections_received:")[1].split()[0])

    before = connections()
    refused(f"valkey://127.0.0.1:{guarded.port}", "wrong")
    assert connections() == before + 2  # that one, and the question


# ---- permissions


@contextlib.contextmanager
def limited(server: Server, *rules: str) -> Iterator[str]:
    """The URL of a user with the documented permissions, but for these."""
    grants = [f"+{name}" for name in COMMANDS]
    must(server.ask("ACL", "SETUSER", "few", "reset", "on", f">{PASSWORD}", "~kvf1:*", *grants, *rules))
    try:
        yield f"valkey://few@127.0.0.1:{server.port}"
    finally:
        server.ask("ACL", "DELUSER", "few")


@pytest.mark.parametrize("name", ["get", "set", "touch", "unlink"])
def test_a_missing_permission_is_named_at_start(server: Server, refused: Refused, name: str) -> None:
    with limited(server, f"-{name}") as url:
        line = refused(url, PASSWORD)
    assert f"user 'few' may not run {name}" in line
    assert "ACL SETUSER" in line
    assert server.key_names() == []


@pytest.mark.parametrize("name", ["cluster|slots", "asking"])
def test_a_permission_that_a_cluster_needs_is_named_at_start(
    cluster: Cluster, refused: Refused, name: str
) -> None:
    with limited(cluster.servers[0], f"-{name}") as url:
        assert f"may not run {name}" in refused(url, PASSWORD)


def test_all_missing_permissions_are_named_at_once(server: Server, refused: Refused) -> None:
    with limited(server, "-get", "-unlink") as url:
        assert "add +get +unlink there" in refused(url, PASSWORD)


def test_what_a_single_server_does_not_need_is_not_asked_for(server: Server) -> None:
    for rules in (("-cluster|slots", "-asking"), ("-info", "-asking")):
        with limited(server, *rules, "-client|setname", "-ping") as url:
            works(url, PASSWORD)


def test_without_info_a_cluster_is_recognised_by_its_map(cluster: Cluster) -> None:
    with contextlib.ExitStack() as users:
        urls = [users.enter_context(limited(server, "-info")) for server in cluster.servers]
        works(urls[0], PASSWORD)


def test_without_info_and_the_map_nobody_can_tell_a_cluster(server: Server, refused: Refused) -> None:
    with limited(server, "-info", "-cluster|slots") as url:
        assert "may not run cluster|slots" in refused(url, PASSWORD)


@pytest.mark.parametrize(
    ("rules", "stored"),
    [(("-touch",), False), (("-get",), True), (("-set",), False), (("resetkeys", "~other:*"), False)],
    ids=["touch", "get", "set", "keys"],
)
def test_a_permission_lost_later_is_a_failure_with_a_name_and_not_a_miss(
    server: Server, caplog: pytest.LogCaptureFixture, rules: tuple[str, ...], stored: bool
) -> None:
    ref, data = some_ref(1000, 3), some_bytes(1000, 3)
    with limited(server) as url:
        tier = ValkeyTier.connect(ValkeySettings(parse_url(url, password=PASSWORD)))
        try:
            _round_trip(tier)
            must(server.ask("ACL", "SETUSER", "few", *rules))
            before = tier.statistics()
            outcomes = store_all(tier, [(ref, data)])
            outcomes += [result.outcome for result, _ in fetch_all(tier, [some_ref(1000, 1)])]
            after = tier.statistics()
        finally:
            tier.close()
    assert Outcome.REFUSED in outcomes
    assert (outcomes[0] is Outcome.OK) is stored
    assert after.failed["not_allowed"] > before.failed.get("not_allowed", 0)
    assert after.missed_parts == before.missed_parts
    assert "NOPERM" in after.detail["denied"]
    denials = [record.message for record in caplog.records if "NOPERM" in record.message]
    assert len(denials) == len(set(denials)) >= 1


# ---- TLS


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
def test_client_files_that_cannot_be_used_are_named(tls: TlsServer, refused: Refused) -> None:
    one, two = tls.authority.issue("one"), tls.authority.issue("two")
    line = refused(tls.url(client=Issued(one.cert, two.key)))
    assert f"key={two.key} is not the key of cert={one.cert}" in line
    two.key.chmod(0o644)
    assert f"chmod 600 {two.key}" in refused(tls.url(client=two))
    locked = tls.authority.issue("locked", passphrase="secret")
    assert "encrypted" in refused(tls.url(client=locked))
    missing = tls.directory / "none.pem"
    assert f"cannot read key={missing}" in refused(tls.url(client=Issued(one.cert, missing)))
    assert f"cannot read ca={missing}" in refused(tls.url(ca=missing))
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
def test_the_other_scheme_is_offered_and_never_taken(
    tls: TlsServer, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "valkeys://" in refused(f"valkey://127.0.0.1:{tls.port}", PASSWORD)
    assert "TLS" in refused(f"valkeys://127.0.0.1:{tls.server.port}?ca={tls.authority.ca}", PASSWORD)


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


@needs_redis
def test_new_connections_read_replaced_certificates(tls: TlsServer, tmp_path: Path) -> None:
    mine = Issued(tmp_path / "cert.pem", tmp_path / "key.pem")

    def use(issued: Issued) -> None:
        for source, target in ((issued.cert, mine.cert), (issued.key, mine.key)):
            shutil.copy(source, tmp_path / "new")
            (tmp_path / "new").replace(target)

    old = Authority(tls.directory, "old authority")
    use(old.issue("first-client"))
    must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(old.ca)))
    tls.present(tls.authority.issue("server4"), clients="yes")
    tier = ValkeyTier.connect(ValkeySettings(parse_url(tls.url(client=mine))))
    try:
        _round_trip(tier, seed=1)
        must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(tls.authority.ca)))
        use(tls.authority.issue("second-client"))
        must(tls.server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        give_up = time.monotonic() + 30
        while True:
            with contextlib.suppress(AssertionError):
                _round_trip(tier, seed=2)
                break
            assert time.monotonic() < give_up
    finally:
        tier.close()
        must(tls.server.ask("CONFIG", "SET", "tls-ca-cert-file", str(tls.authority.ca)))
