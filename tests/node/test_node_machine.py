"""The node's decisions against a dict model: what a client reads is a failure or the exact bytes.

Engines attach, look up, load, store and die in any order; the tier answers late, wrongly, or not at all;
the clock moves in steps. ``machine_model`` says what must hold after each step.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.node.machine_model import Asked, Loading, Model, space_of
from tests.node.machine_tier import Value
from tests.node.machine_world import CHECKSUMS, CONTENT, KEYS, PROMPTS, SPACES, part_bytes
from tests.runs import runs

from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.node.framing import join_checksums, split_checksums
from kvferry.node.wire import (
    Abandon,
    Commit,
    Copied,
    Corrupt,
    DropQuery,
    EndLoad,
    Filled,
    Join,
    Lookup,
    Message,
    Ping,
    Prefill,
    Reserve,
    Role,
)
from kvferry.tiers.contract import Outcome

which = st.integers(0, 11)
prompts = st.integers(0, len(PROMPTS) - 1)
chunk_counts = st.integers(1, 6)
endings = st.sampled_from(
    [None, None, None, Outcome.MISS, Outcome.CORRUPT, Outcome.REFUSED, Outcome.LATE, Outcome.FAILED]
)
SOON_S = (0.01, 0.3, 1.1, 3.1)
LATER_S = (5.0, 30.0, 61.0, 130.0)


class NodeMachine(RuleBasedStateMachine):
    """Rules name what they act on by a number, modulo how many there are."""

    with_tier = True

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(with_tier=self.with_tier)

    @initialize(stored=st.integers(0, 6))
    def another_host_stored(self, stored: int) -> None:
        """The tier holds the head of a prompt."""
        for key in KEYS:
            if self.model.tier is not None and key.chunk in PROMPTS[0][:stored]:
                self.model.tier.values[key] = Value(key, CONTENT[key], CHECKSUMS[key])

    def say(self, role: Role, number: int, message: Message) -> None:
        """A client's message that is not answered at once; the node may close the connection over it."""
        peer = self.model.peer(role, number)
        if not self.model.world.say(peer, message):
            self.model.gone(peer)

    # ---- schedulers

    @rule(who=which, space=which, prompt=prompts, chunks=chunk_counts, first=st.integers(0, 2),
          wait_s=st.sampled_from([0.0, 0.05, 1.0]), cap_s=st.sampled_from([0.0, 0.5]),
          per_token_s=st.sampled_from([0.0, 1e-4, 1.0]))  # fmt: skip
    def look_up(
        self,
        who: int,
        space: int,
        prompt: int,
        chunks: int,
        first: int,
        wait_s: float,
        cap_s: float,
        per_token_s: float,
    ) -> None:
        """Ask for a prefix."""
        model, wanted_space = self.model, space_of(space)
        peer = model.peer(Role.SCHEDULER, who)
        asked, wanted = PROMPTS[prompt][:chunks], PROMPTS[prompt][first:chunks]
        model.tickets += 1
        memory = model.world.state.catalogue.run(wanted_space.namespace, wanted)
        probes = list(model.tier.probes) if model.tier is not None else []
        lookup = model.asked[peer, model.tickets] = Asked(
            peer, wanted_space, wanted, first, model.clock.now + wait_s, memory
        )
        assert model.world.say(
            peer,
            Lookup(
                ticket=model.tickets,
                request_id=f"r{model.tickets}",
                namespace=wanted_space.namespace,
                chunks=b"".join(asked),
                first_chunk=first,
                prompt_tokens=len(asked) * wanted_space.chunk_tokens + 1,
                prefill=Prefill(0.0, per_token_s, 0.0),
                max_wait_s=wait_s,
                deadline_cap_s=cap_s,
            ),
        )
        if model.tier is not None:
            lookup.probe = next((probe for probe in model.tier.probes if probe not in probes), None)

    def loading(self, number: int) -> Loading:
        """One of the loads that run."""
        return list(self.model.loads.values())[number % len(self.model.loads)]

    @precondition(lambda self: self.model.loads)
    @rule(load=which)
    def end_load(self, load: int) -> None:
        """The request is done, or aborted."""
        loading = self.loading(load)
        self.model.world.say(loading.peer, EndLoad(load_id=loading.load_id))
        self.model.ending.append(loading)

    @rule(who=which, load=which)
    def end_what_is_not_ones_own(self, who: int, load: int) -> None:
        """Another's load, or one that is over."""
        peer = self.model.peer(Role.SCHEDULER, who)
        foreign = [loading.load_id for loading in self.model.loads.values() if loading.peer is not peer]
        ids = foreign + self.model.stale
        self.say(Role.SCHEDULER, who, EndLoad(load_id=ids[load % len(ids)]))

    # ---- workers: loads

    @precondition(lambda self: self.model.loads)
    @rule(who=which, load=which, part=which)
    def join(self, who: int, load: int, part: int) -> None:
        """A rank listens."""
        loading = self.loading(load)
        peer = self.model.peer(Role.WORKER, who)
        part = loading.space.parts[part % len(loading.space.parts)]
        loading.joined.setdefault((peer, part), loading.first_chunk + len(loading.chunks))
        self.model.world.say(peer, Join(load_id=loading.load_id, epoch=self.model.epoch, part=part))

    @rule(who=which, load=which, before=st.booleans())
    def join_what_is_over(self, who: int, load: int, before: bool) -> None:
        """A handle of a load that has ended, or of an earlier node process."""
        stale = self.model.stale[load % len(self.model.stale)]
        self.say(Role.WORKER, who, Join(load_id=stale, epoch=self.model.epoch - before, part=0))

    @precondition(lambda self: any(loading.places for loading in self.model.loads.values()))
    @rule(who=which, load=which, place=which)
    def copy(self, who: int, load: int, place: int) -> None:
        """Copy a part, verify the copy, and say what came of it."""
        loads = [loading for loading in self.model.loads.values() if loading.places]
        loading = loads[load % len(loads)]
        at = list(loading.places)[place % len(loading.places)]
        given = loading.places.pop(at)
        key = loading.key(*at)
        view = self.model.world.arena.view(given.offset, part_bytes(key))
        if part_checksums(view) == split_checksums(given.checksums):
            assert bytes(view) == CONTENT[key]
            message: Message = Copied(load_id=loading.load_id, part=at[1], chunks=(at[0],))
        else:
            message = Corrupt(load_id=loading.load_id, part=at[1], chunk=at[0])
        self.say(Role.WORKER, who, message)

    @precondition(lambda self: self.model.loads)
    @rule(who=which, load=which, part=st.integers(0, 3), chunk=st.integers(0, 9))
    def call_it_corrupt(self, who: int, load: int, part: int, chunk: int) -> None:
        """Whether it is or not, was handed out or not, exists or not."""
        loading = self.loading(load)
        self.say(Role.WORKER, who, Corrupt(load_id=loading.load_id, part=part, chunk=chunk))

    @precondition(lambda self: self.model.loads)
    @rule(who=which, load=which, part=st.integers(0, 3))
    def say_copied_again(self, who: int, load: int, part: int) -> None:
        """Of parts that were copied already, and of some that are outside the load."""
        loading = self.loading(load)
        again = [chunk for chunk, of in loading.given - set(loading.places) if of == part]
        outside = [loading.first_chunk + len(loading.chunks), 60_000]
        self.say(Role.WORKER, who, Copied(load_id=loading.load_id, part=part, chunks=(*again, *outside)))

    # ---- workers: saves

    @rule(who=which, space=which, part=which, prompt=prompts, first=st.integers(0, 4), chunks=chunk_counts)
    def reserve(self, who: int, space: int, part: int, prompt: int, first: int, chunks: int) -> None:
        """Ask for slots."""
        wanted_space = space_of(space)
        part = wanted_space.parts[part % len(wanted_space.parts)]
        wanted = PROMPTS[prompt][first : first + chunks]
        peer = self.model.peer(Role.WORKER, who)
        self.model.world.say(
            peer,
            Reserve(
                ticket=0,
                namespace=wanted_space.namespace,
                part=part,
                prefix=b"".join(PROMPTS[prompt][:first]),
                chunks=b"".join(wanted),
            ),
        )
        self.model.reserved(peer, [PartKey(wanted_space.namespace, chunk, part) for chunk in wanted])

    def settle_saves(self, who: int, keys: list[PartKey], *, kept: bool) -> None:
        """Commit or abandon parts of one number, and expect what becomes of them."""
        model = self.model
        peer = model.peer(Role.WORKER, who)
        for key in keys:
            lease = model.lease(peer, key)
            if lease is None:
                model.saves["lease-ended"] += kept
                continue
            model.writing.remove(lease)
            lease.view[:] = CONTENT[key]
            if lease.expires > model.clock.now:
                model.saves["committed" if kept else "abandoned"] += 1
            else:
                model.saves["lease-ended"] += kept
        space, part = keys[0].namespace, keys[0].part
        if kept:
            filled = tuple(Filled(key.chunk, join_checksums(CHECKSUMS[key])) for key in keys)
            model.world.say(peer, Commit(namespace=space, part=part, filled=filled))
        else:
            chunks = b"".join(key.chunk for key in keys)
            model.world.say(peer, Abandon(namespace=space, part=part, chunks=chunks))

    def owned(self, who: int) -> list[PartKey]:
        """What that worker may write, of one namespace and part."""
        peer = self.model.peer(Role.WORKER, who)
        keys = [w.key for w in self.model.writing if w.peer is peer]
        return [key for key in keys if (key.namespace, key.part) == (keys[0].namespace, keys[0].part)]

    @rule(who=which, most=chunk_counts, kept=st.sampled_from([True, True, False]))
    def finish_saves(self, who: int, most: int, kept: bool) -> None:
        """Of what was reserved."""
        keys = self.owned(who)[:most]
        if keys:
            self.settle_saves(who, keys, kept=kept)

    @rule(who=which, space=which, prompt=prompts, kept=st.booleans())
    def finish_saves_of_anything(self, who: int, space: int, prompt: int, kept: bool) -> None:
        """Reserved or not, by oneself or another."""
        wanted_space = space_of(space)
        part = wanted_space.parts[0]
        self.settle_saves(
            who, [PartKey(wanted_space.namespace, chunk, part) for chunk in PROMPTS[prompt][:3]], kept=kept
        )

    # ---- anyone

    @precondition(lambda self: self.model.peers)
    @rule(who=which)
    def die(self, who: int) -> None:
        """A connection is lost."""
        peer = self.model.peers[who % len(self.model.peers)]
        self.model.world.hang_up(peer)
        self.model.gone(peer)

    @rule(role=st.sampled_from([Role.SCHEDULER, Role.WORKER]), who=which)
    def connect(self, role: Role, who: int) -> None:
        """One more."""
        if len(self.model.peers) < 8:
            self.model.peers.append(self.model.world.connect(role, f"engine {who}"))

    @rule(namespace=st.sampled_from([b"", *(space.namespace for space in SPACES)]))
    def drop_memory(self, namespace: bytes) -> None:
        """``kvferry drop``."""
        self.say(Role.ADMIN, 0, DropQuery(tier="memory", namespace=namespace))

    @rule(role=st.sampled_from([Role.SCHEDULER, Role.WORKER]), who=which, space=which, odd=st.integers(0, 6))
    def say_nonsense(self, role: Role, who: int, space: int, odd: int) -> None:
        """Well-formed on the wire, and not to be done."""
        name, parts = space_of(space).namespace, len(space_of(space).part_bytes)
        digest = PROMPTS[0][0]
        nonsense: tuple[Message, ...] = (
            Reserve(ticket=0, namespace=name, part=parts, prefix=b"", chunks=digest),
            Reserve(ticket=0, namespace=name, part=0, prefix=b"", chunks=digest[:7]),
            Commit(namespace=name, part=0, filled=(Filled(digest, b""),)),
            Commit(namespace=name, part=parts, filled=(Filled(digest, bytes(16)),)),
            Abandon(namespace=b"?" * 16, part=0, chunks=digest),
            Join(load_id=next(iter(self.model.loads), 7), epoch=self.model.epoch, part=4000),
            Ping(),
        )
        self.say(role, who, nonsense[odd])

    # ---- time, memory, the tier

    @rule(seconds=st.sampled_from(SOON_S))
    def wait(self, seconds: float) -> None:
        """Deadlines pass."""
        self.model.clock.now += seconds

    @rule(seconds=st.sampled_from(LATER_S))
    def wait_long(self, seconds: float) -> None:
        """Leases pass."""
        self.model.clock.now += seconds

    @rule(key=st.sampled_from(KEYS), byte=which)
    def damage_memory(self, key: PartKey, byte: int) -> None:
        """A bit flips in the pool."""
        seen = self.model.world.visible(key)
        if seen is not None:
            seen[0][byte] ^= 1
            self.model.damaged.add(key)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.probes)
    @rule(number=which, odd=st.sampled_from([None, None, *Outcome]), at=which)
    def answer_probe(self, number: int, odd: Outcome | None, at: int) -> None:
        """Truthfully, or with one part unknown, gone, or not there after all."""
        tier = self.model.tier
        assert tier is not None
        tier.answer(tier.probes[number % len(tier.probes)], odd, at)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.fetches)
    @rule(number=which, count=chunk_counts, ending=endings)
    def finish_fetches(self, number: int, count: int, ending: Outcome | None) -> None:
        """Some, in any order."""
        tier = self.model.tier
        assert tier is not None
        for _ in range(min(count, len(tier.fetches))):
            tier.finish(tier.fetches[number % len(tier.fetches)], ending)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.stores)
    @rule(number=which, count=chunk_counts, ending=endings)
    def finish_stores(self, number: int, count: int, ending: Outcome | None) -> None:
        """Some, in any order."""
        tier = self.model.tier
        assert tier is not None
        for _ in range(min(count, len(tier.stores))):
            tier.stored(tier.stores[number % len(tier.stores)], ending)

    @precondition(lambda self: self.model.tier is not None and self.model.tier.values)
    @rule(number=which, how=st.sampled_from(["lost", "cut", "flipped", "another's"]))
    def damage_tier(self, number: int, how: str) -> None:
        """A value goes, or is not what it was."""
        tier = self.model.tier
        assert tier is not None
        key = list(tier.values)[number % len(tier.values)]
        value = tier.values[key]
        if how == "lost":
            del tier.values[key]
        elif how == "cut":
            value.data = value.data[: number * 100]
        elif how == "flipped":
            value.data = value.data[:number] + bytes([value.data[number] ^ 1]) + value.data[number + 1 :]
        else:
            tier.values[key] = next(iter(tier.values.values()))

    @precondition(lambda self: self.model.tier is not None)
    @rule()
    def turn_the_tier(self) -> None:
        """Between being up and being down, as it says itself."""
        if self.model.tier is not None:
            self.model.tier.up = not self.model.tier.up

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


STEPS = settings(
    max_examples=runs(150),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
NodeMachine.TestCase.settings = STEPS
MemoryNodeMachine.TestCase.settings = settings(STEPS, max_examples=runs(50))
TestNode = NodeMachine.TestCase
TestMemoryNode = MemoryNodeMachine.TestCase
