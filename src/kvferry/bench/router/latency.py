"""What a router adds to the time to first token, and what a request and a token cost it."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.router import client
from kvferry.bench.router.bodies import Bodies
from kvferry.bench.router.routers import Arm, Route, running
from kvferry.bench.router.usage import cpu_s
from kvferry.errors import BrokenError
from kvferry.testing.worker_engine import WorkerSettings
from kvferry.testing.worker_fleet import running_workers

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """streams at a time, prompts of nbytes, answers of ``tokens``, one every ``step_s``."""

    streams: int
    nbytes: int
    tokens: int
    step_s: float

    @property
    def stream_s(self) -> float:
        """How long one answer takes."""
        return self.tokens * self.step_s


@dataclass(frozen=True, slots=True)
class Run:
    """One arm under a load, once. Times in seconds; cpu: of the router alone, 0 for the direct arm."""

    ttft_p50_s: float
    ttft_p99_s: float
    cpu_request_s: float
    requests: int
    requests_s: float
    tokens_s: float
    tokens_core_s: float


@dataclass(slots=True)
class Cell:
    """A load, and the runs of each arm, one per round."""

    load: Load
    runs: dict[str, list[Run]] = field(default_factory=dict[str, list[Run]])

    def median(self, arm: str, what: str) -> float:
        """Over the rounds."""
        return statistics.median(float(getattr(run, what)) for run in self.runs[arm])

    def added_s(self, arm: str, what: str) -> float:
        """Median over the rounds of what the arm's figure is above the direct one of its round."""
        pairs = zip(self.runs[arm], self.runs["direct"], strict=True)
        return statistics.median(float(getattr(one, what) - getattr(bare, what)) for one, bare in pairs)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        figures = ("ttft_p50_s", "ttft_p99_s")
        return {
            "streams": self.load.streams,
            "prompt_bytes": self.load.nbytes,
            "tokens": self.load.tokens,
            "arms": {
                arm: {
                    **{name: self.median(arm, name) for name in Run.__dataclass_fields__},
                    **{f"added_{name}": self.added_s(arm, name) for name in figures if "direct" in self.runs},
                }
                for arm in self.runs
            },
        }


def measure(
    loads: Sequence[Load],
    arms: Sequence[Arm],
    *,
    rounds: int,
    seconds: float,
    seed: int,
    directory: Path,
    peer: str,
    say: Callable[[str], None],
) -> list[Cell]:
    """Every load, every arm in turn, ``rounds`` times. All arms have the same workers and stay started."""
    cells = [Cell(load) for load in loads]
    for step_s, group in itertools.groupby(cells, lambda cell: cell.load.step_s):
        with ExitStack() as stack:
            settings = [WorkerSettings(name=f"w{n}", step_s=step_s, cache_blocks=0) for n in range(WORKERS)]
            workers = stack.enter_context(running_workers(*settings, directory=directory))
            urls = [worker.url for worker in workers]
            routes = {
                arm.name: stack.enter_context(running(arm, urls, directory=directory, peer=peer))
                for arm in arms
            }
            for cell in group:
                _cell(cell, routes, rounds=rounds, seconds=seconds, seed=seed, say=say)
    return cells


def _cell(
    cell: Cell,
    routes: Mapping[str, Route],
    *,
    rounds: int,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
) -> None:
    names = list(routes)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run = once(routes[name], cell.load, seconds=seconds, seed=seed + number)
            cell.runs.setdefault(name, []).append(run)
            say(
                f"{cell.load.streams} streams, {cell.load.nbytes:,} bytes, {name}: TTFT p50 "
                f"{run.ttft_p50_s * 1e3:.2f} p99 {run.ttft_p99_s * 1e3:.2f} ms, CPU "
                f"{run.cpu_request_s * 1e3:.2f} ms per request, {run.requests_s:.0f} requests/s"
            )


def once(route: Route, load: Load, *, seconds: float, seed: int) -> Run:
    """One run. BrokenError when a request failed: the figures would be of something else."""
    bodies = Bodies(load.nbytes, seed=seed, max_tokens=load.tokens)
    before = cpu_s(route.group) if route.group else 0.0
    apart_s = max(load.stream_s, 0.2)
    samples = client.run(
        client.closed_loop(route.urls, bodies.next, streams=load.streams, seconds=seconds, apart_s=apart_s)
    )
    used_s = cpu_s(route.group) - before if route.group else 0.0
    for sample in samples:
        if sample.error or sample.tokens < load.tokens:
            raise BrokenError(f"{route.arm.name}: a request failed: {sample.error or 'tokens are missing'}")
    counted = [sample for sample in samples if sample.at >= apart_s]
    ttfts = [sample.ttft_s for sample in counted]
    tokens = sum(sample.tokens for sample in samples)
    took_s = max(sample.at + sample.total_s for sample in samples)
    return Run(
        ttft_p50_s=client.quantile(ttfts, 0.5),
        ttft_p99_s=client.quantile(ttfts, 0.99),
        cpu_request_s=used_s / len(samples),
        requests=len(counted),
        requests_s=len(samples) / took_s,
        tokens_s=tokens / took_s,
        tokens_core_s=tokens / used_s if used_s else 0.0,
    )
