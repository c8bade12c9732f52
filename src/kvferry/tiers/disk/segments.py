"""Where each part lies and which segment is written next. Pure: no clock, file or thread inside.

    FREE ──begin──► ACTIVE ──full, or a write failed──► SEALED ──vacate──► LEAVING ──retire──► ERASING ─┐
     ▲                                                                  (until nobody reads it any more) │
     └───────────────────────────────────────────retired─────────────────────────────────────────────────┘

Segments leave whole, oldest first. What was used since it was written is carried over into the active
one, the most recently used first, up to a share of a segment. So one segment is kept free where possible.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.tiers.disk.format import FIRST_RECORD, Preamble, SegmentHead, next_link, record_bytes

CARRIED_SHARE = 2
"""Half a segment at most is carried over, so that each eviction gives room."""


class State(enum.Enum):
    """Of a segment; the diagram is above."""

    FREE = "free"
    ACTIVE = "active"
    SEALED = "sealed"
    LEAVING = "leaving"
    ERASING = "erasing"


class Lack(enum.Enum):
    """Why a part gets no place."""

    PRESENT = "present"  # it has one
    WRITING = "writing"  # it is being written
    NO_ROOM = "no room"  # until the next segment is begun
    TOO_LARGE = "too large"  # for any segment


class Place(NamedTuple):
    """Of a record: valid as long as the segment has that generation."""

    segment: int
    generation: int
    offset: int


class Reservation(NamedTuple):
    """A place that is being written. Its segment is pinned until ``commit`` or ``abandon``."""

    ref: PartRef
    place: Place
    link: int

    @property
    def preamble(self) -> Preamble:
        return Preamble(self.ref, self.place.generation, self.link, removed=False)


@dataclass(slots=True)
class Record:
    """used: when it was last, 0: not since it was written. old: where it was carried over from."""

    place: Place
    used: int = 0
    failures: int = 0
    old: Place | None = None


class StepKind(enum.Enum):
    """What is to be done to the files next."""

    ALLOCATE = "allocate"  # a new segment
    BEGIN = "begin"  # a free one
    EVICT = "evict"  # the oldest sealed one
    RETIRE = "retire"  # one that nobody reads any more


class Step(NamedTuple):
    """Answered by ``allocated``, ``begin``, ``vacate`` or ``retired``."""

    kind: StepKind
    segment: int


class Scanned(NamedTuple):
    """A segment as it was found. records: in order. end: behind the last. link: of the last."""

    number: int
    head: SegmentHead
    records: list[tuple[Preamble, int]]
    end: int
    link: int


@dataclass(slots=True)
class _Segment:
    number: int
    state: State = State.FREE
    generation: int = 0
    link: int = 0
    end: int = FIRST_RECORD
    pins: int = 0
    refs: set[PartRef] = field(default_factory=set[PartRef])


class SegmentLog:
    """Not thread-safe: the owner holds its lock. max_segments: the hard limit, in segments."""

    def __init__(self, *, segment_bytes: int, max_segments: int) -> None:
        self.segment_bytes = segment_bytes
        self.max_segments = max_segments
        self.may_grow = True
        self.records: dict[PartRef, Record] = {}
        self._segments: dict[int, _Segment] = {}
        self._active: _Segment | None = None
        self._writing: set[PartRef] = set()
        self._doomed: set[PartRef] = set()
        self._kept_free = 0  # bytes of the active segment, for what is carried over next
        self._clock = 0
        self._generation = 0

    # -- reading -----------------------------------------------------------------------------------

    def use(self, ref: PartRef) -> bool:
        """Whether it is there; if so it was used now."""
        record = self.records.get(ref)
        if record is None:
            return False
        self._clock += 1
        record.used = self._clock
        return True

    def pin(self, ref: PartRef) -> Place | None:
        """Where it is; its segment stays until ``unpin``."""
        record = self.records.get(ref)
        if record is None:
            return None
        self._segments[record.place.segment].pins += 1
        return record.place

    def lies_at(self, ref: PartRef, place: Place) -> bool:
        """Whether it is there still."""
        record = self.records.get(ref)
        return record is not None and record.place == place

    def unpin(self, place: Place) -> None:
        """Raises BrokenError when it was not pinned."""
        segment = self._segments[place.segment]
        if segment.pins <= 0 or segment.generation != place.generation:
            raise BrokenError(f"segment {place.segment} was released twice")
        segment.pins -= 1

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, ref: PartRef, *, carried: bool = False) -> Reservation | Lack:
        """A place in the active segment. A part that is carried over has one already, and finds no room
        without the active one being sealed for it."""
        nbytes = record_bytes(ref.nbytes)
        if nbytes > self.segment_bytes - FIRST_RECORD:
            return Lack.TOO_LARGE
        if ref in self._writing:
            return Lack.WRITING
        if not carried and self.use(ref):
            return Lack.PRESENT
        active = self._active
        if active is None:
            return Lack.NO_ROOM
        room = self.segment_bytes - active.end
        if nbytes > room or (not carried and nbytes > room - self._kept_free):
            if not carried and not self._kept_free:
                self._seal()
            return Lack.NO_ROOM
        if carried:
            self._kept_free = max(0, self._kept_free - nbytes)
        place = Place(active.number, active.generation, active.end)
        active.link = next_link(active.link, generation=place.generation, offset=place.offset, ref=ref)
        active.end += nbytes
        active.pins += 1
        self._writing.add(ref)
        return Reservation(ref, place, active.link)

    def commit(self, reservation: Reservation) -> list[Place]:
        """It is written: from now on it is found. Returns what is to be marked removed, pinned."""
        ref, place, _ = reservation
        segment = self._segments[place.segment]
        self._writing.discard(ref)
        if ref in self._doomed:
            self._doomed.discard(ref)
            return [place]  # and the pin goes on
        segment.pins -= 1
        if segment.state is not State.ACTIVE and segment.state is not State.SEALED:
            return []
        before = self.records.get(ref)
        if before is not None:
            self._segments[before.place.segment].refs.discard(ref)
        self.records[ref] = Record(place, old=before.place if before is not None else None)
        segment.refs.add(ref)
        return []

    def abandon(self, reservation: Reservation) -> None:
        """It could not be written. What would follow it could not be found again: the segment is sealed."""
        self._writing.discard(reservation.ref)
        self._doomed.discard(reservation.ref)
        segment = self._segments[reservation.place.segment]
        segment.pins -= 1
        if segment is self._active:
            self._seal()

    def remove(self, ref: PartRef) -> tuple[bool, list[Place]]:
        """Whether it was there, and where it is to be marked removed; those segments are pinned."""
        if ref in self._writing:
            self._doomed.add(ref)
        record = self.records.pop(ref, None)
        if record is None:
            return False, []
        self._segments[record.place.segment].refs.discard(ref)
        places = [place for place in (record.place, record.old) if place is not None and self._holds(place)]
        for place in places:
            self._segments[place.segment].pins += 1
        return True, places

    # -- segments ----------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """What is to be done next so that writing goes on; None: nothing, or nothing can be."""
        step = self._next_step()
        if step is None or step.kind is not StepKind.EVICT:
            self._kept_free = 0
        return step

    def _next_step(self) -> Step | None:
        free = next((s for s in self._segments.values() if s.state is State.FREE), None)
        leaving = [s for s in self._segments.values() if s.state is State.LEAVING]
        leaving += [s for s in self._segments.values() if s.state is State.ERASING]
        for segment in leaving:
            if not segment.pins:
                return Step(StepKind.RETIRE, segment.number)
        growing = self.may_grow and len(self._segments) < self.max_segments
        if self._active is None:
            if free is not None:
                return Step(StepKind.BEGIN, free.number)
            if growing:
                return Step(StepKind.ALLOCATE, self._unused_number())
        elif free is not None or growing:
            return None
        sealed = [s for s in self._segments.values() if s.state is State.SEALED]
        if leaving or not sealed:
            return None
        return Step(StepKind.EVICT, min(sealed, key=lambda s: s.generation).number)

    def allocated(self, number: int) -> None:
        """The file is there."""
        if len(self._segments) >= self.max_segments or number in self._segments:
            raise BrokenError(f"segment {number} is one too many")
        self._segments[number] = _Segment(number)

    def next_head(self, seed: int) -> SegmentHead:
        """For the next segment that is begun. seed: 64 random bits."""
        self._generation += 1
        return SegmentHead(self.segment_bytes, self._generation, seed)

    def begin(self, number: int, head: SegmentHead) -> None:
        """Its first block is written: it is the active one now."""
        segment = self._segments[number]
        if segment.state is not State.FREE or self._active is not None:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot be begun")
        segment.state, segment.generation = State.ACTIVE, head.generation
        segment.link, segment.end = head.seed, FIRST_RECORD
        self._active = segment
        step = self._next_step()
        if step is not None and step.kind is StepKind.EVICT:
            self.worth_carrying(step.segment)  # before anything else is written into this segment

    def worth_carrying(self, number: int) -> list[PartRef]:
        """What was used since it was written, the last used first. The active segment has room for it, and
        keeps that until ``vacate``."""
        hot = [(self.records[ref].used, ref) for ref in self._segments[number].refs]
        hot = sorted((item for item in hot if item[0]), key=lambda item: item[0], reverse=True)
        left = self.segment_bytes - self._active.end if self._active is not None else 0
        room = min(self.segment_bytes // CARRIED_SHARE, left)
        chosen: list[PartRef] = []
        self._kept_free = 0
        for _, ref in hot:
            nbytes = record_bytes(ref.nbytes)
            if self._kept_free + nbytes > room:
                break
            self._kept_free += nbytes
            chosen.append(ref)
        return chosen

    def not_worth_carrying(self, ref: PartRef) -> None:
        """It cannot be read now: it goes with its segment, unless it is used again."""
        record = self.records.get(ref)
        if record is not None:
            record.used = 0

    def vacate(self, number: int) -> int:
        """What is left in it is not found any more. Returns how many parts that were."""
        segment = self._segments[number]
        if segment.state is not State.SEALED:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot leave")
        for ref in segment.refs:
            del self.records[ref]
        self._kept_free = 0
        gone = len(segment.refs)
        segment.refs.clear()
        segment.state = State.LEAVING
        return gone

    def retire(self, number: int) -> bool:
        """Its first block is about to be erased. False if it is in use again: a removal is written down."""
        segment = self._segments[number]
        if segment.pins or segment.state not in (State.LEAVING, State.ERASING):
            return False
        segment.state = State.ERASING
        return True

    def retired(self, number: int) -> None:
        """Its first block is erased."""
        segment = self._segments[number]
        if segment.pins or segment.state is not State.ERASING:
            raise BrokenError(f"segment {number} is in use")
        segment.state = State.FREE

    # -- recovery ----------------------------------------------------------------------------------

    def restore(self, free: Iterable[int], scanned: Iterable[Scanned]) -> None:
        """What was found at start-up. Of two records of one part the newer counts, also when it says that
        the part was removed."""
        for number in free:
            self.allocated(number)
        newest: _Segment | None = None
        for found in sorted(scanned, key=lambda item: item.head.generation):
            self.allocated(found.number)
            segment = newest = self._segments[found.number]
            segment.state, segment.generation = State.SEALED, found.head.generation
            segment.link, segment.end = found.link, found.end
            self._generation = max(self._generation, segment.generation)
            for preamble, offset in found.records:
                self._restore_record(segment, preamble, offset)
        if newest is not None:  # where it is full already, the next reservation says so
            newest.state, self._active = State.ACTIVE, newest

    def _restore_record(self, segment: _Segment, preamble: Preamble, offset: int) -> None:
        ref = preamble.ref
        before = self.records.pop(ref, None)
        if before is not None:
            self._segments[before.place.segment].refs.discard(ref)
        if not preamble.removed:
            old = before.place if before is not None else None
            self.records[ref] = Record(Place(segment.number, segment.generation, offset), old=old)
            segment.refs.add(ref)

    # -- for people and tests ----------------------------------------------------------------------

    @property
    def segments(self) -> int:
        """How many there are on the disk."""
        return len(self._segments)

    @property
    def writable(self) -> bool:
        """Whether a segment is being written."""
        return self._active is not None

    @property
    def leaving(self) -> bool:
        """Whether a segment becomes free as soon as nobody reads it any more."""
        return any(s.state in (State.LEAVING, State.ERASING) for s in self._segments.values())

    @property
    def pinned(self) -> int:
        """Reads, writes and marks under way."""
        return sum(segment.pins for segment in self._segments.values())

    def check(self) -> None:
        """Raises BrokenError when the books do not agree. Slow; for tests."""
        listed = {ref: s.number for s in self._segments.values() for ref in s.refs}
        if listed != {ref: record.place.segment for ref, record in self.records.items()}:
            raise BrokenError("records and segments disagree")
        for ref, record in self.records.items():
            segment = self._segments[record.place.segment]
            if segment.state not in (State.ACTIVE, State.SEALED) or not self._holds(record.place):
                raise BrokenError(f"{ref} lies in a segment that is {segment.state.value}")
            if record.place.offset + record_bytes(ref.nbytes) > segment.end:
                raise BrokenError(f"{ref} lies beyond its segment's end")
        if any(s.end > self.segment_bytes for s in self._segments.values()):
            raise BrokenError("a segment is longer than it may be")
        if len(self._segments) > self.max_segments:
            raise BrokenError("there are too many segments")

    def _holds(self, place: Place) -> bool:
        segment = self._segments[place.segment]
        return segment.generation == place.generation and segment.state not in (State.FREE, State.ERASING)

    def _seal(self) -> None:
        if self._active is not None:
            self._active.state = State.SEALED
            self._active = None

    def _unused_number(self) -> int:
        return next(n for n in range(self.max_segments + len(self._segments) + 1) if n not in self._segments)
