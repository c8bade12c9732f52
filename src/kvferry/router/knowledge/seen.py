"""What each worker's own cache should hold, from what this router sent it. Pure.

An engine keeps what was used last, heads longer than tails: a prefix is there as long as it and all that was
computed since its last use go into the cache. So each worker has an odometer of tokens computed, and a prefix
the reading of its last use. How much a cache holds is told, or learned from answers that say what was cached.

A prefix counts from when its request is sent: what comes after it waits for it in the worker's queue.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvferry.router.contract import Key

MAX_NAMES = 1 << 19
ASSUMED_CAPACITY_TOKENS = 1 << 19  # until something says otherwise
MIN_CAPACITY_TOKENS = 2048.0
TELLING_TOKENS = 128  # a smaller expectation proves nothing
EMPTY_AFTER = 2  # misses one after the other, of prefixes used lately: the cache is empty
FEW = 24  # holders that are looked at one by one: all of a pool whose workers are


@dataclass(slots=True)
class Cache:
    """One worker's. used: tokens computed so far; before: what was last used before it is gone."""

    used: float = 0.0
    before: float = 0.0
    capacity: float = ASSUMED_CAPACITY_TOKENS
    misses: int = 0
    told: float = math.inf  # by itself, or its engine

    def holds(self, stamp: float, tokens: int) -> bool:
        """Whether a prefix of so many tokens that was last used then should be there still."""
        return stamp > self.before and self.used - stamp + tokens <= self.capacity


class Several(msgspec.Struct, eq=False, gc=False):
    """More than one worker. mask: of their numbers."""

    mask: int
    stamps: dict[int, float]


class Sighting(NamedTuple):
    """These workers (a mask) hold the prefix keys[place], and no longer one."""

    place: int
    mask: int


class Mark(msgspec.Struct, eq=False):
    """What ``sent`` wrote: keys from ``first`` on were new to the worker, with this stamp.

    distance: tokens computed since the last use of what it should have. judged: somebody has said how much
    of that was there.
    """

    worker: int
    stamp: float
    first: int
    distance: float
    judged: bool = False


class Seen:
    """Workers by number."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._names: OrderedDict[bytes, tuple[int, float] | Several] = OrderedDict()
        self._caches: dict[int, Cache] = {}

    def __len__(self) -> int:
        return len(self._names)

    def cache(self, worker: int) -> Cache:
        """Of a worker."""
        cache = self._caches.get(worker)
        if cache is None:
            cache = self._caches[worker] = Cache()
        return cache

    def holds(self, keys: Sequence[Key], tokens: Sequence[int], workers: int) -> list[Sighting]:
        """Which of these workers (a mask) should hold how much; the longest first. tokens: of each prefix."""
        found: list[Sighting] = []
        names = self._names
        place = len(keys)
        for key in reversed(keys):
            place -= 1
            held = names.get(key[0])
            if held is None:
                continue
            if type(held) is tuple:
                worker, stamp = held
                mask = 1 << worker
                if not workers & mask or not self.cache(worker).holds(stamp, tokens[place]):
                    continue
            else:
                mask = held.mask & workers  # type: ignore[union-attr]
                if mask > 0 and mask.bit_count() <= FEW:
                    mask = self._alive(held, mask, tokens[place])  # type: ignore[arg-type]
            if mask:
                found.append(Sighting(place, mask))
                workers &= ~mask
                if not workers:
                    break
        return found

    def _alive(self, held: Several, mask: int, tokens: int) -> int:
        for worker in numbers(mask):
            if not self.cache(worker).holds(held.stamps[worker], tokens):
                mask &= ~(1 << worker)
        return mask

    def sent(self, keys: Sequence[Key], worker: int, *, new_tokens: float) -> Mark:
        """This prompt is on its way there, and so many tokens of it will be computed."""
        cache = self.cache(worker)
        before = cache.used
        cache.used += max(new_tokens, 1.0)  # no two requests have one stamp
        stamp, names, bit = cache.used, self._names, 1 << worker
        first, distance = 0, 0.0
        for place, key in enumerate(keys):
            name = key[0]
            held = names.get(name)
            old: float | None = None
            if held is None:
                names[name] = (worker, stamp)
            else:
                if type(held) is tuple:
                    if held[0] == worker:
                        old = held[1]
                        names[name] = (worker, stamp)
                    else:
                        names[name] = Several(bit | 1 << held[0], {held[0]: held[1], worker: stamp})
                else:
                    old = held.stamps.get(worker)  # type: ignore[union-attr]
                    held.stamps[worker] = stamp  # type: ignore[union-attr]
                    held.mask |= bit  # type: ignore[union-attr]
                names.move_to_end(name)
            if old is not None and old > cache.before and before - old < cache.capacity:
                first, distance = place + 1, before - old
        while len(names) > self._limit:
            names.popitem(last=False)
        return Mark(worker, stamp, first, distance)

    def taken_back(self, keys: Sequence[Key], mark: Mark) -> None:
        """It was never computed: what nobody else has asked for since is not there."""
        for key in keys[mark.first :]:
            held = self._names.get(key.name)
            if isinstance(held, tuple):
                if held == (mark.worker, mark.stamp):
                    del self._names[key.name]
            elif held is not None and held.stamps.get(mark.worker) == mark.stamp:
                del held.stamps[mark.worker]
                held.mask &= ~(1 << mark.worker)
                if not held.mask:
                    del self._names[key.name]

    def computed(self, worker: int, tokens: float) -> None:
        """These take room there too: an answer, or more of a prompt than was expected."""
        self.cache(worker).used += max(tokens, 0.0)

    def forget(self, worker: int) -> None:
        """Its cache is empty."""
        cache = self.cache(worker)
        cache.used += 1.0
        cache.before = cache.used
        cache.misses = 0

    def renew(self, worker: int) -> None:
        """The number is somebody else's from now on."""
        used = self.cache(worker).used + 1.0
        self._caches[worker] = Cache(used=used, before=used)

    def told(self, worker: int, capacity_tokens: int) -> None:
        """How much its cache holds."""
        cache = self.cache(worker)
        cache.capacity = cache.told = max(float(capacity_tokens), MIN_CAPACITY_TOKENS)

    def answered(self, mark: Mark, *, expected_tokens: float, cached_tokens: int) -> bool:
        """The engine's node, or else the answer, said how much the cache had. Returns whether it is empty."""
        if mark.judged or expected_tokens < TELLING_TOKENS:
            return False
        mark.judged = True
        cache = self.cache(mark.worker)
        if mark.stamp <= cache.before:
            return False
        if cached_tokens >= 0.5 * expected_tokens:
            cache.misses = 0
            if mark.distance > 0.8 * cache.capacity:
                cache.capacity = min(1.25 * mark.distance, cache.told)
            return False
        if mark.distance > 0.25 * cache.capacity:
            cache.capacity = max(0.9 * mark.distance, MIN_CAPACITY_TOKENS)
            return False
        cache.misses += 1
        if cache.misses < EMPTY_AFTER:
            return False
        self.forget(mark.worker)
        # What was sent meanwhile is being computed anew; its requests say so themselves with their ends.
        return True


def numbers(mask: int) -> Iterator[int]:
    """The places of the bits of a mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
