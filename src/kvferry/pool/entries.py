"""The catalogue's words: owners, slots, answers, and the entry behind each part.

State of one part:

    ABSENT --reserve--> FILLING --commit--> READY --unlink, eviction, drop--> ABSENT
       ^                   |                  |
       |                   |                  +--unlink while pinned--> (invisible, memory held)
       +---abandon---------+                                                    |
       +-------------------------------last unpin-------------------------------+

FILLING --retire--> ABSENT too, but the slot stays its owner's until reclaim or release_owner.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import RefusedError
from kvferry.identity.boundaries import core_parts
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS, NAMESPACE_BYTES, PartKey
from kvferry.lifetimes import NEVER
from kvferry.pool.slots import Run

MAX_TRAILING_NUMBERS = 64  # different ones in a namespace: a lookup keeps a row of its chunks for each

Owner = int


class EntryState(enum.Enum):
    """What a key is to a reader. An unlinked part that is still pinned is ABSENT."""

    ABSENT = "absent"
    FILLING = "filling"
    READY = "ready"


class Slot(NamedTuple):
    """Where a part's bytes lie in the arena. checksums: one per stripe; empty while FILLING."""

    offset: int
    nbytes: int
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """The caller now owns an empty slot and must commit or abandon it."""

    slot: Slot


class DeclineReason(enum.Enum):
    """Why no slot was given. None of them is worth waiting for in a loop."""

    EXISTS = "exists"  # the part is READY
    FILLING = "filling"  # someone is filling it now
    UNLINKED = "unlinked"  # it was unlinked, and its old memory is still pinned by a reader
    FULL = "full"  # all memory that could serve it is pinned, being filled, or spared
    TOO_LARGE = "too_large"  # the pool could not hold it even when empty


@dataclass(frozen=True, slots=True)
class Declined:
    """No slot was given."""

    reason: DeclineReason


class Place(enum.Enum):
    """Where the eviction order keeps an entry (``pool.policy.RecencyQueue``)."""

    OUT = "out"
    LINKED = "linked"
    ASIDE = "aside"
    RETURNED = "returned"


class Gap(NamedTuple):
    """A chunk that lacks parts. position: of the chunk among those asked for. parts: what it lacks."""

    position: int
    parts: tuple[int, ...]


class Entry:
    """One part that occupies a slot. Compared by identity: a key that comes back is a new entry."""

    __slots__ = (
        "checksums",
        "filler",
        "key",
        "level",
        "nbytes",
        "offset",
        "pins",
        "place",
        "run",
        "stamp",
        "tick",
        "unlinked",
    )

    def __init__(self, key: PartKey, *, nbytes: int, offset: int, run: Run, filler: Owner) -> None:
        self.key = key
        self.nbytes = nbytes
        self.offset = offset
        self.run = run
        self.filler: Owner | None = filler  # not None exactly while FILLING
        self.checksums: tuple[bytes, ...] = ()
        self.pins = 0
        self.unlinked = False
        self.level = 0  # how often it was used (``lifetimes.LEVELS``)
        self.place = Place.OUT
        self.stamp = 0
        self.tick = NEVER  # of its last use, in the time of ``lifetimes``

    @property
    def readable(self) -> bool:
        """Whether a reader may see it."""
        return self.filler is None and not self.unlinked

    def slot(self) -> Slot:
        return Slot(self.offset, self.nbytes, self.checksums)


