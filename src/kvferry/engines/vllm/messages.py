"""What the scheduler side and the worker side tell each other inside vLLM's own step messages.

Plain classes; ``connector`` registers them with vLLM's abstract ones.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.client.messages import LoadTicket, NamespaceInfo
from kvferry.engines.planning import BlockSpan
from kvferry.errors import BrokenError


@dataclass(frozen=True)
class WorkerFacts:
    """What only a worker knows of its KV memory. scales: (layer and kind, values) of quantised KV."""

    tensor_rank: int
    block_bytes: int
    layout: str
    packing: str
    device: str
    layers: tuple[str, ...]
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()
    problem: str = ""


class WorkerPart(NamedTuple):
    """The part that a rank holds, and how many ranks hold equal bytes."""

    number: int
    replicas: int


@dataclass(frozen=True)
class Assignment:
    """Everything a worker needs to reach the node: where, as whom, and which part each rank holds."""

    socket: str
    engine: str
    namespace: NamespaceInfo
    parts: tuple[WorkerPart, ...]


class LoadSpec(NamedTuple):
    """Load one request's prefix. blocks: engine blocks per chunk; first_span: which of the first chunk."""

    request_id: str
    tickets: tuple[LoadTicket, ...]  # by part number
    blocks: tuple[tuple[int, ...], ...]
    first_span: BlockSpan

    def needed(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Number of the first block to fill of the chunk at ``position``, and the blocks to fill."""
        if position:
            return 0, self.blocks[position]
        span = self.first_span
        return span.start, self.blocks[0][span.start : span.stop]


class SaveChunk(NamedTuple):
    """One full chunk to store. number: in the prompt. blocks: pinned until every rank has reported."""

    number: int
    digest: bytes
    blocks: tuple[int, ...]


class SaveSpec(NamedTuple):
    """Chunks of one request that this step completes. prefix: the digests before the first of them."""

    save_id: int
    prefix: tuple[bytes, ...]
    chunks: tuple[SaveChunk, ...]


@dataclass
class StepPlan:
    """One step's work.

    step: numbers the plans. timed: the worker's report names this step. failed: loads that were announced
    to the engine but cannot be made. rest_s: how long a worker may sleep in this step, which has nothing to
    run, unless a load ends before.
    """

    step: int = 0
    timed: bool = False
    assignment: Assignment | None = None
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveSpec, ...] = ()
    cancelled: tuple[str, ...] = ()
    failed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rest_s: float = 0.0


class LoadResult(NamedTuple):
    """How a load ended on one rank. reason: a ``Reason`` value, "complete" when all chunks came."""

    request_id: str
    chunks: int
    nbytes: int
    seconds: float
    reason: str


class SaveResult(NamedTuple):
    """How a save ended on one rank. stored: digests that are in the node now, new or from before."""

    save_id: int
    stored: tuple[bytes, ...]
    declined: int
    nbytes: int


@dataclass
class WorkerReport:
    """What the ranks finished since the last step. steps: the timed steps they came through.

    facts: of ranks that were not told yet whom they serve.
    """

    loads: list[LoadResult] = field(default_factory=list)
    saves: list[SaveResult] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    facts: list[WorkerFacts] = field(default_factory=list)

    def aggregate(self, other: object) -> "WorkerReport":
        """All ranks' results, one after the other."""
        if not isinstance(other, WorkerReport):
            raise BrokenError(f"a worker reported {type(other).__name__}")
        return WorkerReport(
            self.loads + other.loads,
            self.saves + other.saves,
            self.steps + other.steps,
            self.facts + other.facts,
        )
