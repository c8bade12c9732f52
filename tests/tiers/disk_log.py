"""The log of a disk tier on one thread, over segments in memory that can be read as a crash left them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import CorruptError
from kvferry.identity.names import PartRef
from kvferry.testing.tier_calls import (
    empty_memory,
    some_bytes,
    some_ref,
)
from kvferry.tiers.disk.books import Books
from kvferry.tiers.disk.files import Buffers
from kvferry.tiers.disk.format import (
    BLOCK_BYTES,
    Mark,
)
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.opening import NEWEST, verified
from kvferry.tiers.disk.places import Lack, Place
from kvferry.tiers.disk.records import RecordIO
from kvferry.tiers.disk.recovery import scan
from kvferry.tiers.disk.segments import Segments
from kvferry.tiers.disk.settings import FILE_OVERHEAD_BYTES, DiskSettings
from kvferry.tiers.disk.threads import Janitor
from kvferry.tiers.disk.wall import unix_s

SEGMENT_BYTES = 12 * BLOCK_BYTES
SEGMENTS = 4
SIZES = (1, 100, 4096, 5000, 9000, 40, 12000, 8192, 7, 300, 20000, 4097)
NAMESPACES = (b"namespace number", b"another of them.")


def _named(nbytes: int, n: int) -> PartRef:
    ref = some_ref(nbytes, n)
    return ref._replace(key=ref.key._replace(namespace=NAMESPACES[n % 2]))


REFS = [_named(size, n) for n, size in enumerate(SIZES)]
BYTES = [some_bytes(size, n) for n, size in enumerate(SIZES)]
UNDER_WAY = 3


def empty_log(max_parts: int = 100, wall: Callable[[], float] = unix_s) -> SegmentLog:
    size = BLOCK_BYTES + SEGMENTS * (SEGMENT_BYTES + FILE_OVERHEAD_BYTES)
    segments = Segments(segment_bytes=SEGMENT_BYTES, size_bytes=size)
    return SegmentLog(segments, max_parts=max_parts, wall=wall)


class Write(NamedTuple):
    segment: int
    offset: int
    data: bytes


class MemoryFiles:
    """Segments in memory, and every write to them in order."""

    def __init__(self) -> None:
        self.segments: dict[int, bytearray] = {}
        self.journal: list[Write] = []
        self.before: Callable[[str], None] = lambda kind: None

    def allocate(self, number: int, nbytes: int) -> None:
        self.segments[number] = bytearray(random.Random(number).randbytes(nbytes))

    def read(self, number: int, buffers: Buffers, offset: int) -> int:
        self.before("read")
        start = offset
        for buffer in buffers:
            piece = self.segments[number][offset : offset + buffer.nbytes]
            buffer[: len(piece)] = piece
            offset += len(piece)
        return offset - start

    def write(self, number: int, buffers: Buffers, offset: int) -> int:
        self.before("write")
        data = b"".join(buffers)
        assert offset + len(data) <= SEGMENT_BYTES
        self.segments[number][offset : offset + len(data)] = data
        self.journal.append(Write(number, offset, data))
        return len(data)

    def after_a_crash(self, nbytes: int) -> "MemoryFiles":
        """As the first ``nbytes`` written bytes left it. A single block is whole or not there."""
        found = MemoryFiles()
        for number in self.segments:
            found.allocate(number, SEGMENT_BYTES)
        for number, offset, data in self.journal:
            part = data[: max(0, nbytes)]
            if len(data) > BLOCK_BYTES or len(part) == len(data):
                found.segments[number][offset : offset + len(part)] = part
            nbytes -= len(data)
        return found


class Disk:
    """The log, its files and the steps between, on one thread."""

    def __init__(self, files: MemoryFiles, log: SegmentLog) -> None:
        self.files, self.log = files, log
        self.records = RecordIO(files)
        self.janitor = Janitor(Books(DiskSettings(Path(), 1), log), files)  # type: ignore[arg-type]
        self.carrying: PartRef | None = None
        self.sweeps = True
        carry = self.janitor._carry

        def carried(ref: PartRef) -> bool:
            self.carrying = ref
            try:
                return carry(ref)
            finally:
                self.carrying = None

        self.janitor._carry = carried  # type: ignore[method-assign]

    @classmethod
    def empty(cls, max_parts: int = 100, wall: Callable[[], float] = unix_s) -> "Disk":
        return cls(MemoryFiles(), empty_log(max_parts, wall))

    @classmethod
    def recovered(cls, files: MemoryFiles) -> "Disk":
        records = RecordIO(files)
        found, free = [], []
        for number in files.segments:
            segment = scan(
                number, lambda at, n=number: records.read_block(n, at), segment_bytes=SEGMENT_BYTES
            )  # type: ignore[misc]
            if segment is None:
                free.append(number)
            else:
                found.append(segment)
        found.sort(key=lambda segment: segment.head.generation)
        found[-NEWEST:] = [verified(files, segment, under_way=UNDER_WAY) for segment in found[-NEWEST:]]
        log = empty_log()
        log.restore(free, found)
        return cls(files, log)

    def settle(self) -> None:
        """But for drops, where ``sweeps`` says so."""
        books = self.janitor._books
        while True:
            swept = self.sweeps and books.marks.sweeping
            if self.sweeps:
                self.sweep()
            marks = books.marks.next()
            if marks is not None:
                self.janitor._mark(*marks)
            step = self.log.next_step()
            while books.told:
                books.told.popleft()()
            if step is None and marks is None and not swept:
                return
            if step is not None:
                self.janitor._do(step)

    def sweep(self) -> None:
        with self.janitor._books.lock:
            self.janitor._books.sweep()

    def store(self, n: int) -> None:
        for _ in range(60):
            place = self.log.reserve(REFS[n])
            if place is not Lack.NO_ROOM:
                break
            self.sweep()  # a drop that is half done holds its segments
            self.settle()
        if place is not Lack.PRESENT:
            assert not isinstance(place, Lack)
            self.records.write(place, BYTES[n], ())
            assert not self.log.commit(place)
        self.settle()

    def fail_to_store(self, n: int) -> None:
        """The disk refused after half of it."""
        place = self.log.reserve(REFS[n])
        if not isinstance(place, Lack):
            self.log.abandon(place, again=False)
        self.settle()

    def have_no_room_for_one_of_two(self, n: int) -> None:
        """The second is written, or there was no room for it either."""
        places = [self.log.reserve(REFS[m]) for m in (n, (n + 1) % len(REFS))]
        first, second = (None if isinstance(place, Lack) else place for place in places)
        if second is not None and n % 2:
            self.records.write(second, BYTES[(n + 1) % len(REFS)], ())
            self.log.commit(second)
            second = None
        for place in (first, second) if n % 3 else (second, first):
            if place is not None:
                self.log.abandon(place, again=True)
        self.settle()

    def remove(self, n: int) -> None:
        _, places = self.log.remove(REFS[n])
        for place in places:
            self.records.mark(place, Mark.REMOVED)
            self.log.segments.unpin(place)

    def fetch(self, n: int) -> bool:
        """Whether it was there. AssertionError for other bytes than were stored."""
        place = self.log.pin(REFS[n])
        if place is None:
            return False
        memory = empty_memory(SIZES[n])
        self.records.read(place, REFS[n], memory)
        assert memory == BYTES[n]
        self.log.segments.unpin(place)
        return self.log.use(REFS[n])

    def records_right(self, place: Place, ref: PartRef, memory: memoryview) -> bool:
        """Whether the tier would hand it out."""
        try:
            self.records.read(place, ref, memory)
        except CorruptError:
            return False
        return True

    def held(self) -> set[PartRef]:
        return {ref for ref in self.log.records if self.log.find(ref) is not None}
