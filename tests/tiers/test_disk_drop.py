"""Parts of a disk tier forgotten by namespace or age: at once, for good, and nothing else with them."""

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.disks import DiskStore, check, found_right

from kvferry.identity.names import PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import Results, fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Droppable, Dropped, Outcome, StoreItem
from kvferry.tiers.disk import marks
from kvferry.tiers.disk.dropping import Sweep
from kvferry.tiers.disk.format import BLOCK_BYTES
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.places import Record, State
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

MIB = 1 << 20
ONE, OTHER = b"namespace number", b"another of them."
HOUR_S = 3600.0
JANITOR = "kvferry-disk-janitor"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with contextlib.closing(
        DiskStore(DiskSettings(tmp_path / "disk", 64 * MIB, segment_bytes=4 * MIB, stall_s=60.0))
    ) as made:
        yield made


@pytest.fixture
def tier(store: DiskStore) -> Iterator[DiskTier]:
    made = store.open()
    yield made
    made.close()


def named(namespace: bytes, seed: int, nbytes: int = 500_000) -> PartRef:
    ref = some_ref(nbytes, seed)
    return ref._replace(key=ref.key._replace(namespace=namespace))


def keep(tier: DiskTier, refs: list[PartRef]) -> None:
    for ref in refs:
        seed = int.from_bytes(ref.key.chunk[:4], "big")
        assert store_all(tier, [(ref, some_bytes(ref.nbytes, seed))]) == [Outcome.OK]


def is_right(tier: DiskTier, ref: PartRef) -> bool:
    return found_right(tier, ref, int.from_bytes(ref.key.chunk[:4], "big"))


def dropped(tier: Droppable, **which: object) -> Dropped:
    results = Results(1)
    tier.drop(**which, done=lambda found: results.done(0, found))  # type: ignore[arg-type]
    found: Dropped = results.wait()[0]
    return found


@pytest.mark.parametrize("mixed", [False, True])
def test_a_dropped_namespace_is_gone_also_after_a_restart_and_no_other_is(
    store: DiskStore, tier: DiskTier, *, mixed: bool
) -> None:
    """Whether its parts share segments with others or not."""
    ones, others = [named(ONE, n) for n in range(16)], [named(OTHER, 100 + n) for n in range(16)]
    order = [ref for pair in zip(ones, others, strict=True) for ref in pair] if mixed else [*ones, *others]
    keep(tier, order)
    assert dropped(tier, namespace=ONE) == Dropped(16, 16 * 500_000)
    assert probe_all(tier, ones) == [Outcome.MISS] * 16
    assert all(is_right(tier, ref) for ref in others)
    check(tier._books.log)
    tier.close()
    again = store.open()
    assert probe_all(again, ones) == [Outcome.MISS] * 16
    assert all(is_right(again, ref) for ref in others)
    keep(again, ones)
    assert all(is_right(again, ref) for ref in ones)
    assert dropped(again) == Dropped(32, 32 * 500_000)
    assert not again._books.log.records
    again.close()
    last = store.open()
    assert probe_all(last, order) == [Outcome.MISS] * 32
    last.close()


def test_what_was_stored_and_used_long_ago_is_dropped_and_its_age_outlives_a_restart(
    store: DiskStore,
) -> None:
    tier = store.open()
    refs = [named(ONE, n) for n in range(4)]
    keep(tier, refs[:2])
    tier.close()
    store.later_s = HOUR_S
    tier = store.open()
    keep(tier, refs[2:])
    assert probe_all(tier, refs[:1]) == [Outcome.OK]  # which is a use
    store.later_s = 1.5 * HOUR_S
    assert dropped(tier, older_than_s=2 * HOUR_S) == Dropped(0, 0)
    assert dropped(tier, older_than_s=HOUR_S, namespace=OTHER) == Dropped(0, 0)
    assert dropped(tier, older_than_s=HOUR_S) == Dropped(1, 500_000)
    assert probe_all(tier, refs) == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
    tier.close()


def test_what_is_carried_over_keeps_the_time_of_its_last_use(store: DiskStore) -> None:
    """And of its name and place nothing else counts after a restart."""
    tier = store.open()
    hot, cold = named(ONE, 0), named(ONE, 1)
    keep(tier, [hot, cold])
    before = store.place(hot)
    store.later_s = HOUR_S
    tier.touch([hot])
    store.later_s = 2 * HOUR_S
    keep(tier, [named(OTHER, 10 + n) for n in range(150)])
    assert store.place(hot) != before
    tier.close()
    tier = store.open()
    assert dropped(tier, namespace=ONE, older_than_s=1.5 * HOUR_S) == Dropped(0, 0)
    assert dropped(tier, namespace=ONE, older_than_s=0.5 * HOUR_S) == Dropped(1, 500_000)
    tier.close()


