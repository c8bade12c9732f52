"""What the choice of a worker is worth: one plan, every router, the same empty caches before each."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.bench.router import client
from kvferry.bench.router.client import Sample
from kvferry.bench.router.routers import CACHE_AWARE, Arm, Thresholds, running
from kvferry.bench.router.traffic import Mix, Turn, plan
from kvferry.errors import BrokenError
from kvferry.testing.servers import free_ports
from kvferry.testing.worker_engine import WorkerSettings
from kvferry.testing.worker_fleet import RemoteWorker, TierSettings, running_workers

TUNING_SEEDS = (9000, 9001)  # none that is measured with
SWEEP = tuple(
    Thresholds(cache, balance_abs, balance_rel)
    for cache, (balance_abs, balance_rel) in itertools.product((0.3, 0.7), ((64, 1.5), (4, 1.1), (1, 1.01)))
)
MIX = Mix(conversations=160, rate=8.0)
ENGINE = WorkerSettings(
    prefill_token_s=50e-6, step_s=0.01, cache_blocks=400, block_characters=256, chunk_tokens=512
)
TIER = TierSettings(token_s=10e-6, latency_s=0.002)
SLOW = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm with one plan. mean_s, p50_s, p99_s: TTFT, from when the request was due. hit: share of prompt
    tokens that were not computed. workers: requests of the quick and of the slow one."""

    arm: str
    seed: int
    requests: int
    mean_s: float
    p50_s: float
    p99_s: float
    hit: float
    workers: tuple[int, ...]
    hot_mean_s: float


@dataclass(slots=True)
class Comparison:
    """Arms in one setting. tuned: vllm-router's thresholds that did best; sweep: mean and p99 of each."""

    setting: str
    tuned: Thresholds | None = None
    sweep: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def of(self, arm: str) -> list[Outcome]:
        """One per plan."""
        return [outcome for outcome in self.outcomes if outcome.arm == arm]

    def arms(self) -> list[str]:
        """In the order of their first run."""
        return list(dict.fromkeys(outcome.arm for outcome in self.outcomes))

    def median(self, arm: str, what: str) -> float:
        """Over the plans."""
        return statistics.median(float(getattr(outcome, what)) for outcome in self.of(arm))

    def ratio(self, arm: str, what: str, *, to: str) -> float:
        """Median over the plans of each plan's ratio."""
        pairs = zip(self.of(arm), self.of(to), strict=True)
        return statistics.median(float(getattr(one, what) / getattr(other, what)) for one, other in pairs)

    def add_tried(self, thresholds: Thresholds, runs: Sequence["Outcome"]) -> tuple[Thresholds, float, float]:
        """Keep what came of these thresholds: means over the runs."""
        mean_s, p99_s = (
            statistics.fmean(float(getattr(one, what)) for one in runs) for what in ("mean_s", "p99_s")
        )
        self.sweep[str(thresholds)] = (mean_s, p99_s)
        return thresholds, mean_s, p99_s

    def document(self) -> dict[str, Any]:
        """For JSON."""
        figures = ("mean_s", "p50_s", "p99_s", "hit", "hot_mean_s")
        return {
            "setting": self.setting,
            "tuned": str(self.tuned) if self.tuned is not None else None,
            "sweep": {name: {"mean_s": mean, "p99_s": p99} for name, (mean, p99) in self.sweep.items()},
            "arms": {
                arm: {
                    **{what: self.median(arm, what) for what in figures},
                    "requests": sum(outcome.requests for outcome in self.of(arm)),
                    "workers": [list(outcome.workers) for outcome in self.of(arm)],
                }
                for arm in self.arms()
            },
        }


def tuned_arm(thresholds: Thresholds) -> Arm:
    """cache_aware with them; its name stays."""
    return replace(CACHE_AWARE, thresholds=thresholds)


def best(sweep: Iterable[tuple[Thresholds, float, float]]) -> Thresholds:
    """The least of mean and p99 together, each relative to the best one's."""
    found = list(sweep)
    least_mean = min(mean for _, mean, _ in found)
    least_p99 = min(p99 for _, _, p99 in found)
    return min(found, key=lambda each: each[1] / least_mean + each[2] / least_p99)[0]


