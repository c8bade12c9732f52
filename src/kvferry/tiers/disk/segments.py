"""Where each part lies and which segment is written next. Pure: no thread or file inside, the clock is given.

    FREE ──begin──► ACTIVE ──full, or a write failed──► SEALED ──vacate──► LEAVING ──retire──► ERASING ─┐
     ▲                                                                  (until nobody reads it any more) │
     └───────────────────────────────────────────retired─────────────────────────────────────────────────┘

Segments leave whole, oldest first. What was used since it was written is carried over into the active
one, the most recently used first, up to a share of a segment. So one segment is kept free where possible.
"""

from collections.abc import Callable, Iterable

from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.tiers.disk.carrying import CARRIED_SHARE, last_used
from kvferry.tiers.disk.format import FIRST_RECORD, Mark, Preamble, SegmentHead, next_link, record_bytes
from kvferry.tiers.disk.places import (
    Gone,
    Lack,
    Place,
    Record,
    Reservation,
    Scanned,
    Segment,
    State,
    Step,
    StepKind,
)
from kvferry.tiers.disk.settings import MAX_PARTS
from kvferry.tiers.disk.wall import unix_s

MAX_FIRST_BLOCK_FAILURES = 3
"""A segment whose first block could not be written so often is given up."""


class SegmentLog:
    """Not thread-safe: the owner holds its lock. max_segments, max_parts: hard limits. wall: unix seconds."""

    def __init__(
        self,
        *,
        segment_bytes: int,
        max_segments: int,
        max_parts: int = MAX_PARTS,
        wall: Callable[[], float] = unix_s,
    ) -> None:
        self.segment_bytes = segment_bytes
        self.max_segments = max_segments
        self.max_parts = max_parts
        self.may_grow = True
        self.records: dict[PartRef, Record] = {}
        self._wall = wall
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._leaving: set[int] = set()
        self._writing: dict[PartRef, int] = {}  # and into which segment
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
        record.used_at = self._wall()
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
        without the active one being sealed for it. One that could not be read gets a new one."""
        nbytes = record_bytes(ref.nbytes)
        if nbytes > self.segment_bytes - FIRST_RECORD:
            return Lack.TOO_LARGE
        if ref in self._writing:
            return Lack.WRITING
        record = self.records.get(ref)
        if not carried and record is not None and not record.failures:
            self.use(ref)
            return Lack.PRESENT
        active = self._active
        if active is None:
            return Lack.NO_ROOM
        if record is None and self._crowded():
            self._make_way(active)
            return Lack.NO_ROOM
        room = self.segment_bytes - active.end
        if nbytes > room or (not carried and nbytes > room - self._kept_free):
            if not carried and not self._kept_free:
                self._seal()
            return Lack.NO_ROOM
        if carried:
            self._kept_free = max(0, self._kept_free - nbytes)
        used_at = record.used_at if carried and record is not None else self._wall()
        place, before = Place(active.number, active.generation, active.end), active.link
        active.link = next_link(before, generation=place.generation, offset=place.offset, ref=ref)
        active.end += nbytes
        active.pins += 1
        self._writing[ref] = active.number
        return Reservation(ref, place, active.link, before, used_at)

    def commit(self, reservation: Reservation) -> list[Place]:
        """It is written: from now on it is found. Returns what is to be marked removed, pinned."""
        ref, place = reservation.ref, reservation.place
        segment = self._segments[place.segment]
        self._writing.pop(ref, None)
        if ref in self._doomed:
            self._doomed.discard(ref)
            return [place]  # and the pin goes on
        segment.pins -= 1
        if segment.state is not State.ACTIVE and segment.state is not State.SEALED:
            return []
        before = self.records.get(ref)
        if before is not None:
            self._segments[before.place.segment].refs.discard(ref)
        old = before.place if before is not None else None
        self.records[ref] = Record(place, reservation.used_at, old=old)
        segment.refs.add(ref)
        return []

    def abandon(self, reservation: Reservation, *, again: bool) -> None:
        """It could not be written. again: its place can be, when there is room; until that or a mark is
        written there, what follows it would not be found again. If not, its segment is sealed."""
        self._writing.pop(reservation.ref, None)
        self._doomed.discard(reservation.ref)
        self.not_filled(reservation, again=again)

    def remove(self, ref: PartRef) -> tuple[bool, list[Place]]:
        """Whether it was there, and where it is to be marked removed; those segments are pinned."""
        if ref in self._writing:
            self._doomed.add(ref)
        record = self.records.pop(ref, None)
        if record is None:
            return False, []
        self._segments[record.place.segment].refs.discard(ref)
        return True, self._pinned_places(record)

    def drop(self, number: int, wanted: Callable[[PartRef, Record], bool]) -> Gone:
        """Remove the wanted parts of a segment; it leaves whole if they are all, and no write is to stay."""
        segment = self._segments.get(number, Segment(number))
        gone = [ref for ref in segment.refs if wanted(ref, self.records[ref])]
        if not gone:
            return Gone(0, 0, [])
        self._doomed.update(self._writing.keys() & gone)  # carried over this moment
        staying = any(n == number and ref not in self._doomed for ref, n in self._writing.items())
        whole = len(gone) == len(segment.refs) and not staying
        if whole and (segment is not self._active or not segment.pins):
            self._seal(segment)
            self._leave(segment)
        segment.refs.difference_update(gone)
        places = [place for ref in gone for place in self._pinned_places(self.records.pop(ref))]
        return Gone(len(gone), sum(ref.nbytes for ref in gone), places)

    def doom(self, namespace: bytes | None) -> None:
        """What is being written of it (None: of any) is removed as soon as it is written."""
        self._doomed.update(ref for ref in self._writing if namespace in (None, ref.key.namespace))

    # -- segments ----------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """What is to be done next so that writing goes on; None: nothing, or nothing can be."""
        step = self._next_step()
        if step is None or step.kind is not StepKind.EVICT:
            self._kept_free = 0
        return step

    def _next_step(self) -> Step | None:
        for number in self._leaving:
            if not self._segments[number].pins:
                return Step(StepKind.RETIRE, number)
        if self._active is None and self._can_begin():
            free = [s for s in self._segments.values() if s.state is State.FREE]
            if free:
                return Step(StepKind.BEGIN, min(free, key=lambda s: s.failures).number)
            return Step(StepKind.ALLOCATE, self._unused_number())
        if self._active is not None and self._can_begin() and not self._crowded():
            return self._gap_step()
        sealed = self._sealed()
        if self._leaving or not sealed:
            return self._gap_step()
        return Step(StepKind.EVICT, min(sealed, key=lambda s: s.generation).number)

    def _gap_step(self) -> Step | None:
        number = next((s.number for s in self._segments.values() if s.gaps), None)
        return Step(StepKind.FILL, number) if number is not None else None

    def allocated(self, number: int) -> None:
        """The file is there."""
        if len(self._segments) >= self.max_segments or number in self._segments:
            raise BrokenError(f"segment {number} is one too many")
        self._segments[number] = Segment(number)

    def next_head(self, seed: int) -> SegmentHead:
        """For the next segment that is begun. seed: 64 random bits."""
        self._generation += 1
        return SegmentHead(self.segment_bytes, self._generation, seed)

    def begin(self, number: int, head: SegmentHead) -> None:
        """Its first block is written: it is the active one now."""
        segment = self._segments[number]
        if segment.state is not State.FREE or self._active is not None:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot be begun")
        segment.state, segment.generation, segment.failures = State.ACTIVE, head.generation, 0
        segment.link, segment.end = head.seed, FIRST_RECORD
        self._active = segment
        step = self._next_step()
        if step is not None and step.kind is StepKind.EVICT:
            self.worth_carrying(step.segment)  # before anything else is written into this segment

    def worth_carrying(self, number: int) -> list[PartRef]:
        """What was used since it was written, the last used first. The active segment has room for it, and
        keeps that until ``vacate``."""
        refs = self._segments[number].refs
        left = self.segment_bytes - self._active.end if self._active is not None else 0
        chosen = last_used(
            [(ref, self.records[ref]) for ref in refs],
            room=min(self.segment_bytes // CARRIED_SHARE, left),
            most=len(refs) // CARRIED_SHARE if self._crowded() else len(refs),
        )
        self._kept_free = sum(record_bytes(ref.nbytes) for ref in chosen)
        return chosen

    def not_worth_carrying(self, ref: PartRef) -> None:
        """It cannot be read now: it goes with its segment, unless it is used again."""
        record = self.records.get(ref)
        if record is not None:
            record.used = 0

    def vacate(self, number: int) -> int:
        """What is left in it is not found any more. Returns how many parts: none if a drop made it leave."""
        segment = self._segments[number]
        self._kept_free = 0
        if segment.state is State.LEAVING:
            return 0
        if segment.state is not State.SEALED:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot leave")
        for ref in segment.refs:
            del self.records[ref]
        gone = len(segment.refs)
        segment.refs.clear()
        self._leave(segment)
        return gone

    def retire(self, number: int) -> int | None:
        """Its first block is about to be erased: returns its generation. None if it is in use again: a
        removal is written down."""
        segment = self._segments[number]
        if segment.pins or number not in self._leaving:
            return None
        segment.state = State.ERASING
        return segment.generation

    def retired(self, number: int) -> None:
        """Its first block is erased."""
        segment = self._segments[number]
        if segment.pins or segment.state is not State.ERASING:
            raise BrokenError(f"segment {number} is in use")
        segment.state, segment.failures = State.FREE, 0
        self._leaving.discard(number)

    def first_block_failed(self, number: int) -> bool:
        """It could not be written. True: not for the first time, and it is to be given up."""
        segment = self._segments[number]
        segment.failures += 1
        return segment.failures >= MAX_FIRST_BLOCK_FAILURES

    def given_up(self, number: int) -> set[tuple[int, int]]:
        """Its file is gone, its bytes are not used again. Returns what was erased with it, as ``leaving``."""
        if self._segments[number].state not in (State.FREE, State.ERASING):
            raise BrokenError(f"segment {number} is in use")
        gone = {each for each in self.leaving if each[0] == number}
        del self._segments[number]
        self._leaving.discard(number)
        self.max_segments -= 1
        return gone

    def gap(self, number: int) -> Reservation | None:
        """Of a failed write, to be marked void; its segment is pinned until ``filled``."""
        segment = self._segments[number]
        if not segment.gaps:
            return None
        segment.pins += 1
        return segment.gaps.pop()

    def filled(self, gap: Reservation) -> None:
        """The mark is written."""
        self._segments[gap.place.segment].pins -= 1

    def not_filled(self, gap: Reservation, *, again: bool) -> None:
        """It could not be. again: it is tried again; else what follows it counts until a restart."""
        segment = self._segments[gap.place.segment]
        segment.pins -= 1
        if not again:
            self._seal(segment)
        elif segment.state in (State.ACTIVE, State.SEALED):
            segment.gaps.append(gap)
            segment.take_back()

    # -- recovery ----------------------------------------------------------------------------------

    def restore(self, free: Iterable[int], scanned: Iterable[Scanned], leaving: Iterable[int] = ()) -> None:
        """What was found at start-up. Of two records of one part the newer counts, also when it says that
        the part was removed. leaving: segments that are not to be found again."""
        for number in free:
            self.allocated(number)
        newest: Segment | None = None
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
        for number in leaving:
            self.allocated(number)
            self._leave(self._segments[number])

    def _restore_record(self, segment: Segment, preamble: Preamble, offset: int) -> None:
        if preamble.mark is Mark.VOID:
            return
        ref = preamble.ref
        before = self.records.pop(ref, None)
        if before is not None:
            self._segments[before.place.segment].refs.discard(ref)
        if preamble.mark is Mark.WHOLE:
            old = before.place if before is not None else None
            place = Place(segment.number, segment.generation, offset)
            self.records[ref] = Record(place, preamble.used_at, old=old)
            segment.refs.add(ref)

    # -- for people and tests ----------------------------------------------------------------------

    @property
    def segments(self) -> int:
        """How many there are on the disk."""
        return len(self._segments)

    @property
    def in_use(self) -> list[int]:
        """Segments that hold parts, oldest first."""
        used = [s for s in self._segments.values() if s.state in (State.ACTIVE, State.SEALED)]
        return [s.number for s in sorted(used, key=lambda s: s.generation)]

    @property
    def writable(self) -> bool:
        """Whether a segment is being written."""
        return self._active is not None

    @property
    def keeps_free(self) -> bool:
        """Whether room is kept for what is carried over next."""
        return self._kept_free > 0

    @property
    def leaving(self) -> set[tuple[int, int]]:
        """Number and generation of what becomes free as soon as nobody reads it any more."""
        return {(number, self._segments[number].generation) for number in self._leaving}

    @property
    def pinned(self) -> int:
        """Reads, writes and marks under way."""
        return sum(segment.pins for segment in self._segments.values())

    def _pinned_places(self, record: Record) -> list[Place]:
        """Where it is to be marked removed, but for segments that are erased."""
        places = [place for place in (record.place, record.old) if place is not None and self._holds(place)]
        places = [place for place in places if place.segment not in self._leaving or place != record.place]
        for place in places:
            self._segments[place.segment].pins += 1
        return places

    def _holds(self, place: Place) -> bool:
        segment = self._segments.get(place.segment)
        return (
            segment is not None
            and segment.generation == place.generation
            and segment.state not in (State.FREE, State.ERASING)
        )

    def _crowded(self) -> bool:
        return len(self.records) + len(self._writing) >= self.max_parts

    def _make_way(self, active: Segment) -> None:
        """So that the oldest can leave, though there is room: the active one may be that, or have no room for
        what is carried over."""
        half_full = active.end > self.segment_bytes // CARRIED_SHARE
        if not self._leaving and (not self._sealed() or (half_full and self._can_begin())):
            self._seal()

    def _can_begin(self) -> bool:
        growing = self.may_grow and len(self._segments) < self.max_segments
        return growing or any(s.state is State.FREE for s in self._segments.values())

    def _sealed(self) -> list[Segment]:
        return [s for s in self._segments.values() if s.state is State.SEALED]

    def _seal(self, segment: Segment | None = None) -> None:
        """The active one, unless it is another than that."""
        active = self._active
        if active is not None and (segment is None or segment is active):
            active.state = State.SEALED
            self._active = None

    def _leave(self, segment: Segment) -> None:
        segment.state = State.LEAVING
        segment.gaps.clear()
        self._leaving.add(segment.number)

    def _unused_number(self) -> int:
        return next(n for n in range(self.max_segments + len(self._segments) + 1) if n not in self._segments)
