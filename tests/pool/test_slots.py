"""The slab allocator: nothing overlaps, everything comes back, sizes change hands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.pool.slots import PAGE_BYTES, SlotAllocator, slab_bytes_for, slot_bytes_for

MIB = 1 << 20
SLAB = 16 * PAGE_BYTES
sizes = st.sampled_from(
    [1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, SLAB, SLAB + 1, 2 * SLAB + 5, 5 * SLAB]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1000)), max_size=120), st.integers(1, 40))
def test_slots_never_overlap_and_all_memory_comes_back(
    steps: list[tuple[bool, int, int]], slabs: int
) -> None:
    allocator = SlotAllocator(slabs * SLAB, SLAB)
    given_out: dict[int, int] = {}
    for allocate, nbytes, choice in steps:
        if allocate or not given_out:
            offset = allocator.alloc(nbytes)
            if offset is not None:
                for other, length in given_out.items():
                    assert offset + nbytes <= other or other + length <= offset
                assert 0 <= offset <= allocator.arena_bytes - nbytes and offset % PAGE_BYTES == 0
                given_out[offset] = nbytes
            elif not given_out:
                assert not allocator.fits(nbytes)
        else:
            offset = list(given_out)[choice % len(given_out)]
            del given_out[offset]
            allocator.free(offset)
        allocator.check()
        assert allocator.used_bytes == sum(map(slot_bytes_for, given_out.values()))
    for offset in given_out:
        allocator.free(offset)
    allocator.check()
    assert allocator.used_bytes == 0
    assert allocator.alloc(slabs * SLAB) == 0  # the largest part fits again: nothing is fragmented


def test_a_slot_freed_twice_is_an_error() -> None:
    allocator = SlotAllocator(4 * SLAB, SLAB)
    first, second = allocator.alloc(PAGE_BYTES), allocator.alloc(PAGE_BYTES)
    assert first is not None and second is not None
    allocator.free(first)
    with pytest.raises(BrokenError):
        allocator.free(first)
    allocator.free(second)
    with pytest.raises(BrokenError):  # now the whole run is gone
        allocator.free(second)
    with pytest.raises(BrokenError):
        allocator.free(-PAGE_BYTES)


def test_the_warmest_slot_is_given_out_first() -> None:
    allocator = SlotAllocator(8 * SLAB, SLAB)
    offsets = [allocator.alloc(PAGE_BYTES) for _ in range(40)]
    for index in (3, 30, 12):
        offset = offsets[index]
        assert offset is not None
        allocator.free(offset)
    assert [allocator.alloc(PAGE_BYTES) for _ in range(2)] == [offsets[12], offsets[3]]


def test_an_emptied_slab_serves_another_size() -> None:
    allocator = SlotAllocator(SLAB, SLAB)
    offsets = [allocator.alloc(PAGE_BYTES) for _ in range(16)]
    assert allocator.alloc(2 * PAGE_BYTES) is None
    for offset in offsets:
        assert offset is not None
        allocator.free(offset)
    assert allocator.alloc(2 * PAGE_BYTES) == 0


@pytest.mark.parametrize("part_mib", [0.0625, 1, 2.5, 3, 4, 8, 10, 24, 32, 48, 80])
def test_little_of_a_large_pool_is_lost_to_rounding(part_mib: float) -> None:
    arena = 16 << 30
    allocator = SlotAllocator(arena)
    nbytes = int(part_mib * MIB)
    count = 0
    while allocator.alloc(nbytes) is not None:
        count += 1
    assert count * nbytes >= 0.97 * arena


@pytest.mark.parametrize(
    ("arena", "slab"),
    [
        (1 << 20, 2 << 20),
        (64 << 20, 8 << 20),
        (100 << 20, 10 << 20),
        (256 << 20, 32 << 20),
        (24 << 30, 64 << 20),
    ],
)
def test_small_pools_have_small_slabs(arena: int, slab: int) -> None:
    assert slab_bytes_for(arena) == slab


@pytest.mark.parametrize("mib", [34, 100, 250, 1000, 3000, 10_000, 100_000])
def test_no_pool_size_loses_much_to_whole_slabs(mib: int) -> None:
    allocator = SlotAllocator(mib << 20)
    assert allocator.slab_count * allocator.slab_bytes >= 0.98 * (mib << 20)


def test_a_pool_smaller_than_a_slab_is_refused() -> None:
    with pytest.raises(MisconfiguredError, match="smaller than one slab"):
        SlotAllocator(1 << 20)
    with pytest.raises(MisconfiguredError, match="multiple"):
        SlotAllocator(1 << 20, 1000)
