"""The catalogue's rules one by one: who may do what, and what is refused."""

from collections.abc import Callable

import pytest
from tests.pool.model import MIB, OTHER, SPACE, catalogue, chunks, declined, key, put, reserved, run

from kvferry.errors import BrokenError, MisconfiguredError, RefusedError
from kvferry.identity.names import PartKey
from kvferry.pool import catalogue as catalogue_module
from kvferry.pool.catalogue import MAX_NAMESPACES, Catalogue
from kvferry.pool.entries import DeclineReason, EntryState, Slot
from kvferry.pool.slots import SlotAllocator

SUMS = (b"s" * 16, b"t" * 16)


def test_registering_again_is_idempotent_and_differing_sizes_are_refused() -> None:
    made = catalogue(16 * MIB)
    made.register(SPACE, (MIB,), "default")
    with pytest.raises(RefusedError, match="is registered with parts"):
        made.register(SPACE, (MIB, MIB), "default")
    with pytest.raises(RefusedError, match="'default'"):
        made.register(SPACE, (MIB,), "other")
    with pytest.raises(RefusedError, match="trailing"):
        made.register(SPACE, (MIB,), "default", trailing=(1,))
    assert made.statistics().namespaces == 1


@pytest.mark.parametrize("trailing", [(1,), (0, -1), tuple(range(65))])
def test_trailing_numbers_that_cannot_be_are_refused(trailing: tuple[int, ...]) -> None:
    made = Catalogue(SlotAllocator(16 * MIB))
    with pytest.raises(RefusedError, match="trailing"):
        made.register(SPACE, (MIB,) * max(2, len(trailing)), "default", trailing=trailing)
    made.register(SPACE, (MIB,) * 64, "default", trailing=tuple(range(64)))


@pytest.mark.parametrize(
    ("namespace", "part_bytes"),
    [
        (b"short", (MIB,)),
        (OTHER, ()),
        (OTHER, (0,)),
        (OTHER, (MIB, -1)),
        (OTHER, (1 << 31,)),
        (OTHER, (1,) * 4097),
    ],
)
def test_impossible_namespaces_are_refused(namespace: bytes, part_bytes: tuple[int, ...]) -> None:
    with pytest.raises(RefusedError):
        catalogue(16 * MIB).register(namespace, part_bytes, "default")


def test_namespaces_are_bounded() -> None:
    made = catalogue(16 * MIB)
    for index in range(MAX_NAMESPACES - 1):
        made.register(index.to_bytes(16, "big"), (MIB,), "default")
    with pytest.raises(RefusedError, match="more than"):
        made.register(OTHER, (MIB,), "default")


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        (PartKey(OTHER, b"c" * 32, 0), MIB),
        (PartKey(SPACE, b"c" * 31, 0), MIB),
        (PartKey(SPACE, b"c" * 32, 1), MIB),
        (PartKey(SPACE, b"c" * 32, -1), MIB),
        (PartKey(SPACE, b"c" * 32, 0), MIB + 1),
    ],
)
def test_a_reservation_must_name_a_registered_part_of_its_size(name: PartKey, nbytes: int) -> None:
    made = catalogue(16 * MIB)
    with pytest.raises(RefusedError):
        made.reserve(name, nbytes, 1)
    assert made.statistics().used_bytes == 0


@pytest.mark.parametrize("call", [Catalogue.gaps, Catalogue.touch, Catalogue.refresh])
def test_an_unknown_namespace_is_refused_not_missed(call: Callable[..., int]) -> None:
    with pytest.raises(RefusedError, match="attach"):
        call(catalogue(16 * MIB), OTHER, [])
    with pytest.raises(RefusedError, match="attach"):
        catalogue(16 * MIB).drop(OTHER)


def test_a_part_is_visible_from_its_commit_on_with_its_checksums() -> None:
    made = catalogue(16 * MIB)
    slot = reserved(made.reserve(key(1, 0), MIB, 7))
    assert made.state(key(1, 0)) is EntryState.FILLING
    assert made.pin(key(1, 0), 7) is None
    assert run(made, SPACE, chunks(1, 1)) == 0
    made.commit(key(1, 0), 7, SUMS)
    assert made.state(key(1, 0)) is EntryState.READY
    assert made.pin(key(1, 0), 8) == Slot(slot.offset, MIB, SUMS)
    assert run(made, SPACE, chunks(1, 3)) == 1


def test_a_chunk_counts_only_with_all_its_parts() -> None:
    made = catalogue(16 * MIB, part_bytes=(MIB, MIB))
    for index in range(3):
        for part in range(2):
            reserved(made.reserve(key(1, index, part), MIB, 1))
            if (index, part) != (1, 1):
                made.commit(key(1, index, part), 1, ())
    assert run(made, SPACE, chunks(1, 3)) == 1
    made.commit(key(1, 1, 1), 1, ())
    assert run(made, SPACE, chunks(1, 3)) == 3
    made.unlink(key(1, 2, 0))
    assert run(made, SPACE, chunks(1, 3)) == 2


def test_what_is_there_or_coming_is_not_stored_twice() -> None:
    made = catalogue(16 * MIB)
    reserved(made.reserve(key(1, 0), MIB, 1))
    assert declined(made.reserve(key(1, 0), MIB, 1)) is DeclineReason.FILLING
    assert declined(made.reserve(key(1, 0), MIB, 2)) is DeclineReason.FILLING
    made.commit(key(1, 0), 1, ())
    assert declined(made.reserve(key(1, 0), MIB, 2)) is DeclineReason.EXISTS


