"""Where each part lies, and what is worth carrying over. Pure: no thread or file inside, the clock is given.

Segments leave whole, oldest first. What was used since it was written is carried over into the active
one, the most recently used first, up to a share of a segment.

A drop only says what it is about. From then on ``find`` leaves that out, and ``sweep`` takes it out for good,
some parts at a time: so nobody waits for it, however many they are.
"""

from collections import deque
from collections.abc import Callable, Iterable

from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.tiers.disk.carrying import CARRIED_SHARE, last_used
from kvferry.tiers.disk.dropping import Sweep
from kvferry.tiers.disk.format import FIRST_RECORD, Mark, Preamble, SegmentHead, next_link, record_bytes
from kvferry.tiers.disk.places import (
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
from kvferry.tiers.disk.segments import Segments
from kvferry.tiers.disk.settings import MAX_PARTS
from kvferry.tiers.disk.wall import unix_s


class SegmentLog:
    """Not thread-safe: the owner holds its lock. max_parts: a hard limit. wall: unix seconds.

    records: of all parts, those too that a drop is about and that are not taken out yet.
    """

    def __init__(
        self,
        segments: Segments,
        *,
        max_parts: int = MAX_PARTS,
        wall: Callable[[], float] = unix_s,
    ) -> None:
        self.segments = segments
        self.max_parts = max_parts
        self.records: dict[PartRef, Record] = {}
        self._wall = wall
        self._writing: dict[PartRef, int] = {}  # and into which segment
        self._doomed: dict[PartRef, Sweep | None] = {}  # written in vain, and for which drop
        self._sweeps: list[Sweep] = []
        self._kept_free = 0  # bytes of the active segment, for what is carried over next
        self._clock = 0

    # -- reading -----------------------------------------------------------------------------------

    def find(self, ref: PartRef) -> Record | None:
        """None also for what is dropped."""
        record = self.records.get(ref)
        if record is None or (self._sweeps and self._sweep_of(ref, record) is not None):
            return None
        return record

    def use(self, ref: PartRef) -> bool:
        """Whether it is there; if so it was used now."""
        record = self.find(ref)
        if record is None:
            return False
        self._clock += 1
        record.used = self._clock
        record.used_at = self._wall()
        return True

    def pin(self, ref: PartRef) -> Place | None:
        """Where it is; its segment stays until ``unpin``."""
        record = self.find(ref)
        if record is None:
            return None
        self.segments.pin(record.place)
        return record.place

    def lies_at(self, ref: PartRef, place: Place) -> bool:
        """Whether it is there still."""
        record = self.find(ref)
        return record is not None and record.place == place

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, ref: PartRef, *, carried: bool = False) -> Reservation | Lack:
        """A place in the active segment. A part that is carried over has one already, and finds no room
        without the active one being sealed for it. One that could not be read gets a new one."""
        segments = self.segments
        nbytes = record_bytes(ref.nbytes)
        if nbytes > segments.segment_bytes - FIRST_RECORD:
            return Lack.TOO_LARGE
        if ref in self._writing:
            return Lack.WRITING
        record = self._found_or_taken_out(ref)
        if not carried and record is not None and not record.failures:
            self.use(ref)
            return Lack.PRESENT
        active = segments.active
        if active is None:
            return Lack.NO_ROOM
        if record is None and self._crowded():
            self._make_way(active)
            return Lack.NO_ROOM
        room = active.nbytes - active.end
        if nbytes > room or (not carried and nbytes > room - self._kept_free):
            if not carried and not self._kept_free:
                segments.seal()
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
        segment = self.segments[place.segment]
        del self._writing[ref]
        if ref in self._doomed:
            return self._undo_doom(ref, [place])  # and the pin goes on
        segment.pins -= 1
        if segment.state is not State.ACTIVE and segment.state is not State.SEALED:
            return []
        before = self.records.get(ref)
        if before is not None:
            self.segments[before.place.segment].refs.discard(ref)
        old = before.place if before is not None else None
        self.records[ref] = Record(place, reservation.used_at, old=old)
        segment.refs.add(ref)
        self._found_or_taken_out(ref)  # a drop of what is old may have looked here before
        return []

    def abandon(self, reservation: Reservation, *, again: bool) -> None:
        """It could not be written. again: its place can be, when there is room; until that or a mark is
        written there, what follows it would not be found again. If not, its segment is sealed."""
        del self._writing[reservation.ref]
        self._undo_doom(reservation.ref, [])
        if self._sweeps:  # what is written next lies behind what they are about
            self.segments.seal(self.segments[reservation.place.segment])
        self.segments.not_filled(reservation, again=again)

    def remove(self, ref: PartRef) -> tuple[bool, list[Place]]:
        """Whether it was there, and where it is to be marked removed; those segments are pinned."""
        if ref in self._writing:
            self._doomed.setdefault(ref, None)
        record = self.find(ref)
        if record is None:
            return False, []
        return True, self._take_out(ref, record)

    def _undo_doom(self, ref: PartRef, written: list[Place]) -> list[Place]:
        """Its writing has ended. Returns what no drop takes care of."""
        sweep = self._doomed.pop(ref, None)
        if sweep is None:
            return written
        sweep.under_way.discard(ref)
        sweep.places += written
        return []

    # -- dropping ----------------------------------------------------------------------------------

    def drop(self, namespace: bytes | None, latest: float | None) -> Sweep:
        """What it is about (see ``Sweep``) is not found any more. ``sweep`` must take it out."""
        there = deque((segment.number, segment.generation) for segment in self.segments.in_use)
        sweep = Sweep(namespace, latest, self.segments.next_place, there)
        for ref in self._writing:  # as many as there are threads that write
            record = self.records.get(ref)
            begun = latest is None and namespace in (None, ref.key.namespace)
            if begun or (record is not None and sweep.covers(ref, record)):
                if ref not in self._doomed:
                    sweep.under_way.add(ref)
                self._doomed.setdefault(ref, sweep)
        self._sweeps.append(sweep)
        return sweep

    def sweep(self, sweep: Sweep, most: int) -> None:
        """Look at some of the parts that a drop may be about. most: how many."""
        while most > 0 and not sweep.through:
            most -= 1
            if sweep.at is None:
                sweep.at = sweep.segments.popleft()
                segment = self.segments[sweep.at[0]] if self._in_use(sweep.at) else None
                sweep.refs = list(segment.refs) if segment is not None else []
            elif not sweep.refs:
                self._swept(sweep, *sweep.at)
                sweep.at = None
            else:
                ref = sweep.refs.pop()
                record = self.records.get(ref)
                if record is not None and record.place[:2] == sweep.at and sweep.covers(ref, record):
                    self._sweep_out(sweep, ref, record)
        if sweep.over:
            self._sweeps.remove(sweep)

    def _sweep_of(self, ref: PartRef, record: Record) -> Sweep | None:
        """The drop that is about it."""
        return next((sweep for sweep in self._sweeps if sweep.covers(ref, record)), None)

    def _found_or_taken_out(self, ref: PartRef) -> Record | None:
        """As ``find``. What is dropped is taken out at once: another part is to have its name."""
        record = self.records.get(ref)
        if record is None or not self._sweeps or (sweep := self._sweep_of(ref, record)) is None:
            return record
        self._sweep_out(sweep, ref, record)
        return None

    def _sweep_out(self, sweep: Sweep, ref: PartRef, record: Record) -> None:
        sweep.parts += 1
        sweep.nbytes += ref.nbytes
        for place in self._take_out(ref, record):
            (sweep.own if place[:2] == sweep.at else sweep.places).append(place)

    def _swept(self, sweep: Sweep, number: int, generation: int) -> None:
        """A segment was looked through. It leaves whole if it is empty now, and no write is to stay."""
        own, sweep.own = sweep.own, []
        segment = self.segments[number] if self._holds(number, generation) else None
        if segment is None or not own:  # where there are any, their pins hold it
            return
        if segment.state is not State.LEAVING:
            staying = any(n == number and ref not in self._doomed for ref, n in self._writing.items())
            read = segment is self.segments.active and segment.pins > len(own)
            if segment.refs or staying or read:
                sweep.places += own
                return
            self.segments.leave(segment)
        segment.pins -= len(own)

    def _in_use(self, at: tuple[int, int]) -> bool:
        return any((s.number, s.generation) == at for s in self.segments.in_use)

    def _holds(self, number: int, generation: int) -> bool:
        return self.segments.holds(Place(number, generation, 0))

    # -- segments ----------------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """What is to be done next so that writing goes on; None: nothing, or nothing can be."""
        step = self.segments.next_step(crowded=self._crowded())
        if step is None or step.kind is not StepKind.EVICT:
            self._kept_free = 0
        return step

    def begin(self, number: int, head: SegmentHead) -> None:
        """Its first block is written: it is the active one now."""
        self.segments.begin(number, head)
        step = self.segments.next_step(crowded=self._crowded())
        if step is not None and step.kind is StepKind.EVICT:
            self.worth_carrying(step.segment)  # before anything else is written into this segment

    def worth_carrying(self, number: int) -> list[PartRef]:
        """What was used since it was written, the last used first. The active segment has room for it, and
        keeps that until ``vacate``."""
        refs, active = self.segments[number].refs, self.segments.active
        held = ((ref, self.records[ref]) for ref in refs)
        chosen = last_used(
            (part for part in held if not self._sweeps or self._sweep_of(*part) is None),
            room=min(active.nbytes // CARRIED_SHARE, active.nbytes - active.end) if active else 0,
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
        segment = self.segments[number]
        self._kept_free = 0
        if segment.state is State.LEAVING:
            return 0
        if segment.state is not State.SEALED:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot leave")
        for ref in segment.refs:
            del self.records[ref]
        gone = len(segment.refs)
        segment.refs.clear()
        self.segments.leave(segment)
        return gone

    @property
    def keeps_free(self) -> bool:
        """Whether room is kept for what is carried over next."""
        return self._kept_free > 0

    # -- recovery ----------------------------------------------------------------------------------

    def restore(
        self, free: Iterable[int], scanned: Iterable[Scanned], leaving: Iterable[Scanned] = ()
    ) -> None:
        """What was found at start-up. Of two records of one part the newer counts, also when it says that
        the part was removed. leaving: segments that are not to be found again."""
        for number in free:
            self.segments.allocated(number)
        for found in leaving:
            self.segments.leave(self._restore_segment(found))
        newest: Segment | None = None
        for found in sorted(scanned, key=lambda item: item.head.generation):
            newest = self._restore_segment(found)
            for preamble, offset in found.records:
                self._restore_record(newest, preamble, offset)
        if newest is not None:
            self.segments.go_on_with(newest)

    def _restore_segment(self, found: Scanned) -> Segment:
        segment = self.segments.found(found.number, found.head.segment_bytes, found.head.generation)
        segment.link, segment.end = found.link, found.end
        return segment

    def _restore_record(self, segment: Segment, preamble: Preamble, offset: int) -> None:
        if preamble.mark is Mark.VOID:
            return
        ref = preamble.ref
        before = self.records.pop(ref, None)
        if before is not None:
            self.segments[before.place.segment].refs.discard(ref)
        if preamble.mark is Mark.WHOLE:
            old = before.place if before is not None else None
            place = Place(segment.number, segment.generation, offset)
            self.records[ref] = Record(place, preamble.used_at, old=old)
            segment.refs.add(ref)

    # -- one part, and how many ----------------------------------------------------------------------

    def _take_out(self, ref: PartRef, record: Record) -> list[Place]:
        """Returns where it is to be marked removed, pinned; not in a segment that is erased anyway."""
        del self.records[ref]
        segments = self.segments
        segments[record.place.segment].refs.discard(ref)
        places = [p for p in (record.place, record.old) if p is not None and segments.holds(p)]
        places = [p for p in places if p != record.place or not segments.leaves(p.segment)]
        for place in places:
            segments.pin(place)
        return places

    def _crowded(self) -> bool:
        return len(self.records) + len(self._writing) >= self.max_parts

    def _make_way(self, active: Segment) -> None:
        """So that the oldest can leave, though there is room: the active one may be that, or have no room for
        what is carried over."""
        segments = self.segments
        half_full = active.end > active.nbytes // CARRIED_SHARE
        if not segments.leaving and (not segments.sealed or (half_full and segments.can_begin())):
            segments.seal()
