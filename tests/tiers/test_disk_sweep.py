"""Drops of the disk's log that are taken out little by little, whatever else is done between two looks."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.runs import runs
from tests.tiers.disk_log import BYTES, NAMESPACES, REFS, Disk
from tests.tiers.disks import check

from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk import marks
from kvferry.tiers.disk.places import Lack, Reservation

KINDS = ["store", "store", "store", "fetch", "remove", "begin", "finish", "give up", "no room", "settle"]
DROPS = ["drop a namespace", "drop all", "drop what is old", "sweep", "sweep"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS + DROPS), st.integers(0, 11)), max_size=60)
LONG = 5
"""Operations: what was not used for so many is old."""


class Dropping:
    """A log, and what may be found of it: which parts, and when each was last stored or used."""

    def __init__(self, max_parts: int) -> None:
        self.now = 0
        self.disk = Disk.empty(max_parts, wall=lambda: float(self.now))
        self.disk.sweeps = False
        self.times: dict[int, int] = {}
        self.under_way: dict[int, Reservation] = {}
        self.dropped: list[Dropped] = []
        self.drops = 0

    def do(self, what: str, n: int) -> None:
        self.now += 1
        match what:
            case "store" if not self.under_way:  # which may be in the way of the next segment
                self.disk.store(n)
                self.times[n] = self.now
                assert self.found(n), "not there right after it was stored"
            case "fetch":
                if self.disk.fetch(n):
                    self.times[n] = self.now
            case "remove":
                self.disk.remove(n)
                self.times.pop(n, None)
            case "begin" if n not in self.under_way:
                self.begin(n)
            case "finish" if n in self.under_way:
                self.finish(n)
            case "give up" | "no room" if n in self.under_way:
                self.disk.log.abandon(self.under_way.pop(n), again=what == "no room")
            case "sweep":
                before = self.all_found()
                self.disk.sweep()
                assert self.all_found() == before
            case "settle":
                self.disk.settle()
            case "drop a namespace":
                self.drop(NAMESPACES[n % 2], None)
            case "drop all":
                self.drop(None, None)
            case "drop what is old":
                self.drop(NAMESPACES[n % 2] if n % 3 else None, self.now - LONG)

    def begin(self, n: int) -> None:
        place = self.disk.log.reserve(REFS[n])
        if isinstance(place, Reservation):
            self.under_way[n] = place
        elif place is Lack.PRESENT:
            self.times[n] = self.now
        else:
            self.disk.settle()

    def finish(self, n: int) -> None:
        """It may stay or not, where a drop was about it meanwhile."""
        place = self.under_way.pop(n)
        self.disk.records.write(place, BYTES[n], ())
        books = self.disk.janitor._books
        with books.lock:
            books.committed(place)
        if self.found(n):
            self.times[n] = self.now

    def drop(self, namespace: bytes | None, latest: float | None) -> None:
        books = self.disk.janitor._books
        if not books.marks.may_drop:
            return
        before = self.all_found()
        with books.lock:
            books.drop(namespace, latest, self.dropped.append)
        self.drops += 1
        gone = {
            n
            for n, used in self.times.items()
            if namespace in (None, NAMESPACES[n % 2]) and (latest is None or used <= latest)
        }
        self.times = {n: used for n, used in self.times.items() if n not in gone}
        assert self.all_found() == before - gone

    def found(self, n: int) -> bool:
        return self.disk.log.find(REFS[n]) is not None

    def all_found(self) -> set[int]:
        return {n for n in range(len(REFS)) if self.found(n)}


@given(OPERATIONS, st.sampled_from([1, 2, 3, 5, 100]), st.integers(1, 4))
@example([("store", 0), ("begin", 1), *[("store", 0)] * 4, ("drop what is old", 0), ("sweep", 0)], 2, 1)
@settings(deadline=None, max_examples=runs(80))
def test_what_is_dropped_is_gone_from_the_call_on_for_good_and_nothing_else_is(
    operations: list[tuple[str, int]], max_parts: int, parts_at_once: int
) -> None:
    """While it is taken out some parts at a time, and stores, uses, evictions and failed writes go on."""
    dropping = Dropping(max_parts)
    disk = dropping.disk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "PARTS_AT_ONCE", parts_at_once)
        for what, n in operations:
            dropping.do(what, n)
            assert dropping.all_found() <= dropping.times.keys()
            check(disk.log)
        for n in list(dropping.under_way):
            dropping.finish(n)
        disk.sweeps = True
        disk.settle()
    assert [each.outcome for each in dropping.dropped] == [Outcome.OK] * dropping.drops
    assert dropping.all_found() == {REFS.index(ref) for ref in disk.log.records} <= dropping.times.keys()
    assert disk.log.segments.pinned == 0
    check(disk.log)
    again = Disk.recovered(disk.files)
    assert again.held() <= {REFS[n] for n in dropping.times}
    for n in range(len(REFS)):
        again.fetch(n)
