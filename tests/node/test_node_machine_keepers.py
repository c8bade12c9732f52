"""The node's state machine with keepers behind its tier: late, wrong, away, or with parts that go again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.node.machine_model import space_of
from tests.node.machine_tier import Value
from tests.node.machine_world import CHECKSUMS, CONTENT, KEYS, PROMPTS
from tests.node.test_node_machine import STEPS, NodeMachine, chunk_counts, odd_endings, prompts, which
from tests.runs import runs

from kvferry.keeper.wire import Where
from kvferry.tiers.contract import Outcome

pytestmark = pytest.mark.long

places = st.sampled_from([Where.DISK, Where.OBJECTS])


class KeptNodeMachine(NodeMachine):
    """Parts lie in the tier, or below it in one of two places."""

    with_keepers = True

    @initialize(hole=st.integers(1, 8), kept=st.integers(0, 6), deep=st.integers(0, 9), far=st.integers(0, 9))
    def another_host_stored(self, hole: int, kept: int, deep: int, far: int) -> None:
        """The tier has chunks up to some, keepers from some on, far away from another on."""
        keepers, tier = self.model.keepers, self.model.tier
        assert keepers is not None and tier is not None
        for key in KEYS:
            number, value = key.chunk[0], Value(key, CONTENT[key], CHECKSUMS[key])
            if number < deep and number != hole:
                tier.values[key] = value
            if number >= kept:
                keepers.values[key] = (value, Where.OBJECTS if number >= far else Where.DISK)

    @rule(
        who=which,
        space=which,
        prompt=prompts,
        chunks=chunk_counts,
        stages=st.integers(1, 5),
        ending=st.sampled_from([None, None, None, Outcome.FAILED]),
    )
    def request_from_below(
        self, who: int, space: int, prompt: int, chunks: int, stages: int, ending: Outcome | None
    ) -> None:
        """A request whose parts come from the keepers, up to some stage of it."""
        model, wanted = self.model, space_of(space)
        tier, keepers = model.tier, model.keepers
        assert tier is not None and keepers is not None
        probe = model.ask(who, wanted, PROMPTS[prompt][:chunks])
        before = set(model.loads)
        if probe is not None:
            tier.answer(probe, None, 0)
        model.check()
        for locate in list(keepers.locates) if stages > 1 else ():
            keepers.answer(locate)
        model.check()
        for begun in [begun for load_id, begun in model.loads.items() if load_id not in before]:
            for part in begun.space.parts:
                model.join(part, begun, part)
        for stage in list(keepers.stages) if stages > 2 else ():
            keepers.finish(stage, ending)
        model.check()
        for fetch in list(tier.fetches) if stages > 3 else ():
            tier.finish(fetch, None)
        model.check()
        for begun in list(model.loads.values()) if stages > 4 else ():
            for at in list(begun.places):
                model.copy(at[1], begun, at)

    @precondition(lambda self: self.model.keepers is not None and self.model.keepers.locates)
    @rule(number=which, odd_at=st.one_of(st.none(), which), unknown=st.sampled_from([False, False, True]))
    def answer_locate(self, number: int, odd_at: int | None, unknown: bool) -> None:
        """Truthfully, or with a part or all of it unknown."""
        keepers = self.model.keepers
        assert keepers is not None
        locate = keepers.locates[number % len(keepers.locates)]
        keepers.answer(locate, Where.UNKNOWN if unknown else None, odd_at)

    @precondition(lambda self: self.model.keepers is not None and self.model.keepers.stages)
    @rule(number=which, count=chunk_counts, often=st.sampled_from([1, 1, 2]))
    def stage(self, number: int, count: int, often: int) -> None:
        """Some, in any order, and sometimes twice over."""
        keepers = self.model.keepers
        assert keepers is not None
        for _ in range(min(count, len(keepers.stages))):
            keepers.finish(keepers.stages[number % len(keepers.stages)], None, often=often)

    @precondition(lambda self: self.model.keepers is not None and self.model.keepers.stages)
    @rule(number=which, ending=odd_endings, seconds=st.sampled_from([0.0, 0.0, 0.3, 5.0]))
    def fail_a_stage(self, number: int, ending: Outcome, seconds: float) -> None:
        """At once, or late."""
        keepers = self.model.keepers
        assert keepers is not None
        self.model.clock.now += seconds
        keepers.finish(keepers.stages[number % len(keepers.stages)], ending)

    @precondition(lambda self: self.model.keepers is not None and self.model.keepers.stages)
    @rule(number=which)
    def stage_what_is_evicted_before_the_fetch(self, number: int) -> None:
        """It was there, they say."""
        keepers = self.model.keepers
        assert keepers is not None
        keepers.finish(keepers.stages[number % len(keepers.stages)], None, lost=True)

    @rule(number=which, count=chunk_counts, place=places, how=st.sampled_from(["sink", "sink", "lose", "up"]))
    def below(self, number: int, count: int, place: Where, how: str) -> None:
        """The tier evicts what keepers have kept; they lose something; they come or go."""
        keepers, tier = self.model.keepers, self.model.tier
        assert keepers is not None and tier is not None
        for _ in range(count if how == "sink" else 0):
            if tier.values:
                keepers.sink(list(tier.values)[number % len(tier.values)], place)
        if how == "lose" and keepers.values:
            del keepers.values[list(keepers.values)[number % len(keepers.values)]]
        elif how == "up":
            keepers.up = not keepers.up


KeptNodeMachine.TestCase.settings = settings(STEPS, max_examples=runs(50))
TestKeptNode = KeptNodeMachine.TestCase
