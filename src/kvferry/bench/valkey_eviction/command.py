"""``kvferry bench valkey-eviction``: what a full server keeps, by policy and what steers it."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvferry.bench.valkey_eviction.arms import ARMS
from kvferry.bench.valkey_eviction.costs import Cost, measure_costs
from kvferry.bench.valkey_eviction.mixes import Mix, chats_and_scan
from kvferry.bench.valkey_eviction.replay import Fleet, Replay
from kvferry.bench.valkey_eviction.shelf import server_shelf
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError
from kvferry.traces.policies import Policy

MAX_KEYS = 1_000_000
MAX_SAMPLES = 64
HOSTS = 4
POOL_SHARE = 32
"""Each host's pool holds the shelf's room divided by this."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Shares of 1. held_chunks: the mean in the last half. orphans: of the keys held, those nobody can use.

    commands: stores and refreshes, per 1,000 chunks asked for. None where a figure means nothing.
    """

    trace: str
    chunks: int
    stripes: int
    arm: str
    samples: int | None
    hit: float
    hit_last_half: float
    alone_last_half: float | None = None
    held_chunks: int | None = None
    orphans: float | None = None
    rejected: int | None = None
    commands: float | None = None


@dataclass(slots=True)
class Report:
    """Everything measured."""

    rows: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    took_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvferry bench valkey-eviction``."""
    parser.add_argument("traces", nargs="*", type=Path, metavar="FILE", help="traces that identify content")
    parser.add_argument("--chunks", default="6554,13107", metavar="N,...", help="room (default 6554,13107)")
    parser.add_argument("--stripes", default="1", metavar="N,...", help="keys of a chunk (default 1)")
    parser.add_argument(
        "--samples", default="5,10,64", metavar="N,...", help="maxmemory-samples (default 5,10,64)"
    )
    parser.add_argument(
        "--only", default=",".join(ARMS), metavar="ARM,...", help=f"some of {', '.join(ARMS)}"
    )
    parser.add_argument(
        "--no-mix", action="store_true", help="leave out the made-up chats and one-time prompts"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    arms = args.only.split(",")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise MisconfiguredError(f"--only {unknown[0]!r}: arms are {', '.join(ARMS)}")
    mixes = [Mix.of_file(path) for path in args.traces]
    if not args.no_mix:
        mixes.append(chats_and_scan())
    if not mixes:
        raise MisconfiguredError("--no-mix without a trace: nothing to replay")
    try:
        with stop_on_signals():
            report = run(
                mixes,
                chunks=_numbers("--chunks", args.chunks, MAX_KEYS),
                stripes=_numbers("--stripes", args.stripes, MAX_SAMPLES),
                samples=_numbers("--samples", args.samples, MAX_SAMPLES),
                arms=arms,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except StoppedError as stopped:
        print(f"{stopped}; its server has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    return 0


def run(
    mixes: Iterable[Mix],
    *,
    chunks: Sequence[int],
    stripes: Sequence[int],
    samples: Sequence[int],
    arms: Sequence[str] = tuple(ARMS),
    progress: Progress = lambda line: None,
) -> Report:
    """Every arm on every mix, each on a server of its own."""
    began = time.monotonic()
    report = Report(costs=measure_costs(samples))
    for mix in mixes:
        for room in chunks:
            for policy in (Policy.LRU, Policy.OPTIMUM):
                report.rows.append(
                    Row(mix.name, room, 0, f"exact {policy.value}", None, *mix.exact(policy, room))
                )
                progress(_line(report.rows[-1]))
            for keys in stripes:
                for arm in arms:
                    for sample in samples if ARMS[arm].sampled else samples[:1]:
                        report.rows.append(measure(mix, arm, chunks=room, stripes=keys, samples=sample))
                        progress(_line(report.rows[-1]))
    report.took_s = time.monotonic() - began
    return report


def measure(mix: Mix, name: str, *, chunks: int, stripes: int, samples: int) -> Row:
    """One arm on a server with room for so many chunks of so many keys."""
    arm = ARMS[name]
    fleet = Fleet(HOSTS, max(1, chunks // POOL_SHARE))
    replay = Replay(mix.prompts, fleet, stripes=stripes, refreshes=arm.refreshes, repairs=arm.repairs)
    with server_shelf(
        arm.steering(), chunks=chunks, stripes=stripes, samples=samples, end_s=mix.end_s
    ) as shelf:
        tally = replay.run(shelf)
        commands, rejected = shelf.commands, shelf.rejected
    total, half = mix.chunks
    return Row(
        trace=mix.name,
        chunks=chunks,
        stripes=stripes,
        arm=name,
        samples=samples if arm.sampled else None,
        hit=sum(tally.hits) / total,
        hit_last_half=tally.hits[1] / half,
        alone_last_half=tally.alone[1] / half,
        held_chunks=round(tally.held / tally.checkpoints / stripes),
        orphans=tally.orphans / tally.held if tally.held else 0.0,
        rejected=rejected,
        commands=1000 * commands / total,
    )


def render(report: Report) -> str:
    """The table for a terminal."""
    head = f"{'TRACE':<24} {'ROOM':>6} {'KEYS':>4} {'ARM':<16} {'SAMPLES':>7} "
    head += f"{'HIT':>6} {'ALONE':>6} {'ORPHANS':>8} {'REJECTED':>9}"
    costs = [
        f"{cost.command:<8} {f'evicting, {cost.samples} samples' if cost.samples else '':<22} "
        f"{cost.ms_per_1000:>6.2f} ms of server CPU per 1,000 keys"
        for cost in report.costs
    ]
    return "\n".join([head, *map(_line, report.rows), "", *costs, f"took {report.took_s:.0f} s"])


def _line(row: Row) -> str:
    return (
        f"{row.trace[:24]:<24} {row.chunks:>6} {row.stripes or '':>4} {row.arm:<16} {row.samples or '':>7} "
        f"{100 * row.hit_last_half:>5.1f}% {_percent(row.alone_last_half):>6} {_percent(row.orphans):>8}"
        f" {row.rejected if row.rejected is not None else '':>9}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _numbers(flag: str, text: str, highest: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise MisconfiguredError(f"{flag} {text!r}: give whole numbers, as in 1,8") from error
    for number in numbers:
        if not 1 <= number <= highest:
            raise MisconfiguredError(f"{flag} {number}: between 1 and {highest}")
    return numbers