def test_what_left_before_is_not_found_after_a_drop_either(store: DiskStore, tier: DiskTier) -> None:
    """A segment that is still read keeps its parts on the disk: the drop waits for its end."""
    keep(tier, [named(ONE, n) for n in range(40)])
    log = tier._books.log
    with tier._books.lock:
        first = log.segments.in_use[0].number
        read = log.pin(next(ref for ref, record in log.records.items() if record.place.segment == first))
    assert read is not None
    ended: list[Dropped] = []
    tier.drop(done=ended.append)
    assert probe_all(tier, [named(ONE, n) for n in range(40)]) == [Outcome.MISS] * 40
    eventually(lambda: len(log.segments.leaving) == 1, "the end of all other segments")
    assert not log.records
    assert not ended
    with tier._books.lock:
        tier._books.unpin(read)
    eventually(lambda: ended == [Dropped(40, 40 * 500_000)], "the end of the drop")
    assert not log.segments.leaving


def test_a_drop_on_a_disk_that_fails_says_so_and_holds_until_a_restart(
    store: DiskStore, tier: DiskTier
) -> None:
    refs = [named((ONE, OTHER)[n % 2], n) for n in range(8)]
    keep(tier, refs)
    store.troubles.read = errno.EIO  # a mark is read before it is written
    found = dropped(tier, namespace=ONE)
    store.troubles.read = 0
    assert found == Dropped(4, 4 * 500_000, Outcome.FAILED)
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    assert probe_all(tier, refs) == [Outcome.MISS, Outcome.OK] * 4


def test_a_drop_of_a_closed_tier_is_late(store: DiskStore) -> None:
    tier = store.open()
    keep(tier, [named(ONE, 1)])
    tier.close()
    assert dropped(tier).outcome is Outcome.LATE


def test_a_drop_that_a_hung_disk_holds_up_ends_with_the_tier(store: DiskStore) -> None:
    store.settings = DiskSettings(store.settings.directory, 64 * MIB, stall_s=60.0, close_s=0.5)
    tier = store.open()
    keep(tier, [named(ONE, 1), named(OTHER, 2)])
    ended: list[Dropped] = []
    with store.troubles.hang():
        tier.drop(namespace=ONE, done=ended.append)
        assert fetch_all(tier, [named(ONE, 1)], deadline_s=0.2)[0][0].outcome in (
            Outcome.MISS,
            Outcome.REFUSED,
        )
        tier.close()
    assert ended == [Dropped(1, 500_000, Outcome.LATE)]
    for thread in tier._threads:
        thread.join()
    tier._files.close()


def test_while_parts_come_and_go_a_drop_leaves_nothing_that_was_there_before(tier: DiskTier) -> None:
    """Though segments leave meanwhile, and what is used is carried over."""
    hot = [named(ONE, n) for n in range(4)]
    for turn in range(6):
        keep(tier, hot)
        deadline = time.monotonic() + 30.0
        results = Results(1)
        for n in range(24):
            tier.touch(hot)
            keep(tier, [named(OTHER, 1000 * turn + n + 10)])
            if n == 4 * turn:
                tier.drop(namespace=ONE, done=lambda found, results=results: results.done(0, found))  # type: ignore[misc]
        assert results.wait(deadline - time.monotonic())[0].parts == 4
        assert probe_all(tier, hot) == [Outcome.MISS] * 4
        check(tier._books.log)


