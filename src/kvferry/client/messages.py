"""What engines hand to the clients and get back. Tickets are plain tuples: engines send them to workers."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import RefusedError
from kvferry.node.wire import Prefill, Reason, Report, ReserveOutcome, Tier

__all__ = [
    "LoadEnd",
    "LoadTicket",
    "LookupAnswer",
    "LookupRequest",
    "MatchAnswer",
    "NamespaceInfo",
    "PartPlace",
    "Pending",
    "Prefill",
    "ReadyPart",
    "Reason",
    "Report",
    "ReserveOutcome",
    "ReservedSlot",
    "Tier",
]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """namespace: fingerprint (16 bytes). part_bytes: by part number. domain, label: for people.

    trailing: by part number, which chunks a boundary needs of it: 0 for all before it, n for the last n
    (``Geometry.trailing``). Empty: all 0. cache_tokens: what the engine's own cache holds; 0: unknown.
    """

    namespace: bytes
    part_bytes: tuple[int, ...]
    chunk_tokens: int
    domain: str
    label: str = ""
    trailing: tuple[int, ...] = ()
    cache_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """chunks: digests of all chunks of the prompt that may be reused, from the prompt's start.

    first_chunk: how many of them the engine has itself. prompt_tokens: of the whole prompt.
    prefill: all zero to load whatever is there, whatever recomputing it would cost.
    queued_s: GPU seconds of requests that wait. deadline_cap_s: 0 takes the node's setting.
    engine_tokens: what the engine has of it in its own cache, as far as it is more than those chunks.
    """

    request_id: str
    chunks: Sequence[bytes]
    first_chunk: int
    prompt_tokens: int
    prefill: Prefill
    queued_s: float = 0.0
    deadline_cap_s: float = 0.0
    engine_tokens: int = 0


class PartPlace(NamedTuple):
    """A part that lies in the pool: byte offset, and one checksum per stripe, concatenated."""

    offset: int
    checksums: bytes


class LoadTicket(NamedTuple):
    """One rank's share of a load. places[i] is chunk first_chunk + i; None while it is in flight.

    first_chunk: the first that the load needs of this part; that of another part may be another.

    deadline: absolute ``time.monotonic()`` seconds (the same clock in every process of a host).
    """

    load_id: int
    epoch: int
    first_chunk: int
    part: int
    places: tuple[PartPlace | None, ...]
    deadline: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """count chunks from first_chunk on can be loaded; 0 with the reason when none can.

    tiers: a ``Tier`` per counted chunk. parts: per counted chunk a tuple over part numbers; None while
    in flight or not needed. A load_id that is not 0 must be given to ``SchedulerClient.end`` exactly once.
    deadline_s, stall_s: seconds, from the answer. deadline: the same as absolute monotonic seconds.
    trailing: as in the ``NamespaceInfo``.
    """

    request_id: str
    load_id: int
    epoch: int
    count: int
    first_chunk: int
    tiers: tuple[int, ...]
    parts: tuple[tuple[PartPlace | None, ...], ...]
    deadline_s: float
    stall_s: float
    deadline: float
    reason: Reason
    trailing: tuple[int, ...] = ()

    @property
    def all_or_nothing(self) -> bool:
        """Whether the load serves only when every ticket's stream ended with COMPLETE.

        Else what came of all parts before the first failure serves as well.
        """
        return any(self.trailing)

    def start(self, part: int) -> int:
        """How many of the counted chunks, from the first, the load does not need of this part number."""
        trailing = self.trailing[part] if self.trailing else 0
        return max(0, self.count - trailing) if trailing else 0

    def ticket(self, part: int, *, skip: int = 0, count: int | None = None) -> LoadTicket:
        """What the worker that needs this part number is given: from the first chunk that it needs on.

        skip: so many of the counted chunks the engine has itself by now. count: load only so many of
        them. RefusedError for fewer than there are when ``all_or_nothing``: that is another boundary.
        """
        end = self.count if count is None else min(count, self.count)
        if end < self.count and self.all_or_nothing:
            raise RefusedError(f"a load of {self.count} chunks serves as a whole only, not {end} of them")
        start = min(max(skip, self.start(part)), end)
        places = tuple(chunk[part] for chunk in self.parts[start:end])
        return LoadTicket(
            self.load_id, self.epoch, self.first_chunk + start, part, places, self.deadline, self.stall_s
        )


@dataclass(frozen=True, slots=True)
class MatchAnswer:
    """So many leading chunks could be loaded. reason: why not more, COMPLETE when it is all."""

    count: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReadyPart:
    """A part to copy. index: chunk number in the prompt. view: read-only pool memory.

    Trust the copy only when its stripes' checksums equal these after copying.
    """

    index: int
    view: memoryview
    checksums: tuple[bytes, ...]


class LoadEnd(NamedTuple):
    """No more parts. Reason.COMPLETE when all came; else chunk is the first that did not come."""

    reason: Reason
    chunk: int


class Pending(enum.Enum):
    """Nothing within the wait that was asked for; the load goes on."""

    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """index: position in the list that was asked for. view: writable when RESERVED, else None.

    connection: number of the one it came with, which it is lost with.
    """

    index: int
    digest: bytes
    outcome: ReserveOutcome
    view: memoryview | None
    connection: int | None = None
