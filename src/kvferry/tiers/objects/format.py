"""What packs, manifests and lists of removals hold, byte for byte. Pure. ``docs/spec/objects.md`` specifies.

    pack:      record │ record │ ... │ index │ footer
    record:    a header for each stripe │ the part's bytes
    manifest:  head │ for each pack: its id, size and index │ digest
    removed:   head │ pack id and record number, for each │ digest

Integers are little-endian; digests are XXH3-128 with seed 0 of all that precedes them, of a footer: of index
and footer.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import xxhash

from kvferry.errors import CorruptError
from kvferry.identity.header import pack_header, verify_header
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS, PartRef
from kvferry.identity.stripes import HEADER_BYTES, stripe_plan

VERSION = 1
FOOTER_BYTES = 64
DIGEST_BYTES = 16
MAX_PACK_PARTS = 1 << 16
WHOLE_PACK = 0xFFFFFFFF
"""Instead of a record number: none of the pack counts."""

_PACK_MAGIC = b"kvpk"
_MANIFEST_MAGIC = b"kvmf"
_REMOVED_MAGIC = b"kvrm"
# chunk, part, part bytes; the same bytes are the part's key in memory
_KEY = struct.Struct("<32sIQ")
_OFFSET = struct.Struct("<Q")
KEY_BYTES = _KEY.size
ENTRY_BYTES = KEY_BYTES + _OFFSET.size
# magic, version, zero, records, zero, index offset, namespace, zero
_FOOTER = struct.Struct("<4sHHIIQ16s8s")
# magic, version, zero, entries
_HEAD = struct.Struct("<4sHHQ")
_PACK_HEAD = struct.Struct("<16sQI")
_REMOVAL = struct.Struct("<16sI")


class PackIndex(NamedTuple):
    """ident: the pack's. nbytes: of the object. keys and offsets: of its records, in order."""

    ident: bytes
    nbytes: int
    keys: list[bytes]
    offsets: "array[int]"


class Removal(NamedTuple):
    """record: its number within the pack, or WHOLE_PACK."""

    pack: bytes
    record: int


def key_of(ref: PartRef) -> bytes:
    """KEY_BYTES bytes: all of the reference but its namespace."""
    return _KEY.pack(ref.key.chunk, ref.key.part, ref.nbytes)


def part_bytes(key: bytes) -> int:
    """The part's size."""
    return int.from_bytes(key[-8:], "little")


@lru_cache(maxsize=4096)
def head_bytes(nbytes: int) -> int:
    """What precedes a part of that size in its record."""
    return HEADER_BYTES * len(stripe_plan(nbytes))


def record_bytes(nbytes: int) -> int:
    """The whole record."""
    return head_bytes(nbytes) + nbytes


def tail_bytes(records: int) -> int:
    """Index and footer."""
    return records * ENTRY_BYTES + FOOTER_BYTES


def pack_head(ref: PartRef, checksums: Sequence[bytes]) -> bytes:
    """What precedes a part. checksums: one per stripe."""
    plan = stripe_plan(ref.nbytes)
    return b"".join(
        pack_header(ref.key, part_bytes=ref.nbytes, stripe=stripe, stripe_count=len(plan), checksum=checksum)
        for stripe, checksum in zip(plan, checksums, strict=True)
    )


def verify_head(head: memoryview, ref: PartRef) -> tuple[bytes, ...]:
    """The checksum of each stripe, if ``head`` precedes exactly this part. Raises CorruptError."""
    return tuple(
        verify_header(head[HEADER_BYTES * stripe.index :], ref.key, part_bytes=ref.nbytes, stripe=stripe)
        for stripe in stripe_plan(ref.nbytes)
    )


def pack_tail(namespace: bytes, keys: Sequence[bytes], offsets: Sequence[int]) -> bytes:
    """Index and footer of a pack whose records end where they begin."""
    index = b"".join(key + _OFFSET.pack(offset) for key, offset in zip(keys, offsets, strict=True))
    end = offsets[-1] + record_bytes(part_bytes(keys[-1])) if keys else 0
    footer = _FOOTER.pack(_PACK_MAGIC, VERSION, 0, len(keys), 0, end, namespace, bytes(8))
    return index + footer + xxhash.xxh3_128_digest(index + footer)


def tail_length(footer: bytes) -> int:
    """How many bytes index and footer have, from the last FOOTER_BYTES bytes. Raises CorruptError."""
    magic, version, _, count, _, _, _, _ = _FOOTER.unpack_from(footer)
    if (magic, version) != (_PACK_MAGIC, VERSION) or count > MAX_PACK_PARTS:
        raise CorruptError("pack: no footer at its end")
    return tail_bytes(count)