def test_a_drop_while_its_segment_is_being_evicted_is_no_trouble_of_the_disk(
    store: DiskStore, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    """The segment leaves for the drop while what is used in it is being read to be carried over."""
    hot = [named(ONE, n) for n in range(8)]
    keep(tier, hot)
    tier.touch(hot)
    began, go_on = threading.Event(), threading.Event()

    def judge(kind: str, number: int, offset: int, nbytes: int) -> int:
        if kind == "read" and nbytes > BLOCK_BYTES and threading.current_thread().name == JANITOR:
            began.set()
            go_on.wait()
        return 0

    store.troubles.judge = judge
    ended: list[Dropped] = []
    stored: list[Outcome] = []
    try:
        for n in range(1, 200):  # the last one may have to wait for the eviction
            ref = named(OTHER, 100 + n)
            item = StoreItem(ref, some_bytes(ref.nbytes, n), ())
            tier.store(
                [item], deadline=time.monotonic() + 600.0, done=lambda _, outcome: stored.append(outcome)
            )
            eventually(lambda n=n: began.is_set() or len(stored) == n, "a store, or the eviction")  # type: ignore[misc]
            if began.is_set():
                break
        assert began.is_set()
        tier.drop(namespace=ONE, done=ended.append)
    finally:
        go_on.set()
    with caplog.at_level(logging.ERROR):
        eventually(lambda: ended == [Dropped(8, 8 * 500_000)], "the end of the drop")
        eventually(lambda: len(stored) == n, "the last store")
        keep(tier, [named(OTHER, n) for n in range(300, 340)])
    assert set(stored) == {Outcome.OK}
    assert tier.statistics().state == "up"
    assert tier._books.breaker.opened == 0
    assert not caplog.records
    check(tier._books.log)


def test_what_is_being_written_beside_what_is_dropped_is_kept(store: DiskStore, tier: DiskTier) -> None:
    """Though its segment is sealed, and holds nothing but what is dropped so far."""
    log = tier._books.log
    keep(tier, [named(ONE, 0)])
    slow = named(OTHER, 50)
    number = store.place(named(ONE, 0)).segment
    at = number, log.segments[number].end
    began, go_on = threading.Event(), threading.Event()

    def judge(kind: str, segment: int, offset: int, nbytes: int) -> int:
        if kind == "write" and (segment, offset) == at:
            began.set()
            go_on.wait()
        return 0

    store.troubles.judge = judge
    results = Results(1)
    try:
        data = some_bytes(slow.nbytes, int.from_bytes(slow.key.chunk[:4], "big"))
        item = StoreItem(slow, data, ())
        tier.store([item], deadline=time.monotonic() + 600.0, done=results.done)
        eventually(began.is_set, "the write")
        keep(tier, [named(ONE, n) for n in range(1, 12)])
        assert log.segments[number].state is State.SEALED
        ended: list[Dropped] = []
        tier.drop(namespace=ONE, done=ended.append)
    finally:
        go_on.set()
    assert results.wait() == [Outcome.OK]
    assert is_right(tier, slow)
    eventually(lambda: ended == [Dropped(12, 12 * 500_000)], "the end of the drop")
    check(log)
    tier.close()
    again = store.open()
    assert is_right(again, slow)
    assert probe_all(again, [named(ONE, n) for n in range(12)]) == [Outcome.MISS] * 12
    again.close()


def test_whoever_drops_looks_at_no_part_itself_and_nobody_at_many_at_a_time(
    store: DiskStore, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; what is dropped is not found meanwhile."""
    keep(tier, [named((ONE, OTHER)[n % 2], n, 5_000) for n in range(60)])
    looks: Counter[str] = Counter()
    covers, sweep = Sweep.covers, SegmentLog.sweep
    at_once: list[int] = []

    def counted(self: Sweep, ref: PartRef, record: Record) -> bool:
        looks[threading.current_thread().name] += 1
        return covers(self, ref, record)

    def bounded(self: SegmentLog, which: Sweep, most: int) -> None:
        before = looks.total()
        sweep(self, which, 7)
        at_once.append(looks.total() - before)

    monkeypatch.setattr(Sweep, "covers", counted)
    monkeypatch.setattr(SegmentLog, "sweep", bounded)
    results = Results(1)
    tier.drop(namespace=ONE, done=lambda found: results.done(0, found))
    assert probe_all(tier, [named(ONE, 0, 5_000)]) == [Outcome.MISS]
    assert results.wait() == [Dropped(30, 30 * 5_000)]
    mine = threading.current_thread().name
    assert looks[mine] <= 1  # of the probe
    assert looks.total() - looks[mine] == 60
    assert max(at_once) <= 7


def test_drops_under_way_are_bounded_and_none_beyond_is_begun(
    store: DiskStore, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MAX_DROPS", 1)
    refs = [named((ONE, OTHER)[n % 2], n) for n in range(4)]
    keep(tier, refs)
    first, second = list[Dropped](), list[Dropped]()
    with store.troubles.hang():
        tier.drop(namespace=ONE, done=first.append)  # waits for its marks
        tier.drop(done=second.append)
        eventually(lambda: second == [Dropped(0, 0, Outcome.REFUSED)], "the refusal")
        assert probe_all(tier, refs) == [Outcome.MISS, Outcome.OK] * 2
        assert not first
    eventually(lambda: first == [Dropped(2, 2 * 500_000)], "the end of the drop")
