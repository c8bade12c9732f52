"""The prefill fit: right on clean data, unmoved by outliers, never negative, sane with little data."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.costs import PrefillFit, PrefillModel

SIZES = [64, 128, 300, 700, 1500, 3000, 6000, 12000, 32000]
models = st.builds(PrefillModel, st.floats(0.001, 0.5), st.floats(1e-5, 2e-3), st.floats(0, 1e-7))


def fitted(
    model: PrefillModel, *, noise: float = 0.0, outliers: int = 0, factor: float = 50, seed: int = 1
) -> PrefillModel:
    randomness = random.Random(seed)
    fit = PrefillFit()
    samples = [(size, context) for size in SIZES for context in (0, 0, 0, 512, 512, 4096, 4096)]
    per_size = len(samples) // len(SIZES)
    wrong = {  # at most one of each size
        which * per_size + randomness.randrange(per_size)
        for which in randomness.sample(range(len(SIZES)), outliers)
    }
    for index, (size, context) in enumerate(samples):
        seconds = model.seconds(size, context) * randomness.uniform(1 - noise, 1 + noise)
        fit.observe(size, context, seconds * (factor if index in wrong else 1))
    answer = fit.model()
    assert answer is not None
    return answer


@settings(max_examples=40, deadline=None)
@given(models)
def test_clean_measurements_are_reproduced(model: PrefillModel) -> None:
    fit = fitted(model)
    for size in (100, 1000, 10_000, 30_000):
        for context in (0, 2048):
            assert fit.seconds(size, context) == pytest.approx(model.seconds(size, context), rel=0.1)


@settings(max_examples=40, deadline=None)
@given(models, st.integers(0, 1000), st.sampled_from([50, 1 / 20]))
@example(PrefillModel(0.00390625, 1e-05, 5.96e-08), 18, 1 / 20)  # settles slowly
@example(
    PrefillModel(0.015625, 3.664904737373917e-05, 9.870728265438544e-08), 235, 1 / 20
)  # outliers that pull
@example(PrefillModel(0.03940265620771172, 9.886002679891083e-05, 7.593595857283566e-08), 927, 1 / 20)
def test_a_few_wrong_measurements_move_nothing(model: PrefillModel, seed: int, factor: float) -> None:
    fit = fitted(model, noise=0.03, outliers=3, factor=factor, seed=seed)
    for size in (128, 1000, 6000, 30_000):
        # What a prompt takes that is short beside all others weighs little: no decision hangs on 5 ms.
        assert fit.seconds(size) == pytest.approx(model.seconds(size), rel=0.25, abs=0.005)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-6, 1e4)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 200_000),
    st.integers(0, 200_000),
)
def test_no_measurements_ever_lead_to_a_negative_or_infinite_time(
    samples: list[tuple[int, int, float]], new: int, context: int
) -> None:
    fit = PrefillFit()
    for sample in samples:
        fit.observe(*sample)
    model = fit.model()
    assert model is not None
    assert min(model.base_s, model.per_token_s, model.per_token2_s) >= 0
    assert math.isfinite(model.seconds(new, context))
    assert model.seconds(new + 1, context) >= model.seconds(new, context) >= 0


def test_one_measurement_scales_with_the_tokens() -> None:
    fit = PrefillFit()
    assert fit.model() is None
    fit.observe(1000, 0, 2.0)
    model = fit.model()
    assert model is not None
    assert model.seconds(500) == pytest.approx(1.0)
    assert model.seconds(0) == 0


def test_context_costs_what_attending_to_it_costs() -> None:
    model = PrefillModel(0.0, 1e-4, 1e-8)
    whole = model.seconds(8000)
    assert model.seconds(3000) + model.seconds(5000, 3000) == pytest.approx(whole)


def test_what_is_no_measurement_is_ignored() -> None:
    fit = PrefillFit()
    for new, context, seconds in [(0, 0, 1.0), (5, -1, 1.0), (5, 0, 0.0), (5, 0, math.nan), (5, 0, math.inf)]:
        fit.observe(new, context, seconds)
    assert fit.model() is None


def test_a_faster_machine_is_learnt_from_its_own_samples() -> None:
    fit = PrefillFit()
    for seconds in (10.0, 1.0):
        for _ in range(10):
            for size in SIZES:
                fit.observe(size, 0, seconds * size / 1000)
    model = fit.model()
    assert model is not None
    assert model.seconds(4000) == pytest.approx(4.0, rel=0.02)
