"""What leaves first, and what never leaves."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pool.model import MIB, OTHER, SPACE, catalogue, chunk, chunks, declined, key, put, reserved, run

from kvferry.lifetimes import NEW_SHARE
from kvferry.pool import policy
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import DeclineReason, Entry, EntryState, Run
from kvferry.pool.slots import SlotAllocator


def held(made: Catalogue, prompt: int, count: int) -> list[int]:
    return [index for index in range(count) if made.state(key(prompt, index)) is EntryState.READY]


@settings(max_examples=40, deadline=None)
@given(scan=st.lists(st.integers(1, 30), min_size=1, max_size=40), prefix=st.integers(1, 80))
def test_a_scan_of_one_time_prompts_cannot_flush_a_prefix_used_twice(scan: list[int], prefix: int) -> None:
    made = catalogue(100 * MIB)
    put(made, 0, range(prefix))
    made.touch(SPACE, chunks(0, prefix))
    for prompt, length in enumerate(scan, start=1):
        put(made, prompt, range(length))
        made.check()
    # The first prompt was used at once, so new ones are thought to be, until these teach that they are not.
    assert run(made, SPACE, chunks(0, prefix)) >= min(prefix, 40)
    long_scan = 3000
    for prompt in range(1000, 1000 + long_scan):
        put(made, prompt, range(1))
    assert run(made, SPACE, chunks(0, prefix)) >= min(prefix, 30)


def test_new_reuse_displaces_old_reuse() -> None:
    made = catalogue(100 * MIB)
    put(made, 0, range(90))
    made.touch(SPACE, chunks(0, 90))
    for prompt in range(1, 30):
        put(made, prompt, range(5))
        made.touch(SPACE, chunks(prompt, 5))
    assert run(made, SPACE, chunks(0, 90)) == 0
    assert all(run(made, SPACE, chunks(prompt, 5)) == 5 for prompt in range(15, 30))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, 5), st.integers(1, 25)),
            st.tuples(st.just("use"), st.integers(0, 5), st.integers(1, 25)),
            st.tuples(st.just("pin"), st.integers(0, 5), st.integers(1, 25)),
            st.tuples(st.just("unpin"), st.integers(0, 5), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_tail_of_a_prefix_leaves_before_its_head(steps: list[tuple[str, int, int]]) -> None:
    made = catalogue(40 * MIB)
    for verb, prompt, length in steps:
        prefix = chunks(prompt, length)
        if verb == "store":
            put(made, prompt, range(length))
        elif verb == "use":
            made.touch(SPACE, prefix)
        elif verb == "pin":
            reach = run(made, SPACE, prefix)
            made.touch(SPACE, prefix)
            for index in range(reach):  # heads first, as a load does
                made.pin(key(prompt, index), 100 + prompt)
        else:
            made.release_owner(100 + prompt)
        made.check()
        for other in range(6):
            there = held(made, other, 25)
            assert there == list(range(len(there))), f"prompt {other} has a hole: {there}"


def test_nothing_is_evicted_while_there_is_room() -> None:
    made = catalogue(64 * MIB)
    put(made, 1, range(64))
    assert made.statistics().evicted_parts == 0
    put(made, 2, range(1))
    assert made.statistics().evicted_parts == 1
    assert made.take_evicted() == [key(1, 63)]
    assert made.take_evicted() == []


def test_pinned_and_filling_parts_are_never_evicted_and_full_is_said_at_once() -> None:
    made = catalogue(16 * MIB)
    for index in range(16):
        reserved(made.reserve(key(1, index), MIB, 1))
        if index % 2:
            made.commit_pinned(key(1, index), 1, ())
    assert declined(made.reserve(key(2, 0), MIB, 2)) is DeclineReason.FULL
    assert made.statistics().full_refusals == 1
    made.unpin(key(1, 5), 1)
    reserved(made.reserve(key(2, 0), MIB, 2))
    assert made.take_evicted() == [key(1, 5)]


def test_a_pin_keeps_the_age_of_its_last_use() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(8))
    for index in range(8):
        assert made.pin(key(1, index), 9) is not None
    put(made, 2, range(12))  # searches past the pinned ones and sets them aside
    made.release_owner(9)
    put(made, 3, range(4))
    assert held(made, 1, 8) == [0, 1, 2, 3]


def test_a_part_pinned_again_after_its_return_stays() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(8))
    for owner in (8, 9):
        for index in range(8):
            assert made.pin(key(1, index), owner) is not None
        put(made, owner, range(12))
        if owner == 8:
            made.release_owner(8)
    put(made, 3, range(12))
    assert held(made, 1, 8) == list(range(8))
    made.check()


def test_slots_given_back_empty_make_no_time_pass_and_nothing_forgotten() -> None:
    """As for loads from a tier that is down."""
    made = catalogue(100 * MIB)
    put(made, 0, range(100))
    put(made, 1, range(50))
    lost = [n for n in range(100) if made.state(key(0, n)) is EntryState.ABSENT]
    for _ in range(40):
        for n in lost:
            reserved(made.reserve(key(0, n), MIB, 1))
        for n in lost:
            made.abandon(key(0, n), 1)
    assert made.statistics().reused_bytes == 0
    put(made, 0, range(lost[0], lost[0] + 1))
    assert made.statistics().reused_bytes == MIB


def test_returning_from_many_pins_costs_little_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long load pins all that a queue has: when it ends, each part returns at a cost that does not grow."""
    moved = 0

    def counted(items: list[tuple[int, Entry]]) -> None:
        nonlocal moved
        moved += len(items)
        heapify(items)

    heapify = heapq.heapify
    monkeypatch.setattr(policy.heapq, "heapify", counted)
    queue = policy.RecencyQueue()
    run, count = Run(0, slabs=1, slot_bytes=MIB, slots=1), 5000
    entries = [Entry(key(0, n), nbytes=MIB, offset=n * MIB, run=run, filler=1) for n in range(count)]
    for stamp, entry in enumerate(entries):
        entry.stamp = stamp
        queue.append(entry)
        entry.pins = 1
    assert queue.coldest() is None
    for entry in entries:
        entry.pins = 0
        queue.unpinned(entry)
    assert queue.coldest() is entries[0]
    assert moved <= 4 * count


