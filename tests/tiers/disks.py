"""A disk tier's directory as the tier contract sees it, and files that fail, hang or are full on demand."""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.identity.names import PartRef
from kvferry.testing.expectations import eventually, expect
from kvferry.testing.tier_calls import fetch_all, some_bytes, some_ref, store_all
from kvferry.testing.tier_contract import Damage
from kvferry.tiers.disk.files import Buffers, SegmentFiles
from kvferry.tiers.disk.format import head_bytes, pack_head, read_preamble, record_bytes, verify_head
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.places import Place, State
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

ALL = ("read", "write", "allocate", "try_out")


class Troubles:
    """read, write, allocate: the errno that each ends with, 0: none. ``hang``: some of them do not end.

    unreadable, unwritable: places, segment and offset, where a read or write ends with EIO.
    judge: asked before each read and write of a segment for its errno: kind, segment, offset, bytes.
    tried: how often each was begun.
    """

    def __init__(self) -> None:
        self.read = self.write = self.allocate = 0
        self.unreadable: set[tuple[int, int]] = set()
        self.unwritable: set[tuple[int, int]] = set()
        self.judge: Callable[[str, int, int, int], int] = lambda kind, number, offset, nbytes: 0
        self.tried: Counter[str] = Counter()
        self.hanging = 0
        self._going = {kind: threading.Event() for kind in ALL}
        for going in self._going.values():
            going.set()

    def fail(self, code: int = errno.EIO) -> None:
        self.read = self.write = self.allocate = code

    @contextmanager
    def hang(self, *kinds: str) -> Iterator[None]:
        """All kinds, if none is named."""
        for kind in kinds or ALL:
            self._going[kind].clear()
        try:
            yield
        finally:
            for going in self._going.values():
                going.set()

    def meet(self, kind: str, code: int) -> None:
        self.tried[kind] += 1
        self.hanging += 1
        self._going[kind].wait()
        self.hanging -= 1
        if code:
            raise OSError(code, os.strerror(code))


class TroubledFiles(SegmentFiles):
    """The real files, after a look at the troubles."""

    troubles: Troubles

    def read(self, number: int, buffers: Buffers, offset: int) -> int:
        troubles = self.troubles
        bad = errno.EIO if (number, offset) in troubles.unreadable else troubles.read
        troubles.meet("read", bad or troubles.judge("read", number, offset, _size(buffers)))
        return super().read(number, buffers, offset)

    def write(self, number: int, buffers: Buffers, offset: int) -> int:
        troubles = self.troubles
        bad = errno.EIO if (number, offset) in troubles.unwritable else troubles.write
        troubles.meet("write", bad or troubles.judge("write", number, offset, _size(buffers)))
        return super().write(number, buffers, offset)

    def allocate(self, number: int, nbytes: int) -> None:
        self.troubles.meet("allocate", self.troubles.allocate)
        super().allocate(number, nbytes)

    def discard(self, number: int) -> None:
        """Another file of that number lies elsewhere."""
        if hasattr(self, "troubles"):
            self.troubles.unwritable = {at for at in self.troubles.unwritable if at[0] != number}
        super().discard(number)

    def try_out(self) -> None:
        if hasattr(self, "troubles"):
            self.troubles.meet("try_out", self.troubles.write)
        super().try_out()


def files_in(directory: Path) -> dict[str, os.stat_result]:
    """By name; those that a tier discards meanwhile may be missing."""
    found = {}
    for file in directory.iterdir():
        with suppress(FileNotFoundError):
            found[file.name] = file.stat()
    return found


def taken(directory: Path) -> int:
    """Bytes of all files, as the file system counts them."""
    return sum(max(found.st_size, found.st_blocks * 512) for found in files_in(directory).values())


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers)


