"""What a disk tier makes of bad blocks, full and hung disks, stray files, and of more than has room."""

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiers.disks import DiskStore, check, found_right

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.names import MAX_PART_BYTES, PartRef
from kvferry.testing.census import leaves_nothing
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import (
    Results,
    empty_memory,
    fetch_all,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.tiers.contract import FetchItem, Outcome, StoreItem
from kvferry.tiers.disk import books, marks, threads
from kvferry.tiers.disk.format import BLOCK_BYTES
from kvferry.tiers.disk.settings import DiskSettings, segment_room
from kvferry.tiers.disk.tier import DiskTier

MIB = 1 << 20
JANITOR = "kvferry-disk-janitor"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with contextlib.closing(
        DiskStore(
            DiskSettings(tmp_path / "disk", 64 * MIB, segment_bytes=4 * MIB, stall_s=60.0, close_s=60.0)
        )
    ) as made:
        yield made


@pytest.fixture
def tier(store: DiskStore) -> Iterator[DiskTier]:
    made = store.open()
    yield made
    made.close()


def parts(seeds: range, nbytes: int = MIB // 2) -> list[tuple[PartRef, memoryview]]:
    return [(some_ref(nbytes, n), some_bytes(nbytes, n)) for n in seeds]


def names(seeds: range, nbytes: int = MIB // 2) -> list[PartRef]:
    return [some_ref(nbytes, n) for n in seeds]


def stores(tier: DiskTier, seeds: range) -> bool:
    return set(store_all(tier, parts(seeds))) == {Outcome.OK}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is tried again at once."""
    for module in (books, threads):
        monkeypatch.setattr(module, "FULL_S", 0.01)


# -- full ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_file_system_that_is_full_as_it_is_written_to_costs_nothing_that_is_there(
    store: DiskStore, tier: DiskTier
) -> None:
    """However often it is tried: as with copy on write, or thin volumes."""
    assert stores(tier, range(60))
    store.troubles.judge = lambda kind, number, offset, nbytes: (
        errno.ENOSPC if kind == "write" and nbytes > BLOCK_BYTES else 0
    )
    before = store.troubles.tried["write"]
    eventually(
        lambda: store_all(tier, parts(range(100, 104))) and store.troubles.tried["write"] > before + 40,
        "many attempts",
    )
    assert all(found_right(tier, ref, n) for n, ref in enumerate(names(range(60))))
    assert tier._books.counts.evicted_parts == 0
    store.troubles.judge = lambda kind, number, offset, nbytes: 0
    eventually(lambda: stores(tier, range(100, 104)), "room again")
    check(tier._books.log)
    tier.close()
    again = store.open()
    assert all(found_right(again, ref, n) for n, ref in enumerate(names(range(60))))
    assert all(found_right(again, some_ref(MIB // 2, n), n) for n in range(100, 104))
    again.close()


@pytest.mark.usefixtures("impatient")
def test_what_follows_a_write_for_which_there_was_no_room_is_found_after_a_restart(
    store: DiskStore, tier: DiskTier
) -> None:
    """The gap is marked as soon as there is room for that."""
    assert stores(tier, range(1))
    gap = store.place(some_ref(MIB // 2, 0))
    end = tier._books.log.segments[gap.segment].end
    began, second = threading.Event(), threading.Event()

    def judge(kind: str, number: int, offset: int, nbytes: int) -> int:
        if kind == "write" and (number, offset) == (gap.segment, end) and not second.is_set():
            began.set()
            second.wait()
            return errno.ENOSPC
        return 0

    store.troubles.judge = judge
    first = Results(1)
    tier.store([StoreItem(*parts(range(1, 2))[0], ())], deadline=time.monotonic() + 60.0, done=first.done)
    eventually(began.is_set, "the first write")
    assert stores(tier, range(2, 3))
    second.set()
    assert first.wait() == [Outcome.REFUSED]
    eventually(lambda: not tier._books.log.segments[gap.segment].gaps, "the gap to be marked")
    eventually(lambda: tier._books.log.segments.pinned == 0, "the end of that")
    assert store.place(some_ref(MIB // 2, 2)).segment == gap.segment
    tier.close()
    again = store.open()
    assert found_right(again, some_ref(MIB // 2, 2), 2)
    assert probe_all(again, names(range(1, 2))) == [Outcome.MISS]
    again.close()


@pytest.mark.usefixtures("impatient")
def test_what_cannot_be_carried_over_for_want_of_room_stays_where_it_is(
    store: DiskStore, tier: DiskTier
) -> None:
    assert stores(tier, range(8))
    hot = names(range(3))
    tier.touch(hot)
    refused = threading.Event()

    def judge(kind: str, number: int, offset: int, nbytes: int) -> int:
        if kind == "write" and nbytes > BLOCK_BYTES and threading.current_thread().name == JANITOR:
            refused.set()
            return errno.ENOSPC
        return 0

    store.troubles.judge = judge
    for n in range(10, 1000):
        store_all(tier, parts(range(n, n + 1)))
        if refused.is_set():
            break
    before = store.troubles.tried["write"]
    eventually(lambda: store.troubles.tried["write"] > before + 5, "more attempts")
    assert probe_all(tier, hot) == [Outcome.OK] * 3
    assert all(found_right(tier, ref, n) for n, ref in enumerate(hot))
    store.troubles.judge = lambda kind, number, offset, nbytes: 0
    eventually(lambda: tier._books.counts.evicted_parts > 0, "the eviction")
    assert probe_all(tier, hot) == [Outcome.OK] * 3


# -- bad blocks ----------------------------------------------------------------------------------------


def test_a_segment_that_cannot_be_begun_is_given_up(store: DiskStore, tier: DiskTier) -> None:
    store.troubles.unwritable = {(1, 0)}
    assert stores(tier, range(7))
    eventually(lambda: stores(tier, range(100, 110)), "stores again")
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    assert not store.troubles.unwritable
    assert tier._books.log.segments.room_bytes < segment_room(64 * MIB) - 4 * MIB
    assert all(found_right(tier, ref, n) for n, ref in enumerate(names(range(7))))


def test_a_segment_that_cannot_be_erased_is_given_up_with_what_it_held(store: DiskStore) -> None:
    """Or its parts would be found again after a restart."""
    tier = store.open()
    assert stores(tier, range(7))
    first = store.place(some_ref(MIB // 2, 0)).segment
    store.troubles.unwritable = {(first, 0)}
    for start in range(100, 240, 7):
        eventually(lambda start=start: stores(tier, range(start, start + 7)), "stores")  # type: ignore[misc]
    eventually(lambda: not store.troubles.unwritable, "that it is given up")
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    eventually(lambda: stores(tier, range(300, 310)), "stores again")
    check(tier._books.log)
    tier.close()
    again = store.open()
    assert probe_all(again, names(range(7))) == [Outcome.MISS] * 7
    assert found_right(again, some_ref(MIB // 2, 309), 309)
    again.close()


def test_a_part_that_could_not_be_read_is_stored_again_elsewhere(store: DiskStore, tier: DiskTier) -> None:
    assert stores(tier, range(2))
    place = store.place(some_ref(MIB // 2, 0))
    store.troubles.unreadable = {(place.segment, place.offset)}
    assert fetch_all(tier, names(range(1)))[0][0].outcome is Outcome.FAILED
    assert stores(tier, range(1))
    assert store.place(some_ref(MIB // 2, 0)) != place
    assert found_right(tier, some_ref(MIB // 2, 0), 0)
    assert stores(tier, range(1))
    assert tier.statistics().stored_parts == 4
    check(tier._books.log)


# -- hung ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_disk_that_serves_its_trial_and_nothing_else_stays_in_quarantine(
    store: DiskStore, kind: str
) -> None:
    store.settings = replace(store.settings, stall_s=0.2)
    tier = store.open()
    eventually(lambda: stores(tier, range(8)), "stores")
    calls = Results(6)
    with store.troubles.hang(kind):
        deadline = time.monotonic() + 1.0
        if kind == "read":
            items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in names(range(6))]
            tier.fetch(items, deadline=deadline, done=calls.done)
        else:
            new = [StoreItem(ref, data, ()) for ref, data in parts(range(20, 26))]
            tier.store(new, deadline=deadline, done=calls.done)
        eventually(tier._books.moving.hangs, "all of them hang")
        before, opened = store.troubles.tried["try_out"], tier._books.breaker.opened
        eventually(lambda: store.troubles.tried["try_out"] > before + 3, "trials")
        assert tier._books.breaker.opened == opened
        assert tier.statistics().state == "down"
        assert probe_all(tier, names(range(1))) == [Outcome.REFUSED]
    calls.wait()
    eventually(lambda: tier.statistics().state == "up", "the end of its quarantine")
    eventually(lambda: all(found_right(tier, ref, n) for n, ref in enumerate(names(range(8)))), "its parts")
    tier.close()


def test_nothing_is_done_over_and_over_while_a_segment_that_leaves_is_read(
    store: DiskStore, tier: DiskTier
) -> None:
    """And writing goes on when the reader is done."""
    assert stores(tier, range(7))
    log = tier._books.log
    with tier._books.lock:
        read = log.pin(some_ref(MIB // 2, 0))
    assert read is not None
    results, looks = Results(400), [0]
    step = log.next_step

    def counted() -> object:
        looks[0] += 1
        return step()

    log.next_step = counted  # type: ignore[method-assign, assignment]
    items = [StoreItem(ref, data, ()) for ref, data in parts(range(100, 300)) + parts(range(100, 300))]
    tier.store(items, deadline=time.monotonic() + 120.0, done=results.done)
    eventually(
        lambda: bool(log.segments.leaving) and not log.segments.writable, "that nothing can be written"
    )
    before = looks[0]
    time.sleep(0.3)
    assert looks[0] - before < 20, "the threads wake each other"
    with tier._books.lock:
        tier._books.unpin(read)
    assert set(results.wait(60.0)) == {Outcome.OK}


# -- what lies in the directory ------------------------------------------------------------------------


def test_a_first_segment_that_was_never_finished_does_not_set_the_size_of_all(store: DiskStore) -> None:
    store.settings = replace(store.settings, segment_bytes=None)
    store.settings.directory.mkdir(mode=0o700)
    store.segment(0).touch(mode=0o600)
    with store.segment(0).open("r+b") as file:
        file.truncate(3 * BLOCK_BYTES)
    tier = store.open()
    assert stores(tier, range(4))
    assert store.segment(0).stat().st_size > 8 * MIB
    tier.close()


def test_a_stray_file_where_the_next_segment_belongs_is_replaced(store: DiskStore, tier: DiskTier) -> None:
    assert stores(tier, range(2))
    store.segment(1).write_bytes(b"stray")
    for start in range(10, 30, 5):
        assert stores(tier, range(start, start + 5))
    assert len(tier._books.log.segments) > 2
    assert store.segment(1).stat().st_size == 4 * MIB


# -- limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, MIB // 2])
def test_there_are_never_more_parts_than_allowed(store: DiskStore, nbytes: int) -> None:
    """Older ones leave for new ones, what is used stays, also where all fit one segment."""
    store.settings = replace(store.settings, max_parts=20)
    tier = store.open()
    hot = parts(range(3), nbytes)
    assert set(store_all(tier, hot)) == {Outcome.OK}
    for n in range(10, 100):
        tier.touch([ref for ref, _ in hot])
        assert store_all(tier, parts(range(n, n + 1), nbytes)) == [Outcome.OK]
        assert found_right(tier, some_ref(nbytes, n), n)
        check(tier._books.log)
    assert all(found_right(tier, ref, n) for n, (ref, _) in enumerate(hot))
    tier.close()
    store.settings = replace(store.settings, max_parts=8)
    again = store.open()
    assert found_right(again, some_ref(nbytes, 99), 99)
    assert store_all(again, parts(range(100, 120), nbytes)) == [Outcome.OK] * 20
    check(again._books.log)
    again.close()


def test_a_large_load_is_not_cut_by_the_queues_bound(store: DiskStore, tier: DiskTier) -> None:
    """But another call is refused while it waits."""
    tier.close()
    store.settings = replace(store.settings, queued_items=4)
    small = store.open()
    assert stores(small, range(40))
    items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in names(range(40))]
    results = Results(40)
    with store.troubles.hang("read"):
        small.fetch(items, deadline=time.monotonic() + 60.0, done=results.done)
        assert fetch_all(small, names(range(1)))[0][0].outcome is Outcome.REFUSED
        assert fetch_all(small, names(range(90, 91)))[0][0].outcome is Outcome.MISS
    assert {result.outcome for result in results.wait()} == {Outcome.OK}
    assert small.statistics().failed == {"queue_full": 1}
    small.close()


def test_what_is_no_part_is_refused_and_no_thread_ends_of_it(tier: DiskTier) -> None:
    ref, data = parts(range(1))[0]
    huge = memoryview(mmap.mmap(-1, MAX_PART_BYTES + 1))
    for size, memory in ((0, memoryview(b"")), (MAX_PART_BYTES + 1, huge)):
        for _ in range(4):
            assert store_all(tier, [(PartRef(ref.key, size), memory)], checksums=lambda _: ()) == [
                Outcome.REFUSED
            ]
    assert tier.statistics().failed == {"no_part": 8}
    for wrong in (ref.key._replace(part=4096), ref.key._replace(chunk=b""), ref.key._replace(namespace=b"1")):
        with pytest.raises(BrokenError):
            store_all(tier, [(ref._replace(key=wrong), data)])
    for sums in ((b"",), (bytes(16),) * 3):
        with pytest.raises(BrokenError):
            store_all(tier, [(ref, data)], checksums=lambda _, sums=sums: sums)  # type: ignore[misc]
    assert stores(tier, range(1, 6))
    assert tier.statistics().inflight_bytes == 0


def test_removals_that_wait_are_bounded(
    store: DiskStore, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond is gone all the same, and its caller hears that it may come back."""
    monkeypatch.setattr(marks, "MAX_REMOVALS", 3)
    assert stores(tier, range(6))
    results = Results(6)
    with store.troubles.hang("read"):
        for n, ref in enumerate(names(range(6))):
            tier.remove([ref], done=lambda found, n=n: results.done(n, list(found)))  # type: ignore[misc]
        eventually(lambda: len(results._found) == 3, "the refusals")
        tier.remove(names(range(50, 60)))  # nothing of them is to be written
    found = results.wait()
    assert sorted(outcome.value for (outcome,) in found) == ["ok"] * 3 + ["refused"] * 3
    assert probe_all(tier, names(range(6))) == [Outcome.MISS] * 6
    assert tier._books.log.segments.pinned == 0


def test_many_removals_do_not_hold_up_the_next_segment(store: DiskStore) -> None:
    """They are written down a few at a time, and segments come in between."""
    tier = store.open()
    assert stores(tier, range(60))
    books = tier._books
    kinds: list[str] = []
    judged = threading.Event()

    def judge(kind: str, number: int, offset: int, nbytes: int) -> int:
        if threading.current_thread().name == JANITOR and kind == "write":
            kinds.append("first block" if offset == 0 else "mark")
            if len(kinds) == 1:
                judged.wait()  # until the next segment is needed
        return 0

    store.troubles.judge = judge
    tier.remove(names(range(50)))
    new = Results(20)
    items = [StoreItem(ref, data, ()) for ref, data in parts(range(100, 120))]
    tier.store(items, deadline=time.monotonic() + 60.0, done=new.done)
    eventually(lambda: not books.log.segments.writable, "that the next segment is needed")
    judged.set()
    assert set(new.wait()) == {Outcome.OK}
    eventually(lambda: kinds.count("mark") >= 50, "the marks")
    assert kinds.index("first block") < marks.MARKS_AT_ONCE + 3
    tier.close()


def test_a_start_without_threads_leaves_none_and_lets_the_next_one_in(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refusing(self: threading.Thread) -> None:
        if self.name == "kvferry-disk-write-1":
            raise RuntimeError("can't start new thread")
        start(self)

    with leaves_nothing(), monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing)
        with pytest.raises(MisconfiguredError, match="more threads"):
            store.open()
    with contextlib.closing(store.open()) as tier:
        assert stores(tier, range(2))
