"""From a directory to the log of what it holds: once, before the tier's threads start."""

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import CorruptError, MisconfiguredError
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.format import read_segment
from kvferry.tiers.disk.places import Place, Scanned
from kvferry.tiers.disk.records import Moves, RecordIO
from kvferry.tiers.disk.recovery import scan, without_torn
from kvferry.tiers.disk.segments import SegmentLog
from kvferry.tiers.disk.settings import MIN_SEGMENTS, DiskSettings, segments_within, usual_segment_bytes
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
    segment_bytes = _segment_bytes(files, settings, existing)
    limit = segments_within(settings.size_bytes, segment_bytes)
    usable = [number for number, nbytes in existing.items() if nbytes == segment_bytes]
    for number in existing.keys() - usable:  # of another size, or not made to its end
        files.discard(number)
    for number in usable:
        files.attach(number)

    def scanned(number: int) -> Scanned | None:
        records = RecordIO(files)

        def block(offset: int) -> memoryview:
            try:
                return records.read_block(number, offset)
            except OSError as error:  # what is behind it cannot be found; a cache begins without it
                log.warning("segment %d cannot be read at %d: %s", number, offset, error.strerror)
                return memoryview(b"")

        return scan(number, block, segment_bytes=segment_bytes)

    with ThreadPoolExecutor(SCANNERS, "kvferry-disk-scan") as scanners:
        found = dict(zip(usable, scanners.map(scanned, usable), strict=True))
    kept = sorted((s for s in found.values() if s is not None), key=lambda s: s.head.generation)[-limit:]
    free = [number for number, segment in found.items() if segment is None][: limit - len(kept)]
    for number in found.keys() - free - {segment.number for segment in kept}:  # the limit is lower now
        files.detach(number)
        files.discard(number)
    beyond = _beyond(kept, settings.max_parts)
    leaving = [segment.number for segment in kept[:beyond]]
    kept = kept[beyond:]
    kept[-NEWEST:] = [verified(files, segment, under_way=settings.writers + 1) for segment in kept[-NEWEST:]]
    segments = SegmentLog(
        segment_bytes=segment_bytes, max_segments=limit, max_parts=settings.max_parts, wall=wall
    )
    segments.restore(free, kept, leaving)
    if kept:
        log.info("%s holds %d parts in %d segments", files.directory, len(segments.records), len(kept))
    return segments


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


def _segment_bytes(files: SegmentFiles, settings: DiskSettings, existing: dict[int, int]) -> int:
    """That of what is in use, where enough of them fit the size; so a changed size keeps what it can."""
    wanted = settings.segment_bytes or usual_segment_bytes(settings.size_bytes)
    if settings.segment_bytes is None:
        heads = {number: read_segment(files.first_block(number)) for number in existing}
        sizes = [
            head.segment_bytes for n, head in heads.items() if head and head.segment_bytes == existing[n]
        ]
        if sizes:
            (usual, _), *_ = Counter(sizes).most_common(1)
            if segments_within(settings.size_bytes, usual) >= MIN_SEGMENTS:
                return usual
    return wanted
