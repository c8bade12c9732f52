"""From a directory to the log of what it holds: once, before the tier's threads start."""

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import CorruptError, MisconfiguredError
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.format import read_segment
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.places import Place, Scanned
from kvferry.tiers.disk.records import Moves, RecordIO
from kvferry.tiers.disk.recovery import scan, without_torn
from kvferry.tiers.disk.segments import Segments
from kvferry.tiers.disk.settings import (
    FILE_OVERHEAD_BYTES,
    MAX_SEGMENTS,
    MIN_SEGMENTS,
    DiskSettings,
    segments_within,
    usual_segment_bytes,
)
from kvferry.tiers.disk.wall import unix_s

log = logging.getLogger("kvferry.tiers.disk")

SCANNERS = 8
NEWEST = 2
"""Segments of which something may have been under way when the process ended."""


def open_log(
    files: SegmentFiles, settings: DiskSettings, *, wall: Callable[[], float] = unix_s
) -> SegmentLog:
    """Only heads are read, and the records written last. Raises MisconfiguredError, one line."""
    collecting = gc.isenabled()
    gc.disable()  # records appear in great numbers and none goes: looking for garbage takes half the time
    try:
        return _open_log(files, settings, wall)
    except OSError as error:
        raise MisconfiguredError(
            f"disk tier in {files.directory}: cannot read what it holds: {error.strerror}"
        ) from error
    finally:
        if collecting:
            gc.enable()


def _open_log(files: SegmentFiles, settings: DiskSettings, wall: Callable[[], float]) -> SegmentLog:
    existing = files.existing()
    heads = {number: read_segment(files.first_block(number)) for number in existing}
    written = {n: head for n, head in heads.items() if head and head.segment_bytes == existing[n]}
    segments = Segments(
        segment_bytes=_segment_bytes(settings, [head.segment_bytes for head in written.values()]),
        size_bytes=settings.size_bytes,
    )
    kept = _that_fit(sorted(written, key=lambda n: written[n].generation), existing, segments)
    _tell_what_goes(files, settings, [existing[n] for n in written if n not in kept], existing.values())
    for number in kept:
        files.attach(number)
    with ThreadPoolExecutor(SCANNERS, "kvferry-disk-scan") as scanners:
        found = list(scanners.map(lambda number: _scanned(files, number, existing[number]), kept))
    scanned = [segment for segment in found if segment is not None]
    for number in set(kept) - {segment.number for segment in scanned}:
        files.detach(number)
    free = _free(files, existing, scanned, segments)
    beyond = _beyond(scanned, settings.max_parts)
    leaving, scanned = scanned[:beyond], scanned[beyond:]
    scanned[-NEWEST:] = [
        verified(files, segment, under_way=settings.writers + 1) for segment in scanned[-NEWEST:]
    ]
    opened = SegmentLog(segments, max_parts=settings.max_parts, wall=wall)
    opened.restore(free, scanned, leaving)
    if scanned:
        log.info("%s holds %d parts in %d segments", files.directory, len(opened.records), len(scanned))
    return opened


def _that_fit(oldest_first: Sequence[int], nbytes: Mapping[int, int], segments: Segments) -> list[int]:
    """The newest that fit, oldest first. Where the very newest cannot be written further, as another size is
    made now, there is room for one of that size too."""
    room, most = segments.room_bytes, MAX_SEGMENTS
    if oldest_first and nbytes[oldest_first[-1]] != segments.segment_bytes:
        room, most = room - segments.segment_bytes - FILE_OVERHEAD_BYTES, most - 1
    for count, number in enumerate(reversed(oldest_first)):
        room -= nbytes[number] + FILE_OVERHEAD_BYTES
        if room < 0 or count == most:
            return list(oldest_first[len(oldest_first) - count :])
    return list(oldest_first)


def _free(
    files: SegmentFiles, existing: Mapping[int, int], scanned: Sequence[Scanned], segments: Segments
) -> list[int]:
    """Files without parts that can be used again. All others go."""
    taken = sum(found.head.segment_bytes + FILE_OVERHEAD_BYTES for found in scanned)
    size = segments.segment_bytes
    most = min((segments.room_bytes - taken) // (size + FILE_OVERHEAD_BYTES), MAX_SEGMENTS - len(scanned))
    empty = existing.keys() - {found.number for found in scanned}
    free = [number for number in sorted(empty) if existing[number] == size][:most]
    for number in empty.difference(free):
        files.discard(number)
    for number in free:
        files.attach(number)
    return free


def _tell_what_goes(
    files: SegmentFiles, settings: DiskSettings, going: Sequence[int], existing: Iterable[int]
) -> None:
    """One line, when there is less room than there was. Of both the bytes of each segment."""
    if going:
        log.warning(
            "%s took %d MiB and may take %d now: let go the oldest %d of its segments, %d MiB; what was "
            "stored last is kept",
            files.directory,
            sum(existing) >> 20,
            settings.size_bytes >> 20,
            len(going),
            sum(going) >> 20,
        )


def _scanned(files: SegmentFiles, number: int, segment_bytes: int) -> Scanned | None:
    records = RecordIO(files)

    def block(offset: int) -> memoryview:
        try:
            return records.read_block(number, offset)
        except OSError as error:  # what is behind it cannot be found; a cache begins without it
            log.warning("segment %d cannot be read at %d: %s", number, offset, error.strerror)
            return memoryview(b"")

    return scan(number, block, segment_bytes=segment_bytes)


def _beyond(kept: Sequence[Scanned], max_parts: int) -> int:
    """How many of the oldest hold more than may be listed. The newest is always kept."""
    parts = 0
    for count, segment in enumerate(reversed(kept)):
        parts += len(segment.records)
        if count and parts > max_parts:
            return len(kept) - count
    return 0


def verified(files: Moves, scanned: Scanned, *, under_way: int) -> Scanned:
    """As many records as threads may have been writing are read whole; what is torn is marked, once."""
    records = RecordIO(files)
    found = without_torn(
        scanned,
        lambda ref, offset: records.is_whole(scanned.number, ref, offset),
        under_way=under_way,
    )
    for (was, offset), (preamble, _) in zip(scanned.records, found.records, strict=True):
        if preamble.mark is not was.mark:
            with contextlib.suppress(OSError, CorruptError):  # it will be found torn when it is read
                records.mark(Place(scanned.number, preamble.generation, offset), preamble.mark)
    return found


def _segment_bytes(settings: DiskSettings, there: Sequence[int]) -> int:
    """Of those that are made from now on. As most of those that are there, so that their files are used
    again; another where too few of them would fit, or not as many as fill the size."""
    if settings.segment_bytes is not None or not there:
        return settings.segment_bytes or usual_segment_bytes(settings.size_bytes)
    (usual, _), *_ = Counter(there).most_common(1)
    fitting = segments_within(settings.size_bytes, usual)
    return usual if MIN_SEGMENTS <= fitting <= MAX_SEGMENTS else usual_segment_bytes(settings.size_bytes)
