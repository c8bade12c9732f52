"""What no part and no bucket should be able to cause happens once: it costs that one part, and no thread."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tiers.objects import QUICK, ObjectStore, found_right

from kvferry.errors import BrokenError
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS, PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import Results, fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome, StoreItem
from kvferry.tiers.objects import packing, packs, reading
from kvferry.tiers.objects import tier as objects_tier
from kvferry.tiers.objects.bucket import BucketError, Trouble
from kvferry.tiers.objects.names import Kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

pytestmark = pytest.mark.usefixtures("obstore")
NBYTES = 20_000
FIRST, SECOND, THIRD = (
    (PartRef(PartKey(b"n" * 16, some_ref(1, n).key.chunk, n), NBYTES), some_bytes(NBYTES, n))
    for n in range(3)
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    made = ObjectStore(ObjectSettings(f"file://{tmp_path}/objects", **QUICK))
    yield made
    made.close()


class _Fails:
    """Stands for a function that fails so often, and then works. calls: until now."""

    def __init__(self, works: Any, times: int = 1) -> None:
        self.calls = 0
        self._works = works
        self._times = times

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise ValueError("as told")
        return self._works(*arguments, **named)


def _defects(tier: ObjectTier) -> int:
    return tier._books.counts.requests["defect"]


def _there(tier: ObjectTier) -> list[bool]:
    return [found_right(tier, ref, n) for n, (ref, _) in enumerate((FIRST, SECOND, THIRD))]


# -- packs -------------------------------------------------------------------------------------------------


def test_a_machine_without_memory_for_a_pack_fails_the_part_and_stores_the_next(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store.open()
    monkeypatch.setattr(packs, "mmap", SimpleNamespace(mmap=_Fails(mmap.mmap)))
    assert store_all(tier, [FIRST]) == [Outcome.FAILED]
    assert tier._packer.buffers.used_bytes == 0
    assert tier.statistics().failed == {"defect": 1}
    assert store_all(tier, [FIRST, SECOND]) == [Outcome.OK] * 2
    assert _there(tier) == [True, True, False]
    assert tier.backlog == (0, 0, 0.0)


def test_a_part_that_cannot_be_copied_fails_with_who_waits_for_it_and_leaves_no_trace_in_its_pack(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store.open()
    monkeypatch.setattr(packing, "pack_head", _Fails(packing.pack_head))
    assert store_all(tier, [FIRST, SECOND, THIRD]) == [Outcome.FAILED, Outcome.OK, Outcome.OK]
    assert _there(tier) == [False, True, True]
    assert len(store.paths(Kind.PACK)) == 1
    assert _there(store.open()) == [False, True, True]
    assert store_all(tier, [FIRST]) == [Outcome.OK]
    assert _there(store.open()) == [True, True, True]
    assert _defects(tier) == 1
    eventually(lambda: tier._packer.buffers.used_bytes == 0, "all memory is given back")


@pytest.mark.parametrize("nbytes", [0, MAX_PART_BYTES + 1])
def test_a_size_that_no_part_has_is_refused(store: ObjectStore, nbytes: int) -> None:
    tier = store.open(write_bytes=4 << 30)
    with mmap.mmap(-1, nbytes or 1) as memory, memoryview(memory) as whole, whole[:nbytes] as data:
        results = Results(1)
        item = StoreItem(PartRef(FIRST[0].key, nbytes), data, ())
        tier.store([item], deadline=float("inf"), done=results.done)
        assert results.wait() == [Outcome.REFUSED]
        del item
    assert tier.statistics().failed == {"no_part": 1}
    assert store_all(tier, [SECOND]) == [Outcome.OK]


@pytest.mark.parametrize(
    ("key", "checksums"),
    [
        (FIRST[0].key, (b"x" * 16,) * 2),
        (FIRST[0].key, (b"x" * 15,)),
        (PartKey(b"n" * 15, b"c" * 32, 0), ()),
        (PartKey(b"n" * 16, b"c" * 31, 0), ()),
        (PartKey(b"n" * 16, b"c" * 32, MAX_PARTS), ()),
    ],
)
def test_a_name_or_checksums_that_no_part_has_are_refused_before_they_join_a_pack(
    store: ObjectStore, key: PartKey, checksums: tuple[bytes, ...]
) -> None:
    tier = store.open()
    results = Results(1)
    data = some_bytes(NBYTES, 1)
    with pytest.raises(BrokenError):
        tier.store([StoreItem(PartRef(key, NBYTES), data, checksums)], deadline=1e9, done=results.done)
    good = StoreItem(SECOND[0], data, part_checksums(memoryview(data)))
    tier.store([good], deadline=float("inf"), done=results.done)
    assert results.wait() == [Outcome.OK]


# -- requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["verify_head", "get"])
def test_a_part_that_cannot_be_handed_over_fails_and_is_read_the_next_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tier = store.open()
    assert store_all(tier, [FIRST]) == [Outcome.OK]
    owner: Any = reading if where == "verify_head" else store.bucket.bucket
    monkeypatch.setattr(owner, where, _Fails(getattr(owner, where)))
    assert fetch_all(tier, [FIRST[0]])[0][0].outcome is Outcome.FAILED
    assert found_right(tier, FIRST[0], 0)
    assert _defects(tier) == 1


def test_an_upload_that_falls_over_fails_its_parts_and_gives_its_memory_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store.open()
    monkeypatch.setattr(store.bucket.bucket, "put", _Fails(store.bucket.bucket.put))
    assert store_all(tier, [FIRST]) == [Outcome.FAILED]
    assert tier._packer.buffers.used_bytes == 0
    assert store_all(tier, [FIRST]) == [Outcome.OK]


@pytest.mark.parametrize("removed", [1, 2])
def test_an_upload_that_failed_and_yet_landed_brings_no_removed_part_back(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    tier = store.open()
    put = store.bucket.bucket.put

    async def land_and_fail(path: str, data: Any, *, limit_s: float) -> None:
        if f"/{Kind.PACK.value}/" in path:
            tier.remove([ref for ref, _ in (FIRST, SECOND)[:removed]])
            await put(path, data, limit_s=limit_s)
            raise BucketError(Trouble.FULL, "as told")
        await put(path, data, limit_s=limit_s)

    monkeypatch.setattr(store.bucket.bucket, "put", land_and_fail)
    assert store_all(tier, [FIRST, SECOND]) == [Outcome.REFUSED] * 2
    eventually(lambda: store.paths(Kind.REMOVED), "the list of removals")
    if removed == 2:
        eventually(lambda: not store.paths(Kind.PACK), "the deletion of its pack")
    tier._engine.submit(tier._upkeep.refresh()).result(60)
    for each in (tier, store.open()):
        assert _there(each) == [False, removed == 1, False]


def test_a_removal_whose_writing_down_falls_over_is_told_and_written_down_with_the_next(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_tier, "REMOVE_S", 3600.0)  # this machine may be slow
    tier = store.open()
    assert store_all(tier, [FIRST, SECOND, THIRD]) == [Outcome.OK] * 3
    monkeypatch.setattr(store.bucket.bucket, "put", _Fails(store.bucket.bucket.put))
    for (ref, _), told in ((FIRST, Outcome.FAILED), (SECOND, Outcome.OK)):
        results = Results(1)
        tier.remove([ref], done=lambda outcomes, results=results: results.done(0, outcomes[0]))  # type: ignore[misc]
        assert results.wait() == [told]
    assert _there(store.open()) == [False, False, True]


# -- drivers -----------------------------------------------------------------------------------------------


def test_a_listing_that_falls_over_is_not_the_last_one(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store.open(refresh_s=0.02)
    fails = _Fails(store.bucket.bucket.list, times=3)
    monkeypatch.setattr(store.bucket.bucket, "list", fails)
    eventually(lambda: fails.calls > 3, "the listing after those that fell over")
    assert store_all(store.open(), [FIRST]) == [Outcome.OK]
    eventually(lambda: found_right(tier, FIRST[0], 0), "what another stored")
    assert _defects(tier) == 3


def test_a_probe_that_falls_over_is_not_the_last_one(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store.open()
    with store.outage():
        fails = _Fails(store.bucket.read, times=3)
        monkeypatch.setattr(store.bucket, "read", fails)
        eventually(lambda: fails.calls > 3, "the probe after those that fell over")
    eventually(lambda: tier.statistics().state == "up", "its recovery")
    assert _defects(tier) == 3
    assert store_all(tier, [FIRST]) == [Outcome.OK]
