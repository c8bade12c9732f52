"""Intervals hold as often as they say, and there is none where there can be none."""

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvferry.router.intervals import Estimate, paired, quantile, ratio, share


@pytest.mark.parametrize(("q", "n"), [(0.5, 20), (0.5, 101), (0.99, 600)])
def test_the_interval_of_a_quantile_holds_as_often_as_it_says(q: float, n: int) -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(600):
        found = quantile([draw.random() ** 3 for _ in range(n)], q)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= q**3 <= found.high
    assert held / 600 >= 0.94


@pytest.mark.parametrize(
    ("q", "n", "enough"), [(0.5, 5, False), (0.5, 6, True), (0.99, 367, False), (0.99, 368, True)]
)
def test_too_few_samples_give_no_interval(q: float, n: int, enough: bool) -> None:
    found = quantile([float(x) for x in range(n)], q)
    assert found is not None and found.enough is enough and found.of == n


def test_nothing_is_said_of_nothing() -> None:
    assert quantile([], 0.5) is None and share(0, 0) is None and ratio(None, quantile([1.0], 0.5)) is None
    assert ratio(quantile([1.0], 0.5), quantile([0.0], 0.5)) is None


@hypothesis_settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_a_sample_inside_its_interval(samples: list[float], q: float) -> None:
    found = quantile(samples, q)
    assert found is not None and found.value in samples
    assert found.low is None or found.low <= found.value
    assert found.high is None or found.value <= found.high


def test_shares_are_wilsons() -> None:
    found = share(3, 100)
    assert found is not None and found.value == 0.03
    assert (found.low, found.high) == (pytest.approx(0.0103, abs=1e-4), pytest.approx(0.0845, abs=1e-4))
    assert share(0, 10) == Estimate(0.0, 0.0, pytest.approx(0.2775, abs=1e-4), 10)


def test_two_intervals_hold_together_as_often_as_that_of_their_ratio_says() -> None:
    draw = random.Random(3)
    held = 0
    for _ in range(300):
        slow = quantile([2 * draw.expovariate(1) for _ in range(60)], 0.5, confidence=paired())
        quick = quantile([draw.expovariate(1) for _ in range(60)], 0.5, confidence=paired())
        found = ratio(slow, quick)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 2 <= found.high
    assert held / 300 >= 0.95
