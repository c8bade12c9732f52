"""Hits of a cache of limited capacity: least recently used, first in first out, the pool's, and the optimum.

All look at blocks of a prefix tree: a request hits the blocks that are held from its first one on
without a gap, and then wants all its blocks held. They are exact, not sampled, but visit no single block:

- LRU holds a child only with its parent, and lets tails go before heads. So what a request touched last is
  always one piece of its path, and everything that later requests touched lies before it: one pass over runs
  with a Fenwick tree over requests gives the capacity that each run needs (Mattson's stack distance), for all
  capacities at once.
- FIFO: blocks are numbered as they come in, and the newest ``capacity`` numbers are held. Blocks of one piece
  with consecutive numbers are held or missing together by the time their turn comes.
- The pool's own policy: see ``kvferry.traces.production``.
- The optimum (Belady, free to hold nothing of a request) keeps the blocks whose next use is soonest. Those
  kept for a request are a prefix of it, so a number per future request is all the state there is.
"""

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.traces.production import ProductionCache
from kvferry.traces.reuse import ReuseLog


class Policy(StrEnum):
    """What leaves a full cache first."""

    LRU = "lru"
    FIFO = "fifo"
    PRODUCTION = "production"
    OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True)
class Hits:
    """Hit tokens at one capacity: over all requests, and over the last half of them alone."""

    tokens: int
    last_half_tokens: int


def last_half(log: ReuseLog) -> int:
    """The first request of the last half."""
    return len(log) // 2


def unbounded(log: ReuseLog) -> Hits:
    """What a cache that never forgets hits, empty at the start."""
    half = last_half(log)
    tokens = [0, 0]
    for request in range(len(log)):
        known = sum(log.run_blocks[log.first_run[request] : log.first_run[request + 1]])
        tokens[request >= half] += log.tokens(request, known)
    return Hits(sum(tokens), tokens[1])


def hits(log: ReuseLog, policy: Policy, capacities: Sequence[int]) -> list[Hits]:
    """Hits at each capacity, in blocks, each at least 1."""
    if policy is Policy.LRU:
        return _lru(log, capacities)
    if policy is Policy.FIFO:
        return [_fifo(log, capacity) for capacity in capacities]
    if policy is Policy.PRODUCTION:
        return [_production(log, capacity) for capacity in capacities]
    upcoming = _Upcoming.of(log)
    return [_optimum(log, upcoming, capacity) for capacity in capacities]


def _lru(log: ReuseLog, capacities: Sequence[int]) -> list[Hits]:
    half, size = last_half(log), len(log)
    later = array("q", bytes(8 * (size + 1)))  # Fenwick tree: blocks by latest request, newest first
    totals = [[0, 0] for _ in capacities]
    # A prompt longer than the cache fills it but for one block, as in kvcache-simulator: the block that came
    # in last makes room for the next one, which then lacks its parent. The next prompt takes that room first.
    spare = [bytearray(size) for _ in capacities]
    for request in range(size):
        before: list[tuple[int, int, int]] = []  # (blocks used since, blocks, request) of each run
        first, end = log.first_run[request], log.first_run[request + 1]
        for run in range(first, end):
            at, newer = size - 1 - log.run_request[run], 0
            while at > 0:
                newer += later[at]
                at &= at - 1
            before.append((newer, log.run_blocks[run], log.run_request[run]))
        for run in range(first, end):
            at, blocks = size - log.run_request[run], log.run_blocks[run]
            while at <= size:
                later[at] -= blocks
                at += at & -at
        at, blocks = size - request, max(log.blocks[request], 0)
        while at <= size:
            later[at] += blocks
            at += at & -at
        for place, capacity in enumerate(capacities):
            held = 0
            last = request
            for newer, blocks, previous in before:
                if newer >= capacity:
                    break
                held += min(blocks, capacity - newer)
                last = previous
            if held == capacity and spare[place][last]:
                held -= 1
            if log.blocks[request] > capacity > held:
                spare[place][request] = 1
            if held:
                totals[place][request >= half] += log.tokens(request, held)
    return [Hits(sum(total), total[1]) for total in totals]


