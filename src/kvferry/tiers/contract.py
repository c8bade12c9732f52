"""The contract every tier behind host memory fulfils (Valkey today; disk and objects later).

A tier moves parts between its store and memory that the caller owns. Calls return at once; the work
happens on the tier's own threads, which call ``done`` back exactly once per item. When ``done`` has
been called for an item, no thread of the tier will touch that item's memory again: only then may the
caller reuse it. That holds for cancelled and late items too.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from kvferry.identity.names import PartRef


class Outcome(enum.Enum):
    """How one item of an operation ended. Only MISS means the store was asked and does not have it."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"  # present, but header or checksum did not match; the tier has removed it
    REFUSED = "refused"  # the store declined: out of memory, no permission, breaker open
    LATE = "late"  # the deadline passed, or the caller cancelled
    FAILED = "failed"  # connection, protocol or server error
    OVER_QUOTA = "over-quota"  # of a store: this node may not put so much there


class FetchItem(NamedTuple):
    """ref: what to read. into: writable contiguous memory of exactly ``ref.nbytes`` bytes."""

    ref: PartRef
    into: memoryview


class StoreItem(NamedTuple):
    """ref: what to write. data: contiguous memory of exactly ``ref.nbytes`` bytes, unchanged until done.

    checksums: one 16-byte checksum per stripe of the part (``identity.stripes``); none where the data has
    none yet: the tier computes them as it writes.
    position: how many chunks of the prompt come before this one: a full store does best to lose tails first.
    """

    ref: PartRef
    data: memoryview
    checksums: tuple[bytes, ...]
    position: int = 0


class FetchResult(NamedTuple):
    """checksums: one 16-byte checksum per stripe when outcome is OK, else empty."""

    outcome: Outcome
    checksums: tuple[bytes, ...]


class Dropped(NamedTuple):
    """What a drop removed. outcome: OK, or why some of it may be found again after a restart.

    nbytes: of the parts, without what the store keeps beside them.
    """

    parts: int
    nbytes: int
    outcome: Outcome = Outcome.OK


class Transfer(Protocol):
    """A running fetch or store."""

    def cancel(self) -> None:
        """Ask unfinished items to end soon as LATE. ``done`` is still called once for each."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A frozen snapshot. Counters are since start; ``inflight_bytes`` and ``state`` are now."""

    name: str
    state: str  # "up", "degraded" (some shards fail), "down"
    fetched_parts: int
    fetched_bytes: int
    stored_parts: int
    stored_bytes: int
    missed_parts: int
    failed: dict[str, int]  # cause -> count
    inflight_bytes: int
    detail: dict[str, str]  # for people: server version, shards, addresses without secrets


class Tier(Protocol):
    """Deadlines are absolute ``time.monotonic()`` seconds. Nothing here blocks or raises for I/O."""

    name: str

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """Which parts are wholly present (OK), absent (MISS) or unknown (any other). Refreshes recency."""

    def fetch(
        self,
        items: Sequence[FetchItem],
        *,
        deadline: float,
        done: Callable[[int, FetchResult], None],
    ) -> Transfer:
        """Read parts, in order of preference; ``done(index, result)`` as each is complete and verified."""
        ...

    def store(
        self,
        items: Sequence[StoreItem],
        *,
        deadline: float,
        done: Callable[[int, Outcome], None],
    ) -> Transfer:
        """Write parts that are not there yet. OK also when an equal part was already there."""
        ...

    def touch(self, refs: Sequence[PartRef]) -> None:
        """Refresh recency, last reference first, so that a prefix's head ends as the most recent."""

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """Delete parts, in the background. ``done`` hears which are gone: OK, or MISS if it was not there."""

    def statistics(self) -> TierStatistics:
        """A snapshot; never blocks on I/O."""
        ...

    def close(self) -> None:
        """End all work (remaining items finish as LATE), join threads, close sockets. Idempotent."""


@runtime_checkable
class Droppable(Protocol):
    """A tier that can forget many parts without being told their names."""

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """Forget all parts; of one namespace; or that nobody stored or used for so many seconds.

        They are not found any more from the call on. ``done`` is called once, when a restart will not find
        them either. What is being stored meanwhile may stay. Nothing here blocks or raises for I/O.
        """
        ...


@runtime_checkable
class LowerTier(Tier, Droppable, Protocol):
    """One that can also forget what it is not told the names of: the disk, objects."""
