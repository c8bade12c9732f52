"""What the course of requests teaches: how fast workers prefill and decode."""

import pytest
from tests.router.virtual import Conversations, Fleet, cost_guide, run_virtually

from kvferry.feed.wire import EngineUp, Speed
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Asked, Ended, Key
from kvferry.router.flight import CostFlight
from kvferry.router.knowledge import Knowledge
from kvferry.router.pace import ASSUMED_SLOPE_S

KEYS = (Key(b"k", 40_000),)  # 10,000 tokens


def _taught(guide: CostGuide, knowledge: Knowledge, *, seconds: float, rounds: int) -> float:
    """Prefills of all of it took so long. Returns when the last one was over."""
    now = 0.0
    for number in range(rounds):
        now = 100.0 * number + seconds
        flight = guide.begin(Asked(f"r{number}", "m", KEYS), among=["a"], now=100.0 * number)
        flight.first_byte(now)
        flight.token(now)
        flight.end(Ended.ABORTED, now + 1)
        knowledge.seen.forget(knowledge.worker("a").number)
    return now + 1


def _expected_ms(guide: CostGuide, now: float) -> float:
    flight = guide.begin(Asked("x", "m", KEYS), among=["a"], now=now)
    explained = guide.explain("x")
    flight.end(Ended.ABORTED, now)
    assert explained is not None
    return float(str(explained["ttft_ms_expected"]))


def test_what_was_learned_against_an_assumption_is_not_held_against_a_measured_speed() -> None:
    knowledge = Knowledge()
    guide = cost_guide(knowledge)
    now = _taught(guide, knowledge, seconds=5.0, rounds=6)  # 1 s by assumption
    assert guide.slowness(now)["a"] > 2
    knowledge.near("a", "n")
    knowledge.apply("n", EngineUp(1, "e", 1))
    knowledge.apply("n", Speed(1, 0.0, 5e-4, 0.0))
    assert _expected_ms(guide, now) == pytest.approx(5000, rel=0.05)


def test_an_engine_that_says_it_got_slower_is_not_held_slower_twice() -> None:
    knowledge = Knowledge()
    guide = cost_guide(knowledge)
    knowledge.near("a", "n")
    knowledge.apply("n", EngineUp(1, "e", 1))
    knowledge.apply("n", Speed(1, 0.0, 1e-4, 0.0))
    now = _taught(guide, knowledge, seconds=3.0, rounds=8)  # it says 1 s
    before = _expected_ms(guide, now)
    assert before == pytest.approx(3000, rel=0.2)
    knowledge.apply("n", Speed(1, 0.0, 3e-4, 0.0))
    assert _expected_ms(guide, now) == pytest.approx(before, rel=0.05)


def test_what_prefills_delay_is_not_put_down_to_streams() -> None:
    """A step of these engines takes as long for one stream as for ten."""

    async def main() -> Fleet:
        fleet = Fleet(1, cost_guide)
        await Conversations(sessions=60, per_s=1.0).play(fleet)
        return fleet

    guide = run_virtually(main()).guides[0]
    assert guide.pool.decodes.slope_s < 0.002
    assert guide.pool.decodes.slope_s != ASSUMED_SLOPE_S


def _begun(guide: CostGuide, request_id: str, now: float = 0.0) -> CostFlight:
    return guide.begin(Asked(request_id, "m", KEYS), among=["a"], now=now)


def _in_engine(guide: CostGuide, request_id: str) -> int:
    """How much of the prompt was expected in the engine."""
    explained = guide.explain(request_id)
    assert explained is not None
    candidates = explained["candidates"]
    assert isinstance(candidates, list)
    return int(candidates[0]["engine_tokens"])


def test_a_choice_counts_for_the_next_one_before_its_request_is_sent() -> None:
    guide = cost_guide(Knowledge())
    for name in ("one", "two"):
        _begun(guide, name)
    assert _in_engine(guide, "one") == 0
    assert _in_engine(guide, "two") > 9000


def test_a_worker_lost_before_its_request_was_sent_holds_nothing_of_it() -> None:
    guide = cost_guide(Knowledge())
    flight = _begun(guide, "one")
    guide.worker_lost("a")
    guide.worker_added("a")
    flight.sent()
    _begun(guide, "two")
    assert _in_engine(guide, "two") == 0
    flight.end(Ended.FAILED, 1.0)


@pytest.mark.parametrize("sent", [True, False])
def test_what_was_never_computed_is_not_there(*, sent: bool) -> None:
    guide = cost_guide(Knowledge())
    flight = _begun(guide, "one")
    if sent:
        flight.sent()
    flight.end(Ended.ABORTED, 1.0)
    _begun(guide, "two", 2.0)
    assert _in_engine(guide, "two") == 0
