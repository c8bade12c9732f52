"""The steps below Valkey: the prefix from NVMe and from the bucket, and a keeper killed in the middle."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.demo.ask import Asking, Question
from kvferry.demo.outages import MAX_TRIES, like_cold, loaded_tokens, recompute_limit_s
from kvferry.demo.prompts import chat, document
from kvferry.demo.steps import Source, Step
from kvferry.demo.verify import forget_everything
from kvferry.errors import RefusedError, RetryError

if TYPE_CHECKING:
    from kvferry.demo.scenario import Scenario

OTHER_SEEDS = {"A": 101, "B": 102}
COMMAND_S = 60.0
LOCATED_WITHIN_S = 30.0


class Depth:
    """Runs after the outages of a scenario whose fleet has a keeper."""

    def __init__(self, scenario: "Scenario") -> None:
        self._scenario = scenario
        self._fleet = scenario.fleet

    def drained(self) -> None:
        """Watch the flush backlog: what was reused is on its way to disk and bucket."""
        scenario, storage = self._scenario, self._fleet.storage
        begun, seen = time.monotonic(), storage.backlog()
        took = storage.wait_kept(parts=scenario.boundary // scenario.chunk_tokens())
        scenario.say(
            f"on its way to the bucket: {seen.parts} parts, {seen.nbytes / 1e6:.1f} MB, the oldest for "
            f"{seen.oldest_s:.1f} s; all of it was there {time.monotonic() - begun:.1f} s later"
            if seen.parts
            else f"on disk and in the bucket {took:.1f} s later"
        )

    def run(self) -> Iterator[Step]:
        """RAM overflows; from NVMe, from the bucket; the keeper killed, and back."""
        self.overflow()
        yield self._loaded("disk", "B, from NVMe: memory and Valkey dropped", ["valkey"], Source.DISK, 7)
        yield self._loaded(
            "objects", "B, from the bucket: NVMe dropped too", ["disk", "valkey"], Source.OBJECTS, 8
        )
        yield self.keeper_killed()
        self._fleet.start_keeper()
        self._known_again()
        yield self._loaded(
            "keeper-back", "B, after the keeper came back", ["valkey"], Source.DISK, 9, kept=False
        )

    def overflow(self) -> None:
        """Each replica computes a document that nobody asks for again, more than RAM has room for."""
        scenario, fleet = self._scenario, self._fleet
        before = fleet.storage.copied_parts()

        def ask(name: str) -> None:
            replica = scenario.replica(name)
            text = document(scenario.prompts.entries, filler=0, seed=OTHER_SEEDS[name])
            prompt = replica.tokenize_chat(chat(text, "Who piloted?"))
            replica.ask(Question(f"{scenario.story_id}x{name}", prompt, 2))

        with ThreadPoolExecutor(len(OTHER_SEEDS)) as pool:
            list(pool.map(ask, OTHER_SEEDS))
        fleet.node_view.wait_written_back()
        status = fleet.node_view.status()
        scenario.say(
            "two other documents went through: host memory has evicted "
            f"{status['catalogue']['evicted_parts']} parts, Valkey {fleet.valkey_evictions():,} values; "
            f"{fleet.storage.copied_parts() - before} parts of theirs, which nobody used again, went to disk"
        )

    def keeper_killed(self) -> Step:
        """SIGKILL to the keeper while it stages what B waits for."""
        scenario, fleet = self._scenario, self._fleet
        asking, before = self._caught_staging()
        fleet.storage.kill_keeper()
        scenario.say("keeper killed (-9) in the middle of a stage; B recomputes ...")
        answered = asking.reply()
        # vLLM's usage counts a load when it is admitted; the connector counts what really arrived.
        reply = replace(answered, cached_tokens=int(loaded_tokens(scenario) - before))
        step = scenario.step(
            "keeper-killed",
            "B, keeper killed (-9) during the load",
            "B",
            reply,
            allowed=(Source.COMPUTED, Source.DISK, Source.MIXED),
            limit_s=recompute_limit_s(scenario),
            answer=like_cold(scenario, reply),
        )
        return replace(step, source=Source.DISK) if reply.cached_tokens else step

    def _loaded(
        self, key: str, title: str, tiers: list[str], source: Source, question: int, *, kept: bool = True
    ) -> Step:
        scenario = self._scenario
        self._forget(tiers, kept=kept)
        reply = scenario.ask("B", question, key)
        return scenario.step(
            key,
            title,
            "B",
            reply,
            allowed=(source,),
            wanted=scenario.boundary,
            loaded=True,
            answer=scenario.like_own_hit(reply, question),
        )

    def _forget(self, tiers: list[str], *, kept: bool = True) -> None:
        """What is faster than the tier in question, by the command that people have for it."""
        scenario, fleet = self._scenario, self._fleet
        fleet.node_view.wait_written_back()
        if kept:
            fleet.storage.wait_kept(parts=scenario.boundary // scenario.chunk_tokens())
        for tier in [*tiers, "memory"]:
            self._drop(tier)
        forget_everything(scenario.replica("B"))

    def _drop(self, tier: str) -> None:
        command = [sys.executable, "-m", "kvferry", "drop", tier, "--socket", str(self._fleet.socket_path)]
        namespace = self._fleet.node_view.status()["namespaces"][0]["namespace"]
        done = subprocess.run(
            [*command, "--namespace", namespace],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise RefusedError(f"kvferry drop {tier}: {done.stderr.strip()}")
        self._scenario.say(f"kvferry drop {tier}: {done.stdout.strip()}")

    def _caught_staging(self) -> tuple[Asking, float]:
        """A question whose parts the keeper is bringing now, and B's loaded tokens before."""
        scenario, fleet = self._scenario, self._fleet
        for _ in range(MAX_TRIES):
            self._forget(["valkey"])
            before = loaded_tokens(scenario)
            with fleet.storage.watching() as status:
                asking = Asking(scenario.replica("B"), scenario.question(0, "keeper-killed"))
                while not asking.done:
                    if status()["stages"]["running"]:
                        return asking, before
        raise RetryError(f"no stage could be seen in {MAX_TRIES} tries; run the demo again")

    def _known_again(self) -> None:
        """Wait until the node has found the keeper by itself."""
        took = self._fleet.node_view.wait(
            lambda status: all(keeper["state"] == "up" for keeper in status["keepers"]["keepers"]),
            what="the node finding the keeper again",
            timeout_s=LOCATED_WITHIN_S,
        )
        self._scenario.say(f"the node found the keeper again by itself after {took:.1f} s")
