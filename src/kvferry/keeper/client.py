"""A node's side of its keepers: what it tells them and asks of them, on one thread of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.identity.names import PartRef
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.wire import Where
from kvferry.tiers.contract import Outcome, Transfer
from kvferry.tiers.valkey.url import Address

__all__ = ["KeeperAccess", "KeeperStatus", "Keepers", "KeepersStatistics", "Where"]


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """One keeper, as this node sees it now. Counters are since start.

    state: "up", "silent" (connected, does not answer), "down", "refused" (it does not want this node).
    dropped: parts it was not told about. lost: questions that it never answered.
    """

    address: str
    name: str
    version: str
    state: str
    error: str
    connects: int
    pending: int
    queued_parts: int
    dropped_parts: int
    located_parts: int
    staged_parts: int
    lost: int


@dataclass(frozen=True, slots=True)
class KeepersStatistics:
    """All of them, in the order of their addresses."""

    keepers: tuple[KeeperStatus, ...]
    defects: int

    @property
    def up(self) -> int:
        """How many are up."""
        return sum(keeper.state == "up" for keeper in self.keepers)


class _Ended(NamedTuple):
    """A transfer with nothing under way."""

    def cancel(self) -> None:
        """Nothing to cancel."""


class Keepers:
    """Any thread may call; nothing blocks. ``done`` is called on this object's own thread.

    Each part has one keeper, by rendezvous of its chunk's digest over those that are up. Deadlines are
    absolute ``clock`` seconds.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        access: KeeperAccess,
        node: str = "",
        key_ids: Sequence[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """node: this node's name, for people. key_ids: of its encryption keys, the current one first."""
        self._addresses = tuple(addresses)

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each part is; UNKNOWN where its keeper did not say so by the deadline. Once."""
        done([Where.UNKNOWN] * len(refs))

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """Have parts brought into Valkey, in this order. Once per index, by the deadline.

        OK: it is there now. MISS: its keeper does not have it. REFUSED: no keeper is up. LATE: not in
        time. FAILED: its keeper went away, or could not.
        """
        for index in range(len(refs)):
            done(index, Outcome.REFUSED)
        return _Ended()

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in Valkey now. positions: chunks of the prompt before each. likely: wanted again.

        This, ``used`` and ``remove`` are told at most once; what a keeper that is down misses is counted.
        """

    def used(self, refs: Sequence[PartRef]) -> None:
        """These were loaded."""

    def remove(self, refs: Sequence[PartRef]) -> None:
        """The bytes of these are wrong: away with them, in every tier. All keepers are told."""

    def statistics(self) -> KeepersStatistics:
        """A snapshot, from any thread."""
        return KeepersStatistics((), 0)

    def close(self) -> None:
        """End everything under way as LATE, join the thread. Idempotent."""
