"""How prompts grow, who shares with whom, and what is in use over time."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.traces.reuse import INFERRED, UNKNOWN, ReuseLog

SLICES = 12


@dataclass(frozen=True, slots=True)
class Conversations:
    """Which requests continue earlier ones.

    Where the log has messages, a prompt continues the latest that it begins with. Else blocks tell: a request
    continues the latest one that had the last block it shares, if it has more blocks than that, and all of
    its blocks. A last block that is partial, or too short to have a key, may be missing, as it has
    been filled up since; but then the earlier request must have been the first with its last full block.
    Else all prompts that share a system prompt alone would continue each other.
    """

    conversations: int
    turns: Sequence[int]  # per conversation
    growth_tokens: Sequence[int]  # per continuing request: its input above that of the request it continues
    of: Sequence[int]  # per request: its conversation


def conversations(log: ReuseLog) -> Conversations:
    """Conversations of a trace that identifies content."""
    of = array("i")
    turns: list[int] = []
    growth: list[int] = []
    shared = array("i")  # per request: its blocks that earlier ones had
    for request in range(len(log)):
        first, end = log.first_run[request], log.first_run[request + 1]
        shared.append(sum(log.run_blocks[first:end]))
        previous = log.continued[request]
        if previous == INFERRED:
            previous = log.run_request[end - 1] if end > first else UNKNOWN
            if previous != UNKNOWN and not _continues(log, shared, request, previous):
                previous = UNKNOWN
        if previous != UNKNOWN:
            of.append(of[previous])
            turns[of[previous]] += 1
            growth.append(log.input_tokens[request] - log.input_tokens[previous])
        else:
            of.append(len(turns))
            turns.append(1)
    return Conversations(len(turns), turns, growth, of)


def _continues(log: ReuseLog, shared: Sequence[int], request: int, previous: int) -> bool:
    if log.blocks[request] <= log.blocks[previous] or log.input_tokens[request] <= log.input_tokens[previous]:
        return False
    full = min(log.blocks[previous], log.input_tokens[previous] // log.block_tokens)
    if shared[request] >= log.blocks[previous] and log.input_tokens[previous] <= full * log.block_tokens:
        return True  # nothing of the earlier prompt is without a key
    if shared[request] >= log.blocks[previous] > full:
        return True  # its partial block is shared as it was
    return shared[request] >= full > shared[previous]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Reusable tokens: what a group's own earlier requests left, and what only others did."""

    own_tokens: int
    others_tokens: int


def sharing(log: ReuseLog, group: Sequence[int]) -> Sharing:
    """Between groups of requests (sessions, conversations). A request of group UNKNOWN is alone in it."""
    own = others = 0
    for request in range(len(log)):
        depth = mine = 0
        for previous, blocks in log.runs(request):
            depth += blocks
            if group[request] != UNKNOWN and group[previous] == group[request]:
                mine = depth
        own += log.tokens(request, mine)
        others += log.tokens(request, depth) - log.tokens(request, mine)
    return Sharing(own, others)


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of the trace. start: seconds from the trace's first request, or a request's number.

    touched_tokens: distinct blocks used in it, in tokens. new_tokens: those never seen before.
    hit_tokens: of a cache that never forgets.
    """

    start: float
    requests: int
    input_tokens: int
    touched_tokens: int
    new_tokens: int
    hit_tokens: int


def slices(log: ReuseLog, *, by_time: bool) -> list[Slice]:
    """Twelfths of the trace, or fewer: of its time, which must ascend, or of its requests."""
    bounds = _bounds(log, by_time=by_time)
    found = []
    for (start, first), (_, end) in pairwise(bounds):
        given = touched = new = hit = 0
        for request in range(first, end):
            depth = 0
            for previous, blocks in log.runs(request):
                depth += blocks
                if previous < first:
                    touched += blocks
            given += log.input_tokens[request]
            new += max(log.blocks[request], 0) - depth
            hit += log.tokens(request, depth)
        size = log.block_tokens
        found.append(Slice(start, end - first, given, (touched + new) * size, new * size, hit))
    return found


def times_ascend(log: ReuseLog) -> bool:
    """Whether every request has a time, and none is before the one before it."""
    if any(map(math.isnan, log.time_s)):
        return False
    return all(one <= other for one, other in pairwise(log.time_s))


def _bounds(log: ReuseLog, *, by_time: bool) -> list[tuple[float, int]]:
    """(start, first request) of each slice, and of what would follow the last."""
    number = max(1, min(SLICES, len(log)))
    if by_time:
        origin, span = log.time_s[0], log.time_s[-1] - log.time_s[0]
        starts = [span * place / number for place in range(number)]
        return [*((start, bisect_left(log.time_s, origin + start)) for start in starts), (span, len(log))]
    return [(float(len(log) * place // number), len(log) * place // number) for place in range(number + 1)]
