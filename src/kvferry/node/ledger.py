"""What this node has put into the tier, in order of last use, within a quota. Pure.

    claim ──► STORING ──stored──► HELD ──make_room──► LEAVING ──left──► (gone)
                 └──not stored──► (gone)  └──missing──► (gone)  └──stayed──► HELD, the coldest
                                          └──missing in part──► LEAVING

All three count as used, so that the quota holds while parts are on their way in or out. A part that comes
again while it leaves is both, and counts twice; one that is stored twice at once counts once. What was there
before, of another node or of an earlier process of this one, is not in here and not removed.

A prefix is of use from its head only: of one that is being stored the tail is colder than the head, and no
part of it pushes out another. What does not fit of a prefix larger than the quota is its tail.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.header import HEADER_BYTES
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import stripe_plan

MAX_CHUNKS = 1 << 20  # some 300 bytes of this process each; past that the coldest leave as if over quota

MAX_PREFIX_CHUNKS = 8192  # of one prefix, those that keep their order
MAX_PREFIXES_CHUNKS = 1 << 17  # of all prefixes that are remembered


def stored_bytes(part_bytes: int) -> int:
    """Of a part's values in the tier, headers included."""
    return part_bytes + HEADER_BYTES * len(stripe_plan(part_bytes))


class ChunkName(NamedTuple):
    """All parts of a chunk leave together."""

    namespace: bytes
    chunk: bytes


class _Chunk:
    """parts: bits of the part numbers that are HELD. stamp: when the latest of them was stored."""

    __slots__ = ("parts", "stamp")

    def __init__(self) -> None:
        self.parts = 0
        self.stamp = 0


class _Storing:
    """runs: stores under way. held: that it is there when all have ended. recent: because one stored it."""

    __slots__ = ("held", "recent", "runs")

    def __init__(self, *, held: bool) -> None:
        self.runs = 0
        self.held = held
        self.recent = False


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """removed: to make room for others, since start. The rest is now."""

    quota_bytes: int
    used_bytes: int
    chunks: int
    removed_parts: int
    removed_bytes: int


