"""Several keepers share the scan of a real Valkey, those of them that are alive; servers that count uses."""

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keeper.rig import EAGER, fill, holds, prompt
from tests.keeper.test_scan import BIG, QUICK, Ear, age, passed, started
from tests.servers import Server, must, running_cluster, running_server

from kvferry.keeper import scan
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.rendezvous import owner
from kvferry.keeper.scan import Scanner
from kvferry.keeper.sharers import Sharers
from kvferry.keeper.sightings import STORED_COUNT, Sightings
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import probe_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.keyspace import Keyspace, keeper_key, parse_keeper, parse_key
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier
from kvferry.tiers.valkey.url import ValkeyUrl

NAMES = ("storage-1", "storage-2", "ßtorage.3")
CHUNKS = [bytes([number]) * 32 for number in range(16)]


@pytest.fixture(scope="module")
def lru() -> Iterator[Server]:
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(scope="module")
def lfu() -> Iterator[Server]:
    with running_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lfu") as server:
        yield server


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.sampled_from(NAMES)), max_size=8))
def test_every_chunk_is_the_share_of_somebody_who_is_there(passes: list[set[str]]) -> None:
    """Each pass: who said that they are. All who look see the same, a pass of theirs may see it later."""
    sharers = {name: Sharers(name, NAMES) for name in NAMES}
    before = set(NAMES)
    for here in passes:
        for name in here:
            sharers[name].saw([keeper_key(other) for other in here] + [b"kvf1:probe"])
            sharers[name].end_pass()
        alive = [name for name in NAMES if name in before | here]
        for chunk in CHUNKS if alive else ():
            owners = [name for name in here if name in before and sharers[name].owns(chunk)]
            wanted = owner(chunk, alive)
            assert owners == ([wanted] if wanted in here and wanted in before else [])
        for name in set(NAMES) - here:  # who cannot say it falls back to the list
            sharers[name].end_pass()
            assert [chunk for chunk in CHUNKS if sharers[name].owns(chunk)] == [
                chunk for chunk in CHUNKS if owner(chunk, NAMES) == name
            ]
        before = here
    alone = Sharers("x", ())
    alone.end_pass()
    assert all(alone.owns(chunk) for chunk in CHUNKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_keepers_key_is_no_parts_and_says_whose_it_is(name: str) -> None:
    assert parse_keeper(keeper_key(name)) == name
    assert parse_key(keeper_key(name)) is None
    for other in (b"kvf1:keeper:xy", b"kvf1:keeper:ff", b"kvf1:keepers", b"other"):
        assert parse_keeper(other) is None


def _scanner(keyspace: Keyspace, ear: Ear, name: str, names: tuple[str, ...] = NAMES) -> Scanner:
    return started(keyspace, dataclasses.replace(QUICK, name=name, keepers=names), ear)


def test_those_that_are_alive_share_all_of_it(lru: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies has no share after a while; one that comes back has its own again."""
    monkeypatch.setattr(scan, "MIN_LIFE_S", 0.5)
    monkeypatch.setattr(scan, "LIVES", 0)
    monkeypatch.setattr(scan, "SAY_S", 0.0)
    lru.ask("FLUSHALL")
    refs = prompt("shared", 30)
    tier = ValkeyTier.connect(lru.settings())
    fill(tier, refs)
    ears = {name: Ear() for name in NAMES}
    scanners = {name: _scanner(tier.keyspace(), ears[name], name) for name in NAMES}
    shares = {name: {ref for ref in refs if owner(ref.key.chunk, NAMES) == name} for name in NAMES}
    left = NAMES[:2]

    def use_all_and_see(names: tuple[str, ...]) -> None:
        """Until each of these has found its own, with the rest shared among them."""
        wanted = {name: {ref for ref in refs if owner(ref.key.chunk, names) == name} for name in names}

        def found() -> bool:
            age(lru, 1000)
            for name in names:
                passed(scanners[name], 2)
                ears[name].refs.clear()
            assert probe_all(tier, refs) == [Outcome.OK] * len(refs)
            for name in names:
                passed(scanners[name], 2)
            return all(ears[name].refs == wanted[name] for name in names)

        eventually(found, f"the shares of {names}")

    try:
        use_all_and_see(NAMES)
        assert all(shares.values())
        scanners[NAMES[2]].close()
        use_all_and_see(left)
        scanners[NAMES[2]] = _scanner(tier.keyspace(), ears[NAMES[2]], NAMES[2])
        use_all_and_see(NAMES)
    finally:
        for scanner in scanners.values():
            scanner.close()
        tier.close()
    keys = [key for key in lru.key_names() if parse_keeper(key)]
    assert all(0 <= int(must(lru.ask("PTTL", key))) <= 500 for key in keys)  # type: ignore[call-overload]


def test_who_may_not_say_that_it_is_there_keeps_to_its_share_of_the_list(lru: Server) -> None:
    lru.ask("FLUSHALL")
    refs = prompt("own", 20)
    tier, ear = ValkeyTier.connect(lru.settings()), Ear()
    fill(tier, refs)
    age(lru, 1000)
    space = refs[0].key.namespace.hex()
    must(lru.ask("ACL", "SETUSER", "one", "reset", "on", ">pw", f"~kvf1:{space}*", "+@all"))
    limited = ValkeyTier.connect(ValkeySettings(ValkeyUrl((lru.address,), user="one", password="pw")))
    scanner = _scanner(limited.keyspace(), ear, NAMES[0])
    try:
        passed(scanner, 3)
        assert probe_all(tier, refs) == [Outcome.OK] * len(refs)
        passed(scanner, 3)
        assert ear.refs == {ref for ref in refs if owner(ref.key.chunk, NAMES) == NAMES[0]}
        assert not scanner.statistics.error
        assert not [key for key in lru.key_names() if parse_keeper(key)]
    finally:
        scanner.close()
        limited.close()
        tier.close()
        lru.ask("ACL", "DELUSER", "one")


def test_keepers_of_a_cluster_see_one_another_whichever_shard_has_their_keys() -> None:
    with running_cluster("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as cluster:
        tier = ValkeyTier.connect(cluster.settings())
        scanners = [_scanner(tier.keyspace(), Ear(), name) for name in NAMES]
        try:
            for scanner in scanners:
                passed(scanner, 3)
            keys = [key for server in cluster.servers for key in server.key_names()]
            assert sorted(keys) == sorted(map(keeper_key, NAMES))
            assert all(scanner._sharers._before == set(NAMES) for scanner in scanners)
            assert not any(scanner.statistics.error for scanner in scanners)
        finally:
            for scanner in scanners:
                scanner.close()
            tier.close()


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=10))
def test_a_count_tells_of_a_use_where_it_rose(counts: list[int]) -> None:
    sightings = Sightings(max_keys=10)
    before = STORED_COUNT
    for count in counts:
        assert sightings.counted(b"name", count) == (count > before)
        sightings.end_pass()
        before = count


def test_a_server_that_counts_uses_is_searched_by_its_counts(lfu: Server) -> None:
    """What was used since it was stored is copied, once for each time it is found; nothing else is."""
    lfu.ask("FLUSHALL")
    refs, once = prompt("used", 5, nbytes=BIG), prompt("once", 5, nbytes=BIG)
    tier, other = ValkeyTier.connect(lfu.settings(no_touch=True)), ValkeyTier.connect(lfu.settings())
    fill(other, [*refs, *once])
    disk = MemoryTier("disk")
    keeper = Keeper(valkey=tier, disk=disk, objects=None, limits=EAGER, keyspace=tier.keyspace(), scan=QUICK)
    try:
        eventually(lambda: keeper.statistics().scan.passes > 2, "passes")
        assert not keeper.statistics().scan.error
        assert probe_all(other, refs) == [Outcome.OK] * 5
        eventually(lambda: holds(disk, refs), "copies of what was used")
        passes = keeper.statistics().scan.passes
        eventually(lambda: keeper.statistics().scan.passes > passes + 2, "passes")
        assert len(disk.parts) == 5
        assert keeper.statistics().scan.found_parts == 5
    finally:
        keeper.close()
        other.close()


def test_the_search_goes_on_when_the_policy_changes(lfu: Server) -> None:
    """What servers note under one policy is noise under the other, for a while."""
    lfu.ask("FLUSHALL")
    tier = ValkeyTier.connect(lfu.settings())
    fill(tier, prompt("still", 6))
    scanner = started(tier.keyspace(), QUICK, Ear())
    try:
        for policy in ("allkeys-lru", "allkeys-lfu"):
            must(lfu.ask("CONFIG", "SET", "maxmemory-policy", policy))
            passed(scanner, 3)
            assert not scanner.statistics.error
    finally:
        scanner.close()
        tier.close()
        must(lfu.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"))


def test_where_counts_are_denied_too_the_status_says_why(lfu: Server) -> None:
    lfu.ask("FLUSHALL")
    must(lfu.ask("ACL", "SETUSER", "two", "reset", "on", ">pw", "~kvf1:*", "+@all", "-object|freq"))
    tier = ValkeyTier.connect(ValkeySettings(ValkeyUrl((lfu.address,), user="two", password="pw")))
    fill(tier, prompt("a", 2))
    scanner = started(tier.keyspace(), QUICK, Ear())
    try:
        eventually(lambda: "freq" in scanner.statistics.error.lower(), "why")
    finally:
        scanner.close()
        tier.close()
        lfu.ask("ACL", "DELUSER", "two")
