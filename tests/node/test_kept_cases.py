"""Orders of events between a node, its tier and its keepers, step by step in the machine's world."""

from collections.abc import Iterator, Sequence

import pytest
from tests.node.machine_clients import Clients
from tests.node.machine_held import Loading
from tests.node.machine_keepers import ScriptedKeepers
from tests.node.machine_tier import ScriptedTier, Value
from tests.node.machine_world import CHECKSUMS, CONTENT, DIGESTS, HYBRID, KEYS, ODD, WIDE

from kvferry.identity.names import PartKey
from kvferry.keeper.wire import Where
from kvferry.node import estimate
from kvferry.node.state import Namespace
from kvferry.node.wire import Answer, Corrupt, PartsReady, Reason, Role, Tier
from kvferry.tiers.contract import Outcome


class Kept(Clients):
    """Three engines; keepers have everything on a disk, the tier nothing."""

    def __init__(self) -> None:
        super().__init__(with_tier=True, with_keepers=True)
        assert self.tier is not None and self.keepers is not None
        self.valkey: ScriptedTier = self.tier
        self.below: ScriptedKeepers = self.keepers
        for key in KEYS:
            self.below.values[key] = (Value(key, CONTENT[key], CHECKSUMS[key]), Where.DISK)
        for number in range(3):
            for role in (Role.SCHEDULER, Role.WORKER):
                self.peers.append(self.world.connect(role, f"engine {number}"))

    def load(self, who: int, space: Namespace, chunks: Sequence[bytes], **options: float) -> Loading:
        """A load of all of these chunks from below, to which every part's worker listens."""
        before = set(self.loads)
        probe = self.ask(who, space, chunks, **options)
        assert probe is not None
        self.valkey.answer(probe, None, 0)
        self.check()
        self.below.answer(self.below.locates[-1])
        self.check()
        (started,) = (loading for load_id, loading in self.loads.items() if load_id not in before)
        for part in space.parts:
            self.join(who, started, part)
        self.check()
        return started

    def bring(self) -> None:
        """Everything that is under way comes."""
        while self.below.stages or self.valkey.fetches:
            for stage in list(self.below.stages):
                self.below.finish(stage, None)
            self.check()
            for fetch in list(self.valkey.fetches):
                self.valkey.finish(fetch, None)
            self.check()

    @property
    def counters(self) -> dict[str, int]:
        """Failures, by cause."""
        return dict(self.world.state.counters.failed)


@pytest.fixture
def model() -> Iterator[Kept]:
    made = Kept()
    try:
        yield made
        made.rest()
    finally:
        made.world.close()


def test_parts_are_fetched_as_they_are_staged_and_none_before(model: Kept) -> None:
    loading = model.load(0, ODD, DIGESTS[:4])
    assert (len(model.below.stages), model.valkey.fetches) == (4, [])
    model.below.finish(model.below.stages[2], None)
    model.below.finish(model.below.stages[0], None)
    model.check()
    assert [fetch.item.ref.key.chunk for fetch in model.valkey.fetches] == [DIGESTS[0], DIGESTS[2]]
    model.bring()
    assert loading.given == {(chunk, 0) for chunk in range(4)}
    assert model.world.state.counters.staged_parts == {"disk": 4}
    assert not model.counters


def test_what_is_not_staged_ends_the_load_there_as_a_failure_and_the_head_comes(model: Kept) -> None:
    loading = model.load(0, ODD, DIGESTS[:4])
    model.below.finish(model.below.stages[2], Outcome.MISS)
    model.bring()
    assert (loading.end, loading.given) == (2, {(0, 0), (1, 0)})
    assert model.counters == {"gone": 1}
    assert model.world.state.counters.missed_chunks == 0


def _evict(model: Kept, *numbers: int) -> None:
    """The tier loses what it had of these chunks; keepers have all."""
    for key in [key for key in model.valkey.values if key.chunk in [DIGESTS[number] for number in numbers]]:
        del model.valkey.values[key]


def _fetch_all(model: Kept) -> None:
    for fetch in list(model.valkey.fetches):
        model.valkey.finish(fetch, None)
    model.check()


