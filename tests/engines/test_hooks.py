"""What vLLM's hooks do when the scheduler side breaks: nothing is held for ever, nobody else is disturbed."""

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm.announced import Announced
from kvferry.engines.vllm.guard import Guard
from kvferry.engines.vllm.pins import Pins
from kvferry.errors import BrokenError
from kvferry.testing.fake_engine import BlockPool

pytestmark = pytest.mark.engine


class BreaksWhilePlanning:
    """Pins for one request, then breaks."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> bool:
        return True

    def plan_step(self, output: Any) -> Any:
        self._pins.pin(7, [1, 2])
        raise BrokenError("half way")


@pytest.fixture
def connector() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the engine's own imports
        from kvferry.engines.vllm.connector import KvferryConnector

    made = object.__new__(KvferryConnector)
    made.guard = Guard("scheduler")
    made._geometry = ChunkGeometry(4, 4)
    made._announced, made._pins, made._spare_step = Announced(), Pins(ranks=1), 0
    made._pins.bind(BlockPool(8))
    made._scheduler = BreaksWhilePlanning(made._pins)
    return made


def test_a_plan_that_breaks_off_holds_no_blocks_and_lets_an_idle_engine_rest(connector: Any) -> None:
    plan = connector.build_connector_meta(None)
    assert plan.saves == ()
    assert not connector.has_pending_push_work()
    assert connector.guard.broken


def test_a_plan_that_breaks_off_fails_the_blocks_of_its_loads_only(connector: Any) -> None:
    blocks = SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],))
    connector.update_state_after_alloc(SimpleNamespace(request_id="a"), blocks, 8)
    assert connector.build_connector_meta(None).failed == (("a", (4, 5)),)
    assert connector.build_connector_meta(None).failed == ()


def test_a_load_announced_to_a_side_that_is_off_is_failed_all_the_same(connector: Any) -> None:
    connector.guard.broken = True
    blocks = SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],))
    connector.update_state_after_alloc(SimpleNamespace(request_id="a"), blocks, 8)
    assert connector.build_connector_meta(None).failed == (("a", (4, 5)),)
