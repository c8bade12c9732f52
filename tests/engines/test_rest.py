"""A step that runs nothing leaves the cores to what it waits for."""

import threading
from types import SimpleNamespace

import pytest
from tests.engines.sides import HostMemory

from kvferry.engines.planning import Eligibility
from kvferry.engines.vllm.messages import StepPlan
from kvferry.engines.vllm.requests import REST_ASKED_S, REST_LOADING_S, Phase, Tracked, rest_s
from kvferry.engines.vllm.worker import WorkerSide

LONG_S = 30.0


def _in(*phases: Phase) -> list[Tracked]:
    return [
        Tracked(SimpleNamespace(request_id=str(n)), Eligibility.YES, 0.0, phase=phase)
        for n, phase in enumerate(phases)
    ]


@pytest.mark.parametrize(
    ("phases", "rest"),
    [
        ((), 0.0),
        ((Phase.NEW, Phase.ANSWERED, Phase.SETTLED), 0.0),
        ((Phase.SETTLED, Phase.ASKED), REST_ASKED_S),
        ((Phase.ASKED, Phase.LOADING), REST_LOADING_S),
    ],
)
def test_workers_rest_only_while_an_answer_or_a_load_is_awaited(
    phases: tuple[Phase, ...], rest: float
) -> None:
    assert rest_s(_in(*phases)) == rest


def test_a_resting_worker_reports_a_load_in_the_step_in_which_it_ends() -> None:
    side = WorkerSide(HostMemory(8), rank=0, connect=lambda assignment, rank: None)  # type: ignore[arg-type,return-value]
    side.begin_step(StepPlan(step=1, rest_s=LONG_S))
    ending = threading.Timer(0.05, side.fail, [[("a", [3])]])
    ending.start()
    assert side.finished_loads() == {"a"}
    assert side.failed_blocks() == {3}
    ending.join()
    side.close()


def test_a_load_that_has_ended_is_reported_without_rest_and_rest_is_for_one_step() -> None:
    side = WorkerSide(HostMemory(8), rank=0, connect=lambda assignment, rank: None)  # type: ignore[arg-type,return-value]
    side.begin_step(StepPlan(step=1, rest_s=LONG_S))
    side.fail([("a", [3])])
    assert side.finished_loads() == {"a"}
    assert side.finished_loads() == set()
    side.close()