def test_a_double_release_is_an_error() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(1))
    for _ in range(2):
        assert made.pin(key(1, 0), 3) is not None
    made.unpin(key(1, 0), 3)
    with pytest.raises(BrokenError, match="does not hold"):
        made.unpin(key(1, 0), 4)
    made.unpin(key(1, 0), 3)
    with pytest.raises(BrokenError, match="does not hold"):
        made.unpin(key(1, 0), 3)
    with pytest.raises(BrokenError, match="does not hold"):
        made.unpin(key(9, 9), 3)
    made.check()


@pytest.mark.parametrize("finish", ["commit", "commit_pinned", "abandon"])
def test_a_reservation_ends_once_and_by_its_owner(finish: str) -> None:
    made = catalogue(16 * MIB)

    def end(owner: int) -> None:
        if finish == "abandon":
            made.abandon(key(1, 0), owner)
        else:
            getattr(made, finish)(key(1, 0), owner, SUMS)

    with pytest.raises(BrokenError, match="not filling"):
        end(1)
    reserved(made.reserve(key(1, 0), MIB, 1))
    with pytest.raises(BrokenError, match="not filling"):
        end(2)
    end(1)
    with pytest.raises(BrokenError, match="not filling"):
        end(1)
    made.check()


def test_a_late_commit_after_the_owner_was_released_changes_nothing() -> None:
    made = catalogue(16 * MIB)
    reserved(made.reserve(key(1, 0), MIB, 1))
    made.release_owner(1)
    made.release_owner(1)
    with pytest.raises(BrokenError):
        made.commit(key(1, 0), 1, SUMS)
    assert made.statistics().used_bytes == 0
    reserved(made.reserve(key(1, 0), MIB, 2))  # someone else fills it now
    with pytest.raises(BrokenError):
        made.commit(key(1, 0), 1, SUMS)
    assert made.state(key(1, 0)) is EntryState.FILLING


def test_a_dead_owner_leaves_nothing_behind_and_others_alone() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(4))
    for index in range(4):
        made.pin(key(1, index), 5)
        made.pin(key(1, index), 5)
        made.pin(key(1, index), 6)
    reserved(made.reserve(key(2, 0), MIB, 5))
    made.release_owner(5)
    made.check()
    statistics = made.statistics()
    assert (statistics.pins, statistics.filling_parts, statistics.abandoned_parts) == (4, 0, 1)
    made.release_owner(6)
    assert made.statistics().pinned_bytes == 0


def test_an_unlinked_part_is_gone_at_once_and_its_memory_with_the_last_pin() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(1))
    made.pin(key(1, 0), 5)
    made.pin(key(1, 0), 6)
    made.unlink(key(1, 0))
    made.unlink(key(1, 0))
    assert made.state(key(1, 0)) is EntryState.ABSENT
    assert made.pin(key(1, 0), 7) is None
    assert declined(made.reserve(key(1, 0), MIB, 7)) is DeclineReason.UNLINKED
    made.unpin(key(1, 0), 5)
    assert made.statistics().used_bytes == MIB
    made.unpin(key(1, 0), 6)
    assert made.statistics().used_bytes == 0
    reserved(made.reserve(key(1, 0), MIB, 7))


def test_a_part_unlinked_while_it_is_filled_is_never_seen() -> None:
    made = catalogue(16 * MIB)
    for finish in (made.commit, made.commit_pinned):
        reserved(made.reserve(key(1, 0), MIB, 1))
        made.unlink(key(1, 0))
        finish(key(1, 0), 1, SUMS)
        assert made.state(key(1, 0)) is EntryState.ABSENT
        made.check()
    made.unpin(key(1, 0), 1)
    assert made.statistics().used_bytes == 0


def test_drop_frees_all_that_is_not_in_use() -> None:
    made = catalogue(16 * MIB)
    made.register(OTHER, (MIB,), "default")
    put(made, 1, range(4))
    made.pin(key(1, 2), 5)
    reserved(made.reserve(key(1, 0, namespace=OTHER), MIB, 6))
    assert made.drop(OTHER) == 0
    assert made.drop() == 3 * MIB
    assert made.statistics().used_bytes == 2 * MIB
    assert made.statistics().dropped_parts == 3
    assert made.take_evicted() == []


def test_the_list_of_evictions_is_bounded_and_says_when_it_overflowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue_module, "MAX_EVICTED_UNREPORTED", 3)
    made = catalogue(16 * MIB)
    put(made, 1, range(16))
    put(made, 2, range(5))
    assert len(made.take_evicted()) == 3
    assert made.statistics().evictions_unreported == 2


def test_a_planted_defect_is_found_by_the_check() -> None:
    made = catalogue(16 * MIB)
    put(made, 1, range(2))
    made.pin(key(1, 0), 5)
    made._at[0].pins += 1
    with pytest.raises(BrokenError, match="pins"):
        made.check()


def test_a_pool_without_room_for_a_slab_is_refused() -> None:
    with pytest.raises(MisconfiguredError):
        Catalogue(SlotAllocator(4096))
