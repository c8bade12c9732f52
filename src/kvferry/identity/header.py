"""The header in front of every stored stripe. ``docs/spec/part-header.md`` is the specification.

It names the stripe completely, so that a value found under another key, of another size, or damaged in
any field is refused before its bytes can be used. All integers are little-endian.
"""

import struct
from typing import NamedTuple

import xxhash

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.names import DIGEST_BYTES, MAX_PARTS, NAMESPACE_BYTES, PartKey
from kvferry.identity.stripes import CHECKSUM_BYTES, HEADER_BYTES, MAX_STRIPES, Stripe, stripe_plan

__all__ = ["HEADER_BYTES", "HEADER_VERSION", "MAGIC", "pack_header", "verify_header"]

MAGIC = b"kvfy"
HEADER_VERSION = 1
PROTECTION_XXH3_128 = 1  # 2 is kept for AES-256-GCM, whose tag takes the checksum's place
ENCODING_RAW = 0  # the engine's bytes as they are; other values are kept for compact storage

# magic, version, protection, encoding, namespace, chunk, part, stripe index, stripe count, stripe bytes,
# part bytes, offset
_NAME = struct.Struct("<4sHBB16s32sIIIIQQ")
_CHECKSUM_AT = _NAME.size
_CIPHER_AT = _CHECKSUM_AT + CHECKSUM_BYTES
_CIPHER_BYTES = 16  # key id (4) and nonce (12); zero unless encrypted
_NO_CIPHER = bytes(_CIPHER_BYTES)
_CHECK_AT = _CIPHER_AT + _CIPHER_BYTES


class _Field(NamedTuple):
    name: str
    start: int
    end: int


_FIELDS = (
    _Field("magic", 0, 4),
    _Field("version", 4, 6),
    _Field("protection", 6, 7),
    _Field("encoding", 7, 8),
    _Field("namespace", 8, 24),
    _Field("chunk digest", 24, 56),
    _Field("part", 56, 60),
    _Field("stripe index", 60, 64),
    _Field("stripe count", 64, 68),
    _Field("stripe bytes", 68, 72),
    _Field("part bytes", 72, 80),
    _Field("offset", 80, 88),
    _Field("cipher", _CIPHER_AT, _CHECK_AT),
)


def _pack_name(key: PartKey, part_bytes: int, stripe: Stripe, stripe_count: int) -> bytes:
    return _NAME.pack(
        MAGIC,
        HEADER_VERSION,
        PROTECTION_XXH3_128,
        ENCODING_RAW,
        key.namespace,
        key.chunk,
        key.part,
        stripe.index,
        stripe_count,
        stripe.nbytes,
        part_bytes,
        stripe.offset,
    )


def pack_header(
    key: PartKey, *, part_bytes: int, stripe: Stripe, stripe_count: int, checksum: bytes
) -> bytes:
    """The HEADER_BYTES bytes that precede a stripe's payload. BrokenError if a field has a wrong size."""
    if (len(key.namespace), len(key.chunk), len(checksum)) != (NAMESPACE_BYTES, DIGEST_BYTES, CHECKSUM_BYTES):
        raise BrokenError(f"namespace, digest or checksum of a wrong length: {key!r}, {checksum!r}")
    if not 0 <= key.part < MAX_PARTS or not 0 <= stripe.index < stripe_count <= MAX_STRIPES:
        raise BrokenError(f"part {key.part} or stripe {stripe.index} of {stripe_count} out of range")
    head = _pack_name(key, part_bytes, stripe, stripe_count) + checksum + _NO_CIPHER
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def verify_header(
    buf: bytes | bytearray | memoryview, key: PartKey, *, part_bytes: int, stripe: Stripe
) -> bytes:
    """The payload's checksum, if ``buf`` starts with the header of exactly this stripe.

    Only the first HEADER_BYTES bytes are looked at; what follows is neither read nor copied. Raises
    CorruptError naming the first field that is not as expected.
    """
    head = bytes(memoryview(buf)[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise CorruptError(f"stored value ends inside its header: {len(head)} of {HEADER_BYTES} bytes")
    name = _pack_name(key, part_bytes, stripe, len(stripe_plan(part_bytes)))
    if not head.startswith(name) or head[_CIPHER_AT:_CHECK_AT] != _NO_CIPHER:
        _raise_difference(head, name)
    (check,) = struct.unpack_from("<Q", head, _CHECK_AT)
    if check != xxhash.xxh3_64_intdigest(head[:_CHECK_AT]):
        raise CorruptError("stored header: its own check does not match (checksum or check damaged)")
    return head[_CHECKSUM_AT:_CIPHER_AT]


def _raise_difference(head: bytes, name: bytes) -> None:
    expected = name + head[_CHECKSUM_AT:_CIPHER_AT] + _NO_CIPHER
    for field in _FIELDS:
        found, wanted = head[field.start : field.end], expected[field.start : field.end]
        if found != wanted:
            raise CorruptError(f"stored header: {field.name} is {found.hex()}, expected {wanted.hex()}")
