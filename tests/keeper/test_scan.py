"""The scan of a real Valkey: what was used is found, what was not is left alone; drops reach every key."""

import threading
from collections.abc import Iterator, Sequence

import pytest
from tests.keeper.rig import EAGER, NAMESPACE, contents, fill, holds, prompt
from tests.servers import Cluster, Server, must, running_cluster, running_server

from kvferry.identity.names import PartRef
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.scan import Scanner, ScanSettings
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import fetch_all, probe_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.valkey.acl import KEEPER_COMMANDS
from kvferry.tiers.valkey.keyspace import Keyspace, parse_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

QUICK = ScanSettings(every_s=0.0, page_keys=50, page_s=0.0, share=0.9)
OTHERS = b"o" * 16
BIG = 300_000  # several stripes


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.ask("FLUSHALL")
    return shared


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as made:
        yield made


@pytest.fixture
def valkey(server: Server) -> Iterator[ValkeyTier]:
    tier = ValkeyTier.connect(server.settings())
    yield tier
    tier.close()


class Ear:
    """Hears what a scan finds."""

    def __init__(self) -> None:
        self.refs: set[PartRef] = set()

    def found(self, refs: Sequence[PartRef]) -> None:
        self.refs |= set(refs)


@pytest.fixture
def ear() -> Ear:
    return Ear()


def started(keyspace: Keyspace, settings: ScanSettings, ear: Ear) -> Scanner:
    scanner = Scanner(keyspace, settings=settings, found=ear.found)
    scanner.start()
    return scanner


def passed(scanner: Scanner, passes: int = 2) -> None:
    """So many whole passes have gone by since now."""
    wanted = scanner.statistics.passes + passes
    eventually(lambda: scanner.statistics.passes >= wanted, "passes")


def dropped(scanner: Scanner, *, namespace: bytes | None, older_than_s: float | None = None) -> Dropped:
    found: list[Dropped] = []
    ready = threading.Event()

    def done(result: Dropped) -> None:
        found.append(result)
        ready.set()

    scanner.drop(namespace=namespace, older_than_s=older_than_s, done=done)
    assert ready.wait(60)
    return found[0]


def age(server: Server, seconds: int) -> None:
    """From now on nothing it holds was used for so long."""
    for name in filter(parse_key, server.key_names()):
        dump = must(server.ask("DUMP", name))
        assert isinstance(dump, bytes)
        must(server.ask("RESTORE", name, "0", dump, "REPLACE", "IDLETIME", str(seconds)))


def idle_times(server: Server) -> list[int]:
    return [int(must(server.ask("OBJECT", "IDLETIME", name))) for name in server.key_names()]  # type: ignore[call-overload]


def test_what_is_used_again_is_found_and_nothing_else(server: Server, valkey: ValkeyTier, ear: Ear) -> None:
    refs = prompt("a", 12, nbytes=BIG)
    fill(valkey, refs)
    age(server, 1000)
    scanner = started(valkey.keyspace(), QUICK, ear)
    try:
        passed(scanner, 3)
        assert not ear.refs
        assert probe_all(valkey, refs[:4]) == [Outcome.OK] * 4
        passed(scanner, 3)
        assert ear.refs == set(refs[:4])
        assert scanner.statistics.found_parts == 4, "each once"
    finally:
        scanner.close()


def test_looking_leaves_no_trace(server: Server, valkey: ValkeyTier, ear: Ear) -> None:
    refs = prompt("a", 3)
    fill(valkey, refs)
    age(server, 1000)
    scanner = started(valkey.keyspace(), QUICK, ear)
    try:
        passed(scanner, 3)
        shelf = valkey.keyspace().open(valkey.keyspace().servers()[0])
        assert set(shelf.parts(server.key_names())) == set(refs)
        shelf.close()
    finally:
        scanner.close()
    assert min(idle_times(server)) >= 1000


def test_a_drop_reaches_every_key_of_its_namespace_and_no_other(valkey: ValkeyTier, ear: Ear) -> None:
    mine, theirs = prompt("a", 700, nbytes=200), prompt("b", 5, nbytes=BIG, namespace=OTHERS)
    fill(valkey, mine)
    fill(valkey, theirs)
    scanner = started(valkey.keyspace(), ScanSettings(), ear)
    try:
        assert dropped(scanner, namespace=NAMESPACE) == Dropped(700, 700 * 200)
        assert probe_all(valkey, [*mine, *theirs]) == [Outcome.MISS] * 700 + [Outcome.OK] * 5
    finally:
        scanner.close()


def test_a_drop_of_what_is_old_spares_what_was_used(server: Server, valkey: ValkeyTier, ear: Ear) -> None:
    refs = prompt("a", 30, nbytes=BIG)
    fill(valkey, refs)
    age(server, 1000)
    assert probe_all(valkey, refs[:3]) == [Outcome.OK] * 3
    scanner = started(valkey.keyspace(), ScanSettings(), ear)
    try:
        assert dropped(scanner, namespace=None, older_than_s=2000) == Dropped(0, 0)
        assert dropped(scanner, namespace=None, older_than_s=900) == Dropped(27, 27 * BIG)
        assert probe_all(valkey, refs) == [Outcome.OK] * 3 + [Outcome.MISS] * 27
    finally:
        scanner.close()