def outcome(
    arm: Arm, seed: int, turns: Sequence[Turn], samples: Sequence[Sample], workers: Sequence[int]
) -> Outcome:
    """Of its samples. BrokenError when a request failed."""
    for sample in samples:
        if sample.error:
            raise BrokenError(f"{arm.name}: a request failed: {sample.error}")
    ttfts = [sample.ttft_s for sample in samples]
    hot = [sample.ttft_s for turn, sample in zip(turns, samples, strict=True) if turn.hot]
    prompts = sum(sample.prompt_tokens for sample in samples)
    return Outcome(
        arm=arm.name,
        seed=seed,
        requests=len(samples),
        mean_s=statistics.fmean(ttfts),
        p50_s=client.quantile(ttfts, 0.5),
        p99_s=client.quantile(ttfts, 0.99),
        hit=sum(sample.cached_tokens for sample in samples) / max(1, prompts),
        workers=tuple(workers),
        hot_mean_s=statistics.fmean(hot) if hot else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Mocks:
    """Running mock workers. Which of the two is slow changes with the plan: nobody wins by order."""

    workers: tuple[RemoteWorker, ...]
    directory: Path
    peer: str
    mix: Mix

    def run(self, arm: Arm, *, seed: int) -> Outcome:
        """One plan through a router that knows nothing, to workers that have nothing."""
        turns = plan(self.mix, seed=seed)
        slow = self.workers[seed % 2]
        for worker in self.workers:
            worker.drop(tier=True)
            worker.behave(slow=SLOW if worker == slow else 1.0)
        before = [worker.statistics()["requests"] for worker in self.workers]
        feeds = [
            word
            for worker in self.workers
            if worker.settings.feed_port
            for word in ("--feed", f"{worker.url}=127.0.0.1:{worker.settings.feed_port}")
        ]
        urls = [worker.url for worker in self.workers]
        with running(arm, urls, directory=self.directory, peer=self.peer, options=feeds) as route:
            samples = client.run(client.open_loop(route.urls[0], [(turn.at, turn.body) for turn in turns]))
        after = [worker.statistics()["requests"] for worker in self.workers]
        counts = [b - a for a, b in zip(before, after, strict=True)]
        return outcome(arm, seed, turns, samples, counts if slow == self.workers[-1] else counts[::-1])


def measure(
    arms: Sequence[Arm],
    *,
    tier: TierSettings | None,
    rounds: int,
    seed: int,
    directory: Path,
    peer: str,
    say: Callable[[str], None],
    mix: Mix = MIX,
    engine: WorkerSettings = ENGINE,
    sweep: Sequence[Thresholds] = SWEEP,
) -> Comparison:
    """Tune vllm-router's cache_aware, then every arm with every plan, in turn."""
    setting = f"mock workers, one {SLOW:g} times slower, " + ("shared tier" if tier else "no shared tier")
    comparison = Comparison(setting)
    ports = free_ports(2)
    settings = [replace(engine, name=f"w{number}", feed_port=port) for number, port in enumerate(ports)]
    with running_workers(*settings, directory=directory, tier=tier) as workers:
        mocks = Mocks(workers, directory, peer, mix)
        if sweep and any(arm == CACHE_AWARE for arm in arms):
            comparison.tuned = tune(comparison, mocks.run, sweep, say)
        for number in range(rounds):
            for arm in arms:
                if arm == CACHE_AWARE and comparison.tuned is not None:
                    arm = tuned_arm(comparison.tuned)  # noqa: PLW2901
                comparison.outcomes.append(mocks.run(arm, seed=seed + number))
                say(told(comparison.outcomes[-1]))
    return comparison


def tune(
    comparison: Comparison,
    run: Callable[..., Outcome],
    sweep: Sequence[Thresholds],
    say: Callable[[str], None],
) -> Thresholds:
    """Try all; what came of each is kept in the comparison."""
    tried = []
    for thresholds in sweep:
        found = [run(tuned_arm(thresholds), seed=seed) for seed in TUNING_SEEDS]
        tried.append(comparison.add_tried(thresholds, found))
        say(f"{thresholds}: " + "; ".join(map(told, found)))
    return best(tried)


def told(found: Outcome) -> str:
    """One line of progress."""
    return (
        f"{found.arm}: TTFT mean {found.mean_s * 1e3:.0f} p99 {found.p99_s * 1e3:.0f} ms, "
        f"hit {found.hit:.0%}, requests {'/'.join(map(str, found.workers))}"
    )
