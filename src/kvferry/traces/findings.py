"""What a trace says, as one document: every figure with its window and its unit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from kvferry.traces.formats import Clock
from kvferry.traces.patterns import conversations, sharing, slices, times_ascend
from kvferry.traces.policies import Policy, hits, last_half, unbounded
from kvferry.traces.reuse import UNKNOWN, ReuseLog

GAPS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
CAPACITIES = 9
FOLLOWED = 1_000_000  # requests times capacities at which the pool's policy is simulated: some 20 s


def silent(_text: str) -> None:
    """For whoever wants to hear of no step."""


def document(
    log: ReuseLog,
    *,
    capacities: Sequence[int],
    policies: Sequence[Policy],
    clock: Clock,
    step: Callable[[str], None] = silent,
) -> dict[str, Any]:
    """Everything but where it was read from. capacities: in blocks. step: told what comes next."""
    identified = sum(blocks != UNKNOWN for blocks in log.blocks)
    found: dict[str, Any] = {"traffic": _traffic(log, clock), "block_tokens": log.block_tokens}
    if not identified:
        return found | {"reuse": None}
    rows = by_capacity(log, capacities=capacities, policies=policies, step=step)
    step(f"who shares with whom and for how long, {len(log):,} requests")
    by_time = _one_clock(log, clock) and times_ascend(log) and log.time_s[-1] > log.time_s[0]
    return found | {
        "reuse": {
            "requests_without_content": len(log) - identified,
            "distinct_blocks": log.distinct_blocks,
            "distinct_tokens": log.distinct_blocks * log.block_tokens,
            "hit_rate": _rates(log, *_pair(unbounded(log))),
            "by_capacity": rows,
            "gaps": gaps(log, clock=clock),
            **_people(log),
            "over": "time" if by_time else "requests",
            "slices": [asdict(part) for part in slices(log, by_time=by_time)],
        }
    }


def _people(log: ReuseLog) -> dict[str, Any]:
    """Conversations as they follow from prompts, and who shares with whom."""
    talks = conversations(log)
    found: dict[str, Any] = {
        "conversations": {
            "number": talks.conversations,
            "turns": quantiles(talks.turns),
            "growth_tokens": quantiles(talks.growth_tokens),
            "sharing": asdict(sharing(log, talks.of)),
        },
        "sessions": None,
    }
    if log.sessions:
        found["sessions"] = {"number": log.sessions, "sharing": asdict(sharing(log, log.session))}
    return found


def by_capacity(
    log: ReuseLog,
    *,
    capacities: Sequence[int],
    policies: Sequence[Policy],
    step: Callable[[str], None] = silent,
) -> list[dict[str, Any]]:
    """Per capacity, each policy's hit rate. The pool's policy is the slowest to follow: see ``FOLLOWED``."""
    rows: list[dict[str, Any]] = [
        {"blocks": blocks, "tokens": blocks * log.block_tokens} for blocks in capacities
    ]
    for policy in policies:
        step(f"what a cache of each capacity finds: {policy}, {len(log):,} requests")
        chosen = rows if policy is not Policy.PRODUCTION else _followed(rows, len(log))
        for row, found in zip(chosen, hits(log, policy, [row["blocks"] for row in chosen]), strict=True):
            row[policy.value] = _rates(log, *_pair(found))
    return rows


def _followed(rows: list[dict[str, Any]], requests: int) -> list[dict[str, Any]]:
    """As many of the capacities as there is time for, evenly spread, the middle one first of all."""
    number = max(1, min(len(rows), FOLLOWED // max(1, requests)))
    return [rows[(2 * place + 1) * len(rows) // (2 * number)] for place in range(number)] if rows else []


def gaps(log: ReuseLog, *, clock: Clock = Clock.TRACE) -> dict[str, Any] | None:
    """How long a prefix must be kept: the share of all reused tokens whose last use is at most so long ago.

    Where sessions are timed each from its own start, only reuse within one counts. ``left_out_tokens`` were
    used last on another clock, ``backwards_tokens`` at a later time than now. None where no gap is known.
    """
    within = [0] * len(GAPS_S)
    total, left_out, backwards, longest = 0, 0, 0, 0.0
    by_session = clock is Clock.SESSION
    for request in range(len(log)):
        depth = before = 0
        for previous, blocks in log.runs(request):
            depth += blocks
            tokens = log.tokens(request, depth) - before
            before += tokens
            gap = log.time_s[request] - log.time_s[previous]
            if math.isnan(gap):
                continue
            if log.clock[request] != log.clock[previous] or (
                by_session and not log.session[request] == log.session[previous] != UNKNOWN
            ):
                left_out += tokens
                continue
            if gap < 0:
                backwards += tokens
                continue
            total += tokens
            longest = max(longest, gap)
            for place, limit in enumerate(GAPS_S):
                if gap <= limit:
                    within[place] += tokens
    if not total:
        return None
    return {
        "reused_tokens": total,
        "left_out_tokens": left_out,
        "backwards_tokens": backwards,
        "longest_s": longest,
        "within": [
            {"gap_s": limit, "share": tokens / total, "tokens": tokens}
            for limit, tokens in zip(GAPS_S, within, strict=True)
        ],
    }


def default_capacities(log: ReuseLog) -> list[int]:
    """Powers of two of blocks up to the least at which LRU finds nearly what an unbounded cache does."""
    powers = [1 << power for power in range(log.distinct_blocks.bit_length() + 1)]
    if not log.distinct_blocks:
        return []
    enough = 0.999 * unbounded(log).last_half_tokens
    found = hits(log, Policy.LRU, powers)
    top = next((place for place, at in enumerate(found) if at.last_half_tokens >= enough), len(powers) - 1)
    return powers[max(0, top + 1 - CAPACITIES) : top + 1]


def _traffic(log: ReuseLog, clock: Clock) -> dict[str, Any]:
    times = [time for time in log.time_s if not math.isnan(time)]
    tokens = sum(log.input_tokens)
    outputs = [number for number in log.output_tokens if number != UNKNOWN]
    ratio = None
    if outputs and sum(outputs):
        paired = zip(log.input_tokens, log.output_tokens, strict=True)
        ratio = sum(given for given, made in paired if made != UNKNOWN) / sum(outputs)
    return {
        "requests": len(log),
        "span_s": max(times) - min(times) if times and _one_clock(log, clock) else None,
        "input_tokens": tokens,
        "output_tokens": sum(outputs) if outputs else None,
        "input_to_output": ratio,
        "input_mean": tokens / len(log) if len(log) else None,
        "output_mean": sum(outputs) / len(outputs) if outputs else None,
        "input_quantiles": quantiles(log.input_tokens),
        "output_quantiles": quantiles(outputs),
        "last_half": {
            "first_request": last_half(log),
            "input_tokens": sum(log.input_tokens[last_half(log) :]),
        },
        "sessions": log.sessions or None,
        "times_going_back": sum(later < earlier for earlier, later in pairwise(log.time_s))
        if _one_clock(log, clock)
        else None,
    }


def _one_clock(log: ReuseLog, clock: Clock) -> bool:
    """Whether all times can be compared."""
    return clock is Clock.TRACE and len(set(log.clock)) <= 1


def quantiles(values: Sequence[int]) -> dict[str, int] | None:
    """p50, p90, p99 and the largest, each a value that occurs: the nearest rank."""
    if not values:
        return None
    ranked = sorted(values)
    found = {f"p{q}": ranked[-(-len(ranked) * q // 100) - 1] for q in (50, 90, 99)}
    return found | {"max": ranked[-1]}


def _pair(found: Any) -> tuple[int, int]:
    return found.tokens, found.last_half_tokens


def _rates(log: ReuseLog, tokens: int, last_half_tokens: int) -> dict[str, float | None]:
    whole = sum(log.input_tokens)
    half = sum(log.input_tokens[last_half(log) :])
    return {
        "whole_trace": tokens / whole if whole else None,
        "last_half": last_half_tokens / half if half else None,
        "whole_trace_tokens": tokens,
        "last_half_tokens": last_half_tokens,
    }
