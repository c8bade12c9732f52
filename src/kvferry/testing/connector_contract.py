"""What every engine connector must do, whatever the engine: a suite to subclass.

A subclass provides ``fleet``: a factory that opens connectors of engines which share one node.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.testing.fake_engine import FakeEngine, FakeRequest, Status

BLOCK_TOKENS = 4


class ConnectorFleet(Protocol):
    """Engines of one host. All of their memory is made and released by it."""

    def engine(self, *, blocks: int = 64, ranks: int = 1, tokens_per_step: int = 64) -> FakeEngine:
        """A new engine with a connector of its own, attached to the shared node."""
        ...

    def settle(self, engine: FakeEngine) -> None:
        """Step the idle engine until its connector holds nothing any more; fail when it never does."""

    def stop_node(self) -> None:
        """The node goes away without a word."""

    def damage_node(self) -> None:
        """Every part that is stored now changes under its checksum."""

    def hold_loads(self) -> Callable[[], None]:
        """Loads get no further until the returned function is called."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: of the prompt, a function of ``seed``."""

    tokens: int
    seed: int = 0

    def request(self, name: str, *, output_tokens: int = 1) -> FakeRequest:
        """A request for it."""
        ids = [(self.seed * 7919 + i * 31) % 50000 for i in range(self.tokens)]
        return FakeRequest(name, ids, output_tokens=output_tokens)


class ConnectorContract:
    """Tests; each one's name states the property. Wrong bytes fail inside the engine itself."""

    def test_an_engine_loads_what_another_computed(self, fleet: ConnectorFleet) -> None:
        """All full chunks but the one with the last token."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        request = second.add(Prompt(42).request("b"))
        second.complete(request)
        assert request.external_tokens == 40
        fleet.settle(second)

    def test_a_prompt_that_is_stored_whole_still_computes_a_token(self, fleet: ConnectorFleet) -> None:
        """The engine itself refuses a hit that leaves nothing to compute."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(40))
        request = second.add(Prompt(40).request("b"))
        second.complete(request)
        assert 0 < request.external_tokens < 40

    def test_decoded_tokens_are_stored_too(self, fleet: ConnectorFleet) -> None:
        """A conversation's next turn finds the answer of the one before."""
        first, second = fleet.engine(), fleet.engine()
        turn = first.add(Prompt(10).request("a", output_tokens=12))
        first.complete(turn)
        fleet.settle(first)
        request = second.add(FakeRequest("b", turn.all_token_ids[:21]))
        second.complete(request)
        assert request.external_tokens == 20

    def test_blocks_return_and_the_cache_can_be_reset(self, fleet: ConnectorFleet) -> None:
        """What is copied out is pinned, and only for as long."""
        engine = fleet.engine()
        self._store(fleet, engine, Prompt(42))
        assert engine.pool.reset()

    def test_an_abort_during_a_load_frees_the_blocks_once(self, fleet: ConnectorFleet) -> None:
        """Not before the transfer has ended."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        release = fleet.hold_loads()
        request = second.add(Prompt(42).request("b"))
        second.run(lambda: request.status is Status.WAITING_FOR_REMOTE_KVS)
        second.abort(request)
        second.step()
        held = len(second.pool.free)
        release()
        fleet.settle(second)
        assert held < len(second.pool.free) == 64

    def test_a_damaged_part_is_recomputed_and_asked_for_once(self, fleet: ConnectorFleet) -> None:
        """The engine asks again at once; the same answer again would never end."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        fleet.damage_node()
        request = second.add(Prompt(42).request("b"))
        second.complete(request)
        assert second.recomputed == ["b"]
        fleet.settle(second)

    def test_without_a_node_requests_are_served(self, fleet: ConnectorFleet) -> None:
        """And nothing is left behind."""
        engine = fleet.engine()
        fleet.stop_node()
        request = engine.add(Prompt(42).request("a"))
        engine.complete(request)
        assert request.external_tokens == 0
        fleet.settle(engine)

    def test_a_preempted_request_comes_back_with_its_own_bytes(self, fleet: ConnectorFleet) -> None:
        """Its stored prefix is loaded again when the engine's own copy is gone."""
        engine = fleet.engine(blocks=16)
        request = engine.add(Prompt(42).request("a", output_tokens=6))
        engine.run(lambda: request.num_tokens > 43)
        engine.preempt(request)
        other = engine.add(Prompt(20, seed=5).request("c"))
        engine.complete(request, other)
        fleet.settle(engine)

    def test_scarce_blocks_neither_deadlock_nor_leak(self, fleet: ConnectorFleet) -> None:
        """Many requests over few blocks, all of them finished in the end."""
        engine = fleet.engine(blocks=24)
        requests = [engine.add(Prompt(30 + n, seed=n % 3).request(f"r{n}")) for n in range(9)]
        engine.complete(*requests)
        fleet.settle(engine)
        assert len(engine.pool.free) == 24

    def test_ranks_load_their_own_parts(self, fleet: ConnectorFleet) -> None:
        """Two ranks hold different bytes of the same tokens."""
        first, second = fleet.engine(ranks=2), fleet.engine(ranks=2)
        self._store(fleet, first, Prompt(42))
        request = second.add(Prompt(42).request("b"))
        second.complete(request)
        assert request.external_tokens == 40

    def test_salts_keep_users_apart(self, fleet: ConnectorFleet) -> None:
        """Equal prompts under different salts share nothing."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        salted = second.add(Prompt(42).request("b"))
        salted.cache_salt = "another user"
        second.complete(salted)
        assert salted.external_tokens == 0

    def test_a_malformed_salt_is_served_without_sharing(self, fleet: ConnectorFleet) -> None:
        """Whatever a client sends, the engine lives on."""
        engine = fleet.engine()
        bad = [7, "x" * 5000, "\ud800", b"bytes"]
        requests = []
        for n, salt in enumerate(bad):
            request = engine.add(Prompt(42).request(f"r{n}"))
            request.cache_salt = salt
            requests.append(request)
        engine.complete(*requests)
        assert all(request.external_tokens == 0 for request in requests)

    def test_a_request_that_needs_every_position_reads_nothing(self, fleet: ConnectorFleet) -> None:
        """Prompt log-probabilities cannot come from a cache; what is computed is stored all the same."""
        first, second = fleet.engine(), fleet.engine()
        whole = first.add(Prompt(42).request("a"))
        whole.skip_reading_prefix_cache = True
        first.complete(whole)
        fleet.settle(first)
        request = second.add(Prompt(42).request("b"))
        second.complete(request)
        assert request.external_tokens == 40

    def _store(self, fleet: ConnectorFleet, engine: FakeEngine, prompt: Prompt) -> None:
        engine.complete(engine.add(prompt.request("stores")))
        fleet.settle(engine)
