"""The pool's state machine finds defects: each of these is planted into the catalogue, and must be found."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.planted import must_find
from tests.pool.test_catalogue_machine import STEPS, CatalogueMachine

from kvferry.identity.names import PartKey
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Entry, Gap, Namespace, Slot
from kvferry.pool.policy import EvictionPolicy, RecencyQueue
from kvferry.pool.slots import SlotAllocator

Plant = Callable[[pytest.MonkeyPatch], None]


def forget_a_pin_when_an_owner_dies(patch: pytest.MonkeyPatch) -> None:
    """One of those it held on a part stays."""
    unpin = Catalogue._unpin
    patch.setattr(Catalogue, "_unpin", lambda self, entry, count: unpin(self, entry, min(count, 1)))


def let_a_retired_slot_be_reserved(patch: pytest.MonkeyPatch) -> None:
    """Its owner may still write there."""
    retire = Catalogue.retire

    def careless(self: Catalogue, key: PartKey, owner: int) -> int:
        offset = retire(self, key, owner)
        self.reclaim(offset, owner)
        return offset

    patch.setattr(Catalogue, "retire", careless)
    patch.setattr(Catalogue, "reclaim", lambda self, offset, owner: None)


def free_what_is_unlinked_while_it_is_pinned(patch: pytest.MonkeyPatch) -> None:
    """A reader loses its memory under its hands."""
    unlink = Catalogue.unlink

    def hasty(self: Catalogue, key: PartKey) -> None:
        entry = self._find(key)
        if entry is not None and entry.pins and entry.readable:
            self._remove(entry)
        else:
            unlink(self, key)

    patch.setattr(Catalogue, "unlink", hasty)


def show_what_is_being_filled(patch: pytest.MonkeyPatch) -> None:
    """A reader sees half of a part."""

    def early(self: Catalogue, key: PartKey, owner: int) -> Slot | None:
        entry = self._find(key)
        if entry is None or entry.unlinked:
            return None
        self._pin(entry, owner)
        return entry.slot()

    patch.setattr(Catalogue, "pin", early)


def publish_what_was_unlinked_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """A part that was called corrupt comes back."""
    end = Catalogue._end_filling

    def forgiving(self: Catalogue, entry: Any, owner: int) -> None:
        end(self, entry, owner)
        entry.unlinked = False

    patch.setattr(Catalogue, "_end_filling", forgiving)


def evict_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    """The order of eviction does not look at pins."""
    patch.setattr(RecencyQueue, "coldest", lambda self: next(iter(self._linked), None))


def evict_what_should_be_spared(patch: pytest.MonkeyPatch) -> None:
    """A long prefix eats its own head."""
    victim = EvictionPolicy.victim
    patch.setattr(EvictionPolicy, "victim", lambda self, slot_bytes, before=None: victim(self, slot_bytes))


def clamp_a_double_release(patch: pytest.MonkeyPatch) -> None:
    """A pin too many is given back, and nobody hears of it."""
    unpin = Catalogue.unpin

    def lenient(self: Catalogue, key: PartKey, owner: int) -> None:
        holdings = self._owners.get(owner)
        entry = self._find(key)
        if holdings is not None and entry is not None and entry in holdings.pins:
            unpin(self, key, owner)

    patch.setattr(Catalogue, "unpin", lenient)


def take_anyones_commit(patch: pytest.MonkeyPatch) -> None:
    """Whoever commits is taken for the one who reserved."""
    commit = Catalogue.commit

    def trusting(self: Catalogue, key: PartKey, owner: int, checksums: tuple[bytes, ...]) -> None:
        entry = self._find(key)
        commit(self, key, owner if entry is None or entry.filler is None else entry.filler, checksums)

    patch.setattr(Catalogue, "commit", trusting)


def forget_that_a_slot_is_in_use(patch: pytest.MonkeyPatch) -> None:
    """Every slot is the first of its run."""
    alloc = SlotAllocator.alloc

    def again(self: SlotAllocator, nbytes: int) -> int | None:
        offset = alloc(self, nbytes)
        if offset is not None and len(self.run_of(offset).used) > 1:
            return min(self.run_of(offset).used)
        return offset

    patch.setattr(SlotAllocator, "alloc", again)


def keep_windows_warm_that_nothing_needs(patch: pytest.MonkeyPatch) -> None:
    """A use of a prefix counts for all that is held of it."""
    needed = Namespace.needed

    def generous(self: Namespace, chunks: Sequence[bytes], *, ends: int = 0) -> Iterator[Entry]:
        return needed(self, chunks, ends=ends + 1)

    patch.setattr(Namespace, "needed", generous)


def miss_a_gap_that_only_a_state_leaves(patch: pytest.MonkeyPatch) -> None:
    """As if a chunk were whole with what every chunk needs."""
    gaps = Namespace.gaps

    def careless(self: Namespace, chunks: Sequence[bytes]) -> Iterator[Gap]:
        return (gap for gap in gaps(self, chunks) if gap.parts != (2,))

    patch.setattr(Namespace, "gaps", careless)


PLANTED: tuple[Plant, ...] = (
    keep_windows_warm_that_nothing_needs,
    miss_a_gap_that_only_a_state_leaves,
    forget_a_pin_when_an_owner_dies,
    let_a_retired_slot_be_reserved,
    free_what_is_unlinked_while_it_is_pinned,
    show_what_is_being_filled,
    publish_what_was_unlinked_meanwhile,
    evict_what_is_pinned,
    evict_what_should_be_spared,
    clamp_a_double_release,
    take_anyones_commit,
    forget_that_a_slot_is_in_use,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found_with_what_reproduces_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    must_find(CatalogueMachine, STEPS)
