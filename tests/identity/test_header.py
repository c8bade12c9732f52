"""A stored value is accepted only under its own name, whole, and with an intact header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.header import HEADER_BYTES, pack_header, verify_header
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS, PartKey
from kvferry.identity.stripes import Stripe, stripe_plan

KEY = PartKey(bytes(range(16)), bytes(range(32)), 5)
PART_BYTES = 3 << 20
PLAN = stripe_plan(PART_BYTES)
CHECKSUM = bytes(range(100, 116))
HEADER = pack_header(KEY, part_bytes=PART_BYTES, stripe=PLAN[1], stripe_count=len(PLAN), checksum=CHECKSUM)


@given(
    namespace=st.binary(min_size=16, max_size=16),
    chunk=st.binary(min_size=32, max_size=32),
    part=st.integers(0, MAX_PARTS - 1),
    part_bytes=st.integers(1, MAX_PART_BYTES),
    checksum=st.binary(min_size=16, max_size=16),
    data=st.data(),
)
def test_a_packed_header_is_accepted_and_gives_the_checksum(
    *, namespace: bytes, chunk: bytes, part: int, part_bytes: int, checksum: bytes, data: st.DataObject
) -> None:
    key = PartKey(namespace, chunk, part)
    plan = stripe_plan(part_bytes)
    stripe = data.draw(st.sampled_from(plan))
    header = pack_header(key, part_bytes=part_bytes, stripe=stripe, stripe_count=len(plan), checksum=checksum)
    assert len(header) == HEADER_BYTES <= 128
    for buffer in (header, bytearray(header), memoryview(header + b"payload")):
        assert verify_header(buffer, key, part_bytes=part_bytes, stripe=stripe) == checksum


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_every_flipped_bit_is_detected(position: int) -> None:
    for bit in range(8):
        damaged = bytearray(HEADER)
        damaged[position] ^= 1 << bit
        with pytest.raises(CorruptError):
            verify_header(damaged, KEY, part_bytes=PART_BYTES, stripe=PLAN[1])


@pytest.mark.parametrize(
    ("position", "field"),
    [
        (0, "magic"),
        (4, "version"),
        (6, "protection"),
        (7, "encoding"),
        (8, "namespace"),
        (55, "chunk digest"),
        (56, "part"),
        (60, "stripe index"),
        (64, "stripe count"),
        (68, "stripe bytes"),
        (72, "part bytes"),
        (80, "offset"),
        (88, "checksum"),
        (104, "cipher"),
        (120, "check"),
    ],
)
def test_the_error_names_the_field(position: int, field: str) -> None:
    damaged = bytearray(HEADER)
    damaged[position] ^= 0x40
    with pytest.raises(CorruptError, match=field):
        verify_header(damaged, KEY, part_bytes=PART_BYTES, stripe=PLAN[1])


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_a_value_that_ends_inside_its_header_is_refused(length: int) -> None:
    with pytest.raises(CorruptError, match="ends inside"):
        verify_header(HEADER[:length], KEY, part_bytes=PART_BYTES, stripe=PLAN[1])


@pytest.mark.parametrize(
    ("key", "part_bytes", "stripe"),
    [
        (KEY._replace(namespace=bytes(16)), PART_BYTES, PLAN[1]),
        (KEY._replace(chunk=bytes(32)), PART_BYTES, PLAN[1]),
        (KEY._replace(part=6), PART_BYTES, PLAN[1]),
        (KEY, PART_BYTES, PLAN[0]),
        (KEY, PART_BYTES + 64, PLAN[1]),
    ],
)
def test_a_value_found_under_another_name_is_refused(key: PartKey, part_bytes: int, stripe: Stripe) -> None:
    with pytest.raises(CorruptError):
        verify_header(HEADER, key, part_bytes=part_bytes, stripe=stripe)


def test_a_header_that_could_not_be_told_apart_is_never_written() -> None:
    good = {"part_bytes": PART_BYTES, "stripe": PLAN[1], "stripe_count": len(PLAN), "checksum": CHECKSUM}
    for key, changed in (
        (KEY._replace(namespace=b"short"), {}),
        (KEY._replace(chunk=b"short"), {}),
        (KEY._replace(part=MAX_PARTS), {}),
        (KEY, {"checksum": b"short"}),
        (KEY, {"stripe_count": 1}),
    ):
        with pytest.raises(BrokenError):
            pack_header(key, **(good | changed))
