"""Which part leaves first: two recency queues, tail first (docs/decisions/eviction.md).

New parts enter probation; parts of a prefix that is used again are protected. While probation holds
more than its share of the pool, its coldest part leaves; otherwise the coldest of all. A prefix is
always stamped from its tail to its head, and a head is at least as well protected as its tail, so a
tail leaves before its head. A scan of one-time prompts only ever replaces itself.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from kvferry.errors import BrokenError
from kvferry.pool.entries import Entry, Level, Place

PROBATION_SHARE = 0.10
MAX_STALE_RETURNS = 1024


class RecencyQueue:
    """Entries by recency, with the pinned ones out of the way.

    A pinned entry stays LINKED where it is until a search for a victim meets it; the search sets it
    ASIDE, once per pin, so pinned entries are never scanned twice. When its last pin ends it is
    RETURNED with its old stamp, in a heap: its age is that of its last use, not of its release.
    """

    def __init__(self) -> None:
        self._linked: OrderedDict[Entry, None] = OrderedDict()  # coldest first, stamps ascending
        self._returned: list[tuple[int, Entry]] = []

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
        if len(self._returned) > 2 * len(self._linked) + MAX_STALE_RETURNS:
            self._returned = [item for item in self._returned if self._current(item)]
            heapq.heapify(self._returned)
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


class EvictionPolicy:
    """The order in which parts leave. Queues are kept per slot size; the share is over all of them."""

    def __init__(self, pool_bytes: int) -> None:
        self._probation_limit = int(pool_bytes * PROBATION_SHARE)
        self._queues: dict[tuple[int, Level], RecencyQueue] = {}
        self._bytes = {Level.PROBATION: 0, Level.PROTECTED: 0}
        self._stamp = 0

    @property
    def mark(self) -> int:
        """A stamp older than whatever is stamped from now on."""
        return self._stamp + 1

    @property
    def probation_bytes(self) -> int:
        """Slot bytes on probation, those being filled included."""
        return self._bytes[Level.PROBATION]

    @property
    def protected_bytes(self) -> int:
        return self._bytes[Level.PROTECTED]

    @property
    def sparing_protected(self) -> bool:
        """Whether victims come from probation only, while it has any."""
        return self.probation_bytes > self._probation_limit

    def filling(self, entry: Entry) -> None:
        """Memory was reserved. It counts as probation, so a scan in flight does not eat protected parts."""
        self._bytes[entry.level] += entry.run.slot_bytes

    def ready(self, entry: Entry) -> None:
        """Its bytes are there: it may be a victim from now on."""
        self._stamp_entry(entry)
        self._queue(entry).append(entry)

    def touch(self, entry: Entry, level: Level) -> None:
        """Make a READY entry the most recent, at least at ``level``."""
        self._stamp_entry(entry)
        if level is Level.PROTECTED and entry.level is Level.PROBATION:
            self._queue(entry).remove(entry)
            self._bytes[Level.PROBATION] -= entry.run.slot_bytes
            self._bytes[Level.PROTECTED] += entry.run.slot_bytes
            entry.level = Level.PROTECTED
            entry.run.protected += 1
        self._queue(entry).append(entry)

    def gone(self, entry: Entry) -> None:
        """It left the pool, or was unlinked."""
        self._queue(entry).remove(entry)
        self._bytes[entry.level] -= entry.run.slot_bytes
        if entry.level is Level.PROTECTED:
            entry.run.protected -= 1

    def unpinned(self, entry: Entry) -> None:
        self._queue(entry).unpinned(entry)

    def victim(self, slot_bytes: int, *, before: int | None = None) -> Entry | None:
        """The next part of that slot size, older than ``before``, to leave; None when there is none."""
        probation, protected = (
            entry if entry is not None and (before is None or entry.stamp < before) else None
            for entry in (self._queue_of(slot_bytes, level).coldest() for level in Level)
        )
        if probation is None or protected is None:
            return probation or protected
        if self.sparing_protected or probation.stamp < protected.stamp:
            return probation
        return protected

    def check(self, readable: Sequence[Entry]) -> None:
        """Raise BrokenError unless exactly the readable entries are queued. Slow; for tests."""
        queued: set[Entry] = set()
        for queue in self._queues.values():
            queued |= queue.members()
        aside = {entry for entry in readable if entry.pins and entry.place is Place.ASIDE}
        if queued | aside != set(readable):
            raise BrokenError(f"{len(readable)} parts readable, {len(queued)} queued, {len(aside)} aside")

    def _stamp_entry(self, entry: Entry) -> None:
        self._stamp += 1
        entry.stamp = self._stamp
        entry.run.stamp = self._stamp

    def _queue(self, entry: Entry) -> RecencyQueue:
        return self._queue_of(entry.run.slot_bytes, entry.level)

    def _queue_of(self, slot_bytes: int, level: Level) -> RecencyQueue:
        queue = self._queues.get((slot_bytes, level))
        if queue is None:
            queue = self._queues[slot_bytes, level] = RecencyQueue()
        return queue