def _from_the_tier(model: Kept, chunks: int) -> Loading:
    """A load of which the tier has everything when it is probed."""
    for key in KEYS:
        if key.chunk in DIGESTS[:chunks]:
            model.valkey.values[key] = model.below.values[key][0]
    probe = model.ask(0, ODD, DIGESTS[:chunks])
    assert probe is not None
    model.valkey.answer(probe, None, 0)
    model.check()
    (loading,) = model.loads.values()
    model.join(0, loading, 0)
    model.check()
    return loading


def test_what_is_evicted_between_stage_and_fetch_is_staged_once_more_and_no_oftener(model: Kept) -> None:
    loading = model.load(0, ODD, DIGESTS[:3])
    model.below.finish(model.below.stages[1], None, lost=True)
    model.bring()
    assert (loading.end, loading.given, model.counters) == (3, loading.needed, {})
    model.end(loading)
    model.check()
    again = model.load(0, ODD, DIGESTS[3:6])
    for _ in range(2):
        stage = next(stage for stage in model.below.stages if stage.ref.key == again.key(1, 0))
        model.below.finish(stage, None, lost=True)
        model.check()
        _fetch_all(model)
    model.bring()
    assert (again.end, model.counters) == (1, {"gone": 1})


def test_what_is_evicted_between_probe_and_fetch_is_staged_and_the_load_is_whole(model: Kept) -> None:
    """And tells nothing of how fast the tier is."""
    loading = _from_the_tier(model, 4)
    _evict(model, 1, 2)
    model.clock.now += 0.05
    _fetch_all(model)
    assert [stage.ref.key for stage in model.below.stages] == [loading.key(1, 0), loading.key(2, 0)]
    assert (loading.end, loading.given) == (4, {(0, 0), (3, 0)})
    model.clock.now += 0.05
    model.bring()
    assert (loading.end, loading.given, model.counters) == (4, loading.needed, {})
    assert model.world.state.counters.staged_parts == {"valkey": 2}
    assert model.world.state.fetch_rate.rate(model.clock.now).bytes_per_s is None


def test_a_part_that_is_lost_and_staged_is_no_stall_and_costs_no_more_than_the_deadline(model: Kept) -> None:
    loading = _from_the_tier(model, 3)
    live = model.world.app.loads._loads[loading.load_id]
    live.stall_s = 0.25
    _evict(model, 1)
    _fetch_all(model)
    (worker,) = [peer for peer in model.peers if (peer, 0) in loading.joined]
    told = 0
    while model.clock.now + 0.2 < loading.deadline:
        model.clock.now += 0.2
        model.world.settle()
        told += sum(isinstance(message, PartsReady) and not message.places for message in worker.inbox)
        model.check()
        assert loading.end == 3
    assert told > 5
    model.clock.now = loading.deadline
    model.check()
    assert (loading.end, model.counters) == (1, {"deadline": 1})
    assert model.world.app.loads.fetches == 0
    assert all(stage.call.cancelled for stage in model.below.stages)


@pytest.mark.parametrize(("ending", "cause"), [(Outcome.MISS, "gone"), (None, "tier-down")])
def test_a_part_that_is_lost_and_that_no_keeper_brings_ends_the_load_there(
    model: Kept, ending: Outcome | None, cause: str
) -> None:
    """None: they are away."""
    loading = _from_the_tier(model, 3)
    _evict(model, 1)
    model.below.up = ending is not None
    _fetch_all(model)
    for stage in list(model.below.stages):
        model.below.finish(stage, ending)
    model.check()
    assert (loading.end, loading.given, model.counters) == (1, {(0, 0), (2, 0)}, {cause: 1})