class Namespace:
    """A registered namespace: the bytes of each part of a chunk, and the chunks held.

    parts: the part numbers that exist, that is, have bytes. trailing: which chunks a boundary needs of each
    part number (``identity.boundaries``); empty when all are 0.
    """

    __slots__ = ("chunks", "core", "domain", "part_bytes", "parts", "trailing")

    def __init__(self, part_bytes: tuple[int, ...], domain: str, trailing: tuple[int, ...]) -> None:
        self.part_bytes = part_bytes
        self.parts = tuple(part for part, nbytes in enumerate(part_bytes) if nbytes)
        self.core = core_parts(part_bytes, trailing)
        self.domain = domain
        self.trailing = trailing
        self.chunks: dict[bytes, dict[int, Entry]] = {}  # chunk digest -> part index -> entry

    def gaps(self, chunks: Sequence[bytes]) -> Iterator[Gap]:
        """Those of these chunks that lack readable parts, in order."""
        for position, chunk in enumerate(chunks):
            parts = self.chunks.get(chunk)
            if parts is None:
                yield Gap(position, self.parts)
            elif len(parts) < len(self.parts) or not all(entry.readable for entry in parts.values()):
                readable = {part for part, entry in parts.items() if entry.readable}
                yield Gap(position, tuple(part for part in self.parts if part not in readable))

    def whole(self, chunk: bytes) -> bool:
        """Whether all of it is readable that a boundary needs of every chunk before it."""
        parts = self.chunks.get(chunk)
        if parts is None:
            return False
        for part in self.core:
            entry = parts.get(part)
            if entry is None or not entry.readable:
                return False
        return True

    def needed(self, chunks: Sequence[bytes], *, ends: int = 0) -> Iterator[Entry]:
        """What is held of what a boundary after these chunks needs, tail first, head last.

        ends: the so many boundaries before it count, too.
        """
        last = len(chunks) - ends
        for before, chunk in enumerate(reversed(chunks), 1):
            parts = self.chunks.get(chunk)
            if parts is None:
                continue
            if not self.trailing:
                yield from parts.values()
                continue
            for part, entry in parts.items():
                trailing = self.trailing[part]
                if not trailing or len(chunks) - before >= last - trailing:
                    yield entry


def show(key: PartKey) -> str:
    """A part, for messages."""
    return f"part {key.part} of chunk {key.chunk[:8].hex()} in namespace {key.namespace.hex()}"


def check_sizes(namespace: bytes, part_bytes: tuple[int, ...], trailing: tuple[int, ...]) -> None:
    """Raise RefusedError for a namespace of another length, and for parts that no chunk may have."""
    if len(namespace) != NAMESPACE_BYTES:
        raise RefusedError(f"namespace of {len(namespace)} bytes: must have {NAMESPACE_BYTES}")
    sizes_fit = any(part_bytes) and all(0 <= size <= MAX_PART_BYTES for size in part_bytes)
    if not sizes_fit or len(part_bytes) > MAX_PARTS:
        raise RefusedError(
            f"part sizes {part_bytes[:8]}: there must be 1 to {MAX_PARTS} of 1 to {MAX_PART_BYTES} bytes"
        )
    if len(trailing) not in (0, len(part_bytes)) or any(number < 0 for number in trailing):
        raise RefusedError(
            f"trailing numbers {trailing[:8]} for {len(part_bytes)} parts: give each part one of at least 0, "
            "or none at all"
        )
    if len(set(trailing)) > MAX_TRAILING_NUMBERS:
        raise RefusedError(f"{len(set(trailing))} different trailing numbers: at most {MAX_TRAILING_NUMBERS}")


class Holdings:
    """What one owner has: pins per entry, and the entries it is filling."""

    __slots__ = ("filling", "pins")

    def __init__(self) -> None:
        self.pins: dict[Entry, int] = {}
        self.filling: dict[Entry, None] = {}


@dataclass(frozen=True, slots=True)
class CatalogueStatistics:
    """A frozen snapshot. Bytes and counts named without a verb are now; the rest are since start.

    used_bytes: slot memory of all entries (rounded up to the slot size). pinned_bytes, filling_bytes:
    the part of it that cannot be evicted. new_bytes, reused_bytes: no request used it yet, one did.
    free_bytes: pool_bytes - used_bytes.
    """

    pool_bytes: int
    used_bytes: int
    free_bytes: int
    pinned_bytes: int
    filling_bytes: int
    new_bytes: int
    reused_bytes: int
    namespaces: int
    chunks: int
    ready_parts: int
    filling_parts: int
    unlinked_parts: int
    pins: int
    committed_parts: int
    abandoned_parts: int
    evicted_parts: int
    evicted_bytes: int
    dropped_parts: int
    full_refusals: int
    evictions_unreported: int
