"""A trace played by a small fleet: host pools in front, one shelf that all share behind them."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.bench.valkey_eviction.steering import Use

REFRESH_S = 30.0
STORE_STEP_S = 0.05
"""Between two chunks of one prompt: 512 tokens at 10,000 tokens a second of prefill."""
CHECKPOINTS = 20
BALANCED_EVERY = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """chunks: numbers, the same for the same content after the same content."""

    at_s: float
    chunks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fleet:
    """hosts: prompts go to one of them by chance. pool_chunks: of each host."""

    hosts: int
    pool_chunks: int


class Shelf(Protocol):
    """What all hosts share."""

    def held(self, chunks: Sequence[int]) -> list[bool]:
        """Which are there."""
        ...

    def mark(self, uses: Iterable[tuple[int, Use]]) -> None:
        """Store or use chunks, in this order."""

    def keys(self) -> dict[int, int]:
        """How many keys of each chunk are there."""
        ...

    def balance(self) -> None:
        """Called now and then: keep the room as it should be."""


@dataclass(slots=True)
class Tally:
    """chunks: asked for. hits: found from the first one on without a gap, in pool or shelf.

    alone: hits that the shelf alone would have given, as to a host that has just started. All three by half.
    held, orphans: keys at the checkpoints of the last half, and those of them that nobody can use, as their
    chunk or one before it is not whole.
    """

    chunks: list[int] = field(default_factory=lambda: [0, 0])
    hits: list[int] = field(default_factory=lambda: [0, 0])
    alone: list[int] = field(default_factory=lambda: [0, 0])
    held: int = 0
    orphans: int = 0
    checkpoints: int = 0


class Replay:
    """One run of one trace."""

    def __init__(
        self, prompts: Sequence[Prompt], fleet: Fleet, *, stripes: int, refreshes: bool, repairs: bool = False
    ) -> None:
        self._prompts = prompts
        self._fleet = fleet
        self._stripes = stripes
        self._refreshes = refreshes
        self._repairs = repairs
        self._pools: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(fleet.hosts)]
        self._refreshed: list[dict[int, float]] = [{} for _ in range(fleet.hosts)]
        self._parent: dict[int, int] = {}

    def run(self, shelf: Shelf) -> Tally:
        """All prompts, in order."""
        tally = Tally()
        choice = random.Random(7)
        every = max(1, len(self._prompts) // 2 // CHECKPOINTS)
        for number, prompt in enumerate(self._prompts):
            late = number >= len(self._prompts) // 2
            self._ask(prompt, choice.randrange(self._fleet.hosts), shelf, tally, late=late)
            if number % BALANCED_EVERY == BALANCED_EVERY - 1:
                shelf.balance()
            if late and number % every == 0:
                self._check(shelf, tally)
        return tally

    def _ask(self, prompt: Prompt, host: int, shelf: Shelf, tally: Tally, *, late: bool) -> None:
        """A prompt as nodes serve it: from the pool, then the shelf; the rest is computed and stored."""
        chunks, pool = prompt.chunks, self._pools[host]
        for before, chunk in zip((-1, *chunks), chunks, strict=False):
            self._parent[chunk] = before
        pooled = [chunk in pool for chunk in chunks]
        held = shelf.held(chunks)
        hit = 0
        while hit < len(chunks) and (pooled[hit] or held[hit]):
            hit += 1
        tally.chunks[late] += len(chunks)
        tally.hits[late] += hit
        tally.alone[late] += held.index(False) if False in held else len(held)
        known = [
            at
            for at, chunk in enumerate(chunks)
            if held[at] and self._due(host, chunk, pooled[at] and at < hit, prompt.at_s)
        ]
        uses = [(chunks[at], Use(prompt.at_s, at, rank, stored=False)) for rank, at in enumerate(known)]
        shelf.mark(reversed(uses))
        new = [
            at
            for at, chunk in enumerate(chunks)
            if not held[at]
            and (not pooled[at] or (self._repairs and self._due(host, chunk, at < hit, prompt.at_s)))
        ]
        shelf.mark(
            (chunks[at], Use(prompt.at_s + max(at - hit, 0) * STORE_STEP_S, at, at, stored=True))
            for at in new
        )
        for chunk in reversed(chunks):
            pool[chunk] = None
            pool.move_to_end(chunk)
        while len(pool) > self._fleet.pool_chunks:
            pool.popitem(last=False)

    def _due(self, host: int, chunk: int, from_pool: bool, now: float) -> bool:
        """What the shelf served is used by that; what a pool served must be refreshed, now and then."""
        last = self._refreshed[host]
        if from_pool and (not self._refreshes or now - last.get(chunk, -REFRESH_S) < REFRESH_S):
            return False
        if from_pool:
            last[chunk] = now
        return True

    def _check(self, shelf: Shelf, tally: Tally) -> None:
        keys = shelf.keys()
        usable: dict[int, bool] = {-1: True}
        for chunk, count in keys.items():
            tally.held += count
            way = []
            at = chunk
            while at not in usable and keys.get(at) == self._stripes:
                way.append(at)
                at = self._parent[at]
            good = usable.get(at, False)
            for passed in way:
                usable[passed] = good
            if not (usable.get(chunk, False)):
                tally.orphans += count
        tally.checkpoints += 1
