"""Which part leaves first: what is least likely to be used again soon (docs/decisions/eviction.md).

Parts are queued by how often they were used, each queue by recency. The victim is the coldest part of the
queue whose coldest is worth least (``kvferry.lifetimes``), or of all, while ``as_lru`` holds. A prefix is
always stamped from its tail to its head, and a head is at least as often used as its tail, so a tail leaves
before its head. What left is remembered for a while: that it comes back teaches.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.lifetimes import LEVELS, NEVER, TOP, Lifetimes
from kvferry.pool.entries import Entry, Place

MAX_STALE_RETURNS = 1024
MAX_REMEMBERED = 1 << 18  # parts that left; some 200 bytes each


class RecencyQueue:
    """Entries by recency, with the pinned ones out of the way.

    A pinned entry stays LINKED where it is until a search for a victim meets it; the search sets it
    ASIDE, once per pin, so pinned entries are never scanned twice. When its last pin ends it is
    RETURNED with its old stamp, in a heap: its age is that of its last use, not of its release.
    """

    def __init__(self) -> None:
        self._linked: OrderedDict[Entry, None] = OrderedDict()  # coldest first, stamps ascending
        self._returned: list[tuple[int, Entry]] = []
        self._tidy_at = MAX_STALE_RETURNS

    def append(self, entry: Entry) -> None:
        """Make an entry, whose stamp is the latest, the most recent."""
        self._linked.pop(entry, None)
        self._linked[entry] = None
        entry.place = Place.LINKED

    def remove(self, entry: Entry) -> None:
        self._linked.pop(entry, None)
        entry.place = Place.OUT

    def unpinned(self, entry: Entry) -> None:
        """The last pin of an entry ended."""
        if entry.place is not Place.ASIDE:
            return
        if len(self._returned) > self._tidy_at:
            self._returned = [item for item in self._returned if self._current(item)]
            heapq.heapify(self._returned)
            self._tidy_at = 2 * len(self._returned) + MAX_STALE_RETURNS
        entry.place = Place.RETURNED
        heapq.heappush(self._returned, (entry.stamp, entry))

    def coldest(self) -> Entry | None:
        """The least recently used entry that is not pinned."""
        linked = None
        while self._linked:
            linked = next(iter(self._linked))
            if not linked.pins:
                break
            del self._linked[linked]
            linked.place = Place.ASIDE
            linked = None
        while self._returned:
            item = self._returned[0]
            returned = item[1]
            if self._current(item) and not returned.pins:
                return returned if linked is None or returned.stamp < linked.stamp else linked
            if self._current(item):
                returned.place = Place.ASIDE
            heapq.heappop(self._returned)
        return linked

    def members(self) -> set[Entry]:
        """What is queued, entries set aside excepted."""
        return set(self._linked) | {item[1] for item in self._returned if self._current(item)}

    def _current(self, item: tuple[int, Entry]) -> bool:
        return item[1].place is Place.RETURNED and item[1].stamp == item[0]


class _Left(NamedTuple):
    """A part that was evicted."""

    level: int
    tick: int
    slot_bytes: int


class EvictionPolicy:
    """The order in which parts leave. Queues are kept per slot size, what is learned is of all."""

    def __init__(self, pool_bytes: int) -> None:
        self._lifetimes = Lifetimes(pool_bytes)
        self._queues: dict[int, list[RecencyQueue]] = {}
        self._left: OrderedDict[int, _Left] = OrderedDict()  # by hash of the key, the first to leave first
        self._new_bytes = self._reused_bytes = 0
        self._stamp = 0

    @property
    def mark(self) -> int:
        """A stamp older than whatever is stamped from now on."""
        return self._stamp + 1

    @property
    def new_bytes(self) -> int:
        """Slot bytes of parts that no request has used, those being filled included."""
        return self._new_bytes

    @property
    def reused_bytes(self) -> int:
        """Slot bytes of parts that were used."""
        return self._reused_bytes

    def spares_reused(self, victim: Entry | None) -> bool:
        """Whether that victim leaves because parts that were used are worth more."""
        return victim is None or (victim.level == 0 and not self._lifetimes.as_lru(self._new_bytes))

    def filling(self, entry: Entry) -> None:
        """Memory was reserved."""
        self._count(entry, entry.run.slot_bytes)

    def ready(self, entry: Entry) -> None:
        """Its bytes are there: it may be a victim from now on. One that left and comes back is used."""
        level, slot_bytes = entry.level, entry.run.slot_bytes
        left = self._left.pop(hash(entry.key), None)
        if left is not None and self._lifetimes.remembered(left.tick):
            self._lifetimes.used(left.level, left.tick, left.slot_bytes, held=0)
            level = min(left.level + 1, TOP)
        self._lifetimes.store(slot_bytes)
        self._place(entry, level)

    def use(self, entry: Entry, at_least: int) -> int:
        """A request uses a READY entry: it is the most recent, one level higher, and at least at that one."""
        slot_bytes = entry.run.slot_bytes
        self._lifetimes.used(entry.level, entry.tick, slot_bytes, held=slot_bytes)
        return self._place(entry, max(min(entry.level + 1, TOP), at_least))

    def renew(self, entry: Entry, at_least: int) -> int:
        """Make a READY entry the most recent, at least at that level."""
        self._lifetimes.leave(entry.level, entry.tick, entry.run.slot_bytes)
        return self._place(entry, max(entry.level, at_least))

    def evicted(self, entry: Entry) -> None:
        """It is about to go because it was the victim: remember it."""
        self._left[hash(entry.key)] = _Left(entry.level, entry.tick, entry.run.slot_bytes)
        entry.tick = NEVER
        while self._left:
            oldest = next(iter(self._left.values()))
            if len(self._left) <= MAX_REMEMBERED and self._lifetimes.remembered(oldest.tick):
                break
            self._left.popitem(last=False)
            self._lifetimes.leave(*oldest)

    def gone(self, entry: Entry) -> None:
        """It left the pool, or was unlinked."""
        self._queue(entry).remove(entry)
        self._lifetimes.leave(entry.level, entry.tick, entry.run.slot_bytes)
        self._count(entry, -entry.run.slot_bytes)

    def unpinned(self, entry: Entry) -> None:
        self._queue(entry).unpinned(entry)

    def victim(self, slot_bytes: int, *, before: int | None = None) -> Entry | None:
        """The next part of that slot size, older than ``before``, to leave; None when there is none."""
        lifetimes = self._lifetimes
        as_lru = lifetimes.as_lru(self._new_bytes)
        best, least = None, 0.0
        for queue in self._queues.get(slot_bytes, ()):
            entry = queue.coldest()
            if entry is None or (before is not None and entry.stamp >= before):
                continue
            worth = entry.stamp if as_lru else lifetimes.worth(entry.level, entry.tick)
            if best is None or worth < least:
                best, least = entry, worth
        return best

    def check(self, readable: Sequence[Entry]) -> None:
        """Raise BrokenError unless exactly the readable entries are queued. Slow; for tests."""
        queued: set[Entry] = set()
        for levels in self._queues.values():
            for queue in levels:
                queued |= queue.members()
        aside = {entry for entry in readable if entry.pins and entry.place is Place.ASIDE}
        if queued | aside != set(readable):
            raise BrokenError(f"{len(readable)} parts readable, {len(queued)} queued, {len(aside)} aside")

    def _place(self, entry: Entry, level: int) -> int:
        if level != entry.level:
            self._queue(entry).remove(entry)
            self._count(entry, -entry.run.slot_bytes)
            entry.level = level
            self._count(entry, entry.run.slot_bytes)
        self._lifetimes.enter(level, entry.run.slot_bytes)
        entry.tick = self._lifetimes.now
        self._stamp += 1
        entry.stamp = entry.run.stamp = self._stamp
        self._queue(entry).append(entry)
        return level

    def _count(self, entry: Entry, slot_bytes: int) -> None:
        if entry.level:
            self._reused_bytes += slot_bytes
            entry.run.reused += 1 if slot_bytes > 0 else -1
        else:
            self._new_bytes += slot_bytes

    def _queue(self, entry: Entry) -> RecencyQueue:
        queues = self._queues.get(entry.run.slot_bytes)
        if queues is None:
            queues = self._queues[entry.run.slot_bytes] = [RecencyQueue() for _ in range(LEVELS)]
        return queues[entry.level]