def test_a_head_that_was_lost_comes_back_as_protected_as_its_tail() -> None:
    made = catalogue(40 * MIB)
    put(made, 1, range(4))
    made.touch(SPACE, chunks(1, 4))
    made.unlink(key(1, 0))
    put(made, 1, range(4))
    for prompt in range(10, 110):
        put(made, prompt, range(1))
    assert held(made, 1, 4) == [0, 1, 2, 3]


def test_storing_a_prefix_larger_than_the_pool_keeps_its_head() -> None:
    made = catalogue(16 * MIB)
    put(made, 9, range(16))
    mark = made.refresh(SPACE, chunks(1, 40))
    for index in range(40):
        answer = made.reserve(key(1, index), MIB, 1, spare_from=mark)
        if index < 16:
            reserved(answer)
            made.commit(key(1, index), 1, ())
        else:
            assert declined(answer) is DeclineReason.FULL
    assert run(made, SPACE, chunks(1, 40)) == 16


def test_a_long_new_prompt_is_stored_even_where_all_else_is_protected() -> None:
    made = catalogue(40 * MIB)
    put(made, 0, range(36))
    made.touch(SPACE, chunks(0, 36))
    put(made, 1, range(30))
    assert run(made, SPACE, chunks(1, 30)) == 30
    assert held(made, 0, 36) == list(range(10))


def two_sizes(pool_mib: int) -> Catalogue:
    made = Catalogue(SlotAllocator(pool_mib * MIB, 8 * MIB))
    made.register(SPACE, (MIB,), "default")
    made.register(OTHER, (3 * MIB,), "default")
    return made


