"""Who waits for which part: one fetch per missing part, whoever asks for it. Pure.

A fetch lives from its reservation until the tier has called ``done`` for it. It is asked to end early
only when nobody waits for any part of its batch any more; its slot stays reserved until ``done``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey
from kvferry.node.loads import At

HANGS_S = 1.0
"""A cancelled fetch ends sooner, unless what it was asked of hangs."""


class Waiter(NamedTuple):
    """A part of a load that waits for a fetch."""

    load_id: int
    at: At


@dataclass(slots=True)
class Batch:
    """Parts that went to the tier in one call, and can be cancelled only together."""

    number: int
    waiting: int = 0  # waiters over all its parts
    unfinished: int = 0
    deadline: float = 0.0  # monotonic
    cancelled: bool = False
    cancelled_at: float = 0.0
    measured: bool = True  # every part so far says something about the tier's speed
    late: bool = False  # some part was given up because it took too long

    def ends_before(self, deadline: float) -> bool:
        """Whether a part of it that is LATE need not be late for someone with this deadline."""
        return self.cancelled or self.deadline < deadline


@dataclass(slots=True)
class _Fetch:
    batch: Batch
    waiters: list[Waiter] = field(default_factory=list[Waiter])


class FetchTable:
    """All running fetches of a node."""

    def __init__(self) -> None:
        self._fetches: dict[PartKey, _Fetch] = {}
        self._batches = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def new_batch(self) -> Batch:
        """For the parts of one call to the tier."""
        self._batches += 1
        return Batch(self._batches)

    def known(self, key: PartKey) -> bool:
        """Is there a fetch of this part whose ``done`` has not been called? It may be cancelled."""
        return key in self._fetches

    def hangs(self, key: PartKey, now: float) -> bool:
        """Whether it was cancelled so long ago that nobody should wait for its end."""
        fetch = self._fetches.get(key)
        return fetch is not None and fetch.batch.cancelled and now > fetch.batch.cancelled_at + HANGS_S

    def waiters(self, key: PartKey) -> Sequence[Waiter]:
        """Who waits for it."""
        fetch = self._fetches.get(key)
        return () if fetch is None else tuple(fetch.waiters)

    def begin(self, key: PartKey, batch: Batch, waiter: Waiter) -> None:
        """A slot is reserved and the tier is about to be asked. Raises BrokenError on a second fetch."""
        if key in self._fetches:
            raise BrokenError(f"two fetches of one part {key.part} of chunk {key.chunk.hex()[:12]}")
        self._fetches[key] = _Fetch(batch, [waiter])
        batch.unfinished += 1
        batch.waiting += 1

    def join(self, key: PartKey, waiter: Waiter) -> None:
        """Wait for a known fetch. If it was cancelled, it ends as LATE, and the waiter begins its own."""
        fetch = self._fetches[key]
        fetch.waiters.append(waiter)
        fetch.batch.waiting += 1

    def leave(self, key: PartKey, waiter: Waiter) -> Batch | None:
        """Stop waiting. Returns the batch when nobody waits for any of it now: cancel it."""
        fetch = self._fetches.get(key)
        if fetch is None or waiter not in fetch.waiters:
            return None
        fetch.waiters.remove(waiter)
        fetch.batch.waiting -= 1
        if fetch.batch.waiting or fetch.batch.cancelled:
            return None
        fetch.batch.cancelled = True
        return fetch.batch

    def finish(self, key: PartKey) -> tuple[list[Waiter], Batch]:
        """The tier has called ``done``. Returns who waits for it still."""
        fetch = self._fetches.pop(key)
        fetch.batch.waiting -= len(fetch.waiters)
        fetch.batch.unfinished -= 1
        return fetch.waiters, fetch.batch
