"""The node's state machines: loads, shared fetches, write-back, recency, explain, frames."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.runs import runs

from kvferry.client.breaker import Breaker
from kvferry.errors import BrokenError, RefusedError
from kvferry.frames import FrameBuffer
from kvferry.identity.names import PartKey, PartRef
from kvferry.node.explain import ExplainRing, visible_id
from kvferry.node.fetches import FetchTable, Waiter
from kvferry.node.framing import decode_from_client, encode, split_checksums, split_digests
from kvferry.node.loads import At, Load, PartState
from kvferry.node.recency import REFRESH_INTERVAL_S, RecencyRefresh
from kvferry.node.wire import MAX_FRAME_BYTES, EndLoad, Reason, Report
from kvferry.node.writeback import Unsaved, WriteBack

CHUNKS = tuple(bytes([number]) * 32 for number in range(6))


class LoadMachine(RuleBasedStateMachine):
    """Whatever happens to its parts, a load's window and books hold."""

    under_way = Bundle("under_way")
    ready = Bundle("ready")

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(chunks=CHUNKS, part_bytes=(10, 20), window_bytes=60)
        self.held: set[At] = set()
        self.copied_parts: set[At] = set()

    @rule(target=under_way)
    def fetch(self) -> At:
        at = self.load.next_wanted()
        if at is None:
            return At(-1, 0)
        self.load.fetching(at)
        self.held.add(at)
        return at

    @rule(target=ready)
    def find(self) -> At:
        at = self.load.next_wanted()
        if at is None:
            return At(-1, 0)
        self.load.found(at)
        self.held.add(at)
        return at

    @rule(target=ready, at=consumes(under_way))
    def arrive(self, at: At) -> At:
        if at in self.held:
            self.load.arrived(at)
            return at
        return At(-1, 0)

    @rule(at=consumes(under_way))
    def want_again(self, at: At) -> None:
        if at in self.held:
            self.load.wanted_again(at)
            self.held.discard(at)

    @rule(at=consumes(ready))
    def copy(self, at: At) -> None:
        if at in self.held:
            self.load.copied(at)
            self.held.discard(at)
            self.copied_parts.add(at)
            with pytest.raises(BrokenError):
                self.load.copied(at)

    @rule(position=st.integers(0, len(CHUNKS)))
    def cut(self, position: int) -> None:
        before = self.load.end
        left = self.load.cut(position, Reason.FAILED)
        returned = {*left.ready, *left.fetching}
        assert returned == {at for at in self.held if at.position >= position}
        self.held -= returned
        assert self.load.end == min(before, position)

    @invariant()
    def the_window_holds_exactly_what_is_under_way_or_ready(self) -> None:
        assert self.load.held_bytes == sum((10, 20)[at.part] for at in self.held)
        assert self.load.held_bytes <= 60

    @invariant()
    def nothing_past_the_end_is_wanted(self) -> None:
        at = self.load.next_wanted()
        if at is not None:
            assert at.position < self.load.end
            assert self.load.state(at) is PartState.WANTED
        elif not self.held:
            done = {At(p, part) for p in range(self.load.end) for part in (0, 1)}
            assert done <= self.copied_parts
            assert self.load.settled()


TestLoads = pytest.mark.long(LoadMachine.TestCase)
TestLoads.settings = settings(max_examples=runs(60), stateful_step_count=40, deadline=None, print_blob=True)


def test_a_load_gets_one_part_even_when_it_exceeds_the_window() -> None:
    load = Load(chunks=CHUNKS[:2], part_bytes=(100,), window_bytes=10)
    at = load.next_wanted()
    assert at == At(0, 0)
    load.fetching(at)
    assert load.next_wanted() is None
    assert load.window_full()
    load.arrived(at)
    load.copied(at)
    assert load.next_wanted() == At(1, 0)


def _key(number: int) -> PartKey:
    return PartKey(b"n" * 16, bytes([number]) * 32, 0)


def test_a_batch_is_cancelled_only_when_nobody_waits_for_any_of_it() -> None:
    table = FetchTable()
    batch = table.new_batch()
    first, second = Waiter(1, At(0, 0)), Waiter(2, At(5, 0))
    table.begin(_key(0), batch, first)
    table.begin(_key(1), batch, first)
    table.join(_key(1), second)
    assert table.leave(_key(0), first) is None
    assert table.leave(_key(1), first) is None
    assert table.leave(_key(1), second) is batch
    assert batch.cancelled
    assert table.leave(_key(1), second) is None
    assert table.finish(_key(0)) == ([], batch)
    assert table.finish(_key(1)) == ([], batch)
    assert batch.unfinished == 0
    assert len(table) == 0


