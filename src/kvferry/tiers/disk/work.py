"""What waits to be done: reads, writes and marks, each with its deadline. Used under the tier's lock."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.identity.names import PartRef
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk.dropping import Sweep
from kvferry.tiers.disk.places import Place

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
    """Parts that are not found any more. places: where that must still be written down, pinned.

    ended: called once, with OK, or why it may not hold after a restart.
    """

    places: list[Place]
    deadline: float
    ended: Callable[[Outcome], None] | None
    outcome: Outcome = Outcome.OK

    @property
    def awaited(self) -> bool:
        return self.ended is not None

    def end(self, outcome: Outcome | None = None) -> None:
        """Tell, unless that was done before. outcome: instead of its own."""
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(outcome or self.outcome)


@dataclass(slots=True, eq=False)
class Drop:
    """A drop under way. sweep: what it is about. marks: what must be written down for it. erasing: segments
    that must be erased before it is done, once it is through all of them."""

    sweep: Sweep
    deadline: float
    done: Callable[[Dropped], None] | None
    marks: list[Removal] = field(default_factory=list[Removal])
    erasing: set[tuple[int, int]] | None = None

    @property
    def awaited(self) -> bool:
        return self.done is not None

    @property
    def over(self) -> bool:
        """Whether it will hold after a restart, or is known not to."""
        return self.erasing is not None and not self.erasing and not any(each.places for each in self.marks)

    def end(self, outcome: Outcome | None = None) -> None:
        """Tell, unless that was done before."""
        done, self.done = self.done, None
        failed = any(each.outcome is not Outcome.OK for each in self.marks)
        if done is not None:
            own = Outcome.FAILED if failed else Outcome.OK
            done(Dropped(self.sweep.parts, self.sweep.nbytes, outcome or own))


class WorkQueue:
    """First come, first served. While ``limit`` items wait or more, it takes no other operation."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Item] = deque()
        self._operations: Counter[Operation] = Counter()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    @property
    def full(self) -> bool:
        """An operation that is begun is taken whole, however long: a large load is not cut."""
        return len(self._items) >= self._limit

    def put(self, item: Item) -> None:
        """At the end."""
        self._items.append(item)
        self._operations[item.operation] += 1

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
