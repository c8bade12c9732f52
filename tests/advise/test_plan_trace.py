"""A trace as a plan's workload: what its capacities must cover, and reuse across conversations."""

import json
from array import array
from typing import Any

import pytest
from tests.advise.plan_made import question, shown

from kvferry.advise.plan import make
from kvferry.cli.plan_trace import from_document
from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog


def talks() -> ReuseLog:
    """200 conversations of ten turns, interleaved, that grow by two blocks of 16 tokens a turn."""
    log = ReuseLog(16)
    for number in range(2000):
        who, turn = number % 200, number // 200
        keys = array("q", range(who * 1000, who * 1000 + 40 + 2 * turn)).tobytes()
        log.add(Request(float(number), 16 * (40 + 2 * turn), 9, keys, str(who)))
    return log


def families() -> ReuseLog:
    """50 prompts, each asked for 40 times; next to nothing goes on."""
    log = ReuseLog(16)
    for number in range(2000):
        first = number % 50 * 10_000
        keys = array("q", [*range(first, first + 960), -1 - number]).tobytes()
        log.add(Request(float(number), 16 * 961, 20, keys, None))
    return log


def repeated() -> ReuseLog:
    """One prompt again and again."""
    log = ReuseLog(16)
    for number in range(500):
        log.add(Request(float(number), 1024, 20, array("q", range(64)).tobytes(), None))
    return log


def document(log: ReuseLog, capacities: list[int] | None = None) -> dict[str, Any]:
    found = findings.document(
        log,
        capacities=capacities or findings.default_capacities(log),
        policies=[Policy.LRU],
        clock=Clock.TRACE,
    )
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_an_analysis_of_its_own_capacities_is_taken_and_finds_what_is_found_without_limit() -> None:
    for log in (talks(), families(), repeated()):
        found = document(log)
        curve = from_document(found, name="x")[1]
        assert curve is not None
        assert curve.most == pytest.approx(found["reuse"]["hit_rate"]["last_half"], abs=0.002)


@pytest.mark.parametrize(
    ("capacities", "why"),
    [
        ([64, 128], "ends with 2,048 tokens held, which find 0.0%"),
        ([2048, 4096, 6144], "ends with 98,304 tokens held"),
        ([1 << 30], "with 16 and with 17,179,869,184 tokens held, 0.0% and"),
        ([64, 1 << 30], "and nothing between; make it again without --capacities"),
    ],
)
def test_capacities_that_end_too_soon_or_leave_too_much_between_are_refused(
    capacities: list[int], why: str
) -> None:
    with pytest.raises(MisconfiguredError, match=why):
        from_document(document(talks(), capacities), name="x")


def test_capacities_of_ones_own_that_lie_close_and_reach_what_is_found_are_taken() -> None:
    log = talks()
    powers = [1 << power for power in range(16)]
    own = from_document(document(log, powers), name="x")[1]
    usual = from_document(document(log), name="x")[1]
    assert own and usual and own.most == pytest.approx(usual.most, abs=0.002)
    plans = [
        make(question(measured=(from_document(document(log, found), name="x")[0], curve, "trace x")))
        for found, curve in ((powers, own), (None, usual))
    ]
    assert plans[0].expected[0].hit_rate == pytest.approx(plans[1].expected[0].hit_rate, abs=0.01)


def test_where_prompts_share_across_conversations_new_is_what_is_not_found() -> None:
    numbers, curve, name = from_document(document(families()), name="trace x")
    assert curve and curve.most > 0.99 and numbers.turns and numbers.turns < 50
    assert numbers.new_tokens == pytest.approx(16, rel=0.2)
    plan = make(question(measured=(numbers, curve, name)))
    times = plan.expected[0].times
    assert times and times.prefill_s < plan.returns[0].computed_s / 5
    assert plan.load.return_hit >= plan.load.curve.most - 1e-6


def test_where_one_prompt_comes_again_and_again_hardly_a_token_is_new() -> None:
    measured = from_document(document(repeated()), name="trace x")
    plan = make(question(measured=measured))
    assert plan.load.new_tokens == pytest.approx(1, abs=0.01)
    assert 0 < plan.expected[0].computed_tokens_s < 2 * plan.load.requests_s
    assert plan.returns[0].kv_bytes == pytest.approx(plan.served.copy_bytes(1023), rel=0.01)
    workload = shown(plan)["workload"]
    assert workload["reuse"]["value"] < 1


def test_reuse_beside_a_trace_that_says_it_is_refused() -> None:
    measured = from_document(document(talks()), name="trace x")
    numbers = question().numbers
    with pytest.raises(MisconfiguredError, match="the trace says what is found"):
        make(question(measured=measured, numbers=type(numbers)(reuse=0.5)))