def test_every_shard_of_a_cluster_is_looked_through_and_dropped_from(cluster: Cluster, ear: Ear) -> None:
    tier = ValkeyTier.connect(cluster.settings())
    refs = prompt("c", 40, nbytes=BIG)
    fill(tier, refs)
    for server in cluster.servers:
        age(server, 1000)
    scanner = started(tier.keyspace(), QUICK, ear)
    try:
        passed(scanner)
        assert probe_all(tier, refs) == [Outcome.OK] * len(refs)
        eventually(lambda: len(ear.refs) == len(refs), "all parts of all shards were found")
        assert ear.refs == set(refs)
        assert dropped(scanner, namespace=None) == Dropped(40, 40 * BIG)
        assert [server.key_names() for server in cluster.servers] == [[]] * len(cluster.servers)
    finally:
        scanner.close()
        tier.close()


def test_a_server_that_permits_no_scan_is_named_and_nothing_else_suffers(server: Server, ear: Ear) -> None:
    must(server.ask("ACL", "SETUSER", "node", "reset", "on", ">pw", "~kvf1:*", "+@all", "-scan"))
    url = ValkeyUrl((server.address,), user="node", password="pw")
    tier = ValkeyTier.connect(ValkeySettings(url))
    scanner = started(tier.keyspace(), QUICK, ear)
    try:
        eventually(lambda: "scan" in scanner.statistics.error.lower(), "the complaint")
        assert dropped(scanner, namespace=None).outcome is Outcome.FAILED
    finally:
        scanner.close()
        tier.close()
        server.ask("ACL", "DELUSER", "node")


def test_a_keeper_copies_what_it_was_never_told_of_once_it_is_used(server: Server) -> None:
    with_other = ValkeyTier.connect(server.settings())
    refs = prompt("a", 5)
    fill(with_other, [*refs, *prompt("once", 5)])
    age(server, 1000)
    tier = ValkeyTier.connect(server.settings())
    disk = MemoryTier("disk")
    keeper = Keeper(valkey=tier, disk=disk, objects=None, limits=EAGER, keyspace=tier.keyspace(), scan=QUICK)
    try:
        eventually(lambda: keeper.statistics().scan.passes > 1, "passes")
        assert probe_all(with_other, refs) == [Outcome.OK] * 5
        eventually(lambda: holds(disk, refs), "copies of what was used")
        assert len(disk.parts) == 5
    finally:
        keeper.close()
        with_other.close()


def test_names_that_are_not_ours_are_passed_over() -> None:
    ref = prompt("a", 1)[0]
    name = f"kvf1:{ref.key.namespace.hex()}:{ref.key.chunk.hex()}:0:3"
    found = parse_key(name.encode())
    assert found is not None
    assert (found.part, found.stripe, found.key_id) == (ref.key, 3, b"")
    sealed = parse_key(name.encode() + b":00ff00ff")
    assert sealed is not None
    assert sealed.key_id == bytes.fromhex("00ff00ff")
    for other in ("kvf1:probe", name[:-1], name + ":", name.upper(), name + ":0", "kvf2" + name[4:]):
        assert parse_key(other.encode()) is None
    assert contents(ref)


def test_the_line_for_a_keepers_user_is_enough_and_no_command_on_it_is_idle(server: Server, ear: Ear) -> None:
    """Each command is taken away once: what needs it then fails, and only that."""
    refs = prompt("a", 4)
    writer = ValkeyTier.connect(server.settings())

    def permitted(*taken: str) -> Dropped:
        grants = [f"+{name}" for name in KEEPER_COMMANDS if name not in taken]
        must(server.ask("ACL", "SETUSER", "keep", "reset", "on", ">pw", "~kvf1:*", *grants))
        fill(writer, refs)
        url = ValkeyUrl((server.address,), user="keep", password="pw")
        tier = ValkeyTier.connect(ValkeySettings(url, no_touch=True))
        scanner = started(tier.keyspace(), ScanSettings(), ear)
        try:
            assert [result.outcome for result, _ in fetch_all(tier, refs)] == [Outcome.OK] * 4
            return dropped(scanner, namespace=None, older_than_s=0.0)
        finally:
            scanner.close()
            tier.close()

    try:
        assert permitted() == Dropped(4, sum(ref.nbytes for ref in refs))
        for name in ("scan", "object|idletime", "getrange"):
            assert permitted(name).outcome is Outcome.FAILED
        assert permitted("client|no-touch", "object|freq").outcome is Outcome.OK
    finally:
        writer.close()
        server.ask("ACL", "DELUSER", "keep")
