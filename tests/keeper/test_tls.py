"""TLS and mutual TLS between nodes and keepers: who is not known is let in nowhere, and told why."""

import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.keeper.asking import REFS, located, staged, status
from tests.keeper.conftest import Connect, Serve
from tests.keeper.fleet import Answers, FakeKeeping, some_refs
from tests.keeper.raw import RawPeer
from tests.tiers.authority import Authority, Issued

from kvferry import listening
from kvferry.errors import KvferryError, MisconfiguredError
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.admin import KeeperAdmin
from kvferry.keeper.server import Admission
from kvferry.keeper.tls import keeper_contexts
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.tiers.contract import Outcome
from kvferry.values import TlsFiles


class Fleet:
    """An authority, a keeper's certificate and a node's."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.keeper = self.authority.issue("keeper")
        self.node = self.authority.issue("node")

    def admission(self, issued: Issued | None = None, *, mutual: bool = False, token: str = "") -> Admission:
        files = issued or self.keeper
        ca = str(self.authority.ca) if mutual else None
        contexts = keeper_contexts(TlsFiles(ca, str(files.cert), str(files.key)))
        return Admission(name="k", token=token, tls=contexts)

    def access(
        self, issued: Issued | None = None, *, ca: Path | None = None, token: str = ""
    ) -> KeeperAccess:
        own = (str(issued.cert), str(issued.key)) if issued is not None else (None, None)
        return KeeperAccess(token, TlsFiles(str(ca or self.authority.ca), *own))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def keeping() -> FakeKeeping:
    return FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))


@pytest.mark.parametrize("mutual", [False, True])
def test_questions_and_answers_pass_through_tls(
    fleet: Fleet, serve: Serve, connect: Connect, keeping: FakeKeeping, mutual: bool
) -> None:
    server = serve(keeping, fleet.admission(mutual=mutual, token="ours"))
    access = fleet.access(fleet.node if mutual else None, token="ours")
    keepers = connect([server.address], access=access)
    assert located(keepers) == [Where.DISK] * len(REFS)
    assert staged(keepers) == [Outcome.OK] * len(REFS)
    many = some_refs(40_000, seed="many")  # several frames, and many records of TLS each
    answers = Answers()
    keepers.locate(many, deadline=1e12, done=answers)
    assert answers.wait() == [((Where.ABSENT,) * len(many),)]
    with KeeperAdmin(server.address, access=access) as admin:
        assert admin.status() == {}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no certificate", "wants a certificate: give keeper_tls_cert"),
        ("another authority", "refuses this node's certificate"),
        ("expired", "refuses this node's certificate"),
    ],
)
def test_a_node_without_a_good_certificate_is_not_let_in(
    fleet: Fleet,
    serve: Serve,
    connect: Connect,
    keeping: FakeKeeping,
    tmp_path: Path,
    case: str,
    words: str,
) -> None:
    shown = {
        "no certificate": lambda: None,
        "another authority": lambda: Authority(tmp_path, "another").issue("stranger"),
        "expired": lambda: fleet.authority.issue("expired", first_day=-9, last_day=-1),
    }[case]()
    server = serve(keeping, fleet.admission(mutual=True))
    keepers = connect([server.address], up=0, access=fleet.access(shown))
    eventually(lambda: words in status(keepers).error, "known why")
    assert server.statistics().peers == ()
    assert keeping.told == []
    connect([server.address], access=fleet.access(fleet.node))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another authority", "not of an authority that keeper_tls_ca holds"),
        ("another host", "is for another host"),
        ("expired", "certificate has expired"),
        ("plain", "speaks no TLS there"),
    ],
)
def test_a_node_asks_nothing_of_a_keeper_that_it_cannot_verify(
    fleet: Fleet,
    serve: Serve,
    connect: Connect,
    keeping: FakeKeeping,
    tmp_path: Path,
    case: str,
    words: str,
) -> None:
    admission = {
        "another authority": lambda: fleet.admission(Authority(tmp_path, "another").issue("impostor")),
        "another host": lambda: fleet.admission(fleet.authority.issue("elsewhere", host="keeper.example")),
        "expired": lambda: fleet.admission(fleet.authority.issue("old", first_day=-9, last_day=-1)),
        "plain": lambda: Admission(name="k"),
    }[case]()
    keepers = connect([serve(keeping, admission).address], up=0, access=fleet.access(token="ours"))
    eventually(lambda: words in status(keepers).error, "known why")
    assert staged(keepers) == [Outcome.REFUSED] * len(REFS)


def test_nothing_falls_back_to_a_plain_connection(
    fleet: Fleet, serve: Serve, connect: Connect, keeping: FakeKeeping
) -> None:
    server = serve(keeping, fleet.admission())
    keepers = connect([server.address], up=0)
    eventually(lambda: "this keeper talks TLS, and what came was plain" in status(keepers).error, "known why")
    assert "give keeper_tls_ca" in status(keepers).error
    eventually(lambda: server.statistics().refused.get("tls"), "counted")
    connect([server.address], access=fleet.access())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("plain to TLS", "talks TLS, and what came was plain: give keeper_tls_ca"),
        ("TLS to plain", "speaks no TLS there: start the keeper with --tls-cert, or leave keeper_tls_ca out"),
        ("another authority", "is not of an authority that keeper_tls_ca holds; give it the file"),
        (
            "an authority of the same name",
            "is not of an authority that keeper_tls_ca holds; give it the file",
        ),
        ("no certificate", "wants a certificate: give keeper_tls_cert and keeper_tls_key"),
    ],
)
def test_a_command_says_which_end_lacks_what(
    fleet: Fleet, serve: Serve, tmp_path: Path, case: str, words: str
) -> None:
    admission, access = {
        "plain to TLS": lambda: (fleet.admission(), KeeperAccess()),
        "TLS to plain": lambda: (Admission(name="k"), fleet.access()),
        "another authority": lambda: (
            fleet.admission(),
            fleet.access(ca=Authority(tmp_path, "another").ca),
        ),
        "an authority of the same name": lambda: (fleet.admission(), fleet.access(ca=Authority(tmp_path).ca)),
        "no certificate": lambda: (fleet.admission(mutual=True), fleet.access()),
    }[case]()
    address = serve(FakeKeeping(), admission).address
    with pytest.raises(KvferryError) as refused, KeeperAdmin(address, access=access) as asked:
        asked.status()
    assert f"keeper {address}: " in str(refused.value)
    assert words in str(refused.value)


def test_a_handshake_that_never_ends_has_no_more_time_than_a_hello(
    fleet: Fleet, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 0.2)
    keeper = serve(FakeKeeping(), fleet.admission())
    silent = stack.enter_context(socket.create_connection(keeper.address, timeout=60.0))
    half = stack.enter_context(socket.create_connection(keeper.address, timeout=60.0))
    half.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # a record of 512 bytes begins
    assert silent.recv(100) == b""
    assert half.recv(100) == b""
    eventually(lambda: keeper.statistics().refused == {"no-hello": 2}, "counted")
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 60.0)
    connect([keeper.address], access=fleet.access())


def test_a_stranger_in_the_middle_of_tls_is_refused_like_any(fleet: Fleet, serve: Serve) -> None:
    keeper = serve(FakeKeeping(), fleet.admission())
    context = ssl.create_default_context(cafile=str(fleet.authority.ca))
    with RawPeer(keeper.address, None) as peer:
        peer.sock = context.wrap_socket(peer.sock, server_hostname="127.0.0.1")
        peer.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        said = peer.ended()
        assert "exceeds the limit" in said[-1].message
    eventually(lambda: keeper.statistics().refused == {"refused": 1}, "counted")


def test_replaced_certificates_are_used_from_the_next_connection_on(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    old, new = Fleet(tmp_path), Authority(tmp_path, "new")
    keeper = serve(FakeKeeping(), old.admission())
    keepers = connect([keeper.address], access=old.access())
    issued = new.issue("replacing")
    issued.cert.replace(old.keeper.cert)
    issued.key.replace(old.keeper.key)
    later = connect([keeper.address], access=old.access(ca=new.ca))
    assert staged(later) == staged(keepers) == [Outcome.MISS] * len(REFS)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("missing", "there is no file tls_cert "),
        ("open", "is open to others: chmod 600"),
        ("mixed", "is not the key of tls_cert "),
        ("empty", "holds no certificate in PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_at_start(tmp_path: Path, broken: str, words: str) -> None:
    fleet = Fleet(tmp_path)
    ca, cert, key = fleet.authority.ca, fleet.keeper.cert, fleet.keeper.key
    match broken:
        case "missing":
            cert.unlink()
        case "open":
            key.chmod(0o644)
        case "mixed":
            key = fleet.node.key
        case "empty":
            ca.write_text("")
    with pytest.raises(MisconfiguredError, match=words) as refused:
        keeper_contexts(TlsFiles(str(ca), str(cert), str(key)))
    assert "\n" not in str(refused.value)
