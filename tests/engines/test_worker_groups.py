"""One rank's share of loads and saves of several groups: one answer for each, when all of it is over."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.engines.sides import FULL, STATE, HostMemory

from kvferry.client.messages import (
    LoadEnd,
    LoadTicket,
    NamespaceInfo,
    Pending,
    ReadyPart,
    Reason,
    ReservedSlot,
    ReserveOutcome,
)
from kvferry.engines.planning import GroupLoad
from kvferry.engines.vllm.messages import Assignment, LoadSpec, SaveChunk, SaveSpec, StepPlan, WorkerPart
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.identity.stripes import part_checksums
from kvferry.testing.expectations import eventually

GROUPS = (*FULL, STATE)
NAMESPACE = NamespaceInfo(bytes(16), (3072, 3072, 1848, 1848), 4, "default", trailing=(0, 0, 1, 1))
TWO_STAGES = Assignment(
    "/s", "e", NAMESPACE, ((WorkerPart(0, 1), WorkerPart(2, 1)), (WorkerPart(1, 1), None))
)
TICKETS = tuple(LoadTicket(1, 1, 0, part, (None, None), 0.0, 1.0) for part in range(4))
LOAD = LoadSpec("a", 2, TICKETS, (GroupLoad(0, 0, ((1,), (2,))), GroupLoad(1, 0, ((3,),))))


class Stream:
    """Parts of zeros, then an end."""

    def __init__(self, ticket: LoadTicket, nbytes: int, *, fails: bool) -> None:
        self.left = list(range(ticket.first_chunk, 2))
        self._view = memoryview(bytes(nbytes))
        self._fails = fails
        self.closed = False

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        if self._fails:
            return LoadEnd(Reason.STALLED, 0)
        if not self.left:
            return LoadEnd(Reason.COMPLETE, 2)
        return ReadyPart(self.left.pop(0), self._view, part_checksums(self._view))

    def copied(self, index: int) -> None: ...

    def corrupt(self, index: int) -> None: ...

    def close(self) -> None:
        self.closed = True


class Store:
    """fails: parts that do not come."""

    def __init__(self, *, fails: Sequence[int] = ()) -> None:
        self._fails = fails
        self.streams: dict[int, Stream] = {}
        self.committed: list[tuple[int, bytes]] = []

    def load(self, ticket: LoadTicket) -> Stream:
        first = 1 if ticket.part >= 2 else 0
        ticket = ticket._replace(first_chunk=first)
        made = Stream(ticket, NAMESPACE.part_bytes[ticket.part], fails=ticket.part in self._fails)
        self.streams[ticket.part] = made
        return made

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        nbytes = NAMESPACE.part_bytes[part]
        return [
            ReservedSlot(at, digest, ReserveOutcome.RESERVED, memoryview(bytearray(nbytes)))
            for at, digest in enumerate(wanted)
        ]

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        self.committed += [(part, digest) for digest, _ in filled]
        return True

    def abandon(self, part: int, digests: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


Worker = Callable[..., tuple[WorkerSide, Store]]


@pytest.fixture
def worker() -> Iterator[Worker]:
    made: list[WorkerSide] = []

    def make(rank: int, *, fails: Sequence[int] = ()) -> tuple[WorkerSide, Store]:
        memory, store = HostMemory(8, GROUPS), Store(fails=fails)
        if TWO_STAGES.parts[rank][1] is None:
            memory.copiers[1] = None
        side = WorkerSide(memory, rank=rank, connect=lambda assignment, rank: store, by_block=False)
        made.append(side)
        return side, store

    yield make
    for side in made:
        side.close()


def ended(side: WorkerSide) -> tuple[set[str], set[str], set[int], Any]:
    """What the engine hears of the load once it is over."""
    finished: set[str] = set()
    eventually(lambda: finished.update(side.finished_loads()) or finished, "the end of the load")
    (result,) = (side.report() or pytest.fail("no report")).loads
    return finished, side.failed_requests(), side.failed_blocks(), result


def test_a_load_of_several_parts_is_told_once(worker: Worker) -> None:
    side, store = worker(0)
    side.begin_step(StepPlan(step=1, assignment=TWO_STAGES, loads=(LOAD,)))
    finished, failed, blocks, result = ended(side)
    assert (finished, failed, blocks) == ({"a"}, set(), set())
    assert (result.chunks, result.reason) == (2, Reason.COMPLETE)
    assert result.nbytes == 2 * NAMESPACE.part_bytes[0] + NAMESPACE.part_bytes[2]
    assert sorted(store.streams) == [0, 2]
    assert all(stream.closed for stream in store.streams.values())


@pytest.mark.parametrize("part", [0, 2])
def test_a_load_of_which_a_part_fails_is_told_as_a_whole(worker: Worker, part: int) -> None:
    """And no block by its number, which another group may have for its own."""
    side, _ = worker(0, fails=[part])
    side.begin_step(StepPlan(step=1, assignment=TWO_STAGES, loads=(LOAD,)))
    finished, failed, blocks, result = ended(side)
    assert (finished, failed, blocks) == ({"a"}, {"a"}, set())
    assert (result.chunks, result.reason) == (0, Reason.STALLED)


def test_a_stage_loads_what_it_has_layers_of(worker: Worker) -> None:
    side, store = worker(1)
    side.begin_step(StepPlan(step=1, assignment=TWO_STAGES, loads=(LOAD,)))
    _, failed, _, result = ended(side)
    assert (sorted(store.streams), failed, result.chunks) == ([1], set(), 2)


def test_a_stage_with_nothing_to_load_ends_at_once(worker: Worker) -> None:
    side, store = worker(1)
    nothing = LOAD._replace(groups=(GroupLoad(2, 0, ()), LOAD.groups[1]))
    side.begin_step(StepPlan(step=1, assignment=TWO_STAGES, loads=(nothing,)))
    _, failed, _, result = ended(side)
    assert (store.streams, failed, result.reason) == ({}, set(), Reason.COMPLETE)


def test_a_load_that_is_not_begun_is_told_as_a_whole(worker: Worker) -> None:
    side, _ = worker(0)
    side.decline(StepPlan(step=1, assignment=TWO_STAGES, loads=(LOAD,), failed=(("b", ()),)))
    assert side.finished_loads() == {"a", "b"}
    assert (side.failed_requests(), side.failed_blocks()) == ({"a", "b"}, set())


@pytest.mark.parametrize(("rank", "committed"), [(0, [(2, b"d" * 32)]), (1, [])])
def test_a_stage_without_a_groups_layers_does_not_keep_a_chunk_from_being_stored(
    worker: Worker, rank: int, committed: list[tuple[int, bytes]]
) -> None:
    side, store = worker(rank)
    save = SaveSpec(7, (), (SaveChunk(0, b"d" * 32, (3,)),), 1)
    side.begin_step(StepPlan(step=1, assignment=TWO_STAGES, saves=(save,)))
    side.end_step()
    reports = []
    eventually(lambda: reports.append(side.report()) or reports[-1], "the save's report")
    (result,) = reports[-1].saves
    assert (result.save_id, result.stored, result.declined) == (7, (b"d" * 32,), 0)
    assert store.committed == committed
