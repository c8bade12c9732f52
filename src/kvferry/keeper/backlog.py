"""Parts that wait to be copied: bounded, each once, the most promising first. Pure.

Ranks, best first: what was used again, then what is likely to be; within both heads of prompts before tails,
since a tail is worth nothing without its head. When it is full, the worst go.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.bykey import ByKey

DEPTHS = 16
"""Positions count by their powers of two: 0, 1, 2-3, 4-7, ..."""
RANKS = 2 * DEPTHS
UNKNOWN_POSITION = 64
MIN_AGES = 1024


def rank_of(position: int, *, used: bool) -> int:
    """0 is best. position: how many chunks of the prompt come before it."""
    return (0 if used else DEPTHS) + min(position.bit_length(), DEPTHS - 1)


def positions_in(refs: Sequence[PartRef]) -> list[int]:
    """For each part how many other chunks come before its own in the call, where no more is known."""
    found: list[int] = []
    for at, ref in enumerate(refs):
        found.append((found[-1] + (ref.key.chunk != refs[at - 1].key.chunk)) if at else 0)
    return found


class Wanted(NamedTuple):
    """A part to copy. since: monotonic time of the first wish. tries: how often that failed in passing.

    named: ``ref`` is what it is called below, and it is there only.
    """

    ref: PartRef
    rank: int
    since: float
    tries: int = 0
    named: bool = False


class Backlog:
    """At most so many parts and bytes."""

    def __init__(self, *, max_parts: int, max_bytes: int) -> None:
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._ranks: list[OrderedDict[PartRef, Wanted]] = [OrderedDict() for _ in range(RANKS)]
        self._where: dict[PartRef, int] = {}
        self._keys = ByKey()
        self._ages: list[tuple[float, PartRef]] = []  # a heap; some have left, which shows at its top
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, ref: PartRef) -> bool:
        return ref in self._where

    def __iter__(self) -> Iterator[Wanted]:
        for rank in self._ranks:
            yield from rank.values()

    def oldest_since(self) -> float | None:
        """Monotonic time of the oldest wish; None when there is none."""
        while self._ages:
            if self._waits_since(*self._ages[0]):
                return self._ages[0][0]
            heapq.heappop(self._ages)
        return None

    def offer(self, wanted: Wanted) -> list[Wanted]:
        """Queue it, or take over a better rank; returns what was dropped for it, which may be itself."""
        ref = wanted.ref
        known = self._where.get(ref)
        if known is not None:
            if wanted.rank < known:
                earlier = self._leave(ref)
                self._enter(earlier._replace(rank=wanted.rank))
            return []
        self._enter(wanted)
        self._remember(wanted)
        dropped: list[Wanted] = []
        while len(self._where) > self._max_parts or self.nbytes > self._max_bytes:
            dropped.append(self._leave(self._worst()))
        return dropped

    def peek(self) -> Wanted | None:
        """The next."""
        for rank in self._ranks:
            if rank:
                return next(iter(rank.values()))
        return None

    def take(self, ref: PartRef) -> Wanted:
        """Out of the queue. KeyError when it is not in it."""
        return self._leave(ref)

    def discard(self, unwanted: Callable[[PartRef], bool]) -> int:
        """Take out all of which that holds; how many that were. Looks at every one."""
        return self._discard([ref for ref in self._where if unwanted(ref)])

    def discard_named(self, keys: Iterable[PartKey]) -> int:
        """Take out those; how many that were. Looks at no other."""
        return self._discard(self._keys.of(keys))

    def _discard(self, going: Sequence[PartRef]) -> int:
        for ref in going:
            self._leave(ref)
        return len(going)

    def _remember(self, wanted: Wanted) -> None:
        if len(self._ages) > 2 * len(self._where) + MIN_AGES:
            self._ages = [(each.since, each.ref) for each in self]
            heapq.heapify(self._ages)
        else:
            heapq.heappush(self._ages, (wanted.since, wanted.ref))

    def _waits_since(self, since: float, ref: PartRef) -> bool:
        rank = self._where.get(ref)
        return rank is not None and self._ranks[rank][ref].since == since

    def _worst(self) -> PartRef:
        for rank in reversed(self._ranks):
            if rank:
                return next(reversed(rank))
        raise KeyError("an empty backlog")

    def _enter(self, wanted: Wanted) -> None:
        self._ranks[wanted.rank][wanted.ref] = wanted
        self._where[wanted.ref] = wanted.rank
        self._keys.add(wanted.ref)
        self.nbytes += wanted.ref.nbytes

    def _leave(self, ref: PartRef) -> Wanted:
        wanted = self._ranks[self._where.pop(ref)].pop(ref)
        self._keys.discard(ref)
        self.nbytes -= ref.nbytes
        return wanted