def test_who_joins_a_cancelled_fetch_waits_for_its_end() -> None:
    table = FetchTable()
    batch = table.new_batch()
    table.begin(_key(0), batch, Waiter(1, At(0, 0)))
    assert table.leave(_key(0), Waiter(1, At(0, 0))) is batch
    assert table.known(_key(0))
    late = Waiter(2, At(0, 0))
    table.join(_key(0), late)
    assert table.finish(_key(0)) == ([late], batch)
    assert batch.ends_before(0.0)


def test_a_second_fetch_of_one_part_is_a_defect() -> None:
    table = FetchTable()
    table.begin(_key(0), table.new_batch(), Waiter(1, At(0, 0)))
    with pytest.raises(BrokenError):
        table.begin(_key(0), table.new_batch(), Waiter(2, At(0, 0)))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60))
def test_the_backlog_never_exceeds_its_bounds_and_forgets_nothing(offers: list[tuple[int, bool]]) -> None:
    backlog = WriteBack(max_bytes=100, max_batch_bytes=50)
    accepted = stored = 0
    for number, (nbytes, failing) in enumerate(offers):
        accepted += backlog.offer(Unsaved(PartRef(_key(number), nbytes), 0, ()))
        assert backlog.backlog_bytes <= 100
        for unsaved in backlog.take():
            if failing and not unsaved.tries:
                backlog.again(unsaved)
            else:
                backlog.finished(unsaved)
                stored += 1
    while batch := backlog.take():
        assert sum(unsaved.ref.nbytes for unsaved in batch) <= 50 or len(batch) == 1
        for unsaved in batch:
            backlog.finished(unsaved)
            stored += 1
    assert stored == accepted
    assert backlog.backlog_bytes == 0


def test_recency_is_refreshed_once_per_interval() -> None:
    refresh = RecencyRefresh()
    chunks = list(CHUNKS)
    assert refresh.due(b"n", chunks, 0.0) == chunks
    assert refresh.due(b"n", chunks, 1.0) == []
    assert refresh.due(b"other", chunks, 1.0) == chunks
    assert refresh.due(b"n", chunks, REFRESH_INTERVAL_S) == chunks


@pytest.mark.parametrize(
    ("inside", "seen"),
    [
        ("cmpl-abc123-0-1a2b3c4d", "cmpl-abc123"),
        ("chatcmpl-9f8e7d-1a2b3c4d", "chatcmpl-9f8e7d"),
        ("cmpl-abc123-0", "abc123"),
        ("plain", "plain"),
    ],
)
def test_a_request_is_found_by_the_id_that_its_user_sees(inside: str, seen: str) -> None:
    ring = ExplainRing()
    ring.record("cmpl-other-0-00000000", 0.0)
    ring.record(inside, 1.0)
    assert [record["request_id"] for record in ring.find(seen)] == [inside]
    assert ring.find(inside)[0]["request_id"] == inside


def test_the_ring_keeps_the_newest() -> None:
    ring = ExplainRing(limit=3)
    for number in range(5):
        ring.record(f"r{number}", 0.0)
    ring.report(Report(request_id="r2", note="seen"), 1.0)
    assert len(ring) == 3
    assert ring.find("r1") == []
    assert ring.find("r2")[0]["report"]["note"] == "seen"  # type: ignore[index]


@given(st.text(min_size=1))
def test_no_id_breaks_the_search(text: str) -> None:
    visible_id(text)
    assert ExplainRing().find(text) == []


@given(st.lists(st.integers(0, 1 << 40), max_size=20), st.integers(1, 7))
def test_frames_survive_any_cut_of_the_stream(ids: list[int], step: int) -> None:
    stream = b"".join(encode(EndLoad(load_id=number)) for number in ids)
    frames = FrameBuffer()
    got = [
        decode_from_client(payload)
        for at in range(0, len(stream), step)
        for payload in frames.feed(stream[at : at + step])
    ]
    assert got == [EndLoad(load_id=number) for number in ids]


@given(st.binary(max_size=300))
def test_no_bytes_break_the_decoder(payload: bytes) -> None:
    try:
        decode_from_client(payload)
    except RefusedError:
        return


def test_a_length_over_the_limit_is_refused_before_the_bytes_come() -> None:
    with pytest.raises(RefusedError, match="limit"):
        FrameBuffer().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_broken_lengths_of_digests_and_checksums_are_refused() -> None:
    with pytest.raises(RefusedError):
        split_digests(b"x" * 33)
    with pytest.raises(RefusedError):
        split_checksums(b"x" * 17)


def test_the_breaker_opens_pings_and_gives_up() -> None:
    breaker = Breaker(ping_every_s=1.0, give_up_s=5.0)
    assert breaker.next_look() is None
    breaker.unanswered(10.0)
    assert breaker.is_open
    assert breaker.ping_due(10.0)
    assert not breaker.ping_due(10.5)
    assert breaker.next_look() == 11.0
    assert not breaker.given_up(14.9)
    assert breaker.given_up(15.0)
    breaker.heard()
    assert not breaker.is_open
    assert not breaker.given_up(99.0)
    assert breaker.opened == 1
