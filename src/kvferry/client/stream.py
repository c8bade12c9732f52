"""The parts of one load for one rank, handed out in chunk order whatever order they arrive in."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.client.messages import LoadEnd, LoadTicket, PartPlace, Pending, ReadyPart, Reason
from kvferry.errors import KvferryError
from kvferry.node.framing import split_checksums
from kvferry.node.wire import Place
from kvferry.pool.arena import ArenaMapping

COPIED_BATCH = 16
GRACE_S = 0.1


class StreamOwner(Protocol):
    """What a stream needs of its client."""

    def pump(self) -> None:
        """Handle what has arrived, without waiting."""

    def tell_copied(self, load_id: int, part: int, chunks: Sequence[int]) -> None:
        """These were copied."""

    def tell_corrupt(self, load_id: int, part: int, chunk: int) -> None:
        """This one did not match."""

    def forget(self, stream: "LoadStream") -> None:
        """The stream is closed."""


class LoadStream:
    """Used by one thread at a time; ``arrived`` and ``ended`` come from any, under the client's lock."""

    def __init__(
        self,
        ticket: LoadTicket,
        *,
        owner: StreamOwner,
        mapping: ArenaMapping | None,
        part_bytes: int,
        changed: threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ticket = ticket
        self._owner = owner
        self._mapping = mapping
        self._part_bytes = part_bytes
        self._changed = changed
        self._clock = clock
        self._places: dict[int, PartPlace] = {
            ticket.first_chunk + at: place for at, place in enumerate(ticket.places) if place is not None
        }
        self._next = ticket.first_chunk
        self._last = ticket.first_chunk + len(ticket.places)
        self._progress = clock()
        # A request that waited long in the engine's queue still gets what the node has ready.
        self._deadline = max(ticket.deadline, self._progress + GRACE_S)
        self._end: LoadEnd | None = None
        self._copied: list[int] = []
        self._closed = False

    @property
    def waits(self) -> bool:
        """Some parts were not ready when the ticket was made."""
        return len(self._places) < len(self.ticket.places)

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        """The next part, waiting at most timeout_s (0: only what is there). LoadEnd is final.

        The view is the pool's memory: read it only. A wait is cut short by the load's deadline and, when
        nothing arrives, by its stall timeout.
        """
        with self._changed:
            give_up = self._clock() + timeout_s
            pumped = False
            while True:
                now = self._clock()
                step = self._step(now)
                if step is not None:
                    return step
                if not pumped:
                    pumped = True
                    self._flush()
                    self._owner.pump()
                    continue
                wait_s = min(give_up, self._deadline, self._progress + self.ticket.stall_s) - now
                if give_up <= now:
                    return Pending.PENDING
                self._changed.wait(max(wait_s, 0.0))

    def copied(self, index: int) -> None:
        """That chunk's part was copied and its checksums matched: its slot may be reused."""
        with self._changed:
            self._progress = self._clock()
            self._copied.append(index)
            if len(self._copied) >= COPIED_BATCH:
                self._flush()

    def resumed(self) -> None:
        """Its reader was busy with another part, or the node says that it comes: nothing has stalled."""
        with self._changed:
            self._progress = self._clock()

    def corrupt(self, index: int) -> None:
        """The copy's checksums did not match: the part is removed everywhere, the stream ends there."""
        with self._changed:
            self._owner.tell_corrupt(self.ticket.load_id, self.ticket.part, index)
            self.ended(Reason.CORRUPT, index)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._flush()
                self._owner.forget(self)
                self._mapping = None

    def attach(self, mapping: ArenaMapping | None) -> None:
        """The node of the ticket is connected, after the stream began."""
        self._mapping = mapping
        self._changed.notify_all()

    def arrived(self, place: Place) -> None:
        """The node says that a part is ready."""
        if self._next <= place.chunk < self._last:
            self._places[place.chunk] = PartPlace(place.offset, place.checksums)
            self._progress = self._clock()
            self._changed.notify_all()

    def ended(self, reason: Reason, chunk: int) -> None:
        """Chunks from this one on will not come. The earliest end counts."""
        if self._end is None or chunk < self._end.chunk:
            self._end = LoadEnd(reason, max(chunk, self._next))
            self._changed.notify_all()

    def _step(self, now: float) -> ReadyPart | LoadEnd | None:
        if self._end is not None and self._next >= self._end.chunk:
            return self._end
        if self._next >= self._last or not self._part_bytes:
            return LoadEnd(Reason.COMPLETE, self._last)
        mapping = self._mapping
        place = None if mapping is None else self._places.pop(self._next, None)
        if place is not None and mapping is not None:
            index = self._next
            self._next += 1
            try:
                view = mapping.view(place.offset, self._part_bytes)
                return ReadyPart(index, view, split_checksums(place.checksums))
            except KvferryError:  # a place that cannot be, or the pool is unmapped already
                self._next = index
                self.ended(Reason.REFUSED, index)
                return self._end
        if now >= self._deadline:
            self.ended(Reason.DEADLINE, self._next)
            return self._end
        if now >= self._progress + self.ticket.stall_s:
            self.ended(Reason.STALLED, self._next)
            return self._end
        return None

    def _flush(self) -> None:
        if self._copied:
            copied, self._copied = self._copied, []
            self._owner.tell_copied(self.ticket.load_id, self.ticket.part, copied)
