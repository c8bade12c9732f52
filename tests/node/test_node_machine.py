"""The node's decisions against a dict model: what a client reads is a failure or the exact bytes.

Engines attach, look up, load, store and die in any order; the tier answers late, wrongly, or not at all;
the clock moves in steps. ``machine_model`` says what must hold after each step.
"""

from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.node.machine_clients import Clients, nonsense
from tests.node.machine_held import Loading
from tests.node.machine_model import space_of
from tests.node.machine_tier import Value
from tests.node.machine_world import CHECKSUMS, CONTENT, DIGESTS, HYBRID, KEYS, PROMPTS, STATE
from tests.runs import runs

from kvferry import loop
from kvferry.identity.names import PartKey
from kvferry.node import loading as node_loading
from kvferry.node import lookups, recency, saves, search, state, writeback
from kvferry.node.wire import Copied, Corrupt, DropQuery, EndLoad, Join, Role
from kvferry.tiers.contract import Outcome

pytestmark = pytest.mark.long

which = st.integers(0, 11)
prompts = st.integers(0, len(PROMPTS) - 1)
chunk_counts = st.integers(1, 6)
failures = [Outcome.MISS, Outcome.CORRUPT, Outcome.REFUSED, Outcome.LATE, Outcome.FAILED]
odd_endings = st.sampled_from(failures)
SECONDS = (0.01, 0.01, 0.01, 0.3, 0.3, 1.1, 3.1, 5.0, 61.0, 130.0)
MAX_PEERS = 8