def read_tail(tail: bytes, *, ident: bytes, namespace: bytes, nbytes: int) -> PackIndex:
    """Of a pack object of ``nbytes`` bytes that ends with ``tail``. Raises CorruptError."""
    index, footer, digest = tail[:-FOOTER_BYTES], tail[-FOOTER_BYTES:-DIGEST_BYTES], tail[-DIGEST_BYTES:]
    _, _, _, count, _, end, found, _ = _FOOTER.unpack(footer)
    if xxhash.xxh3_128_digest(index + footer) != digest or found != namespace:
        raise CorruptError("pack: its index is damaged or of another namespace")
    if len(index) != count * ENTRY_BYTES or end + len(tail) != nbytes:
        raise CorruptError("pack: its size is not that of its records and index")
    return _read_index(memoryview(index), ident, nbytes)


def pack_manifest(packs: Sequence[PackIndex]) -> bytes:
    """Of packs of one namespace."""
    pieces = [_HEAD.pack(_MANIFEST_MAGIC, VERSION, 0, len(packs))]
    for pack in packs:
        pieces.append(_PACK_HEAD.pack(pack.ident, pack.nbytes, len(pack.keys)))
        pieces += [key + _OFFSET.pack(offset) for key, offset in zip(pack.keys, pack.offsets, strict=True)]
    return _closed(b"".join(pieces))


def manifest_bytes(packs: Iterable[PackIndex]) -> int:
    """How many a manifest of these has."""
    of_packs = sum(_PACK_HEAD.size + len(pack.keys) * ENTRY_BYTES for pack in packs)
    return _HEAD.size + of_packs + DIGEST_BYTES


def read_manifest(data: memoryview) -> list[PackIndex]:
    """Raises CorruptError."""
    count, body = _opened(data, _MANIFEST_MAGIC)
    packs = []
    for _ in range(count):
        if len(body) < _PACK_HEAD.size:
            raise CorruptError("manifest: it ends too early")
        ident, nbytes, records = _PACK_HEAD.unpack_from(body)
        end = _PACK_HEAD.size + records * ENTRY_BYTES
        if records > MAX_PACK_PARTS or len(body) < end:
            raise CorruptError("manifest: it ends too early")
        packs.append(_read_index(body[_PACK_HEAD.size : end], ident, nbytes))
        body = body[end:]
    return packs


def pack_removed(removals: Sequence[Removal]) -> bytes:
    """Of packs of one namespace."""
    pieces = [_HEAD.pack(_REMOVED_MAGIC, VERSION, 0, len(removals))]
    return _closed(b"".join([*pieces, *(_REMOVAL.pack(*removal) for removal in removals)]))


def read_removed(data: memoryview) -> list[Removal]:
    """Raises CorruptError."""
    count, body = _opened(data, _REMOVED_MAGIC)
    if len(body) != count * _REMOVAL.size:
        raise CorruptError("list of removals: it ends too early")
    return [Removal(*fields) for fields in _REMOVAL.iter_unpack(body)]


def _read_index(index: memoryview, ident: bytes, nbytes: int) -> PackIndex:
    keys: list[bytes] = []
    offsets = array("Q")
    for start in range(0, len(index), ENTRY_BYTES):
        key = bytes(index[start : start + KEY_BYTES])
        (offset,) = _OFFSET.unpack_from(index, start + KEY_BYTES)
        _, part, size = _KEY.unpack(key)
        if part >= MAX_PARTS or not 1 <= size <= MAX_PART_BYTES or offset + record_bytes(size) > nbytes:
            raise CorruptError("pack: its index names what cannot be")
        keys.append(key)
        offsets.append(offset)
    return PackIndex(ident, nbytes, keys, offsets)


def _closed(data: bytes) -> bytes:
    return data + xxhash.xxh3_128_digest(data)


def _opened(data: memoryview, magic: bytes) -> tuple[int, memoryview]:
    if len(data) < _HEAD.size + DIGEST_BYTES:
        raise CorruptError("object: too short for what its path says")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    found, version, _, count = _HEAD.unpack_from(body)
    if (found, version) != (magic, VERSION) or xxhash.xxh3_128_digest(body) != bytes(digest):
        raise CorruptError("object: damaged, or not what its path says")
    return count, body[_HEAD.size :]
