"""The log of the disk tier against a dictionary, and what is found of it after an end at any byte."""

import random
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.disk_log import BYTES, REFS, SEGMENT_BYTES, SEGMENTS, Disk
from tests.tiers.disks import check

from kvferry.identity.names import PartKey, PartRef
from kvferry.testing.tier_calls import (
    empty_memory,
    fetch_all,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.address import address_of
from kvferry.tiers.disk.files import SegmentFiles, aligned_memory
from kvferry.tiers.disk.format import (
    BLOCK_BYTES,
    Preamble,
    SegmentHead,
    next_link,
    pack_head,
    pack_preamble,
    pack_segment,
    read_preamble,
    read_segment,
)
from kvferry.tiers.disk.opening import open_log
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

KINDS = ["store", "store", "fetch", "remove", "fail_to_store", "have_no_room_for_one_of_two"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), max_size=60)


@given(OPERATIONS, st.sampled_from([1, 2, 3, 5, 100]))
@settings(deadline=None, max_examples=60)
def test_a_part_is_found_with_its_own_bytes_or_not_at_all(
    operations: list[tuple[str, int]], max_parts: int
) -> None:
    """And never more of them than allowed."""
    disk, stored = Disk.empty(max_parts), set[int]()
    for what, n in operations:
        getattr(disk, what)(n)
        check(disk.log)
        assert disk.log.segments.pinned == 0
        assert len(disk.files.segments) <= SEGMENTS
        if what == "store":
            stored.add(n)
            assert disk.fetch(n), "not there right after it was stored"
        elif what == "remove":
            stored.discard(n)
        elif what == "have_no_room_for_one_of_two":
            stored.add((n + 1) % len(REFS))
        for m in range(len(REFS)):
            assert not disk.log.records.get(REFS[m]) or m in stored, "there without having been stored"
    for n in range(len(REFS)):
        disk.fetch(n)


@given(OPERATIONS, st.floats(0, 1), st.data())
@settings(deadline=None, max_examples=60)
def test_after_an_end_at_any_byte_the_log_is_what_it_was_between_two_operations(
    operations: list[tuple[str, int]], share: float, data: st.DataObject
) -> None:
    """But for what the one under way was about. All that is found is right, and writing goes on."""
    disk, held, ends = Disk.empty(), [set[PartRef]()], [0]
    for what, n in operations:
        if what != "fail_to_store":  # which may leave a gap: what follows it in its segment is lost
            getattr(disk, what)(n)
            held.append(disk.held())
            ends.append(sum(len(write.data) for write in disk.files.journal))
    crash = int(share * ends[-1])
    before = max(i for i, end in enumerate(ends) if end <= crash)
    after = min(before + 1, len(ends) - 1)
    again = Disk.recovered(disk.files.after_a_crash(crash))
    check(again.log)
    assert held[before] & held[after] <= again.held(), "lost"
    assert again.held() <= held[before] | held[after], (
        "there without having been stored, or after its removal"
    )
    for n in range(len(REFS)):
        again.fetch(n)
    for n in data.draw(st.lists(st.integers(0, 11), max_size=10)):
        again.store(n)
        assert again.fetch(n)
        check(again.log)


