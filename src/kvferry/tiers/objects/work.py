"""What callers wait for, and how it ends. Used under the tier's lock.

                claim            end
    WAITING ──────────► MOVING ───────► ENDED        a part is being copied to or from the caller's memory
       │ ▲                 │
       │ └─── unclaim ─────┘                         it lies in a pack that is not uploaded yet
       └────────── end ────────────────► ENDED       done, late, refused, missed ...

Only what is MOVING touches the caller's memory, and that takes as long as a copy does; so everything ends on
time, whatever the bucket does.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.identity.names import PartRef
from kvferry.tiers.contract import Outcome

Report = Callable[[], None]
"""Tells a caller how something ended; called without the lock."""


class State(enum.Enum):
    """Of an item; see above."""

    WAITING = "waiting"
    MOVING = "moving"
    ENDED = "ended"


class Operation:
    """A ``contract.Transfer``: items with one deadline, monotonic seconds. over_now: ends what waits."""

    __slots__ = ("_over_now", "cancelled", "deadline", "items")

    def __init__(self, deadline: float, over_now: Callable[["Operation"], None]) -> None:
        self.deadline = deadline
        self.cancelled = False
        self.items: set[Item] = set()  # that have not ended
        self._over_now = over_now

    def cancel(self) -> None:
        """See the contract."""
        self.cancelled = True
        self._over_now(self)

    @property
    def over(self) -> bool:
        """Whether nothing of it is wanted any more."""
        return self.cancelled or time.monotonic() >= self.deadline


@dataclass(slots=True, eq=False)
class Item:
    """One part to read or write. ended: called once, with its checksums if it was read."""

    operation: Operation
    ref: PartRef
    memory: memoryview
    ended: Callable[[Outcome, tuple[bytes, ...]], None]
    checksums: tuple[bytes, ...] = ()
    write: bool = False
    state: State = State.WAITING
    began: float = field(default_factory=time.monotonic)
