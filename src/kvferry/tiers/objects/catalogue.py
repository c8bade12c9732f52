"""What is in the bucket, as far as this process knows: packs, the parts in them, and what does not count.

Pure; used under the tier's lock. A part takes about 200 bytes here. The same part may be in several packs,
when two keepers stored it: the newest is read, and removing it removes all.
"""

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.identity.names import PartRef
from kvferry.tiers.objects.format import WHOLE_PACK, PackIndex, Removal, key_of, part_bytes
from kvferry.tiers.objects.names import time_of

_RECORD_BITS = 16
_STALE = 64
"""So many packs that are gone may be in the order by age, beyond as many as there are."""


@dataclass(slots=True, eq=False)
class Pack:
    """used: monotonic seconds at which this process last used each record. gone: records removed."""

    number: int
    namespace: bytes
    index: PackIndex
    used: "array[float]"
    gone: set[int] = field(default_factory=set)

    @property
    def ident(self) -> bytes:
        """See names."""
        return self.index.ident

    @property
    def live(self) -> int:
        """How many of its records count."""
        return len(self.index.keys) - len(self.gone)


class Record(NamedTuple):
    """One of a pack's."""

    pack: Pack
    record: int

    @property
    def offset(self) -> int:
        """Of its head in the object."""
        return self.pack.index.offsets[self.record]

    @property
    def removal(self) -> Removal:
        """What to write down so that it does not count."""
        return Removal(self.pack.ident, self.record)


@dataclass(slots=True, eq=False)
class Cut:
    """What a drop is about: records of a namespace (None: of any) in packs known before it, whose numbers are
    below ``number``; stored before ``stored_s`` (the store's clock) and last used before ``used``.

    parts, nbytes: struck so far.
    """

    namespace: bytes | None
    number: int
    stored_s: float
    used: float
    parts: int = 0
    nbytes: int = 0

    def about(self, pack: Pack) -> bool:
        """Whether any record of it may be dropped."""
        named = self.namespace is None or self.namespace == pack.namespace
        return named and pack.number < self.number and time_of(pack.ident) < self.stored_s

    def covers(self, pack: Pack, record: int) -> bool:
        """Whether it is dropped."""
        return pack.used[record] < self.used and self.about(pack)


