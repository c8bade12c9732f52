"""What every engine connector must do, whatever the engine: a suite to subclass.

A subclass provides ``fleet``: a factory that opens connectors of engines which share one node. After each
test nothing may be left: blocks, pins and requests in the engines, leases and reservations in the node.
"""

import time
from typing import Any

from kvferry.testing.connector_fleet import BLOCK_TOKENS, ConnectorFleet, Prompt
from kvferry.testing.expectations import equal, expect
from kvferry.testing.fake_engine import FakeEngine, FakeRequest, Status
from kvferry.testing.random_life import RandomLife

__all__ = ["BLOCK_TOKENS", "ConnectorContract", "ConnectorFleet", "Prompt"]

RECOVERY_S = 60.0
"""How long a connector may take to use a node that came back: as long as its clients' slowest retry."""


MAX_DAMAGED = 40
"""So many parts of a prompt may be damaged."""


class ConnectorContract:
    """Tests; each one's name states the property. Wrong bytes fail inside the engine itself."""

    # -- reuse -------------------------------------------------------------------------------------

    def test_an_engine_loads_what_another_computed(self, fleet: ConnectorFleet) -> None:
        """All full chunks but the one with the last token."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        self._loads(second, Prompt(42), 40)
        self._end(fleet, first, second)

    def test_a_prompt_that_is_stored_whole_still_computes_a_token(self, fleet: ConnectorFleet) -> None:
        """The engine itself refuses a hit that leaves nothing to compute."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(40))
        loaded = self._loaded(second, Prompt(40))
        expect(0 < loaded < 40, f"{loaded} of 40 tokens came from the connector")
        self._end(fleet, first, second)

    def test_a_longer_prompt_loads_the_prefix_that_it_shares(self, fleet: ConnectorFleet) -> None:
        """And computes, and stores, the rest."""
        first, second, third = fleet.engine(), fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(24))
        self._loads(second, Prompt(57), 24)
        fleet.settle(second)
        self._loads(third, Prompt(57), 56)
        self._end(fleet, first, second, third)

    def test_only_what_the_engine_lacks_is_loaded(self, fleet: ConnectorFleet) -> None:
        """Its own prefix is used first: other requests may be reading those blocks."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        second.complete(second.add(Prompt(17).request("short")))
        self._loads(second, Prompt(42), 40 - 16)
        self._end(fleet, first, second)

    def test_decoded_tokens_are_stored_too(self, fleet: ConnectorFleet) -> None:
        """A conversation's next turn finds the answer of the one before."""
        first, second = fleet.engine(), fleet.engine()
        turn = first.add(Prompt(10).request("a", output_tokens=16))
        first.complete(turn)
        fleet.settle(first)
        request = second.add(FakeRequest("b", turn.all_token_ids[:25]))
        second.complete(request)
        equal(request.external_tokens, 24, "tokens from the connector")
        self._end(fleet, first, second)

    def test_ranks_load_their_own_parts(self, fleet: ConnectorFleet) -> None:
        """Two ranks hold different bytes of the same tokens."""
        first, second = fleet.engine(ranks=2), fleet.engine(ranks=2)
        self._store(fleet, first, Prompt(42))
        self._loads(second, Prompt(42), 40)
        self._end(fleet, first, second)

    def test_salts_keep_users_apart(self, fleet: ConnectorFleet) -> None:
        """Equal prompts under different salts share nothing; under the same one they do."""
        first, second = fleet.engine(), fleet.engine()
        for salt, wanted in ((None, 0), ("one user", 0), ("another user", 0), ("one user", 40)):
            request = (second if wanted else first).add(Prompt(42).request(f"{salt}-{wanted}"))
            request.cache_salt = salt
            (second if wanted else first).complete(request)
            equal(request.external_tokens, wanted, f"tokens under salt {salt!r}")
            fleet.settle(first)
        self._end(fleet, first, second)

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
        for request in requests:
            equal(request.external_tokens, 0, f"tokens under salt {request.cache_salt!r:.20}")
        self._end(fleet, engine)

    def test_a_request_that_needs_every_position_reads_nothing(self, fleet: ConnectorFleet) -> None:
        """Prompt log-probabilities cannot come from a cache; what is computed is stored all the same."""
        first, second = fleet.engine(), fleet.engine()
        whole = first.add(Prompt(42).request("a"))
        whole.skip_reading_prefix_cache = True
        first.complete(whole)
        fleet.settle(first)
        again = second.add(Prompt(42).request("b"))
        again.skip_reading_prefix_cache = True
        second.complete(again)
        equal(again.external_tokens, 0, "tokens of a request that reads nothing")
        self._loads(fleet.engine(), Prompt(42), 40)
        self._end(fleet, first, second)

    def test_a_request_loads_no_more_than_it_allows(self, fleet: ConnectorFleet) -> None:
        """``max_load_tokens`` counts what comes from outside, in whole chunks; 0 is nothing."""
        first = fleet.engine()
        for tokens in (17, 33, 42):
            self._store(fleet, first, Prompt(tokens))
        for cap, wanted in ((0, 0), (3, 0), (19, 16), (40, 40), (1 << 70, 40)):
            equal(self._loaded(fleet.engine(), Prompt(42), cap=cap), wanted, f"tokens under a cap of {cap}")
        second = fleet.engine()
        second.complete(second.add(Prompt(17).request("short")))
        equal(self._loaded(second, Prompt(42), cap=19), 16, "tokens beyond the engine's own 16")
        self._end(fleet, first, second)

    def test_what_is_no_cap_changes_nothing(self, fleet: ConnectorFleet) -> None:
        """Whatever a client sends as one, the engine lives on and loads as without."""
        first = fleet.engine()
        self._store(fleet, first, Prompt(42))
        nonsense: list[object] = [-1, -(10**5000), True, False, 1.5, float("nan"), "8", "x" * 10_000, [8], {}]
        for cap in nonsense:
            equal(self._loaded(fleet.engine(), Prompt(42), cap=cap), 40, f"tokens under {type(cap).__name__}")
        others: list[object] = [{}, [], "max_load_tokens", 7, {7: 7}, {"max_offload_tokens": 0}]
        for params in others:
            request = Prompt(42).request("params")
            request.kv_transfer_params = params
            engine = fleet.engine()
            engine.complete(engine.add(request))
            equal(request.external_tokens, 40, f"tokens with the parameters {params!r}")
        self._end(fleet, first)

    def test_scarce_blocks_neither_deadlock_nor_leak(self, fleet: ConnectorFleet) -> None:
        """Many requests over few blocks, all of them finished in the end."""
        engine = fleet.engine(blocks=24)
        requests = [engine.add(Prompt(30 + n, seed=n % 3).request(f"r{n}")) for n in range(9)]
        engine.complete(*requests)
        self._end(fleet, engine)

    # -- preemption --------------------------------------------------------------------------------

    def test_a_preempted_request_comes_back_with_its_own_bytes(self, fleet: ConnectorFleet) -> None:
        """Its stored prefix is loaded again, since the engine's own copy is gone by then."""
        first, second = fleet.engine(), fleet.engine(blocks=16)
        self._store(fleet, first, Prompt(42))
        request = second.add(Prompt(42).request("a", output_tokens=6))
        second.run(lambda: request.num_tokens > 43)
        second.preempt(request)
        request.external_tokens = 0
        del second.requests["a"]  # it waits its turn while another takes all blocks
        second.complete(second.add(Prompt(61, seed=5).request("other")))
        fleet.settle(second)
        second.complete(second.add(request))
        equal(request.external_tokens, 40, "tokens loaded after the preemption")
        self._end(fleet, first, second)

    def test_what_is_computed_after_a_preemption_is_stored(self, fleet: ConnectorFleet) -> None:
        """Also what was computed before it and was not stored yet."""
        first, second = fleet.engine(tokens_per_step=16), fleet.engine()
        request = first.add(Prompt(57).request("a"))
        first.run(lambda: request.num_computed_tokens >= 32)
        first.preempt(request)
        first.complete(request)
        fleet.settle(first)
        self._loads(second, Prompt(57), 56)
        self._end(fleet, first, second)

    def test_blocks_of_a_preempted_request_are_not_reused_while_they_are_copied_out(
        self, fleet: ConnectorFleet
    ) -> None:
        """What is stored in the end is what was computed, not what came into the blocks later."""
        first, second = fleet.engine(blocks=24), fleet.engine()
        release = fleet.hold_saves()
        request = first.add(Prompt(42).request("a", output_tokens=3))
        first.run(lambda: request.num_tokens > 42)
        first.preempt(request)
        first.abort(request)
        for seed in range(1, 4):
            first.complete(first.add(Prompt(42, seed=seed).request(f"other{seed}")))
        release()
        fleet.settle(first)
        for seed in range(4):
            self._loaded(second, Prompt(42, seed=seed))
        self._end(fleet, first, second)

    # -- abort -------------------------------------------------------------------------------------

    def test_an_abort_during_a_load_frees_the_blocks_once(self, fleet: ConnectorFleet) -> None:
        """Not before the transfer has ended."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        release = fleet.hold_loads()
        request = self._waiting(second, Prompt(42))
        second.abort(request)
        held = len(second.pool.free)
        release()
        fleet.settle(second)
        expect(held < len(second.pool.blocks), "the aborted request's blocks were freed during their load")
        equal(len(second.pool.free), len(second.pool.blocks), "free blocks once the load has ended")
        self._end(fleet, first, second)

    def test_after_an_abort_the_same_prompt_has_a_load_of_its_own(self, fleet: ConnectorFleet) -> None:
        """While the aborted one is still under way, and under the same name once that has ended."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        release = fleet.hold_loads()
        second.abort(self._waiting(second, Prompt(42)))
        again = second.add(Prompt(42).request("again"))
        second.step()
        expect(again.status is not Status.RUNNING, "the second request runs on the aborted one's load")
        release()
        second.complete(again)
        fleet.settle(second)
        equal(again.external_tokens, 40, "tokens of the second request")
        expect(second.pool.reset(), "blocks are in use")
        self._loads(second, Prompt(42), 40)
        self._end(fleet, first, second)

    def test_an_abort_at_any_step_leaves_nothing(self, fleet: ConnectorFleet) -> None:
        """Before the first step, while it is looked up, loaded, computed, and saved."""
        first, second = fleet.engine(), fleet.engine(tokens_per_step=8)
        self._store(fleet, first, Prompt(24))
        for steps in range(12):
            request = second.add(Prompt(57).request(f"r{steps}"))
            for _ in range(steps):
                second.step()
            second.abort(request)
            fleet.settle(second)
            expect(second.pool.reset(), f"blocks are in use after an abort at step {steps}")
        self._end(fleet, first, second)

    # -- failure -----------------------------------------------------------------------------------

    def test_a_damaged_part_is_recomputed_and_asked_for_once(self, fleet: ConnectorFleet) -> None:
        """The engine asks again at once; the same answer again would never end."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        fleet.damage_node()
        request = second.add(Prompt(42).request("b"))
        second.complete(request)
        equal(second.recomputed, ["b"], "loads that failed and were recomputed")
        self._end(fleet, first, second)

    def test_damage_on_one_rank_is_recomputed_on_all(self, fleet: ConnectorFleet) -> None:
        """The minimum over ranks counts, whichever has least."""
        first, second = fleet.engine(ranks=2), fleet.engine(ranks=2)
        for rank in range(2):
            prompt = Prompt(42, seed=rank)
            self._store(fleet, first, prompt)
            fleet.damage_node(rank=rank)
            second.complete(second.add(prompt.request(f"r{rank}")))
            equal(second.recomputed[rank:], [f"r{rank}"], "loads that failed and were recomputed")
        self._end(fleet, first, second)

    def test_what_was_lost_is_stored_again(self, fleet: ConnectorFleet) -> None:
        """By whoever computes it next: another engine, and the one that stored it before.

        A load that serves as a whole only ends with the first damage that it meets; what else is damaged is
        met by the next.
        """
        first, second, third = fleet.engine(), fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        for engine in (second, first):
            fleet.damage_node()
            for _ in range(MAX_DAMAGED):
                for other in (engine, third):
                    expect(other.pool.reset(), "blocks are in use")
                engine.complete(engine.add(Prompt(42).request("again")))
                fleet.settle(engine)
                if self._loaded(third, Prompt(42)) == 40:
                    break
                fleet.settle(third)
            else:
                equal(self._loaded(third, Prompt(42)), 40, "tokens of what was stored again")
            fleet.settle(third)

    def test_without_a_node_requests_are_served(self, fleet: ConnectorFleet) -> None:
        """And nothing is left behind."""
        engine = fleet.engine()
        fleet.stop_node()
        self._loads(engine, Prompt(42), 0)
        self._end(fleet, engine)

    def test_a_node_that_is_gone_during_a_load_costs_the_load_alone(self, fleet: ConnectorFleet) -> None:
        """Its blocks hold the right bytes or are recomputed; the request is answered."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        release = fleet.hold_loads()
        request = self._waiting(second, Prompt(42))
        fleet.stop_node()
        release()
        second.complete(request)
        self._end(fleet, first, second)

    def test_a_node_that_is_gone_during_a_save_gives_the_blocks_back(self, fleet: ConnectorFleet) -> None:
        """The engine goes on meanwhile."""
        engine = fleet.engine()
        release = fleet.hold_saves()
        engine.complete(engine.add(Prompt(42).request("a")))
        fleet.stop_node()
        release()
        engine.complete(engine.add(Prompt(42, seed=1).request("b")))
        self._end(fleet, engine)

    # -- restart -----------------------------------------------------------------------------------

    def test_a_node_that_comes_back_is_used_again_without_help(self, fleet: ConnectorFleet) -> None:
        """What the node had is not taken to be there still: the engines store anew and load again."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        fleet.restart_node()
        give_up = time.monotonic() + RECOVERY_S
        for seed in range(1, 1_000_000):
            first.complete(first.add(Prompt(42, seed=seed).request(f"a{seed}")))
            fleet.settle(first)
            if self._loaded(second, Prompt(42, seed=seed)) == 40:
                break
            expect(time.monotonic() < give_up, "nothing is shared since the node came back")
        expect(first.pool.reset(), "blocks are in use")
        first.complete(first.add(Prompt(42).request("as before")))
        fleet.settle(first)
        self._loads(second, Prompt(42), 40)
        self._end(fleet, first, second)

    def test_a_node_that_restarts_during_a_load_and_a_save_costs_those_alone(
        self, fleet: ConnectorFleet
    ) -> None:
        """What the engine was promised by the one before is not taken from the one after."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        releases = [fleet.hold_loads(), fleet.hold_saves()]
        request = self._waiting(second, Prompt(42))
        first.complete(first.add(Prompt(42, seed=1).request("saved")))
        fleet.restart_node()
        for release in releases:
            release()
        second.complete(request)
        self._end(fleet, first, second)

    def test_an_engine_that_is_killed_during_a_load_leaves_nothing_in_the_node(
        self, fleet: ConnectorFleet
    ) -> None:
        """Another one loads the same at once."""
        first, second, third = fleet.engine(), fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        release = fleet.hold_loads()
        self._waiting(second, Prompt(42))
        fleet.kill_engine(second)
        release()
        fleet.at_rest()
        self._loads(third, Prompt(42), 40)
        self._end(fleet, first, third)

    def test_an_engine_that_is_killed_during_a_save_leaves_nothing_half_written(
        self, fleet: ConnectorFleet
    ) -> None:
        """What it did not finish is stored by the next one that computes it."""
        first, second, third = fleet.engine(), fleet.engine(), fleet.engine()
        release = fleet.hold_saves()
        first.complete(first.add(Prompt(42).request("a")))
        fleet.kill_engine(first)
        release()
        fleet.at_rest()
        self._loaded(second, Prompt(42))
        fleet.settle(second)
        self._loads(third, Prompt(42), 40)
        self._end(fleet, second, third)

    # -- all of it at random -------------------------------------------------------------------------

    def test_a_life_at_random_keeps_bytes_right_and_returns_everything(self, fleet: ConnectorFleet) -> None:
        """Two engines; aborts, preemptions, damage, held transfers, restarts and kills at any time."""
        for seed in range(3):
            RandomLife(fleet, seed=seed).run()

    # -- steps of tests ----------------------------------------------------------------------------

    def _store(self, fleet: ConnectorFleet, engine: FakeEngine, prompt: Prompt) -> None:
        engine.complete(engine.add(prompt.request("stores")))
        fleet.settle(engine)

    def _loads(self, engine: FakeEngine, prompt: Prompt, wanted: int) -> None:
        equal(self._loaded(engine, prompt), wanted, f"of {prompt.tokens} tokens came from the connector")

    def _loaded(self, engine: FakeEngine, prompt: Prompt, *, cap: Any = None) -> int:
        """How many tokens of the prompt the engine takes from the connector. cap: its max_load_tokens."""
        request = engine.add(prompt.request(f"loads{prompt.seed}"))
        if cap is not None:
            request.kv_transfer_params = {"max_load_tokens": cap}
        engine.complete(request)
        return request.external_tokens

    def _waiting(self, engine: FakeEngine, prompt: Prompt) -> FakeRequest:
        """A request whose load is under way."""
        request = engine.add(prompt.request("waits"))
        engine.run(lambda: request.status is Status.WAITING_FOR_REMOTE_KVS)
        engine.step()
        return request

    def _end(self, fleet: ConnectorFleet, *engines: FakeEngine) -> None:
        """Nothing is held any more, and nothing is reported that was reported before."""
        for engine in engines:
            fleet.settle(engine)
            for _ in range(3):
                engine.step()
            equal(len(engine.pool.free), len(engine.pool.blocks), "free blocks in the end")
            expect(engine.pool.reset(), "blocks are in use")
        fleet.at_rest()
