"""The engine benchmark: pairs stay pairs, faults count for nothing, aims are judged by medians."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench import engine_report
from kvferry.bench.engine_arms import MEMORY, Pair, Results, Versus
from kvferry.bench.prompts import Prompts
from kvferry.bench.spread import spread

positive = st.floats(0.01, 100.0)


def _pair(*, load: float, own: float = 0.5, fault: str = "") -> Pair:
    return Pair(engine_report.FIXED, MEMORY, 6020, 5888, load, own, 0.05, 135_000_000, fault)


def test_a_ratio_is_the_median_of_the_pairs_own_ratios() -> None:
    results = Results(pairs=[_pair(load=0.5), _pair(load=2.0, own=2.0), _pair(load=1.0)])
    figure = engine_report.figures(results)[0]
    assert (figure.ratio.median, figure.ratio.n) == (1.0, 3)
    assert figure.met is True


def test_a_pair_that_measured_something_else_does_not_count_and_is_named() -> None:
    results = Results(pairs=[_pair(load=0.5), _pair(load=50.0, fault="came from computed")])
    assert engine_report.figures(results)[0].ratio.n == 1
    assert engine_report.faults(results) == ["fixed length, host memory: came from computed"]


def test_a_missed_aim_is_shown() -> None:
    results = Results(pairs=[_pair(load=0.7)], versus=[Versus("cold", 1.1, 1.0, 0.01)])
    assert engine_report.figures(results)[0].met is False
    assert "NO" in engine_report.terminal(results)
    assert json.loads(json.dumps(engine_report.document(results, {})))["figures"][0]["met"] is False
    assert "<svg" in engine_report.html(results, {"n": 1})


def test_nothing_measured_makes_no_rows() -> None:
    assert engine_report.figures(Results()) == []


@given(values=st.lists(positive, min_size=1, max_size=30))
def test_the_quartiles_enclose_the_median(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_prefixes_of_one_run_share_no_block() -> None:
    prompts = Prompts(1)
    first, second = prompts.tokens(1024), prompts.tokens(1024)
    assert all(first[at : at + 16] != second[at : at + 16] for at in range(0, 1024, 16))
    assert Prompts(1).tokens(64) == first[:64]
