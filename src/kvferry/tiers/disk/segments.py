"""In which state each segment is, and what is to be done to the files next. Pure: no thread or file inside.

    FREE ──begin──► ACTIVE ──full, or a write failed──► SEALED ──leave──► LEAVING ──retire──► ERASING ─┐
     ▲ │                                                         (until nobody reads it any more)       │
     │ └─ of a size that is not made any more ──discarded──►                                            │
     └───────────────────────────────────────────retired────────────────────────────────────────────────┘

Segments leave whole, oldest first. One is kept free where possible, for what is carried over.
"""

from collections.abc import Iterator

from kvferry.errors import BrokenError
from kvferry.tiers.disk.format import FIRST_RECORD, SegmentHead
from kvferry.tiers.disk.places import Place, Reservation, Segment, State, Step, StepKind
from kvferry.tiers.disk.settings import FILE_OVERHEAD_BYTES, MAX_SEGMENTS, segment_room

MAX_FIRST_BLOCK_FAILURES = 3
"""A segment whose first block could not be written so often is given up."""


class Segments:
    """Not thread-safe: the owner holds its lock.

    segment_bytes: of each that is made from now on; there may be others, of a tier of another size before.
    size_bytes: of the directory, a hard limit. active: the one being written.
    """

    def __init__(self, *, segment_bytes: int, size_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.may_grow = True
        self.active: Segment | None = None
        self._room_bytes = segment_room(size_bytes)
        self._all: dict[int, Segment] = {}
        self._leaving: set[int] = set()
        self._generation = 0

    def __len__(self) -> int:
        """How many there are on the disk."""
        return len(self._all)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all.values())

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    # -- what is asked -----------------------------------------------------------------------------

    @property
    def in_use(self) -> list[Segment]:
        """Those that hold parts, oldest first."""
        used = [s for s in self if s.state in (State.ACTIVE, State.SEALED)]
        return sorted(used, key=lambda segment: segment.generation)

    @property
    def sealed(self) -> list[Segment]:
        """Those that may be evicted."""
        return [segment for segment in self if segment.state is State.SEALED]

    @property
    def nbytes(self) -> int:
        """Of their files."""
        return sum(segment.nbytes for segment in self)

    @property
    def taken_bytes(self) -> int:
        """With what the file system needs for them."""
        return self.nbytes + FILE_OVERHEAD_BYTES * len(self)

    @property
    def room_bytes(self) -> int:
        """``taken_bytes`` is never more."""
        return self._room_bytes

    @property
    def writable(self) -> bool:
        """Whether a segment is being written."""
        return self.active is not None

    @property
    def leaving(self) -> set[tuple[int, int]]:
        """Number and generation of what becomes free as soon as nobody reads it any more."""
        return {(number, self._all[number].generation) for number in self._leaving}

    @property
    def pinned(self) -> int:
        """Reads, writes and marks under way."""
        return sum(segment.pins for segment in self)

    @property
    def next_place(self) -> tuple[int, int]:
        """Generation and offset before which everything lies that was written until now."""
        if self.active is not None:
            return self.active.generation, self.active.end
        return max((segment.generation for segment in self.sealed), default=0) + 1, 0

    def holds(self, place: Place) -> bool:
        """Whether what was written there may still be there."""
        segment = self._all.get(place.segment)
        return (
            segment is not None
            and segment.generation == place.generation
            and segment.state not in (State.FREE, State.ERASING)
        )

    def leaves(self, number: int) -> bool:
        """Whether it is about to be erased."""
        return number in self._leaving

    def can_begin(self) -> bool:
        """Whether there may be another active one without an eviction."""
        return self._can_grow() or any(s.state is State.FREE for s in self)

    # -- what is to be done ------------------------------------------------------------------------

    def next_step(self, *, crowded: bool) -> Step | None:
        """So that writing goes on; None: nothing, or nothing can be. crowded: parts must leave for others."""
        for number in self._leaving:
            if not self._all[number].pins:
                return Step(StepKind.RETIRE, number)
        foreign = (s.number for s in self if s.state is State.FREE and s.nbytes != self.segment_bytes)
        for number in foreign:
            return Step(StepKind.DISCARD, number)
        if self.active is None and self.can_begin():
            free = [segment for segment in self if segment.state is State.FREE]
            if free:
                return Step(StepKind.BEGIN, min(free, key=lambda segment: segment.failures).number)
            return Step(StepKind.ALLOCATE, self._unused_number())
        if self.active is not None and self.can_begin() and not crowded:
            return self._gap_step()
        sealed = self.sealed
        if self._leaving or not sealed:
            return self._gap_step()
        return Step(StepKind.EVICT, min(sealed, key=lambda segment: segment.generation).number)

    def _gap_step(self) -> Step | None:
        number = next((segment.number for segment in self if segment.gaps), None)
        return Step(StepKind.FILL, number) if number is not None else None

    # -- what was done -----------------------------------------------------------------------------

    def allocated(self, number: int) -> None:
        """The file is there."""
        if not self._fits(self.segment_bytes) or number in self._all:
            raise BrokenError(f"segment {number} is one too many")
        self._all[number] = Segment(number, self.segment_bytes)

    def found(self, number: int, nbytes: int, generation: int) -> Segment:
        """One was there at the start."""
        if not self._fits(nbytes) or number in self._all:
            raise BrokenError(f"segment {number} is one too many")
        segment = self._all[number] = Segment(number, nbytes, State.SEALED, generation)
        self._generation = max(self._generation, generation)
        return segment

    def go_on_with(self, segment: Segment) -> None:
        """The newest that was found; it is written further if it is of the size that is made now. Where it is
        full already, the next reservation says so."""
        if segment.nbytes == self.segment_bytes:
            segment.state, self.active = State.ACTIVE, segment

    def next_head(self, seed: int) -> SegmentHead:
        """For the next segment that is begun. seed: 64 random bits."""
        self._generation += 1
        return SegmentHead(self.segment_bytes, self._generation, seed)

    def begin(self, number: int, head: SegmentHead) -> None:
        """Its first block is written: it is the active one now."""
        segment = self._all[number]
        if segment.state is not State.FREE or self.active is not None:
            raise BrokenError(f"segment {number} is {segment.state.value} and cannot be begun")
        segment.state, segment.generation, segment.failures = State.ACTIVE, head.generation, 0
        segment.link, segment.end = head.seed, FIRST_RECORD
        self.active = segment

    def seal(self, segment: Segment | None = None) -> None:
        """The active one, unless it is another than that."""
        active = self.active
        if active is not None and (segment is None or segment is active):
            active.state = State.SEALED
            self.active = None

    def leave(self, segment: Segment) -> None:
        """Nothing in it is found any more."""
        self.seal(segment)
        segment.state = State.LEAVING
        segment.gaps.clear()
        self._leaving.add(segment.number)

    def retire(self, number: int) -> int | None:
        """Its first block is about to be erased: returns its generation. None if it is in use again: a
        removal is written down."""
        segment = self._all[number]
        if segment.pins or number not in self._leaving:
            return None
        segment.state = State.ERASING
        return segment.generation

    def retired(self, number: int) -> None:
        """Its first block is erased."""
        segment = self._all[number]
        if segment.pins or segment.state is not State.ERASING:
            raise BrokenError(f"segment {number} is in use")
        segment.state, segment.failures = State.FREE, 0
        self._leaving.discard(number)

    def discarded(self, number: int) -> None:
        """Its file is gone."""
        if self._all[number].state is not State.FREE:
            raise BrokenError(f"segment {number} is in use")
        del self._all[number]

    def first_block_failed(self, number: int) -> bool:
        """It could not be written. True: not for the first time, and it is to be given up."""
        segment = self._all[number]
        segment.failures += 1
        return segment.failures >= MAX_FIRST_BLOCK_FAILURES

    def given_up(self, number: int) -> set[tuple[int, int]]:
        """Its file is gone, its bytes are not used again. Returns what was erased with it, as ``leaving``."""
        segment = self._all[number]
        if segment.state not in (State.FREE, State.ERASING):
            raise BrokenError(f"segment {number} is in use")
        gone = {each for each in self.leaving if each[0] == number}
        del self._all[number]
        self._leaving.discard(number)
        self._room_bytes -= segment.nbytes + FILE_OVERHEAD_BYTES
        return gone

    # -- pins and gaps -----------------------------------------------------------------------------

    def pin(self, place: Place) -> None:
        """Its segment stays until ``unpin``."""
        self._all[place.segment].pins += 1

    def unpin(self, place: Place) -> None:
        """Raises BrokenError when it was not pinned."""
        segment = self._all[place.segment]
        if segment.pins <= 0 or segment.generation != place.generation:
            raise BrokenError(f"segment {place.segment} was released twice")
        segment.pins -= 1

    def gap(self, number: int) -> Reservation | None:
        """Of a failed write, to be marked void; its segment is pinned until ``filled``."""
        segment = self._all[number]
        if not segment.gaps:
            return None
        segment.pins += 1
        return segment.gaps.pop()

    def filled(self, gap: Reservation) -> None:
        """The mark is written."""
        self._all[gap.place.segment].pins -= 1

    def not_filled(self, gap: Reservation, *, again: bool) -> None:
        """It could not be. again: it is tried again; else what follows it counts until a restart."""
        segment = self._all[gap.place.segment]
        segment.pins -= 1
        if not again:
            self.seal(segment)
        elif segment.state in (State.ACTIVE, State.SEALED):
            segment.gaps.append(gap)
            segment.take_back()

    def _can_grow(self) -> bool:
        return self.may_grow and self._fits(self.segment_bytes)

    def _fits(self, nbytes: int) -> bool:
        more = nbytes + FILE_OVERHEAD_BYTES
        return len(self._all) < MAX_SEGMENTS and self.taken_bytes + more <= self._room_bytes

    def _unused_number(self) -> int:
        return next(number for number in range(len(self._all) + 1) if number not in self._all)