def test_who_joins_a_fetch_of_a_lost_part_gets_it_and_what_is_said_of_an_earlier_stage_is_not_heard(
    model: Kept,
) -> None:
    first = _from_the_tier(model, 2)
    _evict(model, 0)
    model.valkey.finish(model.valkey.fetches[0], None)
    model.check()
    probe = model.ask(1, ODD, DIGESTS[:2])
    assert probe is not None
    model.valkey.answer(probe, None, 0)
    model.check()
    model.below.answer(model.below.locates[-1])
    model.check()
    (stage,) = model.below.stages
    model.below.finish(stage, None, lost=True, often=1)
    model.check()
    (fetch,) = [fetch for fetch in model.valkey.fetches if fetch.item.ref.key == first.key(0, 0)]
    model.valkey.finish(fetch, None)
    model.check()
    stage.done(stage.index, Outcome.MISS)
    model.check()
    assert first.end == 2
    model.bring()
    assert all(loading.end == 2 for loading in model.loads.values())
    assert not model.counters


def test_two_requests_share_one_stage_and_the_second_gets_all_when_the_first_ends(model: Kept) -> None:
    first = model.load(0, WIDE, DIGESTS[:2])
    second = model.load(1, WIDE, DIGESTS[:2])
    assert len(model.below.stages) == 4
    model.end(first)
    model.check()
    assert not model.below.stages[0].call.cancelled
    model.bring()
    assert (second.end, second.given) == (2, second.needed)


def test_a_stage_that_nobody_wants_any_more_is_given_up_at_once_and_its_late_report_is_not_heard(
    model: Kept,
) -> None:
    model.end(model.load(0, ODD, DIGESTS[:2]))
    model.check()
    assert all(stage.call.cancelled for stage in model.below.stages)
    assert model.world.app.loads.fetches == 0
    for stage in list(model.below.stages):
        model.below.finish(stage, None)
    model.check()
    assert not model.valkey.fetches


def test_a_load_cut_while_a_staged_part_is_being_fetched_waits_for_that_with_the_slot(model: Kept) -> None:
    model.end(model.load(0, ODD, DIGESTS[:2]))
    loading = model.load(1, ODD, DIGESTS[:2])
    model.below.finish(next(stage for stage in model.below.stages if not stage.call.cancelled), None)
    model.check()
    model.end(loading)
    model.check()
    (fetch,) = model.valkey.fetches
    assert fetch.call.cancelled
    assert model.world.state.catalogue.statistics().filling_parts == 1
    model.valkey.finish(fetch, Outcome.LATE)
    model.check()
    assert model.world.state.catalogue.statistics().filling_parts == 0


def test_keepers_that_never_answer_a_stage_cost_no_more_than_the_deadline(model: Kept) -> None:
    loading = model.load(0, ODD, DIGESTS[:3])
    model.below.finish(model.below.stages[0], None)
    model.check()
    model.valkey.finish(model.valkey.fetches[0], None)
    model.clock.now = loading.deadline
    model.check()
    assert (loading.end, model.counters) == (1, {"deadline": 1})
    assert model.world.app.loads.fetches == 0


def test_keepers_that_are_slow_cost_a_lookup_nothing_that_the_tier_has(model: Kept) -> None:
    for key in KEYS:
        if key.chunk in DIGESTS[:2]:
            model.valkey.values[key] = model.below.values[key][0]
    probe = model.ask(0, ODD, DIGESTS[:5], wait_s=0.5)
    assert probe is not None
    model.valkey.answer(probe, None, 0)
    model.check()
    model.clock.now += 0.5
    model.world.settle()
    (answer,) = (m for m in model.peer(Role.SCHEDULER, 0).inbox if isinstance(m, Answer))
    assert (answer.count, answer.reason) == (2, Reason.DEADLINE)
    model.check()
    assert model.counters == {"deadline": 1}


def test_only_what_could_lead_further_is_asked_of_keepers(model: Kept) -> None:
    """Not the window and states of boundaries before the tier's, nor anything past what is not known."""
    for key in KEYS:
        if key.chunk in DIGESTS[:3] and not (key.part == 2 and key.chunk != DIGESTS[2]):
            model.valkey.values[key] = model.below.values[key][0]
    probe = model.ask(0, HYBRID, DIGESTS[:5])
    assert probe is not None
    at = [ref.key for ref in probe.refs].index(PartKey(HYBRID.namespace, DIGESTS[4], 0))
    model.valkey.answer(probe, Outcome.FAILED, at)
    model.check()
    (locate,) = model.below.locates
    assert {(ref.key.chunk, ref.key.part) for ref in locate.refs} == {(DIGESTS[3], part) for part in range(3)}
    model.below.answer(locate)
    model.check()


