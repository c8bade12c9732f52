"""Requests for which no worker has room yet, in lanes. Bounded, and shared out between callers.

    lane ──► callers, in turn ──► the requests of each, first come first served

All in a lane want the same workers. A lane that waits for a full worker holds up no other one. A caller with
a thousand requests gets every second place beside one that has two; and where there is no room left to wait,
whoever has the most waiting loses the newest of them.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

LANES_LOOKED_AT = 64
"""When a place gets free; the others are looked at when the next one does."""


class Waiter(Protocol):
    """One that waits."""

    @property
    def lane(self) -> Hashable:
        """The same for all that may be placed at the same workers."""
        ...

    @property
    def caller(self) -> str:
        """Whose it is."""
        ...

    def place(self) -> bool:
        """Take a place now, if there is one for it."""
        ...

    def crowded_out(self) -> None:
        """It waits no longer: another caller, who has fewer waiting, needs the room."""
        ...


class Waiting:
    """In each lane callers take turns."""

    def __init__(self, limit: int, *, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._lanes: dict[Hashable, dict[str, dict[Waiter, float]]] = {}
        self._where: dict[Waiter, tuple[Hashable, str]] = {}  # its lane and whose it is
        self._callers: dict[str, dict[Waiter, None]] = {}
        self._ranks: dict[int, dict[str, None]] = {}  # callers by how many they have waiting
        self._most = 0
        self._waking = False

    def __len__(self) -> int:
        return len(self._where)

    def has(self, lane: Hashable) -> bool:
        """Whether somebody waits there."""
        return lane in self._lanes

    def join(self, waiter: Waiter) -> bool:
        """Whether there was room for it to wait, or could be made."""
        key, caller = waiter.lane, waiter.caller
        if len(self._where) >= self._limit and not self._make_room(caller):
            return False
        self._where[waiter] = key, caller
        self._lanes.setdefault(key, {}).setdefault(caller, {})[waiter] = self._clock()
        mine = self._callers.setdefault(caller, {})
        mine[waiter] = None
        self._rank(caller, len(mine) - 1, len(mine))
        return True

    def leave(self, waiter: Waiter) -> None:
        """It does not wait, any more."""
        if waiter not in self._where:
            return
        key, caller = self._where.pop(waiter)
        callers, count = self._lanes[key], len(self._callers[caller])
        self._rank(caller, count, count - 1)
        for of, name in ((callers, caller), (self._callers, caller)):
            del of[name][waiter]
            if not of[name]:
                del of[name]
        if not callers:
            del self._lanes[key]

    def wake(self) -> None:
        """A place got free, or a worker came."""
        if not self._lanes or self._waking:
            return
        self._waking = True
        try:
            for key in list(self._lanes)[:LANES_LOOKED_AT]:
                self._place(key)
        finally:
            self._waking = False

    def older_than(self, seconds: float) -> list[Waiter]:
        """Those that have waited for so long."""
        since = self._clock() - seconds
        found = []
        for callers in self._lanes.values():
            for waiters in callers.values():
                for waiter, joined in waiters.items():
                    if joined > since:
                        break
                    found.append(waiter)
        return found

    def _place(self, key: Hashable) -> None:
        """As many of the lane as find a place. It comes last the next time, as does a caller who got one."""
        while key in self._lanes:
            callers = self._lanes[key]
            caller = next(iter(callers))
            waiter = next(iter(callers[caller]))
            if not waiter.place():
                self._lanes[key] = self._lanes.pop(key)
                return
            self.leave(waiter)
            if caller in callers:
                callers[caller] = callers.pop(caller)

    def _make_room(self, caller: str) -> bool:
        """By crowding out the newest of whoever has the most, if that is more than this one would have."""
        if self._most <= len(self._callers.get(caller, ())) + 1:
            return False
        newest = next(reversed(self._callers[next(iter(self._ranks[self._most]))]))
        self.leave(newest)
        newest.crowded_out()
        return True

    def _rank(self, caller: str, before: int, after: int) -> None:
        """One more or one less."""
        ranks = self._ranks
        if before:
            del ranks[before][caller]
            if not ranks[before]:
                del ranks[before]
        if after:
            ranks.setdefault(after, {})[caller] = None
        if after > self._most or self._most not in ranks:
            self._most = after
