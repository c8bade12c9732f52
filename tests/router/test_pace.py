"""How long workers take, learned."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.router.pace import (
    ASSUMED_PREFILL,
    ASSUMED_SLOPE_S,
    FADE_S,
    FIT_AFTER,
    Decodes,
    Pace,
    Prefills,
    Typical,
)


def test_waiting_is_what_is_ahead_less_what_was_done_of_it() -> None:
    pace = Pace(Typical())
    assert pace.wait_s(0.0, 1.0) == 0.0
    pace.begin("a", 1.0, 0.0)
    pace.begin("b", 2.0, 0.0)
    assert pace.wait_s(0.0, 1.0) == pytest.approx(3.0)
    assert pace.wait_s(0.6, 1.0) == pytest.approx(2.4)
    assert pace.wait_s(2.0, 1.0) == pytest.approx(2.0)  # the first is late: nobody did the second's work
    assert pace.wait_s(2.0, 2.0) == pytest.approx(4.0)
    assert not pace.over("a", 2.0)
    assert pace.wait_s(2.0, 1.0) == pytest.approx(2.0)
    assert pace.over("b", 4.0)
    assert not pace.over("b", 4.0)
    assert not pace.busy


def test_a_worker_that_hangs_looks_worse_the_longer_it_does() -> None:
    pace = Pace(Typical())
    pace.begin("a", 1.0, 0.0)
    waits = [pace.wait_s(now, 1.0) for now in (5.0, 10.0, 50.0)]
    assert waits == sorted(waits)
    assert waits[-1] > 40


def test_a_slow_workers_factor_is_learned_within_a_few_requests_and_fades() -> None:
    pace = Pace(Typical())
    for number in range(10):
        pace.took(3.0, 1.0, float(number))
    assert pace.factor(10.0) == pytest.approx(3.0, rel=0.15)
    typical = Typical()
    pace = Pace(typical)
    pace.took(3.0, 1.0, 0.0)
    typical.log = 0.0
    assert pace.factor(20 * FADE_S) == pytest.approx(1.0, abs=0.01)


def test_one_outlier_moves_little() -> None:
    pace = Pace(Typical())
    for number in range(20):
        pace.took(1.0, 1.0, float(number))
    pace.took(1000.0, 1.0, 20.0)
    assert pace.factor(20.0) < 1.5


def test_times_too_short_to_tell_teach_nothing() -> None:
    pace = Pace(Typical())
    for number in range(50):
        pace.took(0.004, 0.0001, float(number))
    assert pace.factor(50.0) < 1.8


def test_a_hit_that_was_none_does_not_make_its_worker_slow() -> None:
    pace = Pace(Typical())
    for number in range(20):
        told = pace.took(1.0, 0.1, float(number))  # thought to be cached
        pace.corrected(told, 1.0, 1.0)
    assert pace.factor(20.0) == pytest.approx(1.0, abs=0.25)


def test_a_worker_nothing_is_known_of_is_typical() -> None:
    typical = Typical()
    for number in range(100):
        Pace(typical).took(2.0, 1.0, float(number))
    assert Pace(typical).factor(0.0) == pytest.approx(2.0, rel=0.1)


@settings(max_examples=runs(100), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=40))
def test_a_factor_stays_within_bounds_whatever_is_seen(times: list[tuple[float, float]]) -> None:
    pace = Pace(Typical())
    for number, (seconds, predicted) in enumerate(times):
        pace.took(seconds, predicted, float(number))
        assert 1 / 100 < pace.factor(float(number)) < 100
        assert math.isfinite(pace.wait_s(float(number), pace.factor(float(number))))


def test_prefill_is_assumed_until_enough_was_seen() -> None:
    prefills = Prefills()
    for number in range(FIT_AFTER - 1):
        assert not prefills.observe(1000 + number, 0, 0.5, float(number))
    assert prefills.model is ASSUMED_PREFILL
    assert prefills.observe(2000, 0, 1.0, 10.0)
    assert prefills.model.seconds(1500) == pytest.approx(0.75, rel=0.15)


def test_fits_become_rare() -> None:
    prefills = Prefills()
    fits = sum(prefills.observe(500 + number % 900, 0, 0.5, 0.1 * number) for number in range(5000))
    assert 5 <= fits <= 25


def test_what_a_stream_costs_the_others_is_learned_where_it_can_be_told() -> None:
    decodes = Decodes()
    assert decodes.slope_s == ASSUMED_SLOPE_S
    for _ in range(50):
        decodes.observe(3, 0.05)
    assert decodes.slope_s == ASSUMED_SLOPE_S  # always as many
    for streams in range(100):
        decodes.observe(streams % 10, 0.02 + 0.001 * (streams % 10))
    assert decodes.slope_s == pytest.approx(0.001, rel=0.9)
