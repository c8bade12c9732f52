"""How a part is cut into stored values, and the checksum each of them carries.

Every tier stores stripes and checks stripes, so the cut must be the same everywhere: it depends on the
part's size alone. ``docs/spec/part-header.md`` is the specification; golden vectors pin it.

jemalloc rounds an allocation up to a size class, four per doubling, so a value a few bytes over 1, 2.5
or 4 MiB wastes up to a quarter of itself. A stripe therefore fills a class together with its header and
what the server adds, and the rest of the part goes on in the next stripe.
"""

from functools import lru_cache
from typing import NamedTuple

import xxhash

from kvferry.errors import RefusedError
from kvferry.identity.names import MAX_PART_BYTES

HEADER_BYTES = 128
CHECKSUM_BYTES = 16

# What the server allocates with the value: the string header (9 bytes for values of 64 KiB or more), its
# terminating zero (1), the CRLF of the request, kept because a large request buffer becomes the value (2),
# and on other allocators a length prefix (8). Rounded up so that payload offsets stay multiples of 64.
SERVER_MARGIN_BYTES = 64
STRIPE_OVERHEAD_BYTES = HEADER_BYTES + SERVER_MARGIN_BYTES

# Past this class allocators and clients gain nothing, and one slow stripe holds back more of its part.
LARGEST_CLASS_BYTES = 5 << 19  # 2.5 MiB

# A small part is one value: a second command costs more than the memory that its class wastes.
SINGLE_STRIPE_BYTES = 128 << 10

# The last stripe may leave this share of the whole part unused. Below the promised 3%, to leave room for
# keys, dictionary entries and the page that jemalloc may add to each large allocation.
WASTE_DIVISOR = 40

MAX_STRIPES = MAX_PART_BYTES // (LARGEST_CLASS_BYTES - STRIPE_OVERHEAD_BYTES) + 4


class Stripe(NamedTuple):
    """One stored value's share of its part: ``nbytes`` bytes from ``offset`` on."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which a stripe has no use for
    offset: int
    nbytes: int


def class_bytes(nbytes: int) -> int:
    """The jemalloc size class that serves an allocation of ``nbytes`` (exact from 64 bytes on)."""
    if nbytes <= 64:
        return 64
    spacing = 1 << ((nbytes - 1).bit_length() - 3)
    return (nbytes + spacing - 1) // spacing * spacing


def _largest_class_within(nbytes: int) -> int:
    """The largest size class of at most ``nbytes`` bytes and at most LARGEST_CLASS_BYTES."""
    if nbytes >= LARGEST_CLASS_BYTES:
        return LARGEST_CLASS_BYTES
    spacing = 1 << (nbytes.bit_length() - 3)
    return nbytes // spacing * spacing


@lru_cache(maxsize=4096)
def stripe_plan(part_bytes: int) -> tuple[Stripe, ...]:
    """The stripes of a part of ``part_bytes`` bytes, in order, covering it without gaps.

    Raises RefusedError outside 1 .. MAX_PART_BYTES.
    """
    if not 1 <= part_bytes <= MAX_PART_BYTES:
        raise RefusedError(f"a part has 1 to {MAX_PART_BYTES} bytes, not {part_bytes}: use smaller chunks")
    if part_bytes <= SINGLE_STRIPE_BYTES:
        return (Stripe(0, 0, part_bytes),)
    stripes: list[Stripe] = []
    offset = 0
    while offset < part_bytes:
        remaining = part_bytes - offset
        last_class = class_bytes(remaining + STRIPE_OVERHEAD_BYTES)
        if last_class <= LARGEST_CLASS_BYTES and last_class - remaining <= part_bytes // WASTE_DIVISOR:
            nbytes = remaining
        else:
            nbytes = _largest_class_within(remaining + STRIPE_OVERHEAD_BYTES) - STRIPE_OVERHEAD_BYTES
        stripes.append(Stripe(len(stripes), offset, nbytes))
        offset += nbytes
    return tuple(stripes)


def checksum(data: memoryview | bytes) -> bytes:
    """XXH3-128 of ``data`` (seed 0), as 16 bytes in the canonical, big-endian form."""
    return xxhash.xxh3_128_digest(data)


def part_checksums(data: memoryview) -> tuple[bytes, ...]:
    """The checksum of each stripe of the part held in ``data``; nothing is copied."""
    return tuple(checksum(data[s.offset : s.offset + s.nbytes]) for s in stripe_plan(data.nbytes))
