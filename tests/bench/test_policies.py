"""The policies that the pool's own is weighed against hold what they say, and nothing beats the optimum."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.test_policies import log_of, traces

from kvferry.bench.policies import candidates, command, mixes
from kvferry.cli.main import main
from kvferry.traces.policies import Policy, hits, unbounded

SMALL = Path(__file__).parents[1] / "traces/conversations.jsonl"


@pytest.mark.parametrize("make", command.CANDIDATES.values(), ids=list(command.CANDIDATES))
@given(prompts=traces(), capacity=st.integers(2, 40))
@settings(max_examples=25, deadline=None)
def test_a_candidate_finds_no_more_than_the_optimum_and_all_if_nothing_must_leave(
    make: Callable[[int], candidates.Candidate], prompts: list[list[int]], capacity: int
) -> None:
    log = log_of(prompts)
    cache = make(capacity)
    found = sum(log.tokens(number, cache.request(path)) for number, path in enumerate(command._paths(log)))
    assert found <= hits(log, Policy.OPTIMUM, [capacity])[0].tokens
    if capacity >= 2 * log.distinct_blocks and make is not candidates.TinyLfu:
        assert found == unbounded(log).tokens


@pytest.mark.parametrize("mix", mixes.MIXES)
def test_a_mix_is_the_same_every_time_and_in_the_order_of_its_times(mix: str) -> None:
    made = mixes.requests_of(mix)
    assert made == mixes.requests_of(mix)
    times = [request.time_s or 0.0 for request in made]
    assert times == sorted(times)
    assert len(made) > 1000


def test_the_command_weighs_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policies", str(SMALL), "--no-mixes", "--blocks", "64,256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (trace,) = found["traces"]
    assert set(trace["rates"]) == {policy.value for policy in Policy} | set(command.CANDIDATES)
    assert [round(100 * at["last_half"], 1) for at in trace["rates"]["lru"]] == [37.2, 66.5]
    assert {row["policy"] for row in found["summary"]} == set(trace["rates"])
    assert main(["bench", "policies", str(SMALL), "--no-mixes", "--blocks", "64"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
