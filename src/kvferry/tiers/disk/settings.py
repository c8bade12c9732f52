"""How the disk tier behaves: every limit in one place."""

from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import MisconfiguredError
from kvferry.tiers.disk.format import BLOCK_BYTES

MIN_DISK_BYTES = 64 << 20
MIN_SEGMENTS = 4
USUAL_SEGMENTS = 16
MAX_SEGMENTS = 256
"""Each holds a descriptor."""
FILE_OVERHEAD_BYTES = 8 * BLOCK_BYTES
"""What a file system takes for a segment beside its bytes: where they are."""
SMALLEST_SEGMENT_BYTES = 16 << 20
USUAL_SEGMENT_BYTES = 1 << 30
MAX_PARTS = 4_000_000
"""Each takes memory: see docs/decisions/disk-segments.md."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """``docs/decisions/disk-segments.md`` has the reasons.

    directory: made if it is missing; this tier alone uses it. size_bytes: its files never take more.
    segment_bytes: of a new directory; None: from the size. readers, writers: threads, each with one record
    under way. queued_items: waiting reads, and as many writes; while there are more, no other call is taken.
    max_parts: at most, so that the index stays within memory; older ones leave. stall_s: a disk that takes
    so much longer than a slow one would is not used until it answers again. close_s: so long ``close``
    waits for a disk that does not answer.
    """

    directory: Path
    size_bytes: int
    segment_bytes: int | None = None
    readers: int = 4
    writers: int = 2
    queued_items: int = 65536
    max_parts: int = MAX_PARTS
    stall_s: float = 3.0
    close_s: float = 10.0


def usual_segment_bytes(size_bytes: int) -> int:
    """Segments of a disk tier of that size. MisconfiguredError when it is too small for any."""
    if size_bytes < MIN_DISK_BYTES:
        raise MisconfiguredError(
            f"a disk tier of {size_bytes} bytes holds too little; give it at least {MIN_DISK_BYTES >> 20}MiB"
        )
    count = min(max(USUAL_SEGMENTS, -(-size_bytes // USUAL_SEGMENT_BYTES)), MAX_SEGMENTS)
    count = max(MIN_SEGMENTS, min(count, size_bytes // SMALLEST_SEGMENT_BYTES))
    return ((size_bytes - BLOCK_BYTES) // count - FILE_OVERHEAD_BYTES) // BLOCK_BYTES * BLOCK_BYTES


def segment_room(size_bytes: int) -> int:
    """Bytes for segments, with FILE_OVERHEAD_BYTES each, beside the block with which the disk is tried."""
    return size_bytes - BLOCK_BYTES


def segments_within(size_bytes: int, segment_bytes: int) -> int:
    """How many segments of that size fit."""
    return segment_room(size_bytes) // (segment_bytes + FILE_OVERHEAD_BYTES)
