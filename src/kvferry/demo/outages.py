"""The steps in which something breaks: a bounded recompute while it is broken, reuse by itself after."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.demo.ask import Asking, Reply
from kvferry.demo.engineview import counter_of
from kvferry.demo.steps import Source, Step
from kvferry.demo.verify import AnswerCheck, check_answer, forget_everything
from kvferry.errors import RetryError

if TYPE_CHECKING:
    from kvferry.demo.scenario import Scenario

MAX_TRIES = 3
REJOINED_WITHIN_S = 30.0
TIER_BACK_WITHIN_S = 30.0
EXTRA_S = 3.0  # what an outage may cost on top of a recompute
NOISE = 1.3  # a recompute's own spread on a busy machine


class Outages:
    """Runs after the other steps of a scenario, whose fleet it breaks and mends."""

    def __init__(self, scenario: "Scenario") -> None:
        self._scenario = scenario
        self._fleet = scenario.fleet

    def run(self) -> Iterator[Step]:
        """Node killed, node back, Valkey stopped, Valkey back."""
        scenario = self._scenario
        yield self.node_killed()
        self._node_back()
        yield scenario.valkey_only("node-back", "B, after the node came back", question=5)
        if not self._fleet.owns_valkey:
            scenario.say("skipped: stopping Valkey, because the server is not the demo's own")
            return
        yield self.valkey_stopped()
        self._valkey_back()
        yield scenario.valkey_only("valkey-back", "B, after Valkey went on", question=6)

    def node_killed(self) -> Step:
        """SIGKILL to the node while B waits for a load out of Valkey."""
        scenario, fleet = self._scenario, self._fleet
        asking, seen, before = self._caught_loading()
        fleet.kill_node()
        scenario.say(f"node killed (-9) with {seen} in flight; B recomputes ...")
        answered = asking.reply()
        # vLLM's usage counts a load when it is admitted; the connector counts what really arrived.
        reply = replace(answered, cached_tokens=int(loaded_tokens(scenario) - before))
        step = scenario.step(
            "node-killed",
            "B, node killed (-9) during the load",
            "B",
            reply,
            allowed=(Source.COMPUTED, Source.VALKEY),
            limit_s=recompute_limit_s(scenario),
            answer=like_cold(scenario, reply),
            note=f"killed with {seen} in flight",
        )
        return replace(step, source=Source.VALKEY) if reply.cached_tokens else step

    def valkey_stopped(self) -> Step:
        """SIGSTOP to Valkey: connections stay open, nothing answers."""
        scenario, fleet = self._scenario, self._fleet
        scenario.fleet.node_view.wait_written_back()
        fleet.node_view.drop_memory()
        forget_everything(scenario.replica("B"))
        fleet.valkey.send_signal(signal.SIGSTOP)
        scenario.say("Valkey stopped (SIGSTOP); B recomputes ...")
        try:
            reply = scenario.ask("B", 0, "stopped")
        finally:
            fleet.valkey.send_signal(signal.SIGCONT)
        return scenario.step(
            "valkey-stopped",
            "B, Valkey stopped (SIGSTOP)",
            "B",
            reply,
            allowed=(Source.COMPUTED,),
            limit_s=recompute_limit_s(scenario),
            answer=like_cold(scenario, reply),
        )

    def _caught_loading(self) -> tuple[Asking, str, float]:
        """A question whose load is in flight now, how much of it, and B's loaded tokens before.

        A quick load may need another try.
        """
        scenario = self._scenario
        for _ in range(MAX_TRIES):
            scenario.fleet.node_view.wait_written_back()
            self._fleet.node_view.drop_memory()
            forget_everything(scenario.replica("B"))
            before = loaded_tokens(scenario)
            with self._fleet.node_view.watching() as status:
                asking = Asking(scenario.replica("B"), scenario.question(0, "killed"))
                while not asking.done:
                    now = status()
                    if now["loads"] and now["fetches"]:
                        return asking, f"{now['fetches']} fetches", before
        raise RetryError(f"no load could be seen in flight in {MAX_TRIES} tries; run the demo again")

    def _node_back(self) -> None:
        """Start it again and wait until the engines have joined by themselves."""
        scenario, fleet = self._scenario, self._fleet
        fleet.start_node()
        engines = 2 * len(fleet.replicas)
        took = fleet.node_view.wait(
            lambda status: (
                len(status["engines"]) >= engines and status["prepared_bytes"] >= status["pool_bytes"]
            ),
            what="the engines joining the new node and its pool being ready",
            timeout_s=REJOINED_WITHIN_S,
        )
        scenario.say(f"the engines joined the new node by themselves, its pool is ready: after {took:.1f} s")

    def _valkey_back(self) -> None:
        """Wait until the node reports the tier as up again."""
        took = self._fleet.node_view.wait(
            lambda status: status["tier"] is not None and status["tier"]["state"] == "up",
            what="Valkey being used again",
            timeout_s=TIER_BACK_WITHIN_S,
        )
        self._scenario.say(f"Valkey goes on (SIGCONT); the node uses it again after {took:.1f} s")


def loaded_tokens(scenario: "Scenario") -> float:
    """Prompt tokens that B loaded instead of computing, since its start, by its connector's count."""
    return counter_of(scenario.replica("B").metrics(), "vllm:kvferry_loaded_tokens")


def recompute_limit_s(scenario: "Scenario") -> float:
    """The longest that an answer may take when something broke."""
    return NOISE * scenario.facts.cold.ttft_s + EXTRA_S


def like_cold(scenario: "Scenario", reply: Reply) -> AnswerCheck | None:
    """Only a recompute from the first token splits the prompt as the cold run did."""
    if reply.cached_tokens:
        return None
    return check_answer(reply, scenario.facts.cold, against="the cold answer")