class Catalogue:
    """Of all namespaces. parts: how many different ones, with those too that a drop is about and that are not
    struck yet."""

    def __init__(self) -> None:
        self._cuts: list[Cut] = []
        self.packs: dict[bytes, Pack] = {}
        self.nbytes = 0
        self.parts = 0
        self._numbers: dict[int, Pack] = {}
        self._next = 0
        self._places: dict[bytes, dict[bytes, int | tuple[int, ...]]] = {}
        self._dead: dict[bytes, set[int]] = {}  # of packs that are not known yet
        self._missing: set[bytes] = set()  # of those, what the last listing did not show
        self._by_age: list[bytes] = []  # a heap; what is gone is still in it

    # -- what comes and goes -------------------------------------------------------------------------

    def add(self, namespace: bytes, index: PackIndex) -> Pack | None:
        """A pack that is in the bucket. None: it is known, or does not count."""
        dead = self._dead.pop(index.ident, set())
        if index.ident in self.packs or WHOLE_PACK in dead:
            if dead:
                self._dead[index.ident] = dead
            return None
        used = array("d", [-math.inf]) * len(index.keys)
        pack = Pack(self._next, namespace, index, used, {n for n in dead if n < len(index.keys)})
        self._next += 1
        self.packs[index.ident] = self._numbers[pack.number] = pack
        self.nbytes += index.nbytes
        heapq.heappush(self._by_age, index.ident)
        if len(self._by_age) > 2 * len(self.packs) + _STALE:
            self._by_age = sorted(self.packs)
        places = self._places.setdefault(namespace, {})
        for record, key in enumerate(index.keys):
            if record not in pack.gone:
                self._put(places, key, pack.number << _RECORD_BITS | record)
        return pack

    def forget(self, ident: bytes) -> Pack | None:
        """A pack is not in the bucket any more, or will soon not be: nothing of it is found."""
        pack = self.packs.pop(ident, None)
        if pack is None:
            return None
        self.nbytes -= pack.index.nbytes
        if pack.live:
            for record in range(len(pack.index.keys)):
                self._lose(pack, record)
        del self._numbers[pack.number]
        return pack

    def remove(self, ref: PartRef) -> list[Record]:
        """It is not found any more; returns where it is in the bucket."""
        records = list(self.places(ref))
        for record in records:
            self.strike(record)
        return records

    def strike(self, record: Record) -> None:
        """This copy of a part does not count any more."""
        self._lose(record.pack, record.record)
        record.pack.gone.add(record.record)

    def apply(self, removals: Iterable[Removal]) -> None:
        """What others, or this tier before its restart, removed. Of packs to come too."""
        for ident, record in removals:
            pack = self.packs.get(ident)
            if pack is None or record == WHOLE_PACK:
                self._dead.setdefault(ident, set()).add(record)
                self._missing.discard(ident)
                self.forget(ident)
            elif record < len(pack.index.keys) and record not in pack.gone:
                self.strike(Record(pack, record))

    # -- drops ---------------------------------------------------------------------------------------

    @property
    def drops(self) -> int:
        """Under way."""
        return len(self._cuts)

    def cut(self, namespace: bytes | None, stored_s: float, used: float) -> Cut:
        """Its records (see Cut) are not found any more. Each must be struck, and then ``uncut`` called."""
        cut = Cut(namespace, self._next, stored_s, used)
        self._cuts.append(cut)
        return cut

    def strike_some(self, cut: Cut, pack: Pack, records: Iterable[int]) -> list[Removal]:
        """Of these records of a pack those that the cut is about. Returns what is to be written down."""
        if self.packs.get(pack.ident) is not pack:
            return []  # it has gone meanwhile
        found = [record for record in records if record not in pack.gone and cut.covers(pack, record)]
        for record in found:
            self.strike(Record(pack, record))
        cut.parts += len(found)
        cut.nbytes += sum(part_bytes(pack.index.keys[record]) for record in found)
        if found and not pack.live:
            self.apply([Removal(pack.ident, WHOLE_PACK)])
            return [Removal(pack.ident, WHOLE_PACK)]
        return [Removal(pack.ident, record) for record in found]

    def uncut(self, cut: Cut) -> None:
        """All of its records were struck."""
        self._cuts.remove(cut)

    def settle(self, listed: Iterable[bytes]) -> None:
        """Packs that two listings in a row do not show will not come: what was removed of them is not kept.

        One is not enough. A listing takes a while: a pack that came after its place was passed may still be
        spoken of by a list of removals further on, or by this process.
        """
        missing = self._dead.keys() - set(listed)
        for ident in missing & self._missing:
            del self._dead[ident]
        self._missing = missing - self._missing

    def is_dead(self, ident: bytes) -> bool:
        """Whether nothing of a pack counts that may still be in the bucket."""
        return WHOLE_PACK in self._dead.get(ident, ())

    # -- what is asked -------------------------------------------------------------------------------

    def find(self, ref: PartRef) -> Record | None:
        """Its newest copy."""
        return next(self.places(ref), None)

    def use(self, ref: PartRef, now: float) -> bool:
        """Whether it is there; it counts as used then."""
        found = False
        for pack, record in self.places(ref):
            pack.used[record] = now
            found = True
        return found

    def places(self, ref: PartRef) -> Iterator[Record]:
        """All copies, the newest first."""
        found = self._places.get(ref.key.namespace, {}).get(key_of(ref), ())
        for place in (found,) if isinstance(found, int) else found:
            record = Record(self._numbers[place >> _RECORD_BITS], place & (1 << _RECORD_BITS) - 1)
            if not any(cut.covers(*record) for cut in self._cuts):
                yield record

    def first(self) -> Pack | None:
        """The oldest pack."""
        while self._by_age and self._by_age[0] not in self.packs:
            heapq.heappop(self._by_age)
        return self.packs[self._by_age[0]] if self._by_age else None

    def oldest(self) -> list[Pack]:
        """By age."""
        return sorted(self.packs.values(), key=lambda pack: pack.ident)

    def packs_of(self, cut: Cut) -> list[Pack]:
        """Those it may be about."""
        return [pack for pack in self.packs.values() if cut.about(pack)]

    # -- one part's places ---------------------------------------------------------------------------

    def _put(self, places: dict[bytes, int | tuple[int, ...]], key: bytes, place: int) -> None:
        found = places.get(key)
        if found is None:
            places[key] = place
            self.parts += 1
            return
        several = (place, found) if isinstance(found, int) else (place, *found)
        places[key] = tuple(sorted(several, key=self._age))

    def _age(self, place: int) -> tuple[int, ...]:
        """Newest first."""
        return tuple(255 - byte for byte in self._numbers[place >> _RECORD_BITS].ident)

    def _lose(self, pack: Pack, record: int) -> None:
        key, place = pack.index.keys[record], pack.number << _RECORD_BITS | record
        places = self._places.get(pack.namespace, {})
        found = places.get(key)
        if found == place:
            del places[key]
            self.parts -= 1
            if not places:
                del self._places[pack.namespace]
        elif isinstance(found, tuple) and place in found:
            left = tuple(other for other in found if other != place)
            (first, *others) = left
            places[key] = left if others else first
