"""A failure is counted under its reason and never as a miss; a stalled load makes the node a suspect."""

from collections.abc import Iterator

import pytest
from tests.engines.test_saving import BLOCK, Bench, EmptyNode

from kvferry.client.messages import LookupAnswer, Reason
from kvferry.engines.vllm.asker import Patience
from kvferry.engines.vllm.counters import failure, failure_reason
from kvferry.engines.vllm.messages import LoadResult, SaveResult, WorkerReport
from kvferry.testing.fake_engine import FakeRequest

FAILURES = sorted(set(Reason) - {Reason.COMPLETE, Reason.ABSENT, Reason.EVICTED, Reason.CHEAPER})


class TroubledNode(EmptyNode):
    """Finds so many chunks, and says why not more."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.reason = 0, Reason.ABSENT
        self.suspected = 0
        self.unready = 0  # how often it is asked before it answers

    def poll(self, request_id: str) -> LookupAnswer | None:
        if self.unready:
            self.unready -= 1
            return None
        n = self.count
        parts = ((None,),) * n
        return LookupAnswer(request_id, n, 1, n, 0, (0,) * n, parts, 9.0, 9.0, 1e9, self.reason)

    def suspect(self) -> None:
        self.suspected += 1


@pytest.fixture
def node() -> TroubledNode:
    return TroubledNode()


@pytest.fixture
def bench(node: TroubledNode) -> Iterator[Bench]:
    made = Bench(blocks=100, node=node)
    yield made
    made.side.close()
    made.adapters.close()


@pytest.mark.parametrize("reason", FAILURES)
def test_a_lookup_that_failed_is_counted_under_its_reason_and_not_as_a_miss(
    bench: Bench, node: TroubledNode, reason: Reason
) -> None:
    node.reason = reason
    bench.running("r", 3 * BLOCK)
    counts = bench.side.counts.take()
    assert (counts.get(failure(reason)), counts.get("misses"), counts.get("unanswered")) == (1, None, 1)


@pytest.mark.parametrize("reason", [Reason.ABSENT, Reason.EVICTED, Reason.CHEAPER])
def test_what_is_no_failure_is_not_counted_as_one(bench: Bench, node: TroubledNode, reason: Reason) -> None:
    node.reason = reason
    bench.running("r", 3 * BLOCK)
    assert not [name for name in bench.side.counts.take() if failure_reason(name)]


@pytest.mark.parametrize(
    ("reason", "suspected"), [(Reason.STALLED, 1), (Reason.DEADLINE, 1), (Reason.CORRUPT, 0)]
)
def test_a_load_that_failed_is_counted_under_its_reason_and_silence_makes_the_node_a_suspect(
    bench: Bench, node: TroubledNode, reason: Reason, suspected: int
) -> None:
    node.count, node.reason = 2, Reason.COMPLETE
    request = FakeRequest("r", list(range(3 * BLOCK + 1)))
    request.blocks = bench.pool.take(4) or []
    assert bench.side.matched_tokens(request, 0) == (2 * BLOCK, True)
    assert bench.side.allocated(request, (request.blocks,), 2 * BLOCK)
    bench.side.absorb(WorkerReport([LoadResult("r", 1, 100, 0.1, reason)]))
    bench.side.load_finished("r")
    counts = bench.side.counts.take()
    assert (counts["loads_failed"], counts[failure(reason)], node.suspected) == (1, 1, suspected)
    assert "misses" not in counts
    bench.side.finished(request)


@pytest.mark.parametrize(
    ("count", "reason"), [(0, Reason.COMPLETE), (2, Reason.COMPLETE), (2, Reason.STALLED)]
)
def test_time_that_brought_something_is_told_from_time_that_was_lost(
    bench: Bench, node: TroubledNode, count: int, reason: Reason
) -> None:
    node.count, node.reason, node.unready = count, Reason.COMPLETE if count else Reason.TIER_DOWN, 1
    request = FakeRequest("r", list(range(3 * BLOCK + 1)))
    for _ in range(2):
        bench.side.matched_tokens(request, 0)
    if count:
        request.blocks = bench.pool.take(4) or []
        bench.side.allocated(request, (request.blocks,), count * BLOCK)
        bench.side.absorb(WorkerReport([LoadResult("r", count, 100, 0.1, reason)]))
        bench.side.load_finished("r")
    counts = bench.side.counts.take()
    assert counts.get("lookup_lost_seconds") == (None if count else counts["lookup_seconds"])
    assert counts.get("load_seconds") == (0.1 if count else None)
    assert counts.get("load_lost_seconds") == (0.1 if reason is Reason.STALLED else None)
    bench.side.finished(request)


def test_an_engine_that_runs_nothing_has_its_answer_in_the_same_step(
    bench: Bench, node: TroubledNode
) -> None:
    node.reason, node.unready = Reason.TIER_DOWN, 3
    assert bench.side.matched_tokens(FakeRequest("r", list(range(3 * BLOCK + 1))), 0) == (0, False)
    assert bench.side.rested_s > 0.0


def test_an_engine_that_runs_something_waits_for_no_answer(bench: Bench, node: TroubledNode) -> None:
    bench.running("running", 3 * BLOCK)
    bench.step(running=3 * BLOCK)
    node.unready = 3
    asks = FakeRequest("r", list(range(3 * BLOCK + 1)))
    for unready in (2, 1, 0):  # asked once in every step
        assert bench.side.matched_tokens(asks, 0) == (None, False)
        assert node.unready == unready
    assert bench.side.rested_s == 0.0


def test_a_step_stands_still_for_a_bounded_time_however_many_ask(bench: Bench, node: TroubledNode) -> None:
    node.unready = 1000
    for number in range(50):
        asks = FakeRequest(f"r{number}", list(range(3 * BLOCK + 1)))
        assert bench.side.matched_tokens(asks, 0) == (None, False)
    assert 1000 - node.unready == 50 + Patience.POLLS
    bench.step()
    bench.side.matched_tokens(FakeRequest("next", list(range(3 * BLOCK + 1))), 0)
    assert 1000 - node.unready == 51 + 2 * Patience.POLLS


def _saved(bench: Bench, name: str) -> int:
    """How many chunks are to be stored of one and the same prompt, asked under another name."""
    request = FakeRequest(name, list(range(3 * BLOCK + 1)))
    request.blocks = bench.pool.take(4) or []
    assert bench.side.matched_tokens(request, 0) == (0, False)
    bench.requests[name] = request
    return sum(len(save.chunks) for save in bench.step(**{name: 3 * BLOCK}).saves)


def _report(bench: Bench, save_id: int, digests: tuple[bytes, ...]) -> None:
    bench.side.absorb(WorkerReport(saves=[SaveResult(save_id, digests, 0, 0)]))


def _digests(bench: Bench) -> tuple[bytes, ...]:
    return tuple(bench.side._tracked["first"].chain.digests)  # type: ignore[union-attr]


def test_what_was_stored_is_stored_again_once_its_node_is_gone(bench: Bench, node: TroubledNode) -> None:
    node.reason = Reason.NODE_DOWN  # so that nothing is learnt of what is stored
    assert _saved(bench, "first") == 3
    _report(bench, 1, _digests(bench))
    assert _saved(bench, "second") == 0
    node.epoch = 0
    assert _saved(bench, "third") == 3
    _report(bench, 2, _digests(bench))
    node.epoch = 2
    assert _saved(bench, "fourth") == 3


def test_what_was_on_its_way_to_a_node_that_is_gone_is_not_taken_for_stored(
    bench: Bench, node: TroubledNode
) -> None:
    node.reason = Reason.NODE_DOWN
    assert _saved(bench, "first") == 3
    node.epoch = 2
    assert _saved(bench, "second") == 0  # still on its way
    _report(bench, 1, _digests(bench))
    assert _saved(bench, "third") == 3
