"""What a trace says, as one document: every figure with its window and its unit."""

import math
from collections.abc import Sequence
from typing import Any

from kvferry.traces.policies import Policy, hits, last_half, unbounded
from kvferry.traces.reuse import UNKNOWN, ReuseLog

GAPS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
SLICES = 12


def document(log: ReuseLog, *, capacities: Sequence[int], policies: Sequence[Policy]) -> dict[str, Any]:
    """Everything but where it was read from. capacities: in blocks."""
    identified = sum(blocks != UNKNOWN for blocks in log.blocks)
    found: dict[str, Any] = {"traffic": _traffic(log), "block_tokens": log.block_tokens}
    if not identified:
        return found | {"reuse": None}
    return found | {
        "reuse": {
            "distinct_blocks": log.distinct_blocks,
            "distinct_tokens": log.distinct_blocks * log.block_tokens,
            "hit_rate": _rates(log, *_pair(unbounded(log))),
            "by_capacity": by_capacity(log, capacities=capacities, policies=policies),
            "gaps": gaps(log),
        }
    }


def by_capacity(
    log: ReuseLog, *, capacities: Sequence[int], policies: Sequence[Policy]
) -> list[dict[str, Any]]:
    """Per capacity, each policy's hit rate."""
    rows: list[dict[str, Any]] = [
        {"blocks": blocks, "tokens": blocks * log.block_tokens} for blocks in capacities
    ]
    for policy in policies:
        for row, found in zip(rows, hits(log, policy, capacities), strict=True):
            row[policy.value] = _rates(log, *_pair(found))
    return rows


def gaps(log: ReuseLog) -> dict[str, Any] | None:
    """How long a prefix must be kept: the share of all reused tokens whose last use is at most so long ago.

    None where the trace has no times.
    """
    within = [0] * len(GAPS_S)
    total, longest = 0, 0.0
    for request in range(len(log)):
        depth = before = 0
        for previous, blocks in log.runs(request):
            depth += blocks
            tokens = log.tokens(request, depth) - before
            before += tokens
            gap = log.time_s[request] - log.time_s[previous]
            if math.isnan(gap):
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
        "longest_s": longest,
        "within": [
            {"gap_s": limit, "share": tokens / total} for limit, tokens in zip(GAPS_S, within, strict=True)
        ],
    }


def default_capacities(log: ReuseLog) -> list[int]:
    """Powers of two of blocks, from a 512th of what is distinct up to all of it."""
    distinct = log.distinct_blocks
    if not distinct:
        return []
    top = (distinct - 1).bit_length()
    return [1 << power for power in range(max(0, top - 8), top + 1)]


def _traffic(log: ReuseLog) -> dict[str, Any]:
    times = [time for time in log.time_s if not math.isnan(time)]
    tokens = sum(log.input_tokens)
    outputs = [number for number in log.output_tokens if number != UNKNOWN]
    ratio = None
    if outputs and sum(outputs):
        paired = zip(log.input_tokens, log.output_tokens, strict=True)
        ratio = sum(given for given, made in paired if made != UNKNOWN) / sum(outputs)
    return {
        "requests": len(log),
        "span_s": max(times) - min(times) if times else None,
        "input_tokens": tokens,
        "output_tokens": sum(outputs) if outputs else None,
        "input_to_output": ratio,
        "input_quantiles": quantiles(log.input_tokens),
        "output_quantiles": quantiles(outputs),
        "sessions": log.sessions or None,
    }


def quantiles(values: Sequence[int]) -> dict[str, int] | None:
    """p50, p90, p99 and the largest, each a value that occurs."""
    if not values:
        return None
    ranked = sorted(values)
    found = {f"p{q}": ranked[min(len(ranked) - 1, len(ranked) * q // 100)] for q in (50, 90, 99)}
    return found | {"max": ranked[-1]}


def _pair(found: Any) -> tuple[int, int]:
    return found.tokens, found.last_half_tokens


def _rates(log: ReuseLog, tokens: int, last_half_tokens: int) -> dict[str, float | None]:
    whole = sum(log.input_tokens)
    half = sum(log.input_tokens[last_half(log) :])
    return {
        "whole_trace": tokens / whole if whole else None,
        "last_half": last_half_tokens / half if half else None,
    }