def store_other(made: Catalogue, prompt: int, *, use: bool = False) -> None:
    name = key(prompt, 0, namespace=OTHER)
    reserved(made.reserve(name, 3 * MIB, 1))
    made.commit(name, 1, ())
    if use:
        made.touch(OTHER, [chunk(prompt, 0)])


def test_an_abandoned_size_gives_its_slabs_to_the_one_in_use() -> None:
    made = two_sizes(64)
    put(made, 1, range(64))
    made.touch(SPACE, chunks(1, 64))
    for prompt in range(60):
        store_other(made, prompt, use=True)
        made.check()
    assert made.statistics().ready_parts <= 8 * 2 + 1
    assert sum(made.state(key(p, 0, namespace=OTHER)) is EntryState.READY for p in range(60)) >= 15


def test_a_scan_of_another_size_cannot_flush_a_prefix_used_twice() -> None:
    made = two_sizes(160)
    put(made, 1, range(128))
    made.touch(SPACE, chunks(1, 128))
    for prompt in range(500):
        store_other(made, prompt)
    made.check()
    assert run(made, SPACE, chunks(1, 128)) >= 128 - 16


def test_a_size_without_any_slab_gets_one() -> None:
    made = two_sizes(64)
    put(made, 1, range(64))
    made.touch(SPACE, chunks(1, 64))
    store_other(made, 1)
    made.check()
    assert made.statistics().evicted_parts >= 8


def test_slabs_with_anything_pinned_stay() -> None:
    made = two_sizes(16)
    put(made, 1, range(16))
    for index in (0, 8):
        assert made.pin(key(1, index), 5) is not None
    assert declined(made.reserve(key(1, 0, namespace=OTHER), 3 * MIB, 1)) is DeclineReason.FULL
    made.unpin(key(1, 8), 5)
    reserved(made.reserve(key(1, 0, namespace=OTHER), 3 * MIB, 1))
    assert made.state(key(1, 0)) is EntryState.READY


def test_a_part_larger_than_a_slab_takes_neighbouring_ones() -> None:
    made = Catalogue(SlotAllocator(64 * MIB, 8 * MIB))
    made.register(SPACE, (MIB,), "default")
    made.register(OTHER, (20 * MIB,), "default")
    put(made, 1, range(64))
    for prompt in range(6):
        name = key(prompt, 0, namespace=OTHER)
        reserved(made.reserve(name, 20 * MIB, 1))
        made.commit(name, 1, ())
        made.check()
    made.register(b"t" * 16, (65 * MIB,), "default")
    too_large = made.reserve(key(1, 0, namespace=b"t" * 16), 65 * MIB, 1)
    assert declined(too_large) is DeclineReason.TOO_LARGE


@pytest.mark.parametrize("reused", [0, 10, 60])
def test_what_was_just_stored_is_never_squeezed_out(reused: int) -> None:
    made = catalogue(100 * MIB)
    for prompt in range(reused):
        put(made, prompt, range(2))
        made.touch(SPACE, chunks(prompt, 2))
    for prompt in range(1000, 1200):
        put(made, prompt, range(1))
    newest = [made.state(key(prompt, 0)) for prompt in range(1200 - int(100 * NEW_SHARE), 1200)]
    assert newest == [EntryState.READY] * int(100 * NEW_SHARE)


def test_asking_whether_a_prefix_is_there_keeps_none_of_it() -> None:
    made = catalogue(10 * MIB)
    put(made, 0, range(5))
    put(made, 1, range(5))
    for _ in range(20):
        assert run(made, SPACE, chunks(0, 5)) == 5
        assert made.state(key(0, 0)) is EntryState.READY
    put(made, 2, range(5))
    assert run(made, SPACE, chunks(0, 5)) == 0
    assert run(made, SPACE, chunks(1, 5)) == 5
