"""Two real vLLM replicas on a core each, one of them slowed, asked through each router in turn.

With a shared tier each replica has a node of its own, as on a host of its own, and both nodes one Valkey; our
router follows the nodes' feeds. Without, the engines are plain vLLM and nobody tells any router anything.

Slow is a replica whose processes are stopped (SIGSTOP) for all but a share of every 60 ms, as on a host whose
processors somebody else has most of the time. Its core is free meanwhile: routers, nodes, Valkey and the
load, which have no cores of their own on two, use it. All arms pay for that alike.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from kvferry.bench.router import client
from kvferry.bench.router.choice import TUNING_SEEDS, Comparison, Outcome, best, outcome, told, tuned_arm
from kvferry.bench.router.routers import CACHE_AWARE, Arm, Thresholds, running
from kvferry.bench.router.traffic import Mix, plan
from kvferry.demo.ask import Replica
from kvferry.demo.fleet import SERVED_NAME, Fleet, FleetSettings, plan_replicas
from kvferry.demo.model import demo_model
from kvferry.demo.ports import free_port

MIX = Mix(
    conversations=40,
    rate=0.2,
    turns=5,
    hot=0.6,
    cold_prefixes=6,
    prefix=4000,
    question=300,
    answer=150,
    tokens=8,
    think_s=8.0,
    model=SERVED_NAME,
)
CANDIDATES = (Thresholds(0.3, 1, 1.01), Thresholds(0.3, 4, 1.1), Thresholds(0.3, 64, 1.5))
WARM_TOKENS = (300, 300, 600, 1200, 900, 300)
PERIOD_S = 0.06
RUNS_SHARE = 1 / 3


class Slowed:
    """Stops a process group for most of every period, until the context ends."""

    def __init__(self, group: int, *, share: float = RUNS_SHARE, period_s: float = PERIOD_S) -> None:
        """share: of the time in which it runs."""
        self._group = group
        self._share = share
        self._period_s = period_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-slowed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                while not self._end.wait(self._period_s * self._share):
                    os.killpg(self._group, signal.SIGSTOP)
                    self._end.wait(self._period_s * (1 - self._share))
                    os.killpg(self._group, signal.SIGCONT)
            finally:
                os.killpg(self._group, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Side:
    """A replica, its process group and, where it has a node, the feed's port."""

    fleet: Fleet
    replica: Replica
    group: int
    feed_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.replica.port}"

    def drop(self) -> None:
        """Nothing is in the engine's cache and in host memory. What is in Valkey nobody will ask for."""
        self.replica.reset_prefix_cache()
        if self.feed_port:
            self.fleet.node_view.wait_written_back()
            self.fleet.node_view.drop_memory()

    def served(self) -> float:
        """Requests it has finished."""
        from kvferry.demo.engineview import counter_of

        return counter_of(self.replica.metrics(), "vllm:request_success")


@contextlib.contextmanager
def sides(model: Path, *, shared: bool, say: Callable[[str], None]) -> Iterator[tuple[Side, Side]]:
    """Both replicas, started side by side."""
    with ExitStack() as stack:
        fleets: list[tuple[Fleet, int]] = []
        valkey = ""
        for one in plan_replicas(2):
            feed_port = free_port() if shared else 0
            settings = FleetSettings(
                model=model,
                replicas=(replace(one, connected=shared),),
                pool_bytes=512 << 20,
                valkey_url=valkey or None,
                node_arguments=("--feed-listen", f"127.0.0.1:{feed_port}") if shared else (),
            )
            fleet = stack.enter_context(Fleet(settings, say=say))
            if shared:
                if not valkey:
                    fleet.start_valkey()
                    valkey = fleet.valkey_url
                fleet.start_node()
            fleets.append((fleet, feed_port))
        starting = [
            fleet.launch_replicas([one.name for one in fleet.settings.replicas]) for fleet, _ in fleets
        ]
        for (fleet, _), one_starting in zip(fleets, starting, strict=True):
            fleet.await_replicas(one_starting)
        found = [
            Side(fleet, fleet.replicas[name], fleet.process_group(name), port)
            for fleet, port in fleets
            for name in fleet.replicas
        ]
        yield found[0], found[1]


def measure(
    arms: Sequence[Arm],
    *,
    shared: bool,
    rounds: int,
    seed: int,
    directory: Path,
    peer: str,
    say: Callable[[str], None],
    model: Path | None = None,
    mix: Mix = MIX,
    candidates: Sequence[Thresholds] = CANDIDATES,
) -> Comparison:
    """All arms with all plans, in turn.

    cache_aware runs a plan that is not measured with each of ``candidates``; the best of them is its arm.
    """
    tier = "Valkey behind a node each" if shared else "no shared tier"
    comparison = Comparison(f"two vLLM replicas, one slowed to {RUNS_SHARE:.0%}, {tier}")
    with sides(demo_model(chosen=model, say=say), shared=shared, say=say) as both:
        warm(both)
        runs = [0]
        if CACHE_AWARE in arms:
            tuning = Runner(both, directory, peer, mix, TUNING_SEEDS[0], say, runs)
            comparison.tuned = best(
                comparison.add_tried(each, [tuning.run(tuned_arm(each))]) for each in candidates
            )
            arms = [tuned_arm(comparison.tuned) if arm == CACHE_AWARE else arm for arm in arms]
        for number in range(rounds):
            runner = Runner(both, directory, peer, mix, seed + number, say, runs)
            for arm in arms:
                comparison.outcomes.append(runner.run(arm))
    return comparison


def warm(both: Sequence[Side]) -> None:
    """The first requests of an engine are slow, and it has not measured yet how quick it is."""
    from kvferry.bench.prompts import Prompts
    from kvferry.demo.ask import Question

    prompts = Prompts(1)
    for side in both:
        for tokens in WARM_TOKENS:
            side.replica.ask(Question(f"warm{time.monotonic_ns()}", prompts.tokens(tokens), 4))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs arms with one plan. Which replica is slow changes with the plan."""

    both: tuple[Side, Side]
    directory: Path
    peer: str
    mix: Mix
    seed: int
    say: Callable[[str], None]
    runs: list[int]
    """How many there were: each has prompts of its own, at the same times and as long."""

    def run(self, arm: Arm) -> Outcome:
        """Through a router that knows nothing, to replicas that have nothing."""
        self.runs[0] += 1
        turns = plan(self.mix, seed=self.seed, tag=f"[{self.runs[0]:04d}] ")
        for side in self.both:
            side.drop()
        slow = self.both[self.seed % 2]
        before = [side.served() for side in self.both]
        feeds = [
            word
            for side in self.both
            if side.feed_port
            for word in ("--feed", f"{side.url}=127.0.0.1:{side.feed_port}")
        ]
        urls = [side.url for side in self.both]
        with (
            Slowed(slow.group),
            running(arm, urls, directory=self.directory, peer=self.peer, options=feeds) as route,
        ):
            samples = client.run(client.open_loop(route.urls[0], [(turn.at, turn.body) for turn in turns]))
        counts = [round(side.served() - was) for side, was in zip(self.both, before, strict=True)]
        found = outcome(arm, self.seed, turns, samples, counts if slow is self.both[1] else counts[::-1])
        self.say((f"{arm.thresholds}: " if arm.name == CACHE_AWARE.name else "") + told(found))
        return found
