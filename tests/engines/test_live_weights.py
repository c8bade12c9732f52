"""Other weights under a running engine: nothing of the old ones is loaded, nothing goes under their name."""

import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.sides import SideFleet

from kvferry.engines.vllm.guard import Guard
from kvferry.engines.vllm.messages import StepPlan, WorkerReport
from kvferry.engines.vllm.weights import ENTRY_POINTS, WeightsWatch
from kvferry.testing.connector_contract import Prompt


class FakeWorker:
    """An engine's worker."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def reload_weights(self, path: str) -> str:
        self.called.append(path)
        return "done"

    def update_weights(self, info: Any) -> None:
        raise RuntimeError("half way")


def test_calls_are_counted_and_go_on_as_before() -> None:
    watch = WeightsWatch()

    class Counted(FakeWorker):
        reload_weights = FakeWorker.reload_weights
        update_weights = FakeWorker.update_weights

    watch.install(Counted)
    worker = Counted()
    assert not watch.stale
    assert worker.reload_weights("there") == "done"
    assert worker.called == ["there"]
    assert watch.stale
    watch.heard = watch.changes
    assert not watch.stale
    with pytest.raises(RuntimeError, match="half way"):
        worker.update_weights(None)
    assert watch.stale


def test_what_is_heard_while_weights_arrive_does_not_count() -> None:
    watch = WeightsWatch()

    class Interrupted:
        def update_weights(self) -> None:
            watch.heard = watch.changes  # a step in between

    watch.install(Interrupted)
    Interrupted().update_weights()
    assert watch.stale


def test_a_report_of_other_weights_hides_what_was_stored_before(tmp_path: Path, stack: ExitStack) -> None:
    fleet = SideFleet(tmp_path, stack, chunk_blocks=1)
    engine = fleet.engine()
    side = fleet.scheduler(engine)
    for weights, expected in ((0, 0), (0, 40), (2, 0), (2, 40), (4, 0)):
        side.absorb(WorkerReport(weights=weights))
        request = engine.add(Prompt(42).request(f"r{weights}{expected}"))
        engine.complete(request)
        assert request.external_tokens == expected
        fleet.settle(engine)
        assert engine.pool.reset()


def test_ranks_report_the_latest_change() -> None:
    assert WorkerReport(weights=2).aggregate(WorkerReport(weights=4)).weights == 4


@pytest.mark.engine
class TestConnector:
    """The connector's own hooks, and the worker of the installed vLLM."""

    @pytest.fixture
    def connector(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the engine's own imports
            from kvferry.engines.vllm.connector import MAX_INTRODUCTIONS, KvferryConnector

        made = object.__new__(KvferryConnector)
        made.guard = Guard("test")
        made._scheduler = made._facts = None
        made._introduced, made._weights = MAX_INTRODUCTIONS, WeightsWatch()
        begun: list[int] = []
        declined: list[int] = []
        made._worker = SimpleNamespace(
            begin_step=lambda plan: begun.append(plan.step),
            decline=lambda plan: declined.append(plan.step),
            report=lambda: None,
        )
        made.begun, made.declined = begun, declined
        return made

    def test_a_worker_declines_plans_until_the_scheduler_side_has_heard(self, connector: Any) -> None:
        connector.handle_preemptions(StepPlan(step=1))
        connector._weights.changes = 2
        connector.handle_preemptions(StepPlan(step=2))
        assert connector.build_connector_worker_meta() == WorkerReport(weights=2)
        connector.handle_preemptions(StepPlan(step=3, weights=2))
        assert connector.build_connector_worker_meta() is None
        assert (connector.begun, connector.declined) == ([1, 3], [2])

    def test_vllms_worker_has_every_entry_point(self, connector: Any) -> None:
        from vllm.v1.worker.gpu_worker import Worker

        assert [name for name in ENTRY_POINTS if name not in Worker.__dict__] == []
