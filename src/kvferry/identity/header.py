"""The header in front of every stored stripe. ``docs/spec/part-header.md`` is the specification.

It names the stripe completely, so that a value found under another key, of another size, or damaged in
any field is refused before its bytes can be used. All integers are little-endian.
"""

import struct
from typing import NamedTuple

import xxhash

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.names import (
    DIGEST_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    NAMESPACE_BYTES,
    PartKey,
    PartRef,
)
from kvferry.identity.stripes import CHECKSUM_BYTES, HEADER_BYTES, MAX_STRIPES, Stripe, stripe_plan

__all__ = [
    "HEADER_BYTES",
    "HEADER_VERSION",
    "KEY_ID_BYTES",
    "MAGIC",
    "NONCE_BYTES",
    "TAG_BYTES",
    "SealedHeader",
    "named_part",
    "pack_header",
    "pack_sealed_header",
    "sealed_name",
    "verify_header",
    "verify_sealed_header",
]

MAGIC = b"kvfy"
HEADER_VERSION = 1
PROTECTION_XXH3_128 = 1
PROTECTION_AES_256_GCM = 2  # its tag takes the checksum's place
ENCODING_RAW = 0  # the engine's bytes as they are; other values are kept for compact storage

# magic, version, protection, encoding, namespace, chunk, part, stripe index, stripe count, stripe bytes,
# part bytes, offset
_NAME = struct.Struct("<4sHBB16s32sIIIIQQ")
_CHECKSUM_AT = _NAME.size
_CIPHER_AT = _CHECKSUM_AT + CHECKSUM_BYTES
KEY_ID_BYTES = 4
NONCE_BYTES = 12
TAG_BYTES = CHECKSUM_BYTES
_CIPHER_BYTES = KEY_ID_BYTES + NONCE_BYTES  # zero unless encrypted
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


class SealedHeader(NamedTuple):
    """What a stored header says of an encrypted payload. associated: the bytes the tag covers beside it."""

    name: bytes
    nonce: bytes
    tag: bytes
    associated: bytes


