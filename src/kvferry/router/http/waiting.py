"""Requests for which no worker has room yet, in lanes: first come first served in each. Bounded.

All in a lane want the same workers. A lane that waits for a full worker holds up no other one.
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

    def place(self) -> bool:
        """Take a place now, if there is one for it."""
        ...


class Waiting:
    """Ordered by arrival, in each lane."""

    def __init__(self, limit: int, *, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._lanes: dict[Hashable, dict[Waiter, float]] = {}
        self._where: dict[Waiter, Hashable] = {}  # its lane
        self._waking = False

    def __len__(self) -> int:
        return len(self._where)

    def has(self, lane: Hashable) -> bool:
        """Whether somebody waits there."""
        return lane in self._lanes

    def join(self, waiter: Waiter) -> bool:
        """Whether there was room for it to wait."""
        if len(self._where) >= self._limit:
            return False
        key = self._where[waiter] = waiter.lane
        self._lanes.setdefault(key, {})[waiter] = self._clock()
        return True

    def leave(self, waiter: Waiter) -> None:
        """It does not wait, any more."""
        if waiter not in self._where:
            return
        key = self._where.pop(waiter)
        lane = self._lanes[key]
        del lane[waiter]
        if not lane:
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
        for lane in self._lanes.values():
            for waiter, joined in lane.items():
                if joined > since:
                    break
                found.append(waiter)
        return found

    def _place(self, key: Hashable) -> None:
        """As many of the lane as find a place. It comes last the next time."""
        while key in self._lanes:
            waiter = next(iter(self._lanes[key]))
            if not waiter.place():
                self._lanes[key] = self._lanes.pop(key)
                return
            self.leave(waiter)
