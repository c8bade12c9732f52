"""The keeper's decisions by themselves: no clock, no thread, no tier."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.keeper.rig import prompt

from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.keeper.backlog import RANKS, Backlog, Wanted, positions_in, rank_of
from kvferry.keeper.below import NOWHERE
from kvferry.keeper.buffers import GRAIN_BYTES, Buffer, Buffers, Use
from kvferry.keeper.keeping import Line, Task
from kvferry.keeper.reuse import HALF_LIFE_S, ReuseTable, most_used
from kvferry.keeper.sightings import SLACK_S, Sightings
from kvferry.keeper.staging import Request, Stage, StageTable
from kvferry.tiers.contract import Outcome

REFS = prompt("p", 24, nbytes=100)
refs = st.sampled_from(REFS)
some_refs = st.lists(refs, max_size=8)
ranks = st.integers(0, RANKS - 1)


# ---- the backlog


@given(st.lists(st.tuples(refs, ranks), max_size=60), st.integers(1, 12), st.integers(100, 1500))
@settings(deadline=None)
def test_a_backlog_keeps_the_best_within_its_bounds(
    offers: list[tuple[PartRef, int]], parts: int, nbytes: int
) -> None:
    backlog = Backlog(max_parts=parts, max_bytes=nbytes)
    offered: dict[PartRef, int] = {}
    dropped: list[Wanted] = []
    for at, (ref, rank) in enumerate(offers):
        if ref not in backlog:
            offered.pop(ref, None)
        dropped += backlog.offer(Wanted(ref, rank, float(at)))
        offered[ref] = min(rank, offered.get(ref, RANKS))
        assert len(backlog) <= parts
        assert backlog.nbytes == sum(wanted.ref.nbytes for wanted in backlog) <= nbytes
        assert backlog.oldest_since() == min(wanted.since for wanted in backlog)
    kept = {wanted.ref: wanted.rank for wanted in backlog}
    assert all(offered[ref] == rank for ref, rank in kept.items())
    taken: list[int] = []
    while (wanted := backlog.peek()) is not None:
        taken.append(backlog.take(wanted.ref).rank)
    assert taken == sorted(kept.values())
    assert (len(backlog), backlog.nbytes, backlog.oldest_since()) == (0, 0, None)
    if not dropped:
        assert len(kept) == len({ref for ref, _ in offers})


def test_heads_come_before_tails_and_what_was_used_before_what_is_likely() -> None:
    assert [rank_of(position, used=True) for position in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 3]
    assert max(rank_of(1 << 40, used=True), 0) < rank_of(0, used=False)
    assert rank_of(1 << 40, used=False) == RANKS - 1
    assert positions_in([REFS[0], REFS[0], REFS[1]]) == [0, 0, 1]


# ---- a line


class LineMachine(RuleBasedStateMachine):
    """A line beside what it was told: nothing is lost or doubled, and bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.line = Line(Backlog(max_parts=12, max_bytes=1 << 20), batch_bytes=300, share=0.5, pause_s=4.0)
        self.tasks: list[Task] = []
        self.wished = 0
        self.room = 3

    @rule(ref=refs, rank=ranks)
    def want(self, ref: PartRef, rank: int) -> None:
        known = self.line.knows(ref)
        self.line.want(ref, rank, self.now)
        self.wished += not known

    @rule(ref=refs)
    def adopt(self, ref: PartRef) -> None:
        known, paused = self.line.knows(ref), self.line.paused
        task = self.line.adopt(ref, 0, self.now)
        assert (task is None) == (paused or any(other.ref == ref for other in self.tasks))
        if task is not None:
            self.wished += not known
            self.tasks.append(task)

    @rule(waited_for=st.booleans(), room=st.integers(0, 4))
    def take(self, waited_for: bool, room: int) -> None:
        reading = [task for task in self.tasks if task.reading]
        was_paused = self.line.paused
        left = iter(range(room))
        batch = self.line.take(
            self.now, waited_for=waited_for, reserve=lambda ref: next(left, None) is not None
        )
        assert not (batch and reading), "one batch at a time"
        assert len(batch) <= (1 if waited_for or was_paused else 3)
        assert len(batch) <= room
        self.tasks += batch

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), how=st.sampled_from(["read", "copied", "there", "gone", "given_up", "again"]))
    def progress(self, data: st.DataObject, how: str) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        if how == "read":
            self.line.read(task, self.now)
            return
        self.tasks.remove(task)
        if how == "again":
            self.line.again(task, "x", self.now)
            assert self.line.paused
        elif how == "given_up":
            self.line.given_up(task, "x", self.now)
        else:
            end = {"copied": self.line.copied, "there": self.line.was_there, "gone": self.line.gone}[how]
            end(task, self.now)

    @rule(seconds=st.sampled_from([0.01, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(gone=st.sets(refs))
    def forget(self, gone: set[PartRef]) -> None:
        before = self.line.parts
        self.line.forget(gone.__contains__)
        self.wished -= before - self.line.parts
        assert all(task.removed for task in self.tasks if task.ref in gone)

    @rule(gone=st.sets(refs))
    def forget_named(self, gone: set[PartRef]) -> None:
        left = {ref for ref in REFS if self.line.knows(ref)} - (gone - {task.ref for task in self.tasks})
        before = self.line.parts
        self.line.forget_named({ref.key for ref in gone})
        self.wished -= before - self.line.parts
        assert {ref for ref in REFS if self.line.knows(ref)} == left
        assert all(task.removed for task in self.tasks if task.ref in gone)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        counts, line = self.line.counts, self.line
        assert line.running == len(self.tasks)
        assert line.nbytes == 100 * line.parts
        ended = counts.parts + counts.there + counts.gone + counts.dropped
        assert ended + line.parts <= self.wished
        assert self.wished <= ended + line.parts + counts.failed.total()
        assert (line.oldest_s(self.now) > 0) <= (line.parts > 0)

    @invariant()
    def what_waits_is_taken_in_the_end(self) -> None:
        due = self.line.due_at(self.now)
        if due is not None:
            assert self.now < due <= self.now + 5.0

    def teardown(self) -> None:
        """With every task ended well, all that waits comes out."""
        for task in self.tasks:
            self.line.copied(task, self.now)
        rounds = 0
        while self.line.parts:
            self.now += 6.0
            batch = self.line.take(self.now, waited_for=False, reserve=lambda ref: True)
            assert batch
            for task in batch:
                self.line.copied(task, self.now)
            rounds += 1
            assert rounds < 100


TestLine = LineMachine.TestCase
TestLine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_part_that_fails_while_others_do_not_is_given_up_and_an_outage_gives_up_nothing() -> None:
    line = Line(Backlog(max_parts=9, max_bytes=1 << 20), batch_bytes=900, share=1.0, pause_s=1.0)
    bad, good = REFS[:2]
    now = 0.0

    def attempt(works: set[PartRef]) -> None:
        nonlocal now
        now += 2.0
        for task in line.take(now, waited_for=False, reserve=lambda ref: True):
            if task.ref in works:
                line.copied(task, now)
            else:
                line.again(task, "failed", now)

    line.want(bad, 0, now)
    for _ in range(50):
        attempt(set())
    assert line.knows(bad)
    for _ in range(50):
        line.want(good, 0, now)
        attempt({good})
    assert not line.knows(bad)


# ---- stages


class StageMachine(RuleBasedStateMachine):
    """Stages beside a plain account of who waits for what."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = StageTable(max_parts=10)
        self.requests: list[tuple[Request, dict[int, PartRef]]] = []
        self.running: list[Stage] = []

    @rule(wanted=some_refs, patience=st.integers(1, 9))
    def ask(self, wanted: list[PartRef], patience: int) -> None:
        request = self.table.open(wanted, self.now + patience)
        waits: dict[int, PartRef] = {}
        for index, ref in enumerate(wanted):
            if self.table.enqueue(request, index, index, NOWHERE):
                waits[index] = ref
            else:
                assert self.table.answered(request, index)
        self.requests.append((request, waits))

    @rule()
    def begin(self) -> None:
        stage = self.table.peek()
        if stage is None:
            return
        queued = [(r.deadline, ref) for r, waits in self.requests for ref in waits.values()]
        waiting = [deadline for deadline, ref in queued if ref not in self._refs()]
        assert min(waiting) == min(w.request.deadline for w in stage.waiters)
        self.table.begin(stage)
        with pytest.raises(BrokenError):
            self.table.begin(stage)
        self.running.append(stage)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.OK, Outcome.LATE, Outcome.MISS]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        stage = data.draw(st.sampled_from(self.running))
        self.running.remove(stage)
        late_at = stage.deadline
        told = self.table.finished(stage, outcome)
        for request, waits in self.requests:
            indexes = {index for index, ref in waits.items() if ref == stage.ref}
            mine = {waiter.index for waiter in told if waiter.request is request}
            goes_on = outcome is Outcome.LATE and request.deadline > late_at
            assert mine == (set() if goes_on else indexes)
            for index in mine:
                del waits[index]
        assert len(told) == len(set(told))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request, waits = data.draw(st.sampled_from(self.requests))
        left, unwanted = self.table.close(request)
        assert left == sorted(waits)
        waits.clear()
        everyone = {ref for _, others in self.requests for ref in others.values()}
        assert all(stage in self.running and stage.ref not in everyone for stage in unwanted)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    def _refs(self) -> set[PartRef]:
        return {stage.ref for stage in self.running}

    @invariant()
    def every_wish_is_on_its_way(self) -> None:
        wished = {ref for _, waits in self.requests for ref in waits.values()}
        assert len(self.table) == len(wished | self._refs()) <= 10
        assert self.table.queued == len(wished - self._refs())
        assert (self.table.peek() is not None) == bool(wished - self._refs())


TestStages = StageMachine.TestCase
TestStages.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_answers_owed_are_bounded_too() -> None:
    table = StageTable(max_parts=2)
    admitted = 0
    for _ in range(100):
        request = table.open([REFS[0]] * 4, 1.0)
        admitted += sum(table.enqueue(request, index, 0, NOWHERE) for index in range(4))
    assert admitted == 8


# ---- buffers


@given(st.lists(st.tuples(st.sampled_from([*Use, None]), st.integers(1, 30 * GRAIN_BYTES)), max_size=60))
@settings(deadline=None)
def test_buffers_stay_within_their_bound_and_no_use_takes_anothers_share(
    steps: list[tuple[Use | None, int]],
) -> None:
    shares = {Use.STAGE: 20 * GRAIN_BYTES, Use.COPY: 8 * GRAIN_BYTES, Use.FLUSH: 4 * GRAIN_BYTES}
    buffers = Buffers(shares)
    taken: list[Buffer] = []
    for use, nbytes in steps:
        if use is None:
            if taken:
                buffers.give(taken.pop(nbytes % len(taken)))
            continue
        alone = not any(buffer.use is use for buffer in taken)
        buffer = buffers.take(nbytes, use)
        if buffer is None:
            used = sum(each.nbytes for each in taken)
            rounded = -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES
            mine = sum(each.nbytes for each in taken if each.use is use)
            assert used + rounded > buffers.limit_bytes or (not alone and mine + rounded > shares[use])
            continue
        assert buffer.memory.nbytes >= nbytes
        taken.append(buffer)
        mine = sum(each.nbytes for each in taken if each.use is use)
        assert mine <= shares[use] or alone
    assert buffers.used_bytes == sum(buffer.nbytes for buffer in taken) <= buffers.limit_bytes
    for buffer in taken:
        buffers.give(buffer)
        with pytest.raises(BrokenError):
            buffers.give(buffer)
    assert buffers.used_bytes == 0


# ---- the table of uses, sightings


@given(st.lists(st.tuples(some_refs, st.integers(0, 4000)), max_size=20), st.integers(1, 30))
@settings(deadline=None)
def test_the_most_reused_are_the_most_used_of_those_kept(
    calls: list[tuple[list[PartRef], int]], limit: int
) -> None:
    table = ReuseTable(limit)
    uses: Counter[PartRef] = Counter()
    last: dict[PartRef, float] = {}
    now = 0.0
    for call, seconds in calls:
        now += seconds
        table.used(call, now)
        uses.update(call)
        last.update(dict.fromkeys(call, now))
    assert len(table) == min(limit, len(uses))
    found = most_used(table.all(), within_s=5000, max_bytes=1 << 40, namespace=None, now=now)
    assert len(found) == len(set(found)) <= limit
    assert all(now - last[ref] <= 5000 for ref in found)
    if limit >= len(uses):
        assert set(found) == {ref for ref in uses if now - last[ref] <= 5000}
    assert most_used(table.all(), within_s=5000, max_bytes=350, namespace=None, now=now) == found[:3]


def test_yesterdays_favourite_gives_way() -> None:
    table = ReuseTable(10)
    old, new = REFS[:2]
    table.used([old] * 3, 0.0)
    table.used([new] * 2, 2 * HALF_LIFE_S)
    found = most_used(table.all(), within_s=1e9, max_bytes=1000, namespace=None, now=2 * HALF_LIFE_S)
    assert found == [new, old]
    table.forget([new])
    table.forget_namespace(b"other" * 3 + b"!")
    assert len(table) == 1
    table.forget_namespace(None)
    assert len(table) == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_key_is_seen_used_exactly_when_it_was_used_between_two_passes(
    passes: list[tuple[bool, float]],
) -> None:
    """Whatever the rounding of idle times to seconds and the time that the answer took."""
    sightings = Sightings(max_keys=100)
    now, used_at = 1000.0, 990.0
    for at, (used, jitter) in enumerate(passes):
        now += 60.0
        if used:
            used_at = now - 30.0
        idle_s = int(now + jitter - used_at)
        assert sightings.saw(b"key", now - idle_s, now + jitter - idle_s) == (used and at > 0)
        sightings.end_pass()
    assert SLACK_S < 30


@given(st.integers(1, 1000), st.integers(32, 200))
@settings(max_examples=20, deadline=None)
def test_of_more_keys_than_can_be_remembered_every_one_is_looked_at_in_turn(keys: int, limit: int) -> None:
    sightings = Sightings(max_keys=limit)
    found: set[int] = set()
    for number in range(300):
        for key in range(keys):
            name = b"%d" % key
            if sightings.wanted(name) and sightings.saw(name, number * 100.0, number * 100.0):
                found.add(key)
        sightings.end_pass()
        if len(found) == keys:
            return
    raise AssertionError(f"{keys - len(found)} of {keys} keys were never compared")
