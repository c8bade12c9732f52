"""Load or recompute: what the node knows, put to the shared estimator (``kvferry.costs``)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.costs import (
    DecisionReason,
    Length,
    Limits,
    PrefillModel,
    Prospect,
    TierRun,
    decide,
)
from kvferry.identity.boundaries import start_of
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import Lookup, Tier
from kvferry.pool.entries import Gap

STALL_CAP_S = 5.0
MAX_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """load_chunks: how many of the available ones to load. Seconds, from now; None where unknown."""

    load_chunks: int
    deadline_s: float
    stall_s: float
    load_s: float | None
    recompute_s: float | None
    choice: DecisionReason


class Estimator:
    """Loop thread only."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def decide(self, asked: Lookup, space: Namespace, tiers: Sequence[Tier]) -> Verdict:
        """How many of these chunks are worth loading, and by when they must be there.

        tiers: where each available chunk lies, from ``asked.first_chunk`` on.
        """
        runs = [
            TierRun(tier.name.lower(), sum(1 for _ in run), space.chunk_bytes)
            for tier, run in itertools.groupby(tiers)
        ]
        return self._verdict(asked, space, runs=runs)

    def decide_among(
        self, asked: Lookup, space: Namespace, *, gaps: Sequence[Gap], usable: bytearray
    ) -> Verdict:
        """The same, where only some boundaries are usable, and each needs other parts.

        gaps: what memory lacks. usable: see ``reach.Reach``.
        """
        return self._verdict(asked, space, lengths=_lengths(space, gaps, usable, self._state.behind))

    def _verdict(
        self,
        asked: Lookup,
        space: Namespace,
        *,
        runs: Sequence[TierRun] = (),
        lengths: Sequence[Length] | None = None,
    ) -> Verdict:
        now = self._state.loop.clock()
        fetching = self._state.fetch_rate
        cap_s = self._state.deadline_cap_s
        if asked.deadline_cap_s:
            cap_s = min(cap_s, asked.deadline_cap_s)
        decision = decide(
            Prospect(
                prompt_tokens=asked.prompt_tokens,
                computed_tokens=asked.first_chunk * space.chunk_tokens,
                chunk_tokens=space.chunk_tokens,
                runs=runs,
                queued_s=asked.queued_s,
                lengths=lengths,
            ),
            prefill=_prefill(asked),
            rates={self._state.behind.name.lower(): fetching.rate(now)},
            limits=Limits(cap_s=cap_s),
        )
        if decision.reason is DecisionReason.PROBE:
            fetching.probing(now)
        return Verdict(
            load_chunks=decision.load_chunks,
            deadline_s=decision.deadline_s,
            stall_s=min(decision.stall_s, STALL_CAP_S),
            load_s=decision.load_s,
            recompute_s=decision.recompute_s,
            choice=decision.reason,
        )


def _prefill(asked: Lookup) -> PrefillModel | None:
    """The engine's coefficients; all zero while it has measured nothing."""
    model = asked.prefill
    if not (model.base_s or model.per_token_s or model.per_token2_s):
        return None
    return PrefillModel(model.base_s, model.per_token_s, model.per_token2_s)


def _lengths(space: Namespace, gaps: Sequence[Gap], usable: bytearray, behind: Tier) -> list[Length]:
    """The usable boundaries, the longest of each of ``MAX_LENGTHS`` stretches; what the tier must bring."""
    chunks = usable.rfind(1)
    numbers = {space.trailing_of(part) for part in space.parts}
    absent = {number: [0] * chunks for number in numbers}  # bytes by position
    for gap in gaps:
        if gap.position >= chunks:
            break
        for part in gap.parts:
            absent[space.trailing_of(part)][gap.position] += space.part_bytes[part]
    sums = {number: [0, *itertools.accumulate(row)] for number, row in absent.items()}
    step = -(-chunks // MAX_LENGTHS) or 1
    ends = {usable.rfind(1, 0, last + 1) for last in range(chunks, 0, -step)}
    name = behind.name.lower()
    return [
        Length(end, {name: nbytes} if nbytes else {})
        for end in sorted(ends - {0})
        for nbytes in [sum(row[end] - row[start_of(number, end)] for number, row in sums.items())]
    ]
