"""A part is cut the same way everywhere, and what it costs an allocator stays within the promise."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import RefusedError
from kvferry.identity.names import MAX_PART_BYTES
from kvferry.identity.stripes import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    LARGEST_CLASS_BYTES,
    MAX_STRIPES,
    SINGLE_STRIPE_BYTES,
    checksum,
    class_bytes,
    part_checksums,
    stripe_plan,
)

MIB = 1 << 20
SERVER_BYTES = 12  # string header, terminating zero, CRLF of the request
KEY_AND_ENTRY_BYTES = 300  # key string, object and dictionary entry, generously
PAGE_BYTES = 4096  # a jemalloc that is cache-oblivious adds one to each large allocation

part_sizes = st.one_of(st.integers(1, 64 * MIB), st.integers(1, MAX_PART_BYTES))


def _jemalloc_classes() -> list[int]:
    """All size classes up to 4 MiB, from jemalloc's own table: four per doubling from 64 bytes on."""
    classes = [64]
    while classes[-1] < 4 * MIB:
        base = classes[-1]
        classes += [base + base * quarter // 4 for quarter in (1, 2, 3, 4)]
    return classes


CLASSES = _jemalloc_classes()


def _allocated(part_bytes: int) -> int:
    total = 0
    for stripe in stripe_plan(part_bytes):
        value = stripe.nbytes + HEADER_BYTES + SERVER_BYTES
        size_class = next(size for size in CLASSES if size >= value)
        total += size_class + KEY_AND_ENTRY_BYTES + (PAGE_BYTES if size_class >= 16384 else 0)
    return total


@given(part_sizes)
@example(MAX_PART_BYTES)
@example(SINGLE_STRIPE_BYTES)
@example(SINGLE_STRIPE_BYTES + 1)
def test_stripes_cover_the_part_once_and_in_order(part_bytes: int) -> None:
    plan = stripe_plan(part_bytes)
    assert [stripe.index for stripe in plan] == list(range(len(plan)))
    end = 0
    for stripe in plan:
        assert stripe.offset == end
        assert stripe.nbytes > 0
        assert stripe.offset % 64 == 0
        end += stripe.nbytes
    assert end == part_bytes
    assert len(plan) <= MAX_STRIPES


@given(part_sizes)
def test_a_stored_stripe_fits_the_largest_class(part_bytes: int) -> None:
    for stripe in stripe_plan(part_bytes):
        assert stripe.nbytes + HEADER_BYTES + SERVER_BYTES <= LARGEST_CLASS_BYTES


@pytest.mark.parametrize("part_mib", [1, 2.5, 4, 8, 10, 32])
def test_common_part_sizes_cost_at_most_three_percent(part_mib: float) -> None:
    part_bytes = int(part_mib * MIB)
    assert _allocated(part_bytes) <= part_bytes * 1.03


@given(st.integers(MIB, 64 * MIB))
def test_any_part_from_one_mebibyte_on_costs_at_most_three_and_a_half_percent(part_bytes: int) -> None:
    assert _allocated(part_bytes) <= part_bytes * 1.035


@given(st.integers(1, 64 * MIB))
def test_stripes_are_few(part_bytes: int) -> None:
    assert len(stripe_plan(part_bytes)) <= part_bytes // (LARGEST_CLASS_BYTES - 1024) + 4


@given(st.integers(1, SINGLE_STRIPE_BYTES))
def test_a_small_part_is_one_stripe(part_bytes: int) -> None:
    assert len(stripe_plan(part_bytes)) == 1


@given(st.integers(64, 4 * MIB))
def test_size_classes_are_those_of_jemalloc(nbytes: int) -> None:
    assert class_bytes(nbytes) == next(size for size in CLASSES if size >= nbytes)


@pytest.mark.parametrize("part_bytes", [-1, 0, MAX_PART_BYTES + 1])
def test_a_part_of_no_possible_size_is_refused(part_bytes: int) -> None:
    with pytest.raises(RefusedError, match=str(part_bytes)):
        stripe_plan(part_bytes)


def test_each_stripe_has_its_own_checksum_and_any_flipped_byte_changes_one() -> None:
    data = bytearray(i * 31 % 251 for i in range(300_000))
    plan = stripe_plan(len(data))
    before = part_checksums(memoryview(data))
    assert [len(item) for item in before] == [CHECKSUM_BYTES] * len(plan)
    assert before == tuple(checksum(bytes(data[s.offset : s.offset + s.nbytes])) for s in plan)
    for position in (0, plan[1].offset - 1, plan[1].offset, len(data) - 1):
        data[position] ^= 1
        after = part_checksums(memoryview(data))
        changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert changed == [s.index for s in plan if s.offset <= position < s.offset + s.nbytes]
        data[position] ^= 1