class DiskStore:
    """``TierStore`` over one directory. settings: of a new tier."""

    def __init__(self, settings: DiskSettings) -> None:
        self.settings = settings
        self.troubles = Troubles()
        self.later_s = 0.0  # how far its clock is ahead
        self._opened: list[DiskTier] = []

    def open(self) -> DiskTier:
        wall = lambda: time.time() + self.later_s  # noqa: E731
        self._opened.append(DiskTier.open(self.settings, open_files=self._open_files, wall=wall))
        return self._opened[-1]

    def close(self) -> None:
        """Of every tier that it opened, also where a test failed before it closed its own."""
        for tier in self._opened:
            tier.close()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Every read and write ends with EIO, and the tier has noticed."""
        self.troubles.fail()
        try:
            for n, tier in enumerate(self._opened):
                store_all(tier, [(some_ref(1, 9000 + n), some_bytes(1, 9000 + n))], deadline_s=0.5)
                eventually(lambda tier=tier: tier.statistics().state == "down", "quarantine")  # type: ignore[misc]
            yield
        finally:
            self.troubles.fail(0)

    def damage(self, ref: PartRef, how: Damage) -> None:
        """Of the tier opened last: a bit of its bytes, or its size as its head has it."""
        place = self.place(ref)
        record = bytearray(self.record(place, ref))
        head = head_bytes(ref.nbytes)
        if how is Damage.BIT_FLIP:
            record[head + ref.nbytes // 2] ^= 1
        else:
            found = read_preamble(record)
            expect(found is not None, "no record to damage")
            assert found is not None
            other = PartRef(ref.key, ref.nbytes + (-1 if how is Damage.TRUNCATION else 1))
            checksums = verify_head(memoryview(record), ref)
            record[:head] = pack_head(found._replace(ref=other), checksums)
        self.put(place, bytes(record))

    def misplace(self, source: PartRef, under: PartRef) -> None:
        self.put(self.place(under), self.record(self.place(source), source))

    def place(self, ref: PartRef) -> Place:
        """Where it lies."""
        return self._opened[-1]._books.log.records[ref].place

    def record(self, place: Place, ref: PartRef) -> bytes:
        with self.segment(place.segment).open("rb") as file:
            file.seek(place.offset)
            return file.read(record_bytes(ref.nbytes))

    def put(self, place: Place, data: bytes) -> None:
        with self.segment(place.segment).open("r+b") as file:
            file.seek(place.offset)
            file.write(data)

    def segment(self, number: int) -> Path:
        return self.settings.directory / f"segment-{number:04d}"

    def _open_files(self, directory: Path) -> SegmentFiles:
        files = TroubledFiles.open(directory)
        assert isinstance(files, TroubledFiles)
        files.troubles = self.troubles
        return files


def found_right(tier: DiskTier, ref: PartRef, seed: int) -> bool:
    """Whether it is there with the bytes of that seed. AssertionError for any other bytes."""
    result, memory = fetch_all(tier, [ref])[0]
    if result.outcome.value != "ok":
        return False
    expect(memory == some_bytes(ref.nbytes, seed), "other bytes came back")
    return True


def check(log: SegmentLog) -> None:
    """AssertionError when the books of a log do not agree."""
    segments = log.segments
    listed = {ref: segment.number for segment in segments for ref in segment.refs}
    held = {ref: record.place.segment for ref, record in log.records.items()}
    expect(listed == held, "records and segments disagree")
    for ref, record in log.records.items():
        segment = segments[record.place.segment]
        right = segment.state in (State.ACTIVE, State.SEALED) and segments.holds(record.place)
        expect(right, f"{ref} lies in a segment that is {segment.state.value}")
        end = record.place.offset + record_bytes(ref.nbytes)
        expect(end <= segment.end, f"{ref} lies beyond its segment's end")
    expect(all(s.end <= s.nbytes for s in segments), "a segment is longer than it may be")
    expect(segments.taken_bytes <= segments.room_bytes, "segments take too much")
    leaving = {s.number for s in segments if s.state in (State.LEAVING, State.ERASING)}
    expect(leaving == {number for number, _ in segments.leaving}, "segments and their states disagree")
    expect(len(log.records) <= log.max_parts, "there are too many parts")
