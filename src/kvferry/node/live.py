"""What the driver keeps for a load and for a batch of fetches while they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.costs import TransferTicket
from kvferry.identity.names import PartKey
from kvferry.loop import Timer
from kvferry.node.framing import join_checksums
from kvferry.node.loads import At, Load
from kvferry.node.server import Connection
from kvferry.node.state import Namespace
from kvferry.node.wire import MAX_BATCH, LoadEnded, PartsReady, Place, Reason, Tier
from kvferry.pool.entries import Owner, Slot
from kvferry.tiers.contract import Outcome, Transfer

REASONS = {
    Outcome.MISS: Reason.GONE,
    Outcome.CORRUPT: Reason.CORRUPT,
    Outcome.REFUSED: Reason.TIER_DOWN,
    Outcome.LATE: Reason.DEADLINE,
    Outcome.FAILED: Reason.FAILED,
    Outcome.OVER_QUOTA: Reason.LIMIT,
}


class RunningBatch(NamedTuple):
    """A batch, all of which lies in one tier. timing: until the estimate of that tier's speed has it."""

    tier: Tier
    transfer: Transfer
    timing: TransferTicket | None


@dataclass(slots=True, eq=False)
class LiveLoad:
    """A load and what the driver keeps for it. connection: the scheduler's, which owns it.

    deep: where keepers have what the tier has not. listeners: by part; ranks that hold equal bytes share one.
    ready: what a rank that joins is sent at once; unsent: what those that have joined were not sent yet.
    """

    load_id: int
    request_id: str
    connection: Connection
    space: Namespace
    owner: Owner
    load: Load
    first_chunk: int
    started: float
    deadline: float
    stall_s: float
    progress: float
    deep: Mapping[tuple[int, int], Tier] = field(default_factory=dict[tuple[int, int], Tier])
    listeners: dict[int, list[Connection]] = field(default_factory=dict[int, list[Connection]])
    ready: dict[At, Place] = field(default_factory=dict[At, Place])
    unsent: dict[int, list[Place]] = field(default_factory=dict[int, list[Place]])
    fetched_bytes: int = 0
    told_end: dict[int, int] = field(default_factory=dict[int, int])
    timer: Timer | None = None

    def key(self, at: At) -> PartKey:
        """The name of one of its parts."""
        return PartKey(self.space.namespace, self.load.chunks[at.position], at.part)

    def place(self, at: At, slot: Slot) -> Place:
        """Where one of its parts lies, for a worker."""
        return Place(
            chunk=self.first_chunk + at.position,
            part=at.part,
            offset=slot.offset,
            checksums=join_checksums(slot.checksums),
        )

    def say(self, listeners: Sequence[Connection], places: Sequence[Place]) -> None:
        """These are ready."""
        for at in range(0, len(places), MAX_BATCH):
            message = PartsReady(load_id=self.load_id, places=tuple(places[at : at + MAX_BATCH]))
            for connection in listeners:
                connection.send(message)

    def say_that_it_comes(self) -> None:
        """To all who listen: nothing has stalled."""
        for connection in dict.fromkeys(one for each in self.listeners.values() for one in each):
            connection.send(PartsReady(load_id=self.load_id, places=()))

    def say_end(self, part: int, listeners: Sequence[Connection]) -> None:
        """Where it was cut, if it was."""
        end, reason = self.load.end, self.load.reason
        if end < len(self.load.chunks):
            chunk = self.first_chunk + end
            message = LoadEnded(load_id=self.load_id, part=part, chunk=chunk, reason=reason)
            for connection in listeners:
                connection.send(message)