def test_one_load_takes_each_part_from_where_it_lies(model: Kept) -> None:
    for key in KEYS:
        if key.chunk == DIGESTS[0]:
            model.valkey.values[key] = model.below.values[key][0]
        elif key.chunk in DIGESTS[2:]:
            model.below.values[key] = (model.below.values[key][0], Where.OBJECTS)
    probe = model.ask(0, ODD, DIGESTS[:3])
    assert probe is not None
    model.valkey.answer(probe, None, 0)
    model.check()
    model.below.answer(model.below.locates[0])
    model.world.settle()
    (answer,) = (m for m in model.peer(Role.SCHEDULER, 0).inbox if isinstance(m, Answer))
    assert list(answer.tiers) == [Tier.VALKEY, Tier.DISK, Tier.OBJECTS]
    calls = {id(stage.call) for stage in model.below.stages}
    assert (len(model.valkey.fetches), len(model.below.stages), len(calls)) == (1, 2, 2)
    model.check()
    model.clock.now += 0.1
    model.bring()
    rates = model.world.state.rates()
    known = {name for name, rate in rates.items() if rate.rate(model.clock.now).bytes_per_s is not None}
    assert known == {"valkey", "disk", "objects"}
    hits = model.world.state.counters.hit_chunks
    assert hits == {"valkey": 1, "disk": 1, "objects": 1}
    (record,) = model.world.state.explain.find("r1")
    assert record["reused_chunks"] == {"memory": 0, "valkey": 1, "disk": 1, "objects": 1}


def test_a_pause_of_what_was_never_measured_is_no_stall_and_later_twice_the_load_is(
    model: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = model.load(0, ODD, DIGESTS[:2])
    live = model.world.app.loads._loads[loading.load_id]
    assert live.stall_s == pytest.approx(loading.deadline - model.clock.now)
    model.clock.now += 0.3
    model.bring()
    model.end(loading)
    model.check()
    monkeypatch.setattr(estimate, "STALL_CAP_S", 100.0)
    again = model.load(1, ODD, DIGESTS[2:8])
    live = model.world.app.loads._loads[again.load_id]
    assert live.stall_s == pytest.approx(2 * 6 * 0.3 / 2)
    model.bring()


def test_a_corrupt_part_leaves_every_tier(model: Kept) -> None:
    loading = model.load(0, ODD, DIGESTS[:2])
    model.bring()
    key = loading.key(0, 0)
    assert key in model.below.values and key in model.valkey.values
    model.tell(Role.WORKER, 0, Corrupt(load_id=loading.load_id, part=0, chunk=0))
    model.check()
    assert key not in model.below.values and key not in model.valkey.values
    other = loading.key(1, 0)
    second = model.load(1, ODD, [DIGESTS[4]])
    model.below.finish(model.below.stages[0], None)
    model.check()
    model.valkey.damage(second.key(0, 0), "flipped")
    model.valkey.finish(model.valkey.fetches[0], None)
    model.check()
    assert second.key(0, 0) not in model.below.values and other in model.below.values


def test_what_the_tier_has_is_told_with_its_place_in_the_prompt_and_what_is_found_is_used(
    model: Kept,
) -> None:
    keys = model.reserve(0, ODD, 0, prefix=DIGESTS[:1], wanted=DIGESTS[1:3])
    model.finish(0, keys, kept=True)
    model.check()
    model.valkey.end_all(None)
    model.check()
    model.valkey.end_all(None)
    model.check()
    told = [(ref.key.chunk, position, likely) for ref, position, likely in model.below.told]
    assert told == [(DIGESTS[1], 1, False), (DIGESTS[2], 2, False)]
    assert model.below.used_parts == 0
    for turn in range(2):
        model.end(model.load(turn, ODD, DIGESTS[:4]))
        model.check()
    assert model.below.used_parts == 4  # and no more often than recency is renewed
