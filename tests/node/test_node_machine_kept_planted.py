"""The machine with keepers finds defects: each of these is planted into the node, and must be found."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.node.machine_world import CHECKSUMS
from tests.node.test_node_machine_keepers import STEPS, KeptNodeMachine
from tests.planted import must_find

from kvferry.keeper.wire import Where
from kvferry.node import search
from kvferry.node.deep import DeepFetch
from kvferry.node.search import Search, Searches
from kvferry.node.telling import Telling
from kvferry.tiers.contract import FetchResult, Outcome

Plant = Callable[[pytest.MonkeyPatch], None]


def take_a_staged_part_for_a_fetched_one(patch: pytest.MonkeyPatch) -> None:
    """It is in Valkey, and not in the slot."""

    def hasty(self: DeepFetch, staged: Sequence[int]) -> None:
        for index in staged:
            key = self._items[index].ref.key
            self._loop.post(lambda at=index, key=key: self._done(at, FetchResult(Outcome.OK, CHECKSUMS[key])))

    patch.setattr(DeepFetch, "_fetch", hasty)


def give_up_a_slot_that_the_tier_still_writes_to(patch: pytest.MonkeyPatch) -> None:
    """A cancelled batch is taken to have ended, with what was staged of it."""
    fetch, cancel = DeepFetch._fetch, DeepFetch.cancel
    fetching: dict[DeepFetch, list[int]] = {}

    def remember(self: DeepFetch, staged: Sequence[int]) -> None:
        fetching.setdefault(self, []).extend(staged)
        done = self._done

        def once(index: int, result: FetchResult) -> None:
            if index in fetching[self]:
                fetching[self].remove(index)
                done(index, result)

        self._done = once
        fetch(self, staged)
        self._done = done

    def hasty(self: DeepFetch) -> None:
        cancel(self)
        for index in fetching.pop(self, []):
            self._loop.post(lambda at=index: self._done(at, FetchResult(Outcome.LATE, ())))
        fetching[self] = []

    patch.setattr(DeepFetch, "_fetch", remember)
    patch.setattr(DeepFetch, "cancel", hasty)


def listen_to_what_is_said_twice(patch: pytest.MonkeyPatch) -> None:
    """Each report of a staged part begins a fetch."""
    take = DeepFetch._take_reports

    def eager(self: DeepFetch) -> None:
        while self._reports:
            index, _, outcome = self._reports.popleft()
            self._staging.pop(index, None)
            if outcome is Outcome.OK:
                self._fetch([index])
            else:
                self._done(index, FetchResult(outcome, ()))
        take(self)

    patch.setattr(DeepFetch, "_take_reports", eager)


def forget_a_part_that_the_tier_has_lost(patch: pytest.MonkeyPatch) -> None:
    """Nobody stages it, and nobody says so."""
    take = DeepFetch._take_reports

    def careless(self: DeepFetch) -> None:
        self._misses.clear()
        take(self)

    patch.setattr(DeepFetch, "_take_reports", careless)


def call_a_miss_what_keepers_cannot_tell(patch: pytest.MonkeyPatch) -> None:
    """They are away, so they have nothing."""
    located = Searches._located

    def careless(self: Searches, search: Search, asked: Sequence[Any], where: Sequence[Any]) -> None:
        located(self, search, asked, [Where.ABSENT if place is Where.UNKNOWN else place for place in where])

    patch.setattr(Searches, "_located", careless)


def ask_keepers_for_all_that_the_tier_has_not(patch: pytest.MonkeyPatch) -> None:
    """Windows of boundaries that nobody wants, and chunks past a failure."""

    def greedy(search: Search, reached: object) -> list[tuple[int, int]]:
        answers = zip(search.probed, search.outcomes, strict=True)
        return [at for at, outcome in answers if outcome is Outcome.MISS]

    patch.setattr(search, "_deep_questions", greedy)


def wait_for_keepers_without_end(patch: pytest.MonkeyPatch) -> None:
    """The lookup's wait ends before they have answered, and nothing happens."""
    late = Searches._late

    def patient(self: Searches, search: Search) -> None:
        if search.known is None:
            late(self, search)

    patch.setattr(Searches, "_late", patient)


def tell_keepers_twice(patch: pytest.MonkeyPatch) -> None:
    """Of each part that the tier has."""
    stored = Telling.stored
    patch.setattr(Telling, "stored", lambda self, unsaved: (stored(self, unsaved), stored(self, unsaved)))


PLANTED: tuple[Plant, ...] = (
    take_a_staged_part_for_a_fetched_one,
    give_up_a_slot_that_the_tier_still_writes_to,
    listen_to_what_is_said_twice,
    forget_a_part_that_the_tier_has_lost,
    call_a_miss_what_keepers_cannot_tell,
    ask_keepers_for_all_that_the_tier_has_not,
    wait_for_keepers_without_end,
    tell_keepers_twice,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found_with_what_reproduces_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    must_find(KeptNodeMachine, STEPS)
