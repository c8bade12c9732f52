"""The node's state machine finds defects: each of these is planted into the node, and must be found."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.node.machine_world import CHECKSUMS
from tests.node.test_node_machine import STEPS, NodeMachine
from tests.planted import must_find

from kvferry.identity.boundaries import start_of, usable_boundaries
from kvferry.identity.names import PartKey
from kvferry.node import loads, reach, saves, search
from kvferry.node.fetches import FetchTable
from kvferry.node.live import LiveLoad
from kvferry.node.loading import Loads
from kvferry.node.loads import LeftOver, Load
from kvferry.node.lookups import Lookups
from kvferry.node.saves import Saves
from kvferry.node.search import Searches
from kvferry.node.state import FETCHER, WRITER
from kvferry.node.wire import Reason
from kvferry.pool.catalogue import Catalogue
from kvferry.tiers.contract import Outcome

Plant = Callable[[pytest.MonkeyPatch], None]


def publish_before_the_fetch_has_ended(patch: pytest.MonkeyPatch) -> None:
    """A slot is a reader's while the tier still writes to it."""
    fetch = Loads._fetch

    def eager(self: Loads, live: Any, batch: Any, items: Sequence[Any]) -> None:
        fetch(self, live, batch, items)
        for item in items:
            self._state.catalogue.commit(item.ref.key, FETCHER, CHECKSUMS[item.ref.key])

    patch.setattr(Loads, "_fetch", eager)


def give_a_cancelled_fetchs_slot_away(patch: pytest.MonkeyPatch) -> None:
    """The tier was asked to stop, and is taken to have stopped."""
    leave, catalogues = FetchTable.leave, []
    make = Catalogue.__init__

    def remember(self: Catalogue, *args: Any) -> None:
        make(self, *args)
        catalogues[:] = [self]

    def hasty(self: FetchTable, key: PartKey, waiter: Any) -> Any:
        batch = leave(self, key, waiter)
        if batch is not None:
            catalogues[0].retire(key, FETCHER)
            catalogues[0].release_owner(FETCHER)
        return batch

    patch.setattr(Catalogue, "__init__", remember)
    patch.setattr(FetchTable, "leave", hasty)


def forget_that_a_lost_engine_may_still_write(patch: pytest.MonkeyPatch) -> None:
    """Its slots are free the moment its connection is gone."""
    patch.setattr(saves, "QUARANTINE_S", 0.0)


def free_a_slot_when_its_reservation_expires(patch: pytest.MonkeyPatch) -> None:
    """A stopped engine goes on and writes into another's slot."""
    retire = Catalogue.retire

    def generous(self: Catalogue, key: PartKey, owner: int) -> int:
        offset = retire(self, key, owner)
        self.reclaim(offset, owner)
        return offset

    patch.setattr(Catalogue, "retire", generous)


def forget_what_a_load_holds_when_it_ends(patch: pytest.MonkeyPatch) -> None:
    """Neither the load nor its owner gives its pins back."""
    release, finish = Catalogue.release_owner, Load.finish

    def forgetful(self: Catalogue, owner: int) -> None:
        holdings = self._owners.get(owner)
        if holdings is None or not holdings.pins:
            release(self, owner)

    def hasty(self: Load, reason: Reason) -> LeftOver:
        return LeftOver((), finish(self, reason).fetching)

    patch.setattr(Catalogue, "release_owner", forgetful)
    patch.setattr(Load, "finish", hasty)


def tell_nobody_where_a_load_ends(patch: pytest.MonkeyPatch) -> None:
    """A worker waits for a part that will not come."""
    patch.setattr(LiveLoad, "say_end", lambda self, part, listeners: None)


def count_a_failure_as_a_miss(patch: pytest.MonkeyPatch) -> None:
    """A tier that is down has nothing, they say."""
    for outcome in (Outcome.REFUSED, Outcome.FAILED, Outcome.LATE):
        patch.setitem(search._UNKNOWN, outcome, None)


