"""A tier that lets a request wait in silence makes no other wait, but for trials, until it is back."""

from collections.abc import Iterator

import pytest
from tests.node.machine_held import Loading
from tests.node.machine_world import DIGESTS, KEYS, ODD
from tests.node.test_kept_cases import Kept

from kvferry.costs.lengths import PROBE_CHUNKS
from kvferry.costs.rates import FIRST_PROBE_S, MAX_PROBE_S
from kvferry.keeper.wire import Where
from kvferry.node.fetches import HANGS_S
from kvferry.tiers.contract import Outcome

CHUNKS = 5
STEP_S = 0.1


class Silent(Kept):
    """place: where everything lies; what is asked of that is answered while it ``works``."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.works = False
        self.from_tier = place in ("valkey", "lost")
        self.loses = place == "lost"
        for key in KEYS:
            value, _ = self.below.values[key]
            self.below.values[key] = (value, Where.OBJECTS if place == "objects" else Where.DISK)
        self.waited_s = 0.0

    def request(self, first: int = 0) -> int:
        """One that would rather wait long than recompute. Returns how many chunks it began to load."""
        self.valkey.values.clear()
        for key in KEYS if self.from_tier else ():
            self.valkey.values.setdefault(key, self.below.values[key][0])
        self.world.state.catalogue.drop()
        before = set(self.loads)
        probe = self.ask(0, ODD, DIGESTS[first : first + CHUNKS], per_token_s=100.0)
        assert probe is not None
        self.valkey.answer(probe, None, 0)
        if self.loses:
            self.valkey.values.clear()
        self.check()
        for locate in list(self.below.locates):
            self.below.answer(locate)
        self.check()
        begun = [loading for load_id, loading in self.loads.items() if load_id not in before]
        for loading in begun:
            self._wait(loading)
        self.clock.now += STEP_S
        return sum(loading.end if self.works else len(loading.chunks) for loading in begun)

    def _wait(self, loading: Loading) -> None:
        self.join(0, loading, 0)
        began = self.clock.now
        while loading.given != loading.needed and loading.end:
            for stage in [stage for stage in self.below.stages if not stage.call.cancelled]:
                if self.works:
                    self.below.finish(stage, None)
            self.check()
            for fetch in [fetch for fetch in self.valkey.fetches if not fetch.call.cancelled]:
                if self.works or (self.loses and fetch.item.ref.key not in self.valkey.values):
                    self.valkey.finish(fetch, None)
            self.check()
            for at in list(loading.places):
                self.copy(0, loading, at)
            self.clock.now += 0.01 if self.works else STEP_S
            self.check()
        self.waited_s += self.clock.now - began
        self.end(loading)
        self.check()
        for fetch in list(self.valkey.fetches):
            self.valkey.finish(fetch, Outcome.LATE)
        self.check()


@pytest.fixture(params=["valkey", "disk", "objects"])
def model(request: pytest.FixtureRequest) -> Iterator[Silent]:
    made = Silent(request.param)
    try:
        yield made
        made.rest()
    finally:
        made.world.close()


def test_one_request_finds_out_and_trials_find_that_it_is_back(model: Silent) -> None:
    assert model.request() == CHUNKS
    assert model.waited_s > 0.0
    found_out = model.waited_s
    for _ in range(int(FIRST_PROBE_S / STEP_S) - 2):
        assert model.request(CHUNKS) == 0
    assert model.waited_s == found_out
    trials, until = 0, model.clock.now + 2 * MAX_PROBE_S
    while model.clock.now < until:
        model.clock.now += 1.0
        loaded = model.request(CHUNKS)
        assert loaded <= PROBE_CHUNKS
        trials += loaded > 0
    assert 1 <= trials <= 8, "1, 2, 4, ... s after one another"
    model.works = True
    healed = model.clock.now
    while not model.request():
        assert model.clock.now <= healed + MAX_PROBE_S + STEP_S
    assert [model.request() for _ in range(5)] == [CHUNKS] * 5


def test_one_that_answered_before_is_no_better(model: Silent) -> None:
    model.works = True
    assert [model.request() for _ in range(5)] == [CHUNKS] * 5
    model.works = False
    assert model.request() == CHUNKS
    assert model.request(CHUNKS) == 0


def test_keepers_that_hang_are_asked_for_what_the_tier_has_lost_by_trials_only() -> None:
    model = Silent("lost")
    try:
        model.works = True
        assert [model.request() for _ in range(3)] == [CHUNKS] * 3
        model.works = False
        assert model.request() == CHUNKS
        found_out = model.waited_s
        assert found_out > 0.0
        for _ in range(5):
            assert model.request() == CHUNKS
        assert model.waited_s == pytest.approx(found_out + 5 * STEP_S), "they end at once"
        model.works = True
        model.clock.now += MAX_PROBE_S
        assert [model.request() for _ in range(3)] == [CHUNKS] * 3
        model.rest()
    finally:
        model.world.close()


def test_nobody_waits_for_a_transfer_that_was_cancelled_long_ago_and_never_ends() -> None:
    model = Silent("valkey")
    try:
        for key in KEYS:
            model.valkey.values[key] = model.below.values[key][0]
        loading = _begin(model)
        model.end(loading)
        model.check()
        hung = list(model.valkey.fetches)
        assert hung and all(fetch.call.cancelled for fetch in hung)
        model.clock.now += 2 * HANGS_S
        before = model.clock.now
        again = _begin(model)
        assert again is None or again.end == 0
        assert model.clock.now == before
        for fetch in hung:
            model.valkey.finish(fetch, Outcome.LATE)
        model.check()
        assert _begin(model).end == CHUNKS
        model.rest()
    finally:
        model.world.close()


def _begin(model: Silent) -> Loading | None:
    before = set(model.loads)
    probe = model.ask(0, ODD, DIGESTS[:CHUNKS], per_token_s=100.0)
    assert probe is not None
    model.valkey.answer(probe, None, 0)
    model.check()
    return next((loading for load_id, loading in model.loads.items() if load_id not in before), None)
