"""Load or recompute: how many chunks of a found prefix to load, and how long to wait for them."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.costs.lengths import Length, Lengths, Listed, Runs, TierRun
from kvferry.costs.prefill import PrefillModel
from kvferry.costs.rates import SILENT_S, TierRate

DEADLINE_MULTIPLE = 1.5  # of the prefill that a load saves; time in the queue comes on top
DEADLINE_FLOOR_S = 0.25
DEADLINE_CAP_S = 10.0
STALL_FLOOR_S = 0.25
STALL_MULTIPLE = 8.0  # of the time one chunk should take
STALL_SHARE = 0.2  # of the deadline: a load that saves seconds outlives a pause of the host


class DecisionReason(enum.Enum):
    """Why a load has the length it has."""

    LOAD = "load"  # all of it, since that is fastest
    UNMEASURED = "unmeasured"  # all of it, since nothing is known yet
    PROBE = "probe"  # a little of a tier thought too slow, to see whether it still is
    PARTIAL = "partial"  # the head; recomputing the rest is faster
    PARTIAL_CAP = "partial_cap"  # the head; the rest would not be here before the deadline cap
    RECOMPUTE = "recompute"  # nothing; recomputing is faster
    RECOMPUTE_CAP = "recompute_cap"  # nothing; not even one chunk would be here before the cap
    NOTHING_FOUND = "nothing_found"


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a load. cap_s: the operator's deadline cap."""

    cap_s: float = DEADLINE_CAP_S
    floor_s: float = DEADLINE_FLOOR_S
    multiple: float = DEADLINE_MULTIPLE


@dataclass(frozen=True, slots=True)
class Prospect:
    """One request and what was found for it.

    computed_tokens: what the engine has itself; the found chunks follow it. runs: the found chunks, in
    order; those past the prompt's end are of no use. queued_s: GPU seconds of work before this request;
    a load is free while they last. lengths: given, shortest first, where only some lengths are possible;
    ``runs`` do not count then.
    """

    prompt_tokens: int
    computed_tokens: int
    chunk_tokens: int
    runs: Sequence[TierRun]
    queued_s: float = 0.0
    lengths: Sequence[Length] | None = None

    @property
    def wanted_tokens(self) -> int:
        """Prompt tokens that must be loaded or computed."""
        return max(self.prompt_tokens - self.computed_tokens, 0)

    @property
    def useful_chunks(self) -> int:
        """How many of the found chunks hold tokens of the prompt."""
        return self.possible.longest(-(-self.wanted_tokens // self.chunk_tokens))

    @property
    def possible(self) -> Lengths:
        """The lengths that a load of it may have."""
        return Runs(self.runs) if self.lengths is None else Listed(self.lengths)


@dataclass(frozen=True, slots=True)
class Decision:
    """load_chunks: how many of the found chunks to load, from the head; the rest is recomputed.

    deadline_s, stall_s: how long to wait for all, and for the next chunk. load_s: predicted, None when
    unknown. recompute_s: predicted prefill that the load saves, None when unknown. tiers: that have to bring
    something for it. tries: those that a PROBE is for.
    """

    load_chunks: int
    deadline_s: float
    stall_s: float
    load_s: float | None
    recompute_s: float | None
    reason: DecisionReason
    tiers: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()


def decide(
    prospect: Prospect,
    *,
    prefill: PrefillModel | None,
    rates: Mapping[str, TierRate],
    limits: Limits | None = None,
) -> Decision:
    """How much to load. Seconds saved per chunk grow along a prefix, so within one tier the best length
    is an end of its run; the others worth a look are where a load stops being hidden, behind queued work
    or behind another tier, and what just fits under the cap.

    The time to the first token with k chunks loaded is max(load(k), queue) + prefill(rest): a load takes
    no GPU time, so it is hidden behind queued work, and what it saves unblocks those behind it.
    """
    limits = limits if limits is not None else Limits()
    found, possible = prospect.useful_chunks, prospect.possible
    if found == 0:
        return _decision(
            prospect, 0, DecisionReason.NOTHING_FOUND, prefill=prefill, rates=rates, limits=limits
        )
    fitting = possible.fitting(found, rates, within_s=limits.cap_s)
    best, reason = fitting, DecisionReason.LOAD if fitting == found else DecisionReason.PARTIAL_CAP
    if fitting == 0:
        reason = DecisionReason.RECOMPUTE_CAP
    elif possible.seconds(fitting, rates) is None:
        reason = DecisionReason.UNMEASURED if fitting == found else reason
    elif prefill is not None:
        best = _fastest(prospect, fitting, prefill, rates, cap_s=limits.cap_s)
        if best < fitting:
            reason = DecisionReason.PARTIAL if best else DecisionReason.RECOMPUTE
    if best < found and (trial := possible.trial(best, found, rates)) is not None:
        tried = _decision(
            prospect, trial.chunks, DecisionReason.PROBE, prefill=prefill, rates=rates, limits=limits
        )
        return replace(tried, tries=trial.tiers)
    return _decision(prospect, best, reason, prefill=prefill, rates=rates, limits=limits)


def _fastest(
    prospect: Prospect,
    fitting: int,
    prefill: PrefillModel,
    rates: Mapping[str, TierRate],
    *,
    cap_s: float,
) -> int:
    """Of the candidate lengths the one with the least time to the first token; the longest of equals."""
    possible, wanted = prospect.possible, prospect.wanted_tokens
    whole = wanted // prospect.chunk_tokens  # without a chunk that the prompt only begins
    candidates = possible.candidates(fitting, rates, whole=whole, queued_s=prospect.queued_s, cap_s=cap_s)

    def seconds(chunks: int) -> tuple[float, int]:
        tokens = min(chunks * prospect.chunk_tokens, wanted)
        rest = prefill.seconds(wanted - tokens, prospect.computed_tokens + tokens)
        load = possible.seconds(chunks, rates) or 0.0
        return max(load, prospect.queued_s) + rest, -chunks

    return min(candidates | {0}, key=seconds)


def _decision(
    prospect: Prospect,
    chunks: int,
    reason: DecisionReason,
    *,
    prefill: PrefillModel | None,
    rates: Mapping[str, TierRate],
    limits: Limits,
) -> Decision:
    load_s = prospect.possible.seconds(chunks, rates)
    if load_s is not None and load_s >= SILENT_S:
        load_s = None
    recompute_s = None
    deadline_s = limits.cap_s
    if prefill is not None:
        wanted = prospect.wanted_tokens
        tokens = min(chunks * prospect.chunk_tokens, wanted)
        recompute_s = prefill.seconds(tokens, prospect.computed_tokens)
        deadline_s = min(limits.cap_s, max(limits.floor_s, prospect.queued_s + limits.multiple * recompute_s))
    chunk_s = 0.0 if load_s is None or chunks == 0 else load_s / chunks
    stall_s = min(deadline_s, max(STALL_FLOOR_S, STALL_MULTIPLE * chunk_s, STALL_SHARE * deadline_s))
    return Decision(
        load_chunks=chunks,
        deadline_s=deadline_s,
        stall_s=stall_s,
        load_s=load_s,
        recompute_s=recompute_s,
        reason=reason,
        tiers=tuple(tier for tier, nbytes in prospect.possible.tier_bytes(chunks).items() if nbytes),
    )
