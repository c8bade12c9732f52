"""What a segment holds, byte for byte. ``docs/spec/disk-segments.md`` is the specification. Pure.

    segment:  block with magic, generation and seed │ record │ record │ ... │ what an older generation left
    record:   preamble, one header per stripe, padding │ the part's bytes, padding

Blocks have 4,096 bytes and everything begins at one, for O_DIRECT. Each preamble carries a link: a digest
of the link before it and of its own name, size and place. What an older generation left behind, or a
torn write, is not linked to what is before it, so a scan ends there. Integers are little-endian.
"""

import enum
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from kvferry.errors import CorruptError
from kvferry.identity.header import pack_header, verify_header
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS, PartKey, PartRef
from kvferry.identity.stripes import HEADER_BYTES, stripe_plan

BLOCK_BYTES = 4096
VERSION = 2
FIRST_RECORD = BLOCK_BYTES

_SEGMENT_MAGIC = b"kvsg"
_RECORD_MAGIC = b"kvrc"
# magic, version, unused, segment bytes, generation, seed
_SEGMENT = struct.Struct("<4sHHQQQ")
# magic, version, flags, part, part bytes, generation, namespace, chunk, link, used at
_PREAMBLE = struct.Struct("<4sHHIQQ16s32sQQ")
_CHECK = struct.Struct("<Q")
_LINK = struct.Struct("<QQQIQ16s32s")


class Mark(enum.IntEnum):
    """What was written into a record later on."""

    WHOLE = 0
    REMOVED = 1  # and with it whatever was stored of its part before
    VOID = 2  # it was never written to its end: it says nothing of its part


class SegmentHead(NamedTuple):
    """generation: grows with every segment begun. seed: the link before the first record."""

    segment_bytes: int
    generation: int
    seed: int


class Preamble(NamedTuple):
    """Of a record: whose part it is. used_at: unix seconds, when it was stored, or used before it was copied.

    mark: whether its bytes may be used.
    """

    ref: PartRef
    generation: int
    link: int
    used_at: float
    mark: Mark = Mark.WHOLE


_MARKS = frozenset(Mark)


def padded(nbytes: int) -> int:
    """Up to the next block."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def head_bytes(part_bytes: int) -> int:
    """What precedes the part's bytes in its record."""
    return padded(HEADER_BYTES * (1 + len(stripe_plan(part_bytes))))


@lru_cache(maxsize=4096)
def record_bytes(part_bytes: int) -> int:
    """The whole record."""
    return head_bytes(part_bytes) + padded(part_bytes)


def next_link(link: int, *, generation: int, offset: int, ref: PartRef) -> int:
    """The link of a record at ``offset`` that follows the one with ``link``."""
    key = ref.key
    name = _LINK.pack(link, generation, offset, key.part, ref.nbytes, key.namespace, key.chunk)
    return xxhash.xxh3_64_intdigest(name)


def pack_segment(head: SegmentHead) -> bytes:
    """The first block of a segment."""
    return _block(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, 0, head.segment_bytes, head.generation, head.seed))


def read_segment(block: bytes | memoryview) -> SegmentHead | None:
    """None unless it is the first block of a segment in use."""
    fields = _checked(_SEGMENT, bytes(block[:BLOCK_BYTES]))
    if fields is None or fields[:2] != (_SEGMENT_MAGIC, VERSION):
        return None
    return SegmentHead(*fields[3:])


def pack_preamble(preamble: Preamble) -> bytes:
    """HEADER_BYTES bytes."""
    key, nbytes = preamble.ref
    fields = _PREAMBLE.pack(
        _RECORD_MAGIC,
        VERSION,
        preamble.mark,
        key.part,
        nbytes,
        preamble.generation,
        key.namespace,
        key.chunk,
        preamble.link,
        int(preamble.used_at * 1000),
    )
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")


def read_preamble(head: bytes | memoryview) -> Preamble | None:
    """None unless ``head`` starts with a whole preamble of a part that can exist."""
    fields = _checked(_PREAMBLE, bytes(head[:HEADER_BYTES]))
    if fields is None:
        return None
    magic, version, mark, part, nbytes, generation, namespace, chunk, link, used_ms = fields
    if (magic, version) != (_RECORD_MAGIC, VERSION) or part >= MAX_PARTS or not 1 <= nbytes <= MAX_PART_BYTES:
        return None
    if mark not in _MARKS:
        return None
    ref = PartRef(PartKey(namespace, chunk, part), nbytes)
    return Preamble(ref, generation, link, used_ms / 1000, Mark(mark))


def pack_head(preamble: Preamble, checksums: Sequence[bytes]) -> bytes:
    """All that precedes the part's bytes. checksums: one per stripe."""
    key, nbytes = preamble.ref
    plan = stripe_plan(nbytes)
    headers = [
        pack_header(key, part_bytes=nbytes, stripe=stripe, stripe_count=len(plan), checksum=checksum)
        for stripe, checksum in zip(plan, checksums, strict=True)
    ]
    return b"".join([pack_preamble(preamble), *headers]).ljust(head_bytes(nbytes), b"\0")


def verify_head(head: memoryview, ref: PartRef) -> tuple[bytes, ...]:
    """The checksum of each stripe, if ``head`` precedes exactly this part. Raises CorruptError."""
    preamble = read_preamble(head)
    if preamble is None or preamble.ref != ref or preamble.mark is not Mark.WHOLE:
        raise CorruptError("stored record: its preamble is not that of this part")
    return tuple(
        verify_header(
            head[HEADER_BYTES * (1 + stripe.index) :], ref.key, part_bytes=ref.nbytes, stripe=stripe
        )
        for stripe in stripe_plan(ref.nbytes)
    )


def _block(fields: bytes) -> bytes:
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(BLOCK_BYTES, b"\0")


def _checked(layout: struct.Struct, data: bytes) -> tuple[Any, ...] | None:
    """The fields, if the check behind them fits."""
    size = layout.size
    if len(data) < size + _CHECK.size:
        return None
    (check,) = _CHECK.unpack_from(data, size)
    if check != xxhash.xxh3_64_intdigest(data[:size]):
        return None
    return layout.unpack_from(data)