class Ledger:
    """quota_bytes: of values in the tier, headers included."""

    def __init__(self, quota_bytes: int, *, max_chunks: int = MAX_CHUNKS) -> None:
        self._quota_bytes = quota_bytes
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[ChunkName, _Chunk] = OrderedDict()  # HELD, coldest first
        self._part_bytes: dict[tuple[bytes, int], int] = {}  # by namespace and part number
        self._storing: dict[PartKey, _Storing] = {}
        self._leaving: set[PartKey] = set()
        self._held_bytes = self._storing_bytes = self._leaving_bytes = 0
        self._removed_parts = self._removed_bytes = 0
        self._stamp = 0
        self._victims: list[PartRef] = []  # for the next make_room
        self._prefixes: OrderedDict[int, tuple[ChunkName, ...]] = OrderedDict()  # latest last, by number
        self._prefix_of: dict[ChunkName, int] = {}
        self._prefix_chunks = 0
        self._prefix_number = 0

    @property
    def mark(self) -> int:
        """The present, for ``missing``."""
        return self._stamp

    @property
    def over_quota(self) -> bool:
        """Whether more is used than may be, until what is leaving has left."""
        return self._used_bytes > self._quota_bytes

    def holds(self, key: PartKey) -> bool:
        """Whether it is HELD."""
        chunk = self._chunks.get(ChunkName(key.namespace, key.chunk))
        return chunk is not None and bool(chunk.parts >> key.part & 1)

    def is_leaving(self, key: PartKey) -> bool:
        """Whether its removal is under way: a store would be removed with it."""
        return key in self._leaving

    def extends(self, names: Sequence[ChunkName]) -> None:
        """An engine is about to store some of this prefix."""
        self._prefix_number += 1
        kept = tuple(names[:MAX_PREFIX_CHUNKS])
        self._prefixes[self._prefix_number] = kept
        self._prefix_chunks += len(kept)
        for name in kept:
            self._prefix_of[name] = self._prefix_number
        while self._prefix_chunks > MAX_PREFIXES_CHUNKS:
            number, forgotten = self._prefixes.popitem(last=False)
            self._prefix_chunks -= len(forgotten)
            for name in forgotten:
                if self._prefix_of.get(name) == number:
                    del self._prefix_of[name]
        self.touch(kept)

    def order(self, names: Sequence[ChunkName]) -> None:
        """These are being stored, or have been: their prefixes get the order in which they should leave."""
        for number in sorted({self._prefix_of.get(name, 0) for name in names} - {0}):
            self.touch(self._prefixes[number])

    def claim(self, ref: PartRef) -> bool:
        """HELD or absent to STORING. False: there is no room, whatever was removed for it."""
        key, nbytes = ref.key, stored_bytes(ref.nbytes)
        if key not in self._storing:
            if not self._fits(key, nbytes):
                return False
            self._part_bytes[key.namespace, key.part] = ref.nbytes
            self._storing[key] = _Storing(held=self.holds(key))
            self._storing_bytes += nbytes
            self._drop(key)
        self._storing[key].runs += 1
        return True

    def make_room(self) -> list[PartRef]:
        """HELD to LEAVING, the coldest chunks first, until the rest is within the quota: remove these."""
        while self._chunks and (
            self._held_bytes + self._storing_bytes > self._quota_bytes or len(self._chunks) > self._max_chunks
        ):
            self._leave_coldest()
        victims, self._victims = self._victims, []
        self._removed_parts += len(victims)
        self._removed_bytes += sum(stored_bytes(ref.nbytes) for ref in victims)
        return victims

    def stored(self, key: PartKey) -> None:
        """STORING to HELD, the most recent, when no other store of it is under way."""
        self._storing[key].held = self._storing[key].recent = True
        self._end_storing(key)

    def not_stored(self, key: PartKey, *, traces: bool) -> None:
        """STORING to absent; to HELD, the coldest, if it was so before.

        traces: something of it may be there all the same: it counts as HELD too.
        """
        self._storing[key].held |= traces
        self._end_storing(key)

    def forget(self, refs: Sequence[PartRef]) -> None:
        """HELD to LEAVING: somebody asked for their removal."""
        for ref in refs:
            if self.holds(ref.key):
                self._leave(ref.key)

    def left(self, key: PartKey, *, gone: bool) -> None:
        """LEAVING to absent; to HELD, the coldest, when it could not be removed."""
        if key not in self._leaving:
            return
        self._leaving.remove(key)
        self._leaving_bytes -= self._stored_bytes(key)
        if gone:
            return
        if key in self._storing:
            self._storing[key].held = True
        else:
            self._hold(key, last=False)

    def missing(self, refs: Sequence[PartRef], *, since: int) -> list[PartRef]:
        """They were seen not to be there as a whole, by a question asked at the mark ``since``.

        HELD to absent; to LEAVING those of which some values may be left: they serve nobody, remove them.
        """
        remains: list[PartRef] = []
        for ref in refs:
            chunk = self._chunks.get(ChunkName(ref.key.namespace, ref.key.chunk))
            if chunk is None or chunk.stamp > since or not self.holds(ref.key):
                continue
            if len(stripe_plan(ref.nbytes)) > 1:
                remains.append(self._leave(ref.key))
            else:
                self._drop(ref.key)
        return remains

    def touch(self, names: Sequence[ChunkName]) -> None:
        """These were used: the first becomes the most recent, so that of a prefix the tail leaves first."""
        for name in reversed(names):
            if name in self._chunks:
                self._chunks.move_to_end(name)

    def statistics(self) -> LedgerStatistics:
        """A snapshot."""
        return LedgerStatistics(
            quota_bytes=self._quota_bytes,
            used_bytes=self._used_bytes,
            chunks=len(self._chunks),
            removed_parts=self._removed_parts,
            removed_bytes=self._removed_bytes,
        )

    def check(self) -> None:
        """Raise BrokenError when the books do not balance; for tests."""
        held = [
            PartKey(*name, part) for name, chunk in self._chunks.items() for part in _numbers(chunk.parts)
        ]
        if any(not chunk.parts for chunk in self._chunks.values()):
            raise BrokenError("a chunk of no parts is in the ledger")
        if not self._storing.keys().isdisjoint(held) or not self._leaving.isdisjoint(held):
            raise BrokenError("a part is in two states")
        sums = [sum(map(self._stored_bytes, keys)) for keys in (held, self._storing, self._leaving)]
        if sums != [self._held_bytes, self._storing_bytes, self._leaving_bytes]:
            raise BrokenError(f"the ledger's bytes {sums} are not what it counts")

    @property
    def _used_bytes(self) -> int:
        return self._held_bytes + self._storing_bytes + self._leaving_bytes

    def _stored_bytes(self, key: PartKey) -> int:
        return stored_bytes(self._part_bytes[key.namespace, key.part])

    def _hold(self, key: PartKey, *, last: bool) -> None:
        name = ChunkName(key.namespace, key.chunk)
        known = name in self._chunks
        chunk = self._chunks.setdefault(name, _Chunk())
        chunk.parts |= 1 << key.part
        self._held_bytes += self._stored_bytes(key)
        if last:
            self._stamp += 1
            chunk.stamp = self._stamp
        if last or not known:
            self._chunks.move_to_end(name, last=last)

    def _fits(self, key: PartKey, nbytes: int) -> bool:
        """Whether there is room, made by what is colder than the rest of its own prefix."""
        if self._storing_bytes + nbytes > self._quota_bytes:
            return False
        prefix = self._prefix_of.get(ChunkName(key.namespace, key.chunk), 0)
        more = 0 if self.holds(key) else nbytes
        while self._held_bytes + self._storing_bytes + more > self._quota_bytes:
            if prefix and self._prefix_of.get(next(iter(self._chunks))) == prefix:
                return False
            self._leave_coldest()
        return True

    def _leave_coldest(self) -> None:
        name, chunk = next(iter(self._chunks.items()))
        self._victims += [self._leave(PartKey(*name, part)) for part in _numbers(chunk.parts)]

    def _drop(self, key: PartKey) -> None:
        """Out of HELD, if it is there."""
        if not self.holds(key):
            return
        name = ChunkName(key.namespace, key.chunk)
        chunk = self._chunks[name]
        chunk.parts &= ~(1 << key.part)
        self._held_bytes -= self._stored_bytes(key)
        if not chunk.parts:
            del self._chunks[name]

    def _leave(self, key: PartKey) -> PartRef:
        self._drop(key)
        self._leaving.add(key)
        self._leaving_bytes += self._stored_bytes(key)
        return PartRef(key, self._part_bytes[key.namespace, key.part])

    def _end_storing(self, key: PartKey) -> None:
        storing = self._storing[key]
        storing.runs -= 1
        if storing.runs:
            return
        del self._storing[key]
        self._storing_bytes -= self._stored_bytes(key)
        if not storing.held:
            return
        if key in self._leaving:  # it came while it left
            self._leaving.remove(key)
            self._leaving_bytes -= self._stored_bytes(key)
        self._hold(key, last=storing.recent)


def _numbers(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