def _pack_name(
    key: PartKey, *, part_bytes: int, stripe: Stripe, stripe_count: int, protection: int = PROTECTION_XXH3_128
) -> bytes:
    return _NAME.pack(
        MAGIC,
        HEADER_VERSION,
        protection,
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


def _checked_name(
    key: PartKey, *, part_bytes: int, stripe: Stripe, stripe_count: int, protection: int
) -> bytes:
    if (len(key.namespace), len(key.chunk)) != (NAMESPACE_BYTES, DIGEST_BYTES):
        raise BrokenError(f"namespace or digest of a wrong length: {key!r}")
    if not 0 <= key.part < MAX_PARTS or not 0 <= stripe.index < stripe_count <= MAX_STRIPES:
        raise BrokenError(f"part {key.part} or stripe {stripe.index} of {stripe_count} out of range")
    return _pack_name(
        key, part_bytes=part_bytes, stripe=stripe, stripe_count=stripe_count, protection=protection
    )


def _with_check(head: bytes) -> bytes:
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def pack_header(
    key: PartKey, *, part_bytes: int, stripe: Stripe, stripe_count: int, checksum: bytes
) -> bytes:
    """The HEADER_BYTES bytes that precede a stripe's payload. BrokenError if a field has a wrong size."""
    if len(checksum) != CHECKSUM_BYTES:
        raise BrokenError(f"checksum of a wrong length: {checksum!r}")
    name = _checked_name(
        key,
        part_bytes=part_bytes,
        stripe=stripe,
        stripe_count=stripe_count,
        protection=PROTECTION_XXH3_128,
    )
    return _with_check(name + checksum + _NO_CIPHER)


def sealed_name(key: PartKey, *, part_bytes: int, stripe: Stripe, stripe_count: int) -> bytes:
    """The first 88 bytes of an encrypted stripe's header: all that names it. BrokenError as above."""
    return _checked_name(
        key,
        part_bytes=part_bytes,
        stripe=stripe,
        stripe_count=stripe_count,
        protection=PROTECTION_AES_256_GCM,
    )


def pack_sealed_header(name: bytes, *, key_id: bytes, nonce: bytes, tag: bytes) -> bytes:
    """The header before an encrypted payload. name: of ``sealed_name``. BrokenError for a wrong size."""
    if (len(name), len(key_id), len(nonce), len(tag)) != (_NAME.size, KEY_ID_BYTES, NONCE_BYTES, TAG_BYTES):
        raise BrokenError("name, key id, nonce or tag of a wrong length")
    return _with_check(name + tag + key_id + nonce)


def verify_header(
    buf: bytes | bytearray | memoryview, key: PartKey, *, part_bytes: int, stripe: Stripe
) -> bytes:
    """The payload's checksum, if ``buf`` starts with the plain header of exactly this stripe.

    Only the first HEADER_BYTES bytes are looked at; what follows is neither read nor copied. Raises
    CorruptError naming the first field that is not as expected.
    """
    name = _pack_name(key, part_bytes=part_bytes, stripe=stripe, stripe_count=len(stripe_plan(part_bytes)))
    return _verified(buf, name, cipher=_NO_CIPHER)[_CHECKSUM_AT:_CIPHER_AT]


def verify_sealed_header(
    buf: bytes | bytearray | memoryview, key: PartKey, *, part_bytes: int, stripe: Stripe, key_id: bytes
) -> SealedHeader:
    """Nonce and tag, if ``buf`` starts with the header of exactly this stripe, encrypted under that key.

    The header is authentic only once the tag has been found right. Raises as ``verify_header`` does.
    """
    name = _pack_name(
        key,
        part_bytes=part_bytes,
        stripe=stripe,
        stripe_count=len(stripe_plan(part_bytes)),
        protection=PROTECTION_AES_256_GCM,
    )
    head = _verified(buf, name, cipher=key_id)
    cipher = head[_CIPHER_AT:_CHECK_AT]
    return SealedHeader(name, cipher[KEY_ID_BYTES:], head[_CHECKSUM_AT:_CIPHER_AT], name + cipher)


def named_part(buf: bytes | bytearray | memoryview) -> PartRef:
    """The part that a stripe with this header belongs to, for one who found it by its key.

    Raises CorruptError for what is no whole header. Whether it is the right one is the caller's to see.
    """
    head = _verified(buf, struct.pack("<4sH", MAGIC, HEADER_VERSION), cipher=b"")
    fields = _NAME.unpack_from(head)
    namespace, chunk, part, nbytes = fields[4], fields[5], fields[6], fields[10]
    if part >= MAX_PARTS or not 1 <= nbytes <= MAX_PART_BYTES:
        raise CorruptError(f"stored header: part {part} of {nbytes} bytes")
    return PartRef(PartKey(namespace, chunk, part), nbytes)


def _verified(buf: bytes | bytearray | memoryview, name: bytes, *, cipher: bytes) -> bytes:
    """The header, if it starts with ``name``, its cipher fields start with ``cipher``, and its check fits."""
    head = bytes(memoryview(buf)[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise CorruptError(f"stored value ends inside its header: {len(head)} of {HEADER_BYTES} bytes")
    if not head.startswith(name) or not head.startswith(cipher, _CIPHER_AT):
        _raise_difference(head, name + head[_CHECKSUM_AT:_CIPHER_AT] + cipher)
    (check,) = struct.unpack_from("<Q", head, _CHECK_AT)
    if check != xxhash.xxh3_64_intdigest(head[:_CHECK_AT]):
        raise CorruptError("stored header: its own check does not match (checksum or check damaged)")
    return head


def _raise_difference(head: bytes, expected: bytes) -> None:
    for field in _FIELDS:
        wanted = expected[field.start : field.end]
        found = head[field.start : field.start + len(wanted)]
        if found != wanted:
            raise CorruptError(f"stored header: {field.name} is {found.hex()}, expected {wanted.hex()}")
