"""What is carried over from a segment that leaves, and what may happen meanwhile."""

import errno

import pytest
from tests.tiers.disk_log import BYTES, REFS, Disk
from tests.tiers.disks import check

from kvferry.breaker import SILENCE
from kvferry.errors import CorruptError
from kvferry.identity.names import PartRef
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk.format import (
    BLOCK_BYTES,
)
from kvferry.tiers.disk.places import Place, Reservation
from kvferry.tiers.disk.work import Removal


def carry(disk: Disk, hot: int) -> Place:
    """Store others until it is carried over; where it lay before."""
    disk.store(hot)
    before = disk.log.records[REFS[hot]].place
    for n in [n for n in range(12) if n != hot] * 9:
        disk.fetch(hot)
        disk.remove(n)
        disk.store(n)
        if disk.log.records[REFS[hot]].place != before:
            return before
    raise AssertionError("it was not carried over")


@pytest.mark.parametrize("when", ["read", "write"])
@pytest.mark.parametrize("how", ["remove", "drop", "drop what is old"])
def test_what_is_removed_while_it_is_carried_over_stays_removed(when: str, how: str) -> None:
    """Between the lookup and the copy, and between the copy and its entry; after a restart too."""
    disk = Disk.empty()
    writes, ended = iter(range(1000)), list[Dropped]()

    def remove(kind: str) -> None:
        if kind != when or disk.carrying != REFS[1]:
            return
        disk.files.before = lambda kind: None
        next(writes)
        books = disk.janitor._books
        with books.lock:
            if how == "remove":
                _, places = disk.log.remove(REFS[1])
                books.mark(Removal(places, 0.0, None))
            else:
                latest = disk.log.records[REFS[1]].used_at if how == "drop what is old" else None
                books.drop(REFS[1].key.namespace, latest, ended.append)
        assert disk.log.find(REFS[1]) is None

    disk.files.before = remove
    with pytest.raises(KeyError):
        carry(disk, 1)
    assert next(writes) == 1
    disk.settle()
    assert [each.outcome for each in ended] == [Outcome.OK] * (how != "remove")
    assert REFS[1] not in disk.held()
    check(disk.log)
    assert disk.log.segments.pinned == 0
    assert REFS[1] not in Disk.recovered(disk.files).held()


class StoppedError(Exception):
    """The eviction has ended."""


def test_nothing_more_is_carried_over_once_the_disk_failed() -> None:
    """And the segment stays until it is well again."""
    disk = Disk.empty()
    books, evict = disk.janitor._books, disk.janitor._evict
    reads: list[PartRef] = []

    def fail(kind: str) -> None:
        if disk.carrying is not None and kind == "read":
            reads.append(disk.carrying)
            with books.lock:
                books.went_wrong(OSError(errno.EIO, "elsewhere"), SILENCE)

    def once(number: int) -> None:
        before = len(disk.log.records)
        evict(number)
        assert len(disk.log.records) == before
        raise StoppedError

    disk.files.before = fail
    disk.janitor._evict = once  # type: ignore[method-assign]
    for n in (1, 5, 8):
        disk.store(n)
    with pytest.raises(StoppedError):
        for n in (2, 3, 4, 6, 7, 9, 10, 11, 0):
            for m in (1, 5, 8):
                disk.fetch(m)
            disk.store(n)
    assert len(reads) == 1
    assert {REFS[1], REFS[5], REFS[8]} <= disk.held()
    check(disk.log)


@pytest.mark.parametrize("torn", [BLOCK_BYTES, 2 * BLOCK_BYTES])
def test_a_copy_that_a_crash_cut_off_does_not_hide_what_it_was_made_from(torn: int) -> None:
    """Nor does it later on, when it is no longer among the last records."""
    disk = Disk.empty()
    carry(disk, 3)  # three blocks
    copy = disk.log.records[REFS[3]].place
    at = max(i for i, w in enumerate(disk.files.journal) if (w.segment, w.offset) == copy[::2])
    crash = sum(len(write.data) for write in disk.files.journal[:at]) + torn
    again = Disk.recovered(disk.files.after_a_crash(crash))
    assert again.fetch(3)
    assert again.log.records[REFS[3]].place != copy
    for n in (0, 5, 8):
        again.store(n)
    last = Disk.recovered(again.files)
    assert last.held() >= {REFS[n] for n in (3, 0, 5, 8)}
    assert last.fetch(3)


def test_a_gap_that_a_cut_file_cannot_be_marked_in_does_not_hold_its_segment() -> None:
    disk = Disk.empty()
    disk.store(0)
    first, second = disk.log.reserve(REFS[2]), disk.log.reserve(REFS[5])
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    disk.records.write(second, BYTES[5], ())
    disk.log.commit(second)
    disk.log.abandon(first, again=True)
    assert disk.log.segments.pinned == 0
    disk.files.write = lambda number, buffers, offset: 0  # type: ignore[method-assign]
    with pytest.raises(CorruptError):
        disk.janitor._fill(first.place.segment)
    assert disk.log.segments.pinned == 0
    check(disk.log)
