"""Load or recompute: what the node knows, put to the shared estimator (``kvferry.costs``)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.costs import (
    Decision,
    DecisionReason,
    Length,
    Limits,
    PrefillModel,
    Prospect,
    TierRate,
    TierRun,
    decide,
)
from kvferry.costs.rates import UNKNOWN_RATE
from kvferry.identity.boundaries import start_of
from kvferry.node.keepers import TIERS
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import Lookup, Tier
from kvferry.pool.entries import Gap

STALL_CAP_S = 5.0
STALL_LOADS = 2.0  # times as long as it should take in all
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
        self,
        asked: Lookup,
        space: Namespace,
        *,
        gaps: Sequence[Gap],
        usable: bytearray,
        deep: Mapping[tuple[int, int], Tier] | None = None,
    ) -> Verdict:
        """The same, where only some boundaries are usable, and each needs other parts.

        gaps: what memory lacks. usable: see ``reach.Reach``. deep: see ``search.Search``.
        """
        lengths = _lengths(space, gaps, usable, behind=self._state.behind, deep=deep or {})
        return self._verdict(asked, space, lengths=lengths)

    def _verdict(
        self,
        asked: Lookup,
        space: Namespace,
        *,
        runs: Sequence[TierRun] = (),
        lengths: Sequence[Length] | None = None,
    ) -> Verdict:
        now = self._state.loop.clock()
        learning = self._state.rates()
        rates = {name: rate.rate(now) for name, rate in learning.items()}
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
            rates=rates,
            limits=Limits(cap_s=cap_s),
        )
        for name in decision.tries:
            learning[name].probing(now)
        return Verdict(
            load_chunks=decision.load_chunks,
            deadline_s=decision.deadline_s,
            stall_s=min(_stall_s(decision, rates, behind=self._state.behind), STALL_CAP_S),
            load_s=decision.load_s,
            recompute_s=decision.recompute_s,
            choice=decision.reason,
        )


def _stall_s(decision: Decision, rates: Mapping[str, TierRate], *, behind: Tier) -> float:
    """What keepers bring may come all at its end: no pause before that says anything.

    That they are there at all, their connection watches.
    """
    staged = {tier.name.lower() for tier in TIERS.values() if tier is not behind}.intersection(decision.tiers)
    if not staged:
        return decision.stall_s
    unknown = any(rates.get(name, UNKNOWN_RATE).bytes_per_s is None for name in staged)
    if unknown or decision.load_s is None:
        return decision.deadline_s
    return min(decision.deadline_s, max(decision.stall_s, STALL_LOADS * decision.load_s))


def _prefill(asked: Lookup) -> PrefillModel | None:
    """The engine's coefficients; all zero while it has measured nothing."""
    model = asked.prefill
    if not (model.base_s or model.per_token_s or model.per_token2_s):
        return None
    return PrefillModel(model.base_s, model.per_token_s, model.per_token2_s)


def _lengths(
    space: Namespace,
    gaps: Sequence[Gap],
    usable: bytearray,
    *,
    behind: Tier,
    deep: Mapping[tuple[int, int], Tier],
) -> list[Length]:
    """The usable boundaries, the longest of each of ``MAX_LENGTHS`` stretches; what tiers must bring."""
    chunks = usable.rfind(1)
    absent: dict[tuple[Tier, int], list[int]] = {}  # bytes by position, for each tier and trailing number
    for gap in gaps:
        if gap.position >= chunks:
            break
        for part in gap.parts:
            name = (deep.get((gap.position, part), behind), space.trailing_of(part))
            row = absent.setdefault(name, [0] * chunks)
            row[gap.position] += space.part_bytes[part]
    sums = {name: [0, *itertools.accumulate(row)] for name, row in absent.items()}
    step = -(-chunks // MAX_LENGTHS) or 1
    ends = {usable.rfind(1, 0, last + 1) for last in range(chunks, 0, -step)}
    return [Length(end, _tier_bytes(end, sums)) for end in sorted(ends - {0})]


def _tier_bytes(end: int, sums: Mapping[tuple[Tier, int], Sequence[int]]) -> dict[str, int]:
    """What each tier has to bring for a boundary; those that bring nothing left out."""
    found: dict[str, int] = {}
    for (tier, number), row in sums.items():
        if nbytes := row[end] - row[start_of(number, end)]:
            found[tier.name.lower()] = found.get(tier.name.lower(), 0) + nbytes
    return found