class NodeMachine(RuleBasedStateMachine):
    """Rules name what they act on by a number, modulo how many there are.

    Each rule is as likely as another, so what has to go right for anything to happen has more of them.
    """

    with_tier = True
    with_keepers = False
    tight = False

    def __init__(self) -> None:
        super().__init__()
        self.model = Clients(with_tier=self.with_tier, tight=self.tight, with_keepers=self.with_keepers)

    @initialize(hole=st.integers(1, 8))
    def another_host_stored(self, hole: int) -> None:
        """The tier holds two prompts, but for one chunk."""
        for key in KEYS:
            odd_state = key.namespace == HYBRID.namespace and key.part == STATE and (key.chunk[0] + hole) % 2
            if (
                self.model.tier is not None
                and key.chunk not in (DIGESTS[hole], *PROMPTS[2])
                and not odd_state
            ):
                self.model.tier.values[key] = Value(key, CONTENT[key], CHECKSUMS[key])

    def loading(self, number: int) -> Loading:
        """One of the loads that run."""
        return list(self.model.loads.values())[number % len(self.model.loads)]

    # ---- schedulers

    @rule(
        who=which,
        space=which,
        prompt=prompts,
        reach=st.tuples(st.integers(0, 2), chunk_counts),
        wait_s=st.sampled_from([1.0, 1.0, 0.05, 0.0]),
        cap_s=st.sampled_from([0.0, 0.5]),
        per_token_s=st.sampled_from([0.0, 1e-4, 1.0]),
    )
    def look_up(
        self,
        who: int,
        space: int,
        prompt: int,
        reach: tuple[int, int],
        wait_s: float,
        cap_s: float,
        per_token_s: float,
    ) -> None:
        """Ask for a prefix. reach: the first chunk to load, and how many there are."""
        chunks = PROMPTS[prompt][: reach[1]]
        self.model.ask(
            who, space_of(space), chunks, first=reach[0], wait_s=wait_s, cap_s=cap_s, per_token_s=per_token_s
        )

    @rule(
        who=which,
        space=which,
        prompt=prompts,
        chunks=chunk_counts,
        stages=st.integers(1, 5),
        odd=st.sampled_from([None, None, None, None, None, *failures]),
    )
    def request(
        self, who: int, space: int, prompt: int, chunks: int, stages: int, odd: Outcome | None
    ) -> None:
        """A request as it should go, but for its last stages, and sometimes the first part of it."""
        model, wanted = self.model, space_of(space)
        probe = model.ask(who, wanted, PROMPTS[prompt][:chunks])
        if probe is not None and model.tier is not None:
            model.tier.answer(probe, odd, 0)
        before = set(model.loads)
        model.check()
        for begun in [begun for load_id, begun in model.loads.items() if load_id not in before]:
            for part in wanted.parts if stages > 1 else ():
                model.join(part, begun, part)
            for fetch in list(model.tier.fetches) if stages > 2 and model.tier is not None else ():
                model.tier.finish(fetch, None)
            model.check()
            for at in list(begun.places) if stages > 3 else ():
                model.copy(at[1], begun, at)
            if stages > 4 and begun.load_id in model.loads:
                model.end(begun)

    @precondition(lambda self: self.model.loads)
    @rule(load=which)
    def end_load(self, load: int) -> None:
        """The request is done, or aborted."""
        self.model.end(self.loading(load))

    # ---- workers

    @precondition(lambda self: self.model.loads)
    @rule(who=which, load=which, part=which)
    def join(self, who: int, load: int, part: int) -> None:
        """A rank listens."""
        loading = self.loading(load)
        self.model.join(who, loading, loading.space.parts[part % len(loading.space.parts)])

    @precondition(lambda self: any(loading.places for loading in self.model.loads.values()))
    @rule(who=which, load=which, place=which, count=chunk_counts)
    def copy(self, who: int, load: int, place: int, count: int) -> None:
        """What was given, in any order."""
        loads = [loading for loading in self.model.loads.values() if loading.places]
        loading = loads[load % len(loads)]
        for _ in range(min(count, len(loading.places))):
            self.model.copy(who, loading, list(loading.places)[place % len(loading.places)])

    @rule(who=which, space=which, part=which, prompt=prompts, first=st.integers(0, 4), chunks=chunk_counts)
    def reserve(self, who: int, space: int, part: int, prompt: int, first: int, chunks: int) -> None:
        """Ask for slots."""
        wanted = space_of(space)
        self.model.reserve(
            who,
            wanted,
            wanted.parts[part % len(wanted.parts)],
            prefix=PROMPTS[prompt][:first],
            wanted=PROMPTS[prompt][first : first + chunks],
        )

    @precondition(lambda self: self.model.writing)
    @rule(who=which, most=chunk_counts, kept=st.sampled_from([True, True, True, False]))
    def finish_saves(self, who: int, most: int, kept: bool) -> None:
        """Of one namespace and part of what was reserved."""
        self.model.finish(who, self.model.owned(who)[:most], kept=kept)

    @rule(who=which, space=which, prompt=prompts, chunks=chunk_counts, sparse=st.booleans())
    def save(self, who: int, space: int, prompt: int, chunks: int, sparse: bool) -> None:
        """Store a prefix, as far as slots are given. sparse: only what its own end needs."""
        wanted, spot = PROMPTS[prompt][:chunks], space_of(space)
        for part in spot.parts:
            first = max(0, len(wanted) - spot.trailing_of(part)) if sparse and spot.trailing_of(part) else 0
            keys = self.model.reserve(who, spot, part, prefix=wanted[:first], wanted=wanted[first:])
            self.model.finish(who, keys, kept=True)

    @rule(who=which, space=which, prompt=prompts, chunks=chunk_counts)
    def match(self, who: int, space: int, prompt: int, chunks: int) -> None:
        """Ask what could be loaded, and load nothing."""
        self.model.match(who, space_of(space), PROMPTS[prompt][:chunks])

    # ---- the tier

    @precondition(
        lambda self: self.model.tier is not None and (self.model.tier.probes or self.model.tier.stores)
    )
    @rule()
    def settle_the_tier(self) -> None:
        """It answers all questions truly, and stores what it was given."""
        tier = self.model.tier
        assert tier is not None
        for probe in list(tier.probes):
            tier.answer(probe, None, 0)
        self.model.world.settle()
        for store in list(tier.stores):
            tier.stored(store, None)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.probes)
    @rule(number=which, odd=st.sampled_from([None, None, None, Outcome.OK, *failures]), at=which)
    def answer_probe(self, number: int, odd: Outcome | None, at: int) -> None:
        """Truthfully, or with one part unknown, gone, or not there after all. One of the latest questions."""
        tier = self.model.tier
        assert tier is not None
        tier.answer(tier.probes[-1 - number % min(3, len(tier.probes))], odd, at)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.fetches)
    @rule(number=which, count=chunk_counts)
    def fetch(self, number: int, count: int) -> None:
        """Some, in any order."""
        tier = self.model.tier
        assert tier is not None
        for _ in range(min(count, len(tier.fetches))):
            tier.finish(tier.fetches[number % len(tier.fetches)], None)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.fetches)
    @rule(number=which, ending=odd_endings, seconds=st.sampled_from([0.0, 0.0, 0.3, 5.0]))
    def fail_a_fetch(self, number: int, ending: Outcome, seconds: float) -> None:
        """Whatever lies there, at once or in the moment in which something else happens."""
        tier = self.model.tier
        assert tier is not None
        self.model.clock.now += seconds
        tier.finish(tier.fetches[number % len(tier.fetches)], ending)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.stores)
    @rule(number=which, count=chunk_counts, ending=st.one_of(st.none(), odd_endings))
    def finish_stores(self, number: int, count: int, ending: Outcome | None) -> None:
        """Some, in any order."""
        tier = self.model.tier
        assert tier is not None
        for _ in range(min(count, len(tier.stores))):
            tier.stored(tier.stores[number % len(tier.stores)], ending)

    # ---- what goes wrong

    @rule(seconds=st.sampled_from(SECONDS))
    def wait(self, seconds: float) -> None:
        """Deadlines pass, and sometimes leases."""
        self.model.clock.now += seconds

    @rule(role=st.sampled_from([Role.SCHEDULER, Role.WORKER]), who=which, dies=st.sampled_from([0, 0, 1]))
    def come_or_go(self, role: Role, who: int, dies: int) -> None:
        """A new connection, or one that is lost."""
        if dies and self.model.peers:
            peer = self.model.peers[who % len(self.model.peers)]
            self.model.world.hang_up(peer)
            self.model.gone(peer)
        elif len(self.model.peers) < MAX_PEERS:
            self.model.peers.append(self.model.world.connect(role, f"engine {who}"))

    @rule(how=st.sampled_from(["memory", "lost", "cut", "flipped", "another's", "up or down"]), number=which)
    def damage(self, how: str, number: int) -> None:
        """A bit flips in the pool, or a value in the tier goes or is not what it was."""
        tier = self.model.tier
        seen = [key for key in KEYS if self.model.world.visible(key) is not None]
        if how == "memory" and seen:
            key = seen[number % len(seen)]
            place = self.model.world.visible(key)
            assert place is not None
            place[0][number] ^= 1
            self.model.damaged.add(key)
        elif tier is not None and how == "up or down":
            tier.up = not tier.up
        elif tier is not None and tier.values:
            tier.damage(list(tier.values)[number % len(tier.values)], how)

    @rule(
        how=st.sampled_from(
            ["end", "join", "corrupt", "copied", "commit", "abandon", "drop", "nonsense", "restart"]
        ),
        role=st.sampled_from([Role.SCHEDULER, Role.WORKER]),
        who=which,
        load=which,
        space=which,
        odd=st.integers(0, 6),
    )
    def do_wrong(self, how: str, role: Role, who: int, load: int, space: int, odd: int) -> None:
        """What a correct client would not say now, or of that; or the node dies."""
        model, wanted = self.model, space_of(space)
        stale = model.stale[load % len(model.stale)]
        loading = self.loading(load) if model.loads else None
        if how == "end":
            foreign = [o.load_id for o in model.loads.values() if o.peer is not model.peer(role, who)]
            model.tell(role, who, EndLoad(load_id=(foreign or [stale])[0]))
        elif how == "join":
            model.tell(role, who, Join(load_id=stale, epoch=model.epoch - odd % 2, part=0))
        elif how == "corrupt" and loading is not None:
            model.tell(role, who, Corrupt(load_id=loading.load_id, part=odd, chunk=odd))
        elif how == "copied" and loading is not None:
            again = [chunk for chunk, part in loading.given - set(loading.places) if part == odd]
            outside = [loading.first_chunk + len(loading.chunks), 60_000]
            model.tell(role, who, Copied(load_id=loading.load_id, part=odd, chunks=(*again, *outside)))
        elif how in ("commit", "abandon"):
            keys = [PartKey(wanted.namespace, chunk, wanted.parts[0]) for chunk in PROMPTS[0][: odd + 1]]
            model.finish(who, keys, kept=how == "commit")
        elif how == "drop":
            model.tell(Role.ADMIN, 0, DropQuery(tier="memory", namespace=wanted.namespace if odd else b""))
        elif how == "restart" and odd > 3:
            model.restart()
        else:
            load_id = loading.load_id if loading is not None else stale
            model.tell(role, who, nonsense(wanted, PROMPTS[0][0], load_id=load_id, epoch=model.epoch)[odd])

    # ---- what must hold

    @invariant()
    def everything_is_in_order(self) -> None:
        """After every step."""
        self.model.check()

    def teardown(self) -> None:
        """Nothing is left when all have gone."""
        try:
            self.model.rest()
        finally:
            self.model.world.close()


