"""What the scheduler side and the worker side tell each other inside vLLM's own step messages.

Plain classes; ``connector`` registers them with vLLM's abstract ones.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.client.messages import LoadTicket, NamespaceInfo
from kvferry.engines.planning import GroupLoad
from kvferry.errors import BrokenError


@dataclass(frozen=True)
class GroupFacts:
    """One KV group in a worker's memory. layers, block_bytes: none, where its stage has none of them.

    layout: attention backends, order and shapes of a block. kv_heads: as in ``KvGroup``.
    """

    layers: tuple[str, ...]
    block_bytes: int
    layout: str
    kv_heads: int


@dataclass(frozen=True)
class WorkerFacts:
    """What only a worker knows of its KV memory. scales: (layer and kind, values) of quantised KV.

    rank: in the whole engine, stage by stage. pipeline_rank: of its stage.
    """

    rank: int
    pipeline_rank: int
    groups: tuple[GroupFacts, ...]
    packing: str
    device: str
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()
    problem: str = ""


class WorkerPart(NamedTuple):
    """The part that a rank holds of a group, and how many ranks hold equal bytes."""

    number: int
    replicas: int


@dataclass(frozen=True)
class Assignment:
    """Everything a worker needs to reach the node: where, as whom, and which parts each rank holds.

    parts: by rank, then by group; None where the rank's stage has no layers of the group.
    """

    socket: str
    engine: str
    namespace: NamespaceInfo
    parts: tuple[tuple[WorkerPart | None, ...], ...]


class LoadSpec(NamedTuple):
    """Load one request's prefix. chunks: how many of them it spans. groups: what it fills of each."""

    request_id: str
    chunks: int
    tickets: tuple[LoadTicket, ...]  # by part number
    groups: tuple[GroupLoad, ...]

    @property
    def blocks(self) -> list[int]:
        """Every block that is to be filled, of all groups: not those that the engine has itself."""
        return [block for group in self.groups for blocks in group.blocks for block in blocks]


class SaveChunk(NamedTuple):
    """One full chunk to store. number: in the prompt. blocks: pinned until every rank has reported."""

    number: int
    digest: bytes
    blocks: tuple[int, ...]


class SaveSpec(NamedTuple):
    """Parts of one group of chunks that this step completes. prefix: the digests before the first chunk."""

    save_id: int
    prefix: tuple[bytes, ...]
    chunks: tuple[SaveChunk, ...]
    group: int = 0


@dataclass
class StepPlan:
    """One step's work.

    step: numbers the plans. timed: the worker's report names this step. failed: loads that were announced
    to the engine but cannot be made. rest_s: how long a worker may sleep in this step, which has nothing to
    run, unless a load ends before. weights: changes of weights that the scheduler side has heard of.
    """

    step: int = 0
    timed: bool = False
    assignment: Assignment | None = None
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveSpec, ...] = ()
    cancelled: tuple[str, ...] = ()
    failed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rest_s: float = 0.0
    weights: int = 0


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

    facts: of ranks that were not told yet whom they serve. weights: changes of weights so far.
    """

    loads: list[LoadResult] = field(default_factory=list)
    saves: list[SaveResult] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    facts: list[WorkerFacts] = field(default_factory=list)
    weights: int = 0

    def aggregate(self, other: object) -> "WorkerReport":
        """All ranks' results, one after the other."""
        if not isinstance(other, WorkerReport):
            raise BrokenError(f"a worker reported {type(other).__name__}")
        return WorkerReport(
            self.loads + other.loads,
            self.saves + other.saves,
            self.steps + other.steps,
            self.facts + other.facts,
            max(self.weights, other.weights),
        )
