"""The objects tier over a directory: what is found after a restart, by whom, and what is not any more."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.objects import QUICK, ObjectStore, found_right

from kvferry.identity.names import PartKey, PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import Results, fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Dropped, FetchItem, Outcome, StoreItem
from kvferry.tiers.objects import manifests
from kvferry.tiers.objects.bucket import Trouble
from kvferry.tiers.objects.names import Kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

pytestmark = pytest.mark.usefixtures("obstore")
NAMESPACES = (b"a" * 16, b"b" * 16)
DAY_S = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    made = ObjectStore(ObjectSettings(f"file://{tmp_path}/objects", **QUICK))
    yield made
    made.close()


def _ref(seed: int, nbytes: int = 20_000, namespace: bytes = NAMESPACES[0]) -> PartRef:
    return PartRef(PartKey(namespace, some_ref(1, seed).key.chunk, seed % 3), nbytes)


def _store(tier: ObjectTier, *refs: PartRef) -> None:
    """All of them in one pack for each namespace."""
    parts = [(ref, some_bytes(ref.nbytes, 7)) for ref in refs]
    assert store_all(tier, parts) == [Outcome.OK] * len(refs)


def _store_apart(tier: ObjectTier, *refs: PartRef) -> None:
    for ref in refs:
        _store(tier, ref)


def _there(tier: ObjectTier, *refs: PartRef) -> list[bool]:
    """Also by what a probe says."""
    found = [found_right(tier, ref, 7) for ref in refs]
    assert probe_all(tier, refs) == [Outcome.OK if there else Outcome.MISS for there in found]
    return found


def _refresh(tier: ObjectTier) -> None:
    tier._engine.submit(tier._upkeep.refresh()).result(60)


def _remove(tier: ObjectTier, *refs: PartRef) -> list[Outcome]:
    results = Results(1)
    tier.remove(refs, done=lambda outcomes: results.done(0, list(outcomes)))
    found: list[Outcome] = results.wait()[0]
    return found


def _drop(tier: ObjectTier, namespace: bytes | None = None, older_than_s: float | None = None) -> Dropped:
    results = Results(1)
    tier.drop(namespace=namespace, older_than_s=older_than_s, done=lambda found: results.done(0, found))
    found: Dropped = results.wait()[0]
    return found


class Hold:
    """Holds requests of one kind until it is let go. held: how many."""

    def __init__(self, store: ObjectStore, verb: str, kind: Kind) -> None:
        self.held = 0
        self._go = threading.Event()
        self._verb, self._kind = verb, kind
        store.bucket.before = self._meet

    async def _meet(self, verb: str, path: str) -> None:
        if verb == self._verb and f"/{self._kind.value}/" in path:
            self.held += 1
            while not self._go.is_set():  # noqa: ASYNC110  # another thread lets go
                await asyncio.sleep(0.005)

    def let_go(self) -> None:
        self._go.set()


# -- restarts ----------------------------------------------------------------------------------------------


def test_a_restart_finds_everything_by_reading_the_end_of_each_pack(store: ObjectStore) -> None:
    refs = [_ref(n, namespace=NAMESPACES[n % 2]) for n in range(6)]
    _store_apart(store.open(), *refs)
    again = store.open()
    assert (store.bucket.count("get", Kind.PACK), store.bucket.count("read", Kind.PACK)) == (6, 0)
    assert _there(again, *refs) == [True] * 6


def test_a_restart_reads_a_manifest_instead_of_the_packs_that_it_names(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "NEW_PACKS", 3)
    first = store.open()
    refs = [_ref(n) for n in range(5)]
    _store_apart(first, *refs[:4])
    _refresh(first)
    _store_apart(first, refs[4])
    assert len(store.paths(Kind.MANIFEST)) == 1
    again = store.open()
    assert store.bucket.count("get", Kind.PACK) == 1
    assert _there(again, *refs) == [True] * 5


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "lies"])
def test_a_manifest_that_is_wrong_costs_nothing_but_reads(
    store: ObjectStore, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "NEW_PACKS", 2)
    first = store.open()
    refs = [_ref(n) for n in range(3)]
    _store_apart(first, *refs)
    _refresh(first)
    (path,) = store.paths(Kind.MANIFEST)
    data = bytearray(store.direct.get(path).bytes())
    data[40] ^= damage == "flipped"
    if damage == "lies":  # of another namespace: its packs are not where it says
        store.put(path.replace(NAMESPACES[0].hex(), NAMESPACES[1].hex()), bytes(data))
        store.direct.delete(path)
    else:
        store.put(path, {"cut": bytes(data[:-7]), "empty": b""}.get(damage, bytes(data)))
    again = store.open()
    assert store.bucket.count("get", Kind.PACK) == 3
    assert _there(again, *refs) == [True] * 3


def test_many_small_manifests_become_one(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "NEW_PACKS", 1)
    monkeypatch.setattr(manifests, "MAX_SMALL", 3)
    tier = store.open()
    refs = [_ref(n) for n in range(5)]
    for ref in refs:
        _store_apart(tier, ref)
        _refresh(tier)
    _refresh(tier)
    assert len(store.paths(Kind.MANIFEST)) < 4
    again = store.open()
    assert store.bucket.count("get", Kind.PACK) == 0
    assert _there(again, *refs) == [True] * 5


def test_what_is_no_pack_is_left_alone(store: ObjectStore) -> None:
    first = store.open()
    ref = _ref(1)
    _store(first, ref)
    path = store.paths(Kind.PACK)[0]
    names = [path[:-32] + digit * 32 for digit in "012"]
    for name, data in zip(names, (b"", b"x" * 1000, bytes(store.direct.get(path).bytes())[:-1]), strict=True):
        store.put(name, data)
    store.put("v1/else", b"?")
    again = store.open()
    _refresh(again)
    assert _there(again, ref) == [True]
    assert set(names) <= set(store.paths())
    assert store.bucket.count("get", Kind.PACK) <= 4 + 2  # their ends, once; and the part


# -- removals ----------------------------------------------------------------------------------------------


def test_a_removed_part_stays_removed_after_a_restart_until_it_is_stored_again(store: ObjectStore) -> None:
    first = store.open()
    refs = [_ref(n) for n in range(3)]
    _store(first, *refs)
    assert _remove(first, refs[1], _ref(99)) == [Outcome.OK, Outcome.MISS]
    second = store.open()
    assert _there(second, *refs) == [True, False, True]
    _store(second, refs[1])
    assert _there(store.open(), *refs) == [True] * 3


def test_a_pack_without_parts_is_deleted_and_then_what_was_noted_of_it(store: ObjectStore) -> None:
    tier = store.open()
    refs = [_ref(1), _ref(2)]
    _store(tier, *refs)
    _remove(tier, refs[0])
    assert len(store.paths(Kind.PACK)) == 1
    _remove(tier, refs[1])
    eventually(lambda: not store.paths(Kind.PACK), "its deletion")
    for _ in range(2):
        assert store.paths(Kind.REMOVED)
        _refresh(tier)
    assert store.paths() == []


def test_removing_a_part_removes_all_its_copies(store: ObjectStore) -> None:
    first, second = store.open(), store.open()
    ref = _ref(1)
    _store(first, ref, _ref(2))
    _store(second, ref, _ref(3))
    _refresh(first)
    assert len(store.paths(Kind.PACK)) == 2
    _remove(first, ref)
    assert _there(store.open(), ref, _ref(2), _ref(3)) == [False, True, True]


def test_a_part_removed_on_its_way_is_not_found_when_it_arrives(store: ObjectStore) -> None:
    tier = store.open()
    hold = Hold(store, "put", Kind.PACK)
    results = Results(1)
    item = StoreItem(_ref(1), some_bytes(20_000, 7), ())
    tier.store([item], deadline=float("inf"), done=results.done)
    eventually(lambda: hold.held, "the upload")
    tier.remove([item.ref])
    hold.let_go()
    results.wait()
    assert _there(tier, item.ref) == [False]
    eventually(lambda: not store.paths(Kind.PACK), "the deletion of its pack")
    assert _there(store.open(), item.ref) == [False]


def test_a_removal_that_cannot_be_written_down_is_told_and_written_down_later(store: ObjectStore) -> None:
    tier = store.open()
    refs = [_ref(1), _ref(2)]
    _store(tier, *refs)
    with store.outage():
        assert _remove(tier, refs[0]) in ([Outcome.FAILED], [Outcome.LATE])
    eventually(lambda: store.paths(Kind.REMOVED), "the list of removals")
    assert _there(store.open(), *refs) == [False, True]


# -- drops -------------------------------------------------------------------------------------------------


def test_a_dropped_namespace_is_not_found_before_its_bytes_go_nor_after_a_crash_in_between(
    store: ObjectStore,
) -> None:
    first, other = store.open(), store.open()
    ours = [_ref(n, namespace=NAMESPACES[0]) for n in range(3)]
    kept = _ref(9, namespace=NAMESPACES[1])
    _store_apart(other, ours[2])  # which the first one has not heard of
    store.buckets.reverse()
    _store_apart(first, *ours[:2], kept)
    hold = Hold(store, "delete", Kind.PACK)
    assert _drop(first, NAMESPACES[0]) == Dropped(2, 40_000)
    assert _there(first, *ours, kept) == [False, False, False, True]
    eventually(lambda: hold.held, "their deletion")
    assert len(store.paths(Kind.PACK)) == 4
    crashed = store.open()
    assert _there(crashed, *ours, kept) == [False, False, False, True]
    assert len(store.paths(Kind.PACK)) == 1  # whoever sees that they do not count deletes them
    hold.let_go()


def test_a_drop_tells_when_a_restart_might_find_it_again(store: ObjectStore) -> None:
    tier = store.open()
    _store(tier, _ref(1))
    with store.outage():
        assert _drop(tier).outcome is Outcome.FAILED
    eventually(lambda: not store.paths(Kind.PACK), "its deletion once that is possible")


def test_a_drop_by_age_spares_what_was_used_or_stored_since(store: ObjectStore) -> None:
    tier = store.open()
    tier._upkeep.clock._ahead_s -= DAY_S
    old, used, alone = _ref(1), _ref(2), _ref(3)
    _store(tier, old, used)
    _store(tier, alone)
    tier._upkeep.clock._ahead_s += DAY_S
    new = _ref(4)
    _store(tier, new)
    assert _there(tier, used) == [True]
    assert _drop(tier, older_than_s=DAY_S / 2) == Dropped(2, 40_000)
    assert _there(tier, old, used, alone, new) == [False, True, False, True]
    assert _there(store.open(), old, used, alone, new) == [False, True, False, True]


# -- limits ------------------------------------------------------------------------------------------------


def test_beyond_its_bytes_the_oldest_packs_go(store: ObjectStore) -> None:
    tier = store.open(max_bytes=70_000)
    refs = [_ref(n) for n in range(5)]
    _store_apart(tier, *refs)
    eventually(lambda: len(store.paths(Kind.PACK)) == 3, "two packs go")
    assert _there(tier, *refs) == [False, False, True, True, True]
    assert _there(store.open(max_bytes=30_000), *refs) == [False, False, False, False, True]


def test_beyond_its_age_a_pack_goes(store: ObjectStore) -> None:
    tier = store.open(max_age_s=DAY_S)
    tier._upkeep.clock._ahead_s -= 2 * DAY_S
    _store(tier, _ref(1))
    tier._upkeep.clock._ahead_s += 2 * DAY_S
    _store(tier, _ref(2))
    _refresh(tier)
    assert _there(tier, _ref(1), _ref(2)) == [False, True]
    assert len(store.paths(Kind.PACK)) == 1


def test_what_cannot_be_deleted_is_not_found_and_deleted_later(store: ObjectStore) -> None:
    tier = store.open(max_bytes=30_000)
    hold = Hold(store, "delete", Kind.PACK)
    _store_apart(tier, _ref(1), _ref(2))
    eventually(lambda: hold.held, "the deletion")
    store.bucket.failing = Trouble.SLOW_DOWN
    hold.let_go()
    eventually(lambda: "slow_down" in tier.statistics().detail.get("failed_requests", ""), "it fails")
    store.bucket.failing = None
    assert len(store.paths(Kind.PACK)) == 2
    assert _there(tier, _ref(1), _ref(2)) == [False, True]
    _refresh(tier)
    assert len(store.paths(Kind.PACK)) == 1


# -- several processes -------------------------------------------------------------------------------------


def test_what_another_stores_and_removes_is_followed(store: ObjectStore) -> None:
    one, other = store.open(refresh_s=0.05), store.open()
    refs = [_ref(1), _ref(2), _ref(3)]
    _store_apart(other, *refs)
    eventually(lambda: probe_all(one, refs) == [Outcome.OK] * 3, "what the other stored")
    assert _there(one, *refs) == [True] * 3
    _remove(other, refs[0])
    _drop(other, older_than_s=-1.0)
    eventually(lambda: probe_all(one, refs) == [Outcome.MISS] * 3, "what the other removed")
    assert _there(one, *refs) == [False] * 3


def test_a_pack_that_another_deleted_is_a_miss(store: ObjectStore) -> None:
    one = store.open()
    refs = [_ref(1), _ref(2)]
    _store(one, *refs)
    store.direct.delete(store.paths(Kind.PACK)[0])
    assert [result.outcome for result, _ in fetch_all(one, refs)] == [Outcome.MISS] * 2
    assert probe_all(one, refs) == [Outcome.MISS] * 2
    assert sum(one.statistics().failed.values()) == 0


# -- how it moves ------------------------------------------------------------------------------------------


def test_neighbours_are_read_with_one_request(store: ObjectStore) -> None:
    tier = store.open()
    refs = [_ref(n) for n in range(20)]
    _store(tier, *refs)
    assert len(store.paths(Kind.PACK)) == 1
    store.bucket.requests.clear()
    found = fetch_all(tier, refs[::-1])
    assert all(memory == some_bytes(20_000, 7) for _, memory in found)
    assert store.bucket.count("get") == 1


def test_parts_of_one_namespace_share_packs_and_others_do_not(store: ObjectStore) -> None:
    tier = store.open(pack_bytes=1 << 20)
    _store(tier, *[_ref(n, 100_000, NAMESPACES[n % 2]) for n in range(40)])
    packs = store.paths(Kind.PACK)
    assert len(packs) == 4
    assert sum(NAMESPACES[0].hex() in path for path in packs) == 2


def test_a_part_larger_than_a_pack_has_one_of_its_own(store: ObjectStore) -> None:
    tier = store.open(pack_bytes=1 << 20, write_bytes=4 << 20)
    refs = [_ref(1, 3 << 20), _ref(2, 3 << 20), _ref(3, 5 << 20)]
    outcomes = store_all(tier, [(ref, some_bytes(ref.nbytes, 7)) for ref in refs])
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.REFUSED]
    assert _there(tier, *refs) == [True, True, False]


def test_memory_for_packs_is_bounded_and_what_waits_is_known(store: ObjectStore) -> None:
    tier = store.open(pack_bytes=1 << 20, write_bytes=2 << 20, uploads=1)
    hold = Hold(store, "put", Kind.PACK)
    refs = [_ref(n, 400_000) for n in range(12)]
    data = some_bytes(400_000, 7)
    results = Results(12)
    items = [StoreItem(ref, data, ()) for ref in refs]
    tier.store(items, deadline=float("inf"), done=results.done)
    eventually(lambda: hold.held and tier._packer.buffers.used_bytes == 2 << 20, "its memory is in use")
    backlog = tier.backlog
    assert (backlog.parts, backlog.nbytes) == (12, 12 * 400_000)
    assert backlog.oldest_s > 0.0
    assert "12 parts, 4800000 bytes" in tier.statistics().detail["backlog"]
    hold.let_go()
    assert results.wait() == [Outcome.OK] * 12
    assert tier.backlog == (0, 0, 0.0)
    assert _there(tier, *refs) == [True] * 12


def test_a_store_that_ends_on_the_way_is_late_and_the_part_may_arrive(store: ObjectStore) -> None:
    tier = store.open()
    hold = Hold(store, "put", Kind.PACK)
    results = Results(1)
    data = some_bytes(20_000, 7)
    transfer = tier.store([StoreItem(_ref(1), data, ())], deadline=float("inf"), done=results.done)
    eventually(lambda: hold.held, "the upload")
    transfer.cancel()
    assert results.wait() == [Outcome.LATE]
    data[:] = bytes(20_000)  # it has another owner now
    hold.let_go()
    eventually(lambda: probe_all(tier, [_ref(1)]) == [Outcome.OK], "its arrival")
    assert _there(tier, _ref(1)) == [True]


def test_a_part_that_is_on_its_way_is_not_sent_twice(store: ObjectStore) -> None:
    tier = store.open()
    hold = Hold(store, "put", Kind.PACK)
    results = Results(3)
    item = StoreItem(_ref(1), some_bytes(20_000, 7), ())
    for n in range(3):
        tier.store([item], deadline=float("inf"), done=lambda _, outcome, n=n: results.done(n, outcome))  # type: ignore[misc]
    eventually(lambda: hold.held, "its upload")
    hold.let_go()
    assert results.wait() == [Outcome.OK] * 3
    assert len(store.paths(Kind.PACK)) == 1


def test_more_than_may_wait_is_refused(store: ObjectStore) -> None:
    tier = store.open(queued_items=2)
    _store(tier, _ref(1))
    hold = Hold(store, "get", Kind.PACK)
    results = Results(5)
    items = [FetchItem(_ref(1), some_bytes(20_000, n)) for n in range(5)]
    tier.fetch(items, deadline=float("inf"), done=lambda n, result: results.done(n, result.outcome))
    eventually(lambda: hold.held, "the read")
    hold.let_go()
    assert sorted(o.value for o in results.wait()) == ["ok", "ok", "refused", "refused", "refused"]
    assert tier.statistics().failed == {"queue_full": 3}