@given(st.lists(st.integers(0, 11), max_size=40), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_after_gaps_and_noise_only_right_bytes_are_found(stores: list[int], seed: int) -> None:
    """Writes that failed, and blocks that turned into noise, may cost parts and never spoil one."""
    disk, noise = Disk.empty(), random.Random(seed)
    for n in stores:
        (disk.fail_to_store if noise.random() < 0.2 else disk.store)(n)
    for segment in disk.files.segments.values():
        at = noise.randrange(1, SEGMENT_BYTES // BLOCK_BYTES) * BLOCK_BYTES
        segment[at : at + BLOCK_BYTES] = noise.randbytes(BLOCK_BYTES)
    again = Disk.recovered(disk.files)
    check(again.log)
    for n, ref in enumerate(REFS):
        place = again.log.pin(ref)
        if place is not None:
            memory = empty_memory(ref.nbytes)
            if again.records_right(place, ref, memory):
                assert memory == BYTES[n]
            again.log.segments.unpin(place)


def test_what_lies_behind_a_gap_is_not_found_once_something_else_was_written_there() -> None:
    """Though it has its segment's generation and begins where the new record ends."""
    disk = Disk.empty()
    for n in (2, 5, 0):  # each takes two blocks
        disk.store(n)
    second = disk.log.records[REFS[5]].place
    disk.files.segments[second.segment][second.offset] ^= 1
    again = Disk.recovered(disk.files)
    assert again.held() == {REFS[2]}
    again.store(1)
    assert again.log.records[REFS[1]].place == second
    assert Disk.recovered(disk.files).held() == {REFS[2], REFS[1]}


def test_what_is_used_outlives_what_is_not() -> None:
    """Segments leave whole; what was used since it was written is carried over."""
    disk = Disk.empty()
    disk.store(1)
    disk.store(5)
    for n in (2, 3, 4, 6, 7, 8, 9, 10, 11) * 3:
        disk.fetch(1)
        disk.remove(n)
        disk.store(n)
    assert disk.fetch(1)
    assert not disk.fetch(5)


def test_what_is_carried_over_leaves_room_for_new_parts() -> None:
    """Even where everything is in use."""
    log = Disk.empty()
    for n in range(12):
        log.store(n)
        for m in range(12):
            log.fetch(m)
    for n in range(12):
        log.store(n)
        assert log.fetch(n)


def test_the_layout_is_as_specified() -> None:
    """By docs/spec/disk-segments.md; another one needs another version."""
    ref = PartRef(PartKey(bytes(range(16)), bytes(range(32)), 7), 300_000)
    link = next_link(5, generation=3, offset=4096, ref=ref)
    block = pack_segment(SegmentHead(1 << 24, 3, 5))
    head = pack_head(Preamble(ref, 3, link, 1_700_000_000.123), [bytes([n]) * 16 for n in range(2)])
    assert link == 16788454024925663726
    assert sha256(block).hexdigest()[:32] == "9ae010eac12961acecd4cf1761928787"
    assert sha256(head).hexdigest()[:32] == "2de51ffe28d5fd459ec7a375b046bf14"
    assert (len(block), len(head)) == (BLOCK_BYTES, BLOCK_BYTES)


@given(st.binary(max_size=2 * BLOCK_BYTES), st.integers(0, 127), st.integers(0, 7))
@settings(deadline=None, max_examples=100)
def test_noise_is_no_record_and_a_flipped_bit_is_noticed(noise: bytes, at: int, bit: int) -> None:
    assert read_segment(noise) is None
    assert read_preamble(noise) is None
    preamble = bytearray(pack_preamble(Preamble(REFS[0], 1, 2, 3.0)))
    preamble[at % 100] ^= 1 << bit
    assert read_preamble(preamble) is None


def test_whatever_callers_do_at_a_time_an_answer_is_a_miss_or_the_exact_bytes(tmp_path: Path) -> None:
    """While segments leave all the time; and what is held at the end is found again."""
    sizes = [random.Random(n).choice([1, 5000, 70_000, 300_000, 1_000_000]) for n in range(200)]
    refs = [some_ref(size, n) for n, size in enumerate(sizes)]
    data = [some_bytes(size, n) for n, size in enumerate(sizes)]
    small = DiskSettings(tmp_path / "disk", 64 << 20, segment_bytes=4 << 20, stall_s=30.0, close_s=30.0)
    tier = DiskTier.open(small)

    def call(seed: int) -> int:
        chance, right = random.Random(seed), 0
        for _ in range(60):
            some = [chance.randrange(200) for _ in range(chance.randrange(1, 12))]
            match chance.choice(["store", "store", "fetch", "fetch", "remove", "probe", "touch"]):
                case "store":
                    store_all(tier, [(refs[n], data[n]) for n in some], deadline_s=chance.choice([60, 0.002]))
                case "fetch":
                    for n, (result, memory) in zip(
                        some, fetch_all(tier, [refs[n] for n in some]), strict=True
                    ):
                        assert result.outcome in (Outcome.OK, Outcome.MISS, Outcome.LATE)
                        assert result.outcome is not Outcome.OK or memory == data[n]
                        right += result.outcome is Outcome.OK
                case "remove":
                    tier.remove([refs[n] for n in some[:2]])
                case "probe":
                    probe_all(tier, [refs[n] for n in some])
                case _:
                    tier.touch([refs[n] for n in some])
        return right

    with ThreadPoolExecutor(4) as callers:
        assert sum(callers.map(call, range(4)))
    assert set(tier.statistics().failed) <= {"late"}
    tier.close()
    check(tier._books.log)
    assert tier._books.log.segments.pinned == tier._books.marks.places
    files = SegmentFiles.open(small.directory)
    again = open_log(files, small)
    files.close()
    assert not set(tier._books.log.records) - set(again.records)


def test_memory_that_may_only_be_read_is_written_without_a_copy_too() -> None:
    memory = aligned_memory(3 * BLOCK_BYTES)
    assert address_of(memory.toreadonly()[5:]) == address_of(memory) + 5
    assert address_of(memory) % BLOCK_BYTES == 0
    assert address_of(memoryview(b"x"))
