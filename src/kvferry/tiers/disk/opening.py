"""From a directory to the log of what it holds: once, before the tier's threads start."""

import gc
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import MisconfiguredError
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.records import RecordIO
from kvferry.tiers.disk.recovery import scan, without_torn
from kvferry.tiers.disk.segments import Scanned, SegmentLog
from kvferry.tiers.disk.settings import MIN_SEGMENTS, DiskSettings, segments_within, usual_segment_bytes

log = logging.getLogger("kvferry.tiers.disk")

SCANNERS = 8


def open_log(files: SegmentFiles, settings: DiskSettings) -> SegmentLog:
    """Only heads are read, and the records written last. Raises MisconfiguredError, one line."""
    collecting = gc.isenabled()
    gc.disable()  # records appear in great numbers and none goes: looking for garbage takes half the time
    try:
        return _open_log(files, settings)
    except OSError as error:
        raise MisconfiguredError(
            f"disk tier in {files.directory}: cannot read what it holds: {error.strerror}"
        ) from error
    finally:
        if collecting:
            gc.enable()


def _open_log(files: SegmentFiles, settings: DiskSettings) -> SegmentLog:
    existing = files.existing()
    segment_bytes = _segment_bytes(settings, existing)
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
    if kept:
        kept[-1] = _verified(files, kept[-1], settings)
    segments = SegmentLog(segment_bytes=segment_bytes, max_segments=limit)
    segments.restore(free, kept)
    if kept:
        log.info("%s holds %d parts in %d segments", files.directory, len(segments.records), len(kept))
    return segments


def _verified(files: SegmentFiles, newest: Scanned, settings: DiskSettings) -> Scanned:
    """As many records as threads may have been writing are read whole."""
    records = RecordIO(files)
    return without_torn(
        newest,
        lambda ref, offset: records.is_whole(newest.number, ref, offset),
        under_way=settings.writers + 1,
    )


def _segment_bytes(settings: DiskSettings, existing: dict[int, int]) -> int:
    """That of what is there, where enough of them fit the size; so a changed size keeps what it can."""
    wanted = settings.segment_bytes or usual_segment_bytes(settings.size_bytes)
    if existing and settings.segment_bytes is None:
        (usual, _), *_ = Counter(existing.values()).most_common(1)
        if usual > 0 and segments_within(settings.size_bytes, usual) >= MIN_SEGMENTS:
            return usual
    return wanted