def let_a_lookup_wait_for_the_tier(patch: pytest.MonkeyPatch) -> None:
    """Its bounded wait ends, and nothing happens."""
    patch.setattr(Searches, "_late", lambda self, search: None)


def let_a_load_wait_for_the_tier(patch: pytest.MonkeyPatch) -> None:
    """Its deadline passes, and nothing happens."""
    patch.setattr(Loads, "_watch", lambda self, live: None)


def give_a_stored_part_up_while_the_tier_reads_it(patch: pytest.MonkeyPatch) -> None:
    """The write-back lets go of a part when it hands it to the tier."""
    done, checked = Saves._done_with, Saves._checked

    def early(self: Saves, batch: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        checked(self, batch, outcomes)
        for unsaved, outcome in zip(batch, outcomes, strict=True):
            if outcome in (Outcome.MISS, Outcome.CORRUPT):
                self._state.catalogue.unpin(unsaved.ref.key, WRITER)

    def late(self: Saves, unsaved: Any) -> None:
        self._state.catalogue.pin(unsaved.ref.key, WRITER)
        done(self, unsaved)

    patch.setattr(Saves, "_checked", early)
    patch.setattr(Saves, "_done_with", late)


def sleep_through_a_change(patch: pytest.MonkeyPatch) -> None:
    """Pins end elsewhere, and a load that waits for room is not looked at."""
    patch.setattr(Loads, "room_changed", lambda self: None)


def offer_a_boundary_without_its_state(patch: pytest.MonkeyPatch) -> None:
    """As if a boundary needed nothing but what every chunk has."""

    def careless(chunks: int, missing: Mapping[int, Sequence[int]]) -> bytearray:
        return usable_boundaries(chunks, {0: missing.get(0, ())})

    patch.setattr(reach, "usable_boundaries", careless)


def offer_less_than_could_be_loaded(patch: pytest.MonkeyPatch) -> None:
    """Where parts are needed of some chunks only, the largest boundary is left out."""

    def modest(chunks: int, missing: Mapping[int, Sequence[int]]) -> bytearray:
        usable = usable_boundaries(chunks, missing)
        if len(missing) > 1 and usable.rfind(1):
            usable[usable.rfind(1)] = 0
        return usable

    patch.setattr(reach, "usable_boundaries", modest)


def keep_the_head_of_a_load_that_broke_off(patch: pytest.MonkeyPatch) -> None:
    """It ends at a boundary for which no window or state was loaded."""
    cut = Load.cut

    def lenient(self: Load, position: int, reason: Reason) -> LeftOver:
        self._whole_only = False
        return cut(self, position, reason)

    patch.setattr(Load, "cut", lenient)


def load_a_window_from_one_chunk_too_late(patch: pytest.MonkeyPatch) -> None:
    """Its first chunk is taken for one that is not needed."""
    patch.setattr(loads, "start_of", lambda number, boundary: start_of(number, boundary) + (number > 1))


def keep_what_memorys_boundary_needed(patch: pytest.MonkeyPatch) -> None:
    """Though the tier leads to a later one, which needs others."""
    patch.setattr(Lookups, "_unpin", lambda self, lookup, boundary: None)


PLANTED: tuple[Plant, ...] = (
    offer_a_boundary_without_its_state,
    offer_less_than_could_be_loaded,
    keep_the_head_of_a_load_that_broke_off,
    load_a_window_from_one_chunk_too_late,
    keep_what_memorys_boundary_needed,
    publish_before_the_fetch_has_ended,
    give_a_cancelled_fetchs_slot_away,
    forget_that_a_lost_engine_may_still_write,
    free_a_slot_when_its_reservation_expires,
    forget_what_a_load_holds_when_it_ends,
    tell_nobody_where_a_load_ends,
    count_a_failure_as_a_miss,
    let_a_lookup_wait_for_the_tier,
    let_a_load_wait_for_the_tier,
    give_a_stored_part_up_while_the_tier_reads_it,
    sleep_through_a_change,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found_with_what_reproduces_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    must_find(NodeMachine, STEPS)
