"""Hours of gentle load with a fault now and then: does anything grow?

What is sampled must end where it began. No node and no engine is killed: what grows must show. A quick
start fills what is bounded (a node remembers 4,096 requests), so that only what is not bounded can grow.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.bench.chaos.driver import Driver, Progress
from kvferry.bench.chaos.faults import FaultKind
from kvferry.bench.chaos.fleet import Fleet, Plan, running_fleet
from kvferry.bench.chaos.processes import POOL_MB
from kvferry.bench.chaos.run import Outcome, conclude

SAMPLE_S = 10.0
SAID_EVERY = 12
WARM_REQUESTS = 4500
WARM_SHARE = 0.1  # of the samples: what comes first is still settling
EDGE_SHARE = 0.25  # of the rest: the first and the last of it are compared
SPARE = {
    "descriptors": 3.0,
    "threads": 3.0,
    "anonymous_kb": 4096.0,
    "slots_bytes": 4.0 * (1 << 20),
    "pins": 8.0,
    "loads": 2.0,
}
FULL_SHARE = 0.9  # of the pool: slots in use beyond that are a cache doing its work
GENTLE = (
    FaultKind.FAILOVER,
    FaultKind.MIGRATE,
    FaultKind.DISCONNECT,
    FaultKind.FLIP,
    FaultKind.EVICT,
    FaultKind.PAUSE,
    FaultKind.PRIMARY_KILL,
    FaultKind.NODE_STOP,
    FaultKind.ENGINE_STOP,
    FaultKind.TRUNCATE,
)


@dataclass(frozen=True, slots=True)
class Trend:
    """Of one figure of one process over the soak. slope: per hour."""

    process: str
    figure: str
    first: float
    last: float
    slope_h: float
    flat: bool


@dataclass(slots=True)
class Series:
    """Of one process: when it was sampled, and what was found. pids: more than one where it was killed."""

    times: list[float] = field(default_factory=list[float])
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    pids: set[int] = field(default_factory=set[int])

    def add(self, at: float, pid: int, figures: dict[str, float]) -> None:
        """One sample."""
        self.times.append(at)
        self.pids.add(pid)
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)


@dataclass(slots=True)
class Sampler:
    """Looks at every process each SAMPLE_S; a process that is stopped or starting is left out."""

    fleet: Fleet
    progress: Progress = lambda line: None
    series: dict[str, Series] = field(default_factory=dict[str, Series])
    due: float = 0.0
    samples: int = 0

    def __call__(self) -> None:
        """Sample, when it is time."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + SAMPLE_S
        said: list[str] = []
        for process in self.fleet.processes:
            found, pid = process.census(), process.pid
            if found is None or pid is None:
                continue
            figures: dict[str, float] = {
                "descriptors": found.descriptors,
                "threads": found.threads,
                "anonymous_kb": found.anonymous_kb,
            }
            self.series.setdefault(process.name, Series()).add(now, pid, figures)
            said.append(f"{process.name} {found.descriptors} {found.threads} {found.anonymous_kb / 1024:.1f}")
        for node in self.fleet.nodes:
            status = node.status()
            if status is not None:
                figures = {
                    "slots_bytes": status["catalogue"]["used_bytes"],
                    "pins": status["catalogue"]["pins"],
                    "loads": status["loads"],
                }
                self.series.setdefault(f"{node.name} pool", Series()).add(now, status["pid"], figures)
        if self.samples % SAID_EVERY == 0:
            self.progress("descriptors, threads, MB: " + ", ".join(said))
        self.samples += 1


def soak(plan: Plan, *, progress: Progress = lambda line: None) -> tuple[Outcome, list[Trend]]:
    """Run for ``plan.seconds``. The outcome holds a leak for every figure that grew."""
    with running_fleet(plan) as fleet:
        outcome = Outcome(plan, fleet.tally, faults=fleet.faults, died=fleet.died)
        driver = Driver(fleet, plan, progress)
        driver.start()
        driver.warm_up()
        before = driver.rest()
        fleet.resume()
        sampler = Sampler(fleet, progress)
        driver.break_things(gentle_decks(random.Random(f"decks {plan.seed}")), each=sampler)
        driver.heal()
        conclude(outcome, fleet, before, driver.rest())
    found = [trend for name, series in sampler.series.items() for trend in trends(name, series)]
    outcome.leaks += [
        f"{trend.process}: {trend.figure} went from {trend.first:.0f} to {trend.last:.0f}"
        for trend in found
        if not trend.flat
    ]
    return outcome, found


def gentle_decks(rng: random.Random) -> Iterator[list[FaultKind]]:
    """For ever."""
    for _ in itertools.count():
        deck: list[FaultKind] = [*GENTLE]
        rng.shuffle(deck)
        yield deck


def trends(name: str, series: Series) -> list[Trend]:
    """One for each figure; none for a process that did not live through it, or too few samples."""
    start = int(len(series.times) * WARM_SHARE)
    times = series.times[start:]
    edge = int(len(times) * EDGE_SHARE)
    if len(series.pids) != 1 or not edge:
        return []
    found: list[Trend] = []
    for figure, all_values in series.figures.items():
        values = all_values[start:]
        first, last = statistics.median(values[:edge]), statistics.median(values[-edge:])
        full = figure == "slots_bytes" and last >= FULL_SHARE * (POOL_MB << 20)
        flat = full or last <= first + SPARE[figure]
        found.append(Trend(name, figure, first, last, _slope_h(times, values), flat))
    return found


def _slope_h(times: Sequence[float], values: Sequence[float]) -> float:
    if len(set(times)) < 2:
        return 0.0
    return statistics.linear_regression(times, values).slope * 3600
