"""Load or recompute: what the node knows, put to the shared estimator."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.node.state import NodeState
from kvferry.node.wire import Prefill, Tier

STALL_S = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """load_chunks: how many of the available ones to load. Times in seconds, from now."""

    load_chunks: int
    deadline_s: float
    stall_s: float
    load_s: float
    recompute_s: float


class Estimator:
    """Loop thread only."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def decide(
        self,
        *,
        prefill: Prefill,
        tiers: Sequence[Tier],
        chunk_bytes: int,
        chunk_tokens: int,
        first_chunk: int,
        prompt_tokens: int,
        queued_s: float,
        deadline_cap_s: float,
    ) -> Verdict:
        """How many of these chunks are worth loading, and by when they must be there."""
        return Verdict(len(tiers), deadline_cap_s, min(STALL_S, deadline_cap_s), 0.0, 0.0)
