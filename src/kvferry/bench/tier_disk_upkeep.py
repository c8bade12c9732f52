"""What a disk tier costs beside its transfers: bytes written per byte stored, and the time of a start.

The start is measured on segments that hold heads alone, at the places that they have between real parts: a
start reads nothing else but the last few records. Files are sparse, so it takes little room.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvferry.bench.tier_arms import Parts, TierArm, parts_in_memory
from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import CHECKSUM_BYTES, stripe_plan
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.format import (
    FIRST_RECORD,
    Preamble,
    SegmentHead,
    next_link,
    pack_head,
    pack_segment,
    record_bytes,
)
from kvferry.tiers.disk.settings import MIN_DISK_BYTES, DiskSettings, usual_segment_bytes
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.disk.wall import unix_s

PART_BYTES = 5 << 19
INDEXED_PARTS = 100_000
SHARES = (0.0, 0.1, 0.5, 1.0)
MAX_SIZE_BYTES = 512 << 20
TURNS_PER_SIZE = 8
TIMES = 2
"""The tier's size is written so often."""
USUAL_SAMPLE_BYTES = 256 << 20
"""From which on all of INDEXED_PARTS are laid out."""
MAX_UNREAD = 64
"""The last records are read whole, and have no bytes here."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """amplification: bytes written per byte stored, by the share of parts that are used again. indexed_parts
    of part_mib were found in index_s seconds."""

    amplification: dict[str, float]
    part_mib: float
    indexed_parts: int
    index_s: float


def measure_upkeep(sample_bytes: int) -> Upkeep:
    """In a temporary directory ($TMPDIR). sample_bytes: smaller ones make it quicker."""
    size = max(MIN_DISK_BYTES, min(MAX_SIZE_BYTES, 2 * sample_bytes))
    with parts_in_memory(PART_BYTES, size // TURNS_PER_SIZE) as parts:
        written = {f"{share:g}": _amplification(parts, share, size) for share in SHARES}
    count = INDEXED_PARTS * min(sample_bytes, USUAL_SAMPLE_BYTES) // USUAL_SAMPLE_BYTES
    return Upkeep(written, PART_BYTES / (1 << 20), count, _index_s(count))


def upkeep_lines(upkeep: Upkeep | None) -> list[str]:
    """As text."""
    if upkeep is None:
        return []
    written = ", ".join(f"{each:.2f} with {float(share):.0%}" for share, each in upkeep.amplification.items())
    return [
        f"written per byte stored: {written} of the parts used again",
        f"{upkeep.indexed_parts:,} parts of {upkeep.part_mib:g} MiB found again in {upkeep.index_s:.2f} s",
        "",
    ]


def _amplification(parts: Parts, share: float, size: int) -> float:
    """Stores several times the tier's size; of what is stored the share is used until it leaves for good."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        tier = DiskTier.open(DiskSettings(Path(directory) / "tier", size))
        arm = TierArm(tier)
        try:
            used: list[PartRef] = []
            for _ in range(TIMES * TURNS_PER_SIZE):
                named = parts.renamed()
                arm.set(named)
                used += named.refs[: round(share * len(named.refs))]
                tier.touch(used)
            return float(tier.statistics().detail["write_amplification"])
        finally:
            arm.close()


def _index_s(count: int) -> float:
    """Seconds in which so many parts are found."""
    per_segment = (1 << 30) // record_bytes(PART_BYTES)
    size = (count // per_segment + 3) * ((1 << 30) + (1 << 20))  # more than enough
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        settings = DiskSettings(Path(directory) / "tier", size)
        _lay_out(settings, count)
        began = time.perf_counter()
        tier = DiskTier.open(settings)
        elapsed_s = time.perf_counter() - began
        found = int(tier.statistics().detail["parts"])
        tier.close()
        if found < count - MAX_UNREAD:
            raise BrokenError(f"of {count} parts {found} were found")
        return elapsed_s


def _lay_out(settings: DiskSettings, count: int) -> None:
    """Segments full of heads, on the disk and not in its cache."""
    segment_bytes = usual_segment_bytes(settings.size_bytes)
    files = SegmentFiles.open(settings.directory)
    files.close()
    checksums = [bytes(CHECKSUM_BYTES)] * len(stripe_plan(PART_BYTES))
    number = made = 0
    while made < count:
        with (settings.directory / f"segment-{number:04d}").open("xb") as file:
            os.truncate(file.fileno(), segment_bytes)
            file.write(pack_segment(SegmentHead(segment_bytes, number + 1, number)))
            link, offset = number, FIRST_RECORD
            while made < count and offset + record_bytes(PART_BYTES) <= segment_bytes:
                name = blake2b(made.to_bytes(8, "little"), digest_size=32).digest()
                ref = PartRef(PartKey(bytes(16), name, 0), PART_BYTES)
                link = next_link(link, generation=number + 1, offset=offset, ref=ref)
                file.seek(offset)
                file.write(pack_head(Preamble(ref, number + 1, link, unix_s()), checksums))
                offset += record_bytes(PART_BYTES)
                made += 1
            file.flush()
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        number += 1
