"""What waits to be done: reads, writes and marks, each with its deadline. Used under the tier's lock."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.identity.names import PartRef
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.segments import Place

Report = Callable[[], None]
"""Tells a caller how something ended; called without the lock."""


class Operation:
    """A ``contract.Transfer``: items with one deadline, monotonic seconds. wake: of whoever ends them."""

    __slots__ = ("_wake", "cancelled", "deadline")

    def __init__(self, deadline: float, wake: Callable[[], None]) -> None:
        self.deadline = deadline
        self.cancelled = False
        self._wake = wake

    def cancel(self) -> None:
        """See the contract. What the disk is moving at that moment ends when it has been moved."""
        self.cancelled = True
        self._wake()

    def over(self, now: float) -> bool:
        """Whether nothing of it is wanted any more."""
        return self.cancelled or now >= self.deadline


@dataclass(slots=True, eq=False)
class Item:
    """One part to read or write. ended: called once, with its checksums if it was read."""

    operation: Operation
    ref: PartRef
    memory: memoryview
    ended: Callable[[Outcome, tuple[bytes, ...]], None]
    checksums: tuple[bytes, ...] = ()
    write: bool = False


@dataclass(slots=True, eq=False)
class Removal:
    """Parts that are not found any more, and the places where that must still be written down."""

    places: list[Place]
    outcomes: Sequence[Outcome]
    deadline: float
    done: Callable[[Sequence[Outcome]], None] | None

    def end(self, ending: Outcome | None = None) -> None:
        """Tell, unless that was done before. ending: of all of it, instead of what was found."""
        done, self.done = self.done, None
        if done is not None:
            done([ending] * len(self.outcomes) if ending is not None else self.outcomes)


class WorkQueue:
    """First come, first served; at most ``limit`` items."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Item] = deque()
        self._operations: Counter[Operation] = Counter()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def put(self, item: Item) -> bool:
        """False when it is full."""
        if len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._operations[item.operation] += 1
        return True

    def take(self) -> Item:
        """The first. IndexError when there is none."""
        item = self._items.popleft()
        self._leave(item)
        return item

    def take_this(self, item: Item) -> None:
        """One that is near the front."""
        self._items.remove(item)
        self._leave(item)

    def take_all(self) -> list[Item]:
        items = list(self._items)
        self._items.clear()
        self._operations.clear()
        return items

    def take_over(self, now: float) -> list[Item]:
        """Those that nobody wants any more."""
        if not any(operation.over(now) for operation in self._operations):
            return []
        over: list[Item] = []
        left: deque[Item] = deque()
        for item in self._items:  # in one pass: a cancellation may come at any time
            (over if item.operation.over(now) else left).append(item)
        self._items = left
        self._operations = Counter(item.operation for item in left)
        return over

    def next_deadline(self) -> float:
        """Monotonic seconds; infinite when nothing waits."""
        return min((operation.deadline for operation in self._operations), default=math.inf)

    def _leave(self, item: Item) -> None:
        self._operations[item.operation] -= 1
        if not self._operations[item.operation]:
            del self._operations[item.operation]
