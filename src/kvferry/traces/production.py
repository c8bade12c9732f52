"""Hits of the pool's own policy (``kvferry.pool.policy``), by runs of blocks instead of one by one.

What a request touched last is one piece of its path. It is kept as stretches of one level and age; of each,
what is held comes first, since tails leave before heads. Nothing that decides changes within a tick but the
coldest stretch of each level and the amount of what is new, so as much is stored at a time as changes
neither. Hits are those of the pool itself, if every request uses what it finds, stores the rest from its
head on, one block at a time, and puts its prefix in order.
"""

from collections import deque

from kvferry.lifetimes import LEVELS, NEVER, TOP, Lifetimes
from kvferry.traces.reuse import ReuseLog

_UNKNOWN = -1  # level of what was never stored, or is forgotten


class _Stretch:
    """Neighbouring blocks of one path, the first ``held`` of ``blocks`` in the cache."""

    __slots__ = ("blocks", "held", "level", "stamp", "tick")

    def __init__(self, level: int, tick: int, blocks: int, held: int) -> None:
        self.level = level
        self.tick = tick  # of its last use, in the time of ``lifetimes``
        self.blocks = blocks
        self.held = held
        self.stamp = 0


class ProductionCache:
    """A pool of ``capacity`` blocks of one size."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._lifetimes = Lifetimes(capacity)
        self._queues: list[deque[_Stretch]] = [deque() for _ in range(LEVELS)]  # coldest first
        self._pieces: list[list[_Stretch]] = []  # per request, in the order of its prompt
        self._new = 0  # blocks held that were not used yet
        self._stamp = 0

    def request(self, log: ReuseLog, request: int) -> int:
        """Blocks found of the next request of the log."""
        path: list[_Stretch] = []
        known = 0
        for previous, blocks in log.runs(request):
            path += self._taken(previous, blocks)
            known += blocks
        if log.blocks[request] > known:
            path.append(_Stretch(_UNKNOWN, NEVER, log.blocks[request] - known, 0))
        held: list[_Stretch] = []
        found = self._use(path, held)
        rest = self._store(path, held)
        self._put_in_order(held)
        self._pieces.append(held + rest)
        return found

    def _taken(self, previous: int, blocks: int) -> list[_Stretch]:
        """The first blocks of what an earlier request touched last. They are that request's no more."""
        piece = self._pieces[previous]
        taken = []
        gone = 0
        for stretch in piece:
            if not blocks:
                break
            part = min(blocks, stretch.blocks)
            held = min(part, stretch.held)
            taken.append(_Stretch(stretch.level, stretch.tick, part, held))
            blocks -= part
            stretch.blocks -= part
            stretch.held -= held
            gone += not stretch.blocks
        del piece[:gone]
        return taken

    def _use(self, path: list[_Stretch], held: list[_Stretch]) -> int:
        """Count the use of what is held of a path, and move it there; how many blocks."""
        lifetimes = self._lifetimes
        found = 0
        for stretch in path:
            blocks = stretch.held
            if not blocks:
                break
            lifetimes.used(stretch.level, stretch.tick, blocks, held=blocks)
            if not stretch.level:
                self._new -= blocks
            level = min(stretch.level + 1, TOP)
            lifetimes.enter(level, blocks)
            held.append(_Stretch(level, lifetimes.now, blocks, blocks))
            stretch.blocks -= blocks
            stretch.held = 0
            found += blocks
        return found

    def _store(self, path: list[_Stretch], held: list[_Stretch]) -> list[_Stretch]:
        """Store what is missing of a path, and add it to what is held; what finds no room."""
        for number, stretch in enumerate(path):
            while stretch.blocks:
                stored = self._store_some(stretch)
                if stored is None:
                    return [left for left in path[number:] if left.blocks]
                stretch.blocks -= stored.blocks
                held.append(stored)
        return []

    def _store_some(self, stretch: _Stretch) -> _Stretch | None:
        """Store the first blocks of a stretch. None: everything that is held is of the same request."""
        lifetimes = self._lifetimes
        blocks = min(stretch.blocks, max(1, lifetimes.until_tick - 1))
        if self._free:
            blocks = min(blocks, self._free)
            self._free -= blocks
        else:
            victim = self._victim()
            if victim is None:
                return None
            blocks = min(blocks, victim.held, lifetimes.new_until(self._new))
            victim.held -= blocks
            if not victim.level:
                self._new -= blocks
        level = 0
        if stretch.level != _UNKNOWN and lifetimes.remembered(stretch.tick):
            lifetimes.used(stretch.level, stretch.tick, blocks, held=0)
            level = min(stretch.level + 1, TOP)
        if not level:
            self._new += blocks
        lifetimes.store(blocks)
        lifetimes.enter(level, blocks)
        return _Stretch(level, lifetimes.now, blocks, blocks)

    def _victim(self) -> _Stretch | None:
        lifetimes = self._lifetimes
        as_lru = lifetimes.as_lru(self._new)
        best, least = None, 0.0
        for queue in self._queues:
            while queue and not queue[0].held:
                queue.popleft()
            if queue:
                coldest = queue[0]
                worth = coldest.stamp if as_lru else lifetimes.worth(coldest.level, coldest.tick)
                if best is None or worth < least:
                    best, least = coldest, worth
        return best

    def _put_in_order(self, held: list[_Stretch]) -> None:
        """Stamp it from its tail to its head, a head at least as often used as its tail; merge levels."""
        lifetimes, now = self._lifetimes, self._lifetimes.now
        ordered: list[_Stretch] = []
        level = 0
        for stretch in reversed(held):
            blocks = stretch.blocks
            if stretch.level < level or stretch.tick != now:
                lifetimes.leave(stretch.level, stretch.tick, blocks)
                if not stretch.level and level:
                    self._new -= blocks
                level = max(level, stretch.level)
                lifetimes.enter(level, blocks)
            level = max(level, stretch.level)
            if ordered and ordered[-1].level == level:
                ordered[-1].blocks += blocks
                ordered[-1].held += blocks
            else:
                ordered.append(_Stretch(level, now, blocks, blocks))
        for stretch in ordered:
            self._stamp += 1
            stretch.stamp = self._stamp
            self._queues[stretch.level].append(stretch)
        held[:] = ordered[::-1]