def _fifo(log: ReuseLog, capacity: int) -> Hits:
    half = last_half(log)
    tokens = [0, 0]
    entered = 0
    # Pieces of every request, flat: where in the prompt one begins, and its first block's number.
    first_piece, begins, numbers = array("q", [0]), array("i"), array("q")
    for request in range(len(log)):
        pieces: list[tuple[int, int, int]] = []  # begin, end, number
        depth = 0
        for previous, blocks in log.runs(request):
            pieces += _cut(first_piece, begins, numbers, previous, depth, depth + blocks)
            depth += blocks
        held = 0
        for _, end, number in pieces:
            if number <= entered - capacity:
                break
            held = end
        tokens[request >= half] += log.tokens(request, held)
        known = len(begins)
        for begin, end, old in pieces:
            number = old
            if old <= entered - capacity:
                number = entered + 1
                entered += end - begin
            if len(begins) == known or numbers[-1] + begin - begins[-1] != number:
                begins.append(begin)
                numbers.append(number)
        total = log.blocks[request]
        if depth < total:
            if len(begins) == known or numbers[-1] + depth - begins[-1] != entered + 1:
                begins.append(depth)
                numbers.append(entered + 1)
            entered += total - depth
        first_piece.append(len(begins))
    return Hits(sum(tokens), tokens[1])


def _production(log: ReuseLog, capacity: int) -> Hits:
    half = last_half(log)
    tokens = [0, 0]
    cache = ProductionCache(capacity)
    for request in range(len(log)):
        tokens[request >= half] += log.tokens(request, cache.request(log, request))
    return Hits(sum(tokens), tokens[1])


def _cut(
    first_piece: Sequence[int],
    begins: Sequence[int],
    numbers: Sequence[int],
    request: int,
    start: int,
    stop: int,
) -> list[tuple[int, int, int]]:
    """The pieces of an earlier request between two places of the prompt."""
    found = []
    end = stop
    for piece in range(first_piece[request + 1] - 1, first_piece[request] - 1, -1):
        begin = begins[piece]
        if begin < end:
            cut = max(begin, start)
            found.append((cut, end, numbers[piece] + cut - begin))
            end = cut
            if cut == start:
                break
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Upcoming:
    """The next uses of every request's blocks: those of request r from ``first[r]`` to ``first[r + 1]``."""

    first: "array[int]"
    request: "array[int]"
    blocks: "array[int]"

    @classmethod
    def of(cls, log: ReuseLog) -> "_Upcoming":
        first = array("q", bytes(8 * (len(log) + 1)))
        for previous in log.run_request:
            first[previous + 1] += 1
        for request in range(len(log)):
            first[request + 1] += first[request]
        free = array("q", first)
        upcoming = array("i", bytes(4 * len(log.run_request)))
        blocks = array("i", upcoming)
        for request in range(len(log)):
            for run in range(log.first_run[request], log.first_run[request + 1]):
                previous = log.run_request[run]
                at = free[previous]
                upcoming[at], blocks[at] = request, log.run_blocks[run]
                free[previous] = at + 1
        return cls(first, upcoming, blocks)


def _optimum(log: ReuseLog, upcoming: _Upcoming, capacity: int) -> Hits:
    half = last_half(log)
    tokens = [0, 0]
    kept = array("q", bytes(8 * len(log)))  # blocks held for a request, all of them a prefix of it
    latest: list[int] = []  # requests something is kept for, the latest first
    held = 0
    for request in range(len(log)):
        found = kept[request]
        if found:
            tokens[request >= half] += log.tokens(request, found)
            held -= found
        for use in range(upcoming.first[request], upcoming.first[request + 1]):
            following = upcoming.request[use]
            if not kept[following]:
                heapq.heappush(latest, -following)
            kept[following] += upcoming.blocks[use]
            held += upcoming.blocks[use]
        while held > capacity:
            last = -latest[0]
            released = min(kept[last], held - capacity)
            kept[last] -= released
            held -= released
            if not kept[last]:
                heapq.heappop(latest)
    return Hits(sum(tokens), tokens[1])
