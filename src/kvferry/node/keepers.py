"""What a node asks of the keepers, and tells them. ``keeper.client.Keepers`` does it over the network."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.identity.names import PartRef
from kvferry.keeper.client import KeepersStatistics
from kvferry.keeper.wire import Where
from kvferry.node.wire import Tier
from kvferry.tiers.contract import Outcome, Transfer

TIERS = {Where.DISK: Tier.DISK, Where.OBJECTS: Tier.OBJECTS}
"""What lies where."""


class Keepers(Protocol):
    """All of them together. Calls return at once; ``done`` comes on a thread of theirs.

    Deadlines are absolute ``time.monotonic()`` seconds. Nothing here blocks or raises for I/O.
    """

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each part is; what cannot be known by the deadline is UNKNOWN. ``done`` once."""

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """Bring parts into the tier, in order of preference. ``done`` once per index; OK: it is there now."""
        ...

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in the tier. positions: chunks of the prompt before each. likely: to be wanted again."""

    def used(self, refs: Sequence[PartRef]) -> None:
        """A prompt wanted these, and they were there."""

    def remove(self, refs: Sequence[PartRef]) -> None:
        """Delete these everywhere."""

    def statistics(self) -> KeepersStatistics:
        """A snapshot, from any thread."""
        ...

    def close(self) -> None:
        """End all work: what is not done ends as LATE or UNKNOWN. Idempotent."""
