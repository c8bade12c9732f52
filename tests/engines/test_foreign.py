"""Beside another connector: nothing that it may have failed to load is stored under its tokens' name."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.test_saving import BLOCK, Bench

from kvferry.engines.vllm.foreign import ForeignLoads
from kvferry.testing.fake_engine import StepOutput


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_nothing_is_stored_until_a_step_that_loads_for_another_has_its_result(steps: int) -> None:
    foreign = ForeignLoads(steps_in_flight=steps)
    assert foreign.may_store(loads=False)
    assert not foreign.may_store(loads=True)
    assert [foreign.may_store(loads=False) for _ in range(steps)] == [False] * (steps - 1) + [True]
    assert not foreign.may_store(loads=True)
    assert not foreign.may_store(loads=True)
    assert [foreign.may_store(loads=False) for _ in range(steps)] == [False] * (steps - 1) + [True]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(blocks=100)
    yield made
    made.side.close()
    made.adapters.close()


def _step(bench: Bench, *, computes: int, loads: bool) -> Any:
    tables = {name: (request.blocks,) for name, request in bench.requests.items()}
    scheduled = dict.fromkeys(bench.requests, computes)
    output = StepOutput(scheduled, StepOutput({}, None, tables), has_sync_kv_loads=loads)
    return bench.side.plan_step(output)


def test_blocks_of_a_load_that_failed_are_stored_once_they_are_recomputed(bench: Bench) -> None:
    request = bench.running("a", 10 * BLOCK)
    request.num_computed_tokens = 6 * BLOCK  # what the other connector promised
    assert _step(bench, computes=2 * BLOCK, loads=True).saves == ()
    request.num_computed_tokens = 3 * BLOCK  # what vLLM says once it knows
    first = _step(bench, computes=2 * BLOCK, loads=False)
    assert [chunk.number for save in first.saves for chunk in save.chunks] == [0, 1, 2, 3, 4]
    request.num_computed_tokens = 5 * BLOCK
    rest = _step(bench, computes=5 * BLOCK, loads=False)
    assert [chunk.number for save in rest.saves for chunk in save.chunks] == [5, 6, 7, 8, 9]
