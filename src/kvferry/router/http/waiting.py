"""Requests for which no worker has room yet, first come first served. Bounded."""

from collections.abc import Callable, Iterator
from typing import Protocol

LOOKED_AT = 64
"""Of those that wait, when a place gets free: the first may want other workers."""


class Waiter(Protocol):
    """One that waits."""

    def place(self) -> bool:
        """Take a place now, if there is one for it."""
        ...


class Waiting:
    """Ordered by arrival."""

    def __init__(self, limit: int, *, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._since: dict[Waiter, float] = {}
        self._waking = False

    def __len__(self) -> int:
        return len(self._since)

    def join(self, waiter: Waiter) -> bool:
        """Whether there was room for it to wait."""
        if len(self._since) >= self._limit:
            return False
        self._since[waiter] = self._clock()
        return True

    def leave(self, waiter: Waiter) -> None:
        """It does not wait, any more."""
        self._since.pop(waiter, None)

    def wake(self) -> None:
        """A place got free, or a worker came."""
        if not self._since or self._waking:
            return
        self._waking = True
        try:
            for waiter in list(self._first()):
                if waiter in self._since and waiter.place():
                    self._since.pop(waiter, None)
        finally:
            self._waking = False

    def older_than(self, seconds: float) -> list[Waiter]:
        """Those that have waited for so long."""
        since = self._clock() - seconds
        found = []
        for waiter, joined in self._since.items():
            if joined > since:
                break
            found.append(waiter)
        return found

    def _first(self) -> Iterator[Waiter]:
        for count, waiter in enumerate(self._since):
            if count == LOOKED_AT:
                return
            yield waiter
