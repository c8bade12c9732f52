"""Committed parts on their way to the tier behind memory: a queue bounded in bytes. Pure.

    offer ──► queued ──take──► checking (is it there already?) ──► storing ──► finished
      │          └◄──────────────────────again────────────────────────┘
      └─► DROPPED when the queue is full: the part stays in memory and is a miss elsewhere

Every part in it is pinned by the driver from ``offer`` until ``finished``.
"""

from collections import deque
from typing import NamedTuple

from kvferry.identity.names import PartRef

MAX_BATCH_PARTS = 256


class Unsaved(NamedTuple):
    """A part to write. offset: where its bytes lie in the pool. position: see ``StoreItem``.

    likely: that it will be wanted again (``worth``).
    """

    ref: PartRef
    offset: int
    checksums: tuple[bytes, ...]
    position: int = 0
    tries: int = 0
    likely: bool = False


class WriteBack:
    """max_bytes: queued and under way together. max_batch_bytes: under way at a time."""

    def __init__(self, *, max_bytes: int, max_batch_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_batch_bytes = max_batch_bytes
        self._queue: deque[Unsaved] = deque()
        self._queued_bytes = 0
        self._busy_bytes = 0

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are queued or under way."""
        return self._queued_bytes + self._busy_bytes

    @property
    def backlog_parts(self) -> int:
        """Parts that are queued, not yet under way."""
        return len(self._queue)

    def offer(self, unsaved: Unsaved) -> bool:
        """Whether it was queued; refused when the backlog would pass its bound. Alone, a part always fits."""
        if self.backlog_bytes and self.backlog_bytes + unsaved.ref.nbytes > self._max_bytes:
            return False
        self._queue.append(unsaved)
        self._queued_bytes += unsaved.ref.nbytes
        return True

    def take(self) -> list[Unsaved]:
        """The next batch to put under way; empty when there is nothing or enough is under way."""
        batch: list[Unsaved] = []
        while self._queue and len(batch) < MAX_BATCH_PARTS:
            nbytes = self._queue[0].ref.nbytes
            if self._busy_bytes and self._busy_bytes + nbytes > self._max_batch_bytes:
                break
            batch.append(self._queue.popleft())
            self._queued_bytes -= nbytes
            self._busy_bytes += nbytes
        return batch

    def again(self, unsaved: Unsaved) -> None:
        """It failed in passing: back into the queue, behind the others."""
        self.finished(unsaved)
        self._queue.append(unsaved._replace(tries=unsaved.tries + 1))
        self._queued_bytes += unsaved.ref.nbytes

    def finished(self, unsaved: Unsaved) -> None:
        """It is stored, or given up: no longer under way."""
        self._busy_bytes -= unsaved.ref.nbytes