class MemoryNodeMachine(NodeMachine):
    """A node with nothing behind its memory."""

    with_tier = False


class TightNodeMachine(NodeMachine):
    """Every bound on what the node keeps is reached all the time."""

    tight = True
    bounds: tuple[tuple[ModuleType, str, int], ...] = (
        (search, "MAX_PENDING_PER_CONNECTION", 2),
        (lookups, "MAX_LOADS_PER_CONNECTION", 2),
        (lookups, "MAX_LOADS", 4),
        (search, "MAX_PROBED_PARTS", 6),
        (node_loading, "MAX_BATCH", 2),
        (node_loading, "MAX_TOUCHED", 1),
        (loop, "MAX_POSTED_PER_TURN", 2),
        (recency, "MAX_PER_CALL", 2),
        (recency, "MAX_REMEMBERED", 3),
        (saves, "MAX_RESERVATIONS_PER_CONNECTION", 3),
        (state, "MAX_REMEMBERED_EVICTIONS", 2),
        (writeback, "MAX_BATCH_PARTS", 2),
    )

    def __init__(self) -> None:
        self.patches = pytest.MonkeyPatch()
        for module, name, value in self.bounds:
            self.patches.setattr(module, name, value)
        super().__init__()

    def teardown(self) -> None:
        """With the bounds still as they were."""
        try:
            super().teardown()
        finally:
            self.patches.undo()


STEPS = settings(
    max_examples=runs(150),
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
NodeMachine.TestCase.settings = STEPS
MemoryNodeMachine.TestCase.settings = settings(STEPS, max_examples=runs(50))
TestNode = NodeMachine.TestCase
TestMemoryNode = MemoryNodeMachine.TestCase
TightNodeMachine.TestCase.settings = MemoryNodeMachine.TestCase.settings
TestTightNode = TightNodeMachine.TestCase
