"""Whatever breaks inside the connector, what the engine waits for is answered."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.sides import HostMemory

from kvferry.client.messages import LoadTicket, NamespaceInfo
from kvferry.engines.planning import GroupLoad
from kvferry.engines.vllm.messages import Assignment, LoadSpec, SaveChunk, SaveSpec, StepPlan, WorkerPart
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.errors import BrokenError

ASSIGNMENT = Assignment("/s", "e", NamespaceInfo(bytes(16), (3072,), 4, "default"), ((WorkerPart(0, 1),),))


def load(name: str) -> LoadSpec:
    """Of two chunks into blocks 1 and 2."""
    ticket = LoadTicket(1, 1, 0, 0, (None, None), 0.0, 1.0)
    return LoadSpec(name, 2, (ticket,), (GroupLoad(0, 0, ((1,), (2,))),))


def plan(step: int) -> StepPlan:
    """Two loads, one that cannot be made, and a save."""
    save = SaveSpec(9, (), (SaveChunk(0, b"d" * 32, (3,)),))
    return StepPlan(
        step=step, assignment=ASSIGNMENT, loads=(load("a"), load("b")), saves=(save,), failed=(("c", (5,)),)
    )


class BrokenStore:
    """A client with a defect."""

    def load(self, ticket: LoadTicket) -> Any:
        raise BrokenError("load")

    def reserve(self, *_: Any, **__: Any) -> Any:
        raise BrokenError("reserve")

    def commit(self, *_: Any) -> None:
        raise BrokenError("commit")

    def abandon(self, *_: Any) -> None:
        raise BrokenError("abandon")

    def close(self) -> None: ...


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    side = WorkerSide(HostMemory(8), rank=0, connect=lambda assignment, rank: BrokenStore())
    yield side
    side.close()


def answered(worker: WorkerSide) -> tuple[set[str], set[int], list[int]]:
    """What the engine hears."""
    finished, failed = worker.finished_loads(), worker.failed_blocks()
    report = worker.report()
    return finished, failed, [save.save_id for save in report.saves] if report else []


def test_a_hook_that_breaks_half_way_leaves_nothing_unanswered(worker: WorkerSide) -> None:
    with pytest.raises(BrokenError):
        worker.begin_step(plan(1))
    worker.decline(plan(1))
    assert answered(worker) == ({"a", "b", "c"}, {1, 2, 5}, [9])
    worker.decline(plan(1))
    worker.decline(None)
    assert answered(worker) == (set(), set(), [])


def test_a_side_that_is_off_answers_new_plans(worker: WorkerSide) -> None:
    worker.decline(plan(7))
    assert answered(worker) == ({"a", "b", "c"}, {1, 2, 5}, [9])


def test_a_save_that_breaks_is_reported_as_not_stored(worker: WorkerSide) -> None:
    worker.begin_step(StepPlan(step=1, assignment=ASSIGNMENT, saves=plan(1).saves))
    worker.end_step()
    worker.close()
    report = worker.report()
    assert report is not None
    assert [(save.save_id, save.stored, save.declined) for save in report.saves] == [(9, (), 1)]


def test_a_load_that_breaks_fails_no_block_that_the_engine_had_itself(worker: WorkerSide) -> None:
    """Such a block may be in use by other requests, which would be thrown back."""
    ticket = LoadTicket(1, 1, 0, 0, (None, None), 0.0, 1.0)
    half = LoadSpec("a", 2, (ticket,), (GroupLoad(0, 1, ((2,), (3, 4))),))
    worker.decline(StepPlan(step=1, assignment=ASSIGNMENT, loads=(half,)))
    assert answered(worker)[:2] == ({"a"}, {2, 3, 4})


def test_saves_of_a_step_without_its_last_hook_are_reported_with_the_next(worker: WorkerSide) -> None:
    """Else their blocks would stay pinned and the idle engine would step for ever."""
    worker.begin_step(StepPlan(step=1, assignment=ASSIGNMENT, saves=plan(1).saves))
    worker.begin_step(StepPlan(step=2, assignment=ASSIGNMENT))
    worker.end_step()
    assert answered(worker) == (set(), set(), [9])
