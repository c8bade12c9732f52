"""What the log of a disk tier speaks of: segments, their states, places in them, and what is to be done."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.identity.names import PartRef
from kvferry.tiers.disk.format import FIRST_RECORD, Preamble, SegmentHead, record_bytes


class State(enum.Enum):
    """Of a segment; the diagram is in ``segments``."""

    FREE = "free"
    ACTIVE = "active"
    SEALED = "sealed"
    LEAVING = "leaving"
    ERASING = "erasing"


class Lack(enum.Enum):
    """Why a part gets no place."""

    PRESENT = "present"  # it has one
    WRITING = "writing"  # it is being written
    NO_ROOM = "no room"  # until the next segment is begun, or another has left
    TOO_LARGE = "too large"  # for any segment


class Place(NamedTuple):
    """Of a record: valid as long as the segment has that generation."""

    segment: int
    generation: int
    offset: int


class Reservation(NamedTuple):
    """A place that is being written. Its segment is pinned until ``commit`` or ``abandon``.

    link: of the record; before: of the one before it. used_at: unix seconds.
    """

    ref: PartRef
    place: Place
    link: int
    before: int
    used_at: float

    @property
    def preamble(self) -> Preamble:
        return Preamble(self.ref, self.place.generation, self.link, self.used_at)


@dataclass(slots=True)
class Record:
    """used_at: unix seconds, when it was stored or last used. used: in which order, 0: not since it was
    written. failures: reads in vain. old: where it lay before."""

    place: Place
    used_at: float
    used: int = 0
    failures: int = 0
    old: Place | None = None


class StepKind(enum.Enum):
    """What is to be done to the files next."""

    ALLOCATE = "allocate"  # a new segment
    BEGIN = "begin"  # a free one
    EVICT = "evict"  # the oldest sealed one
    RETIRE = "retire"  # one that nobody reads any more
    DISCARD = "discard"  # a free one of a size that is not made any more
    FILL = "fill"  # a gap that a failed write left


class Step(NamedTuple):
    """Answered by ``allocated``, ``begin``, ``vacate``, ``retired``, ``discarded`` or ``filled``."""

    kind: StepKind
    segment: int


class Scanned(NamedTuple):
    """A segment as it was found. records: in order. end: behind the last. link: of the last."""

    number: int
    head: SegmentHead
    records: list[tuple[Preamble, int]]
    end: int
    link: int


@dataclass(slots=True, eq=False)
class Segment:
    """nbytes: of its file. gaps: places of writes that failed, not yet marked void. failures: of its first
    block."""

    number: int
    nbytes: int
    state: State = State.FREE
    generation: int = 0
    link: int = 0
    end: int = FIRST_RECORD
    pins: int = 0
    failures: int = 0
    refs: set[PartRef] = field(default_factory=set[PartRef])
    gaps: list[Reservation] = field(default_factory=list[Reservation])

    def take_back(self) -> None:
        """Gaps at its end are no gaps: the next record goes there."""
        while True:
            ends = {gap.place.offset + record_bytes(gap.ref.nbytes): gap for gap in self.gaps}
            last = ends.get(self.end)
            if last is None:
                return
            self.gaps.remove(last)
            self.end, self.link = last.place.offset, last.before
