"""``kvferry bench engines``: what a prefix from another replica costs, against the replica's own hit."""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.bench import engine_report, hook_times, restart
from kvferry.bench.engine_arms import DISK, OBJECTS, VALKEY, Arms, Results, idle_node
from kvferry.bench.prompts import Prompts
from kvferry.config import parse_valkey
from kvferry.demo.engineview import block_tokens_of
from kvferry.demo.fleet import Fleet, FleetSettings, ReplicaPlan, plan_replicas
from kvferry.demo.main import check_writable
from kvferry.demo.model import demo_model
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.demo.storage import StorageSettings
from kvferry.errors import MisconfiguredError

SECTIONS = ("fixed", "random", "deep", "cold", "throughput", "idle")
RANDOM_TOKENS = (1000, 6000)
BATCH_REQUESTS = 8
BATCH_TOKENS = 512
BATCH_CONCURRENCY = 4
IDLE_S = 5.0
MAX_ROUNDS = 1000
MAX_TOKENS = 1_000_000
MAX_GAP_S = 3600
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All have defaults; the whole takes about ten minutes on two cores."""
    add = partial(parser.add_argument, type=int, metavar="N")
    add("--prefixes", default=4, help="new prefixes per section fixed and random (default 4)")
    add("--repeats", default=3, help="loads of each prefix from each tier (default 3)")
    add("--tokens", default=6000, help="prefix of section fixed (default 6000)")
    add("--cold", default=4, help="cold prompts with and without the connector (default 4)")
    add("--cold-tokens", default=2048, help="tokens of a cold prompt (default 2048)")
    add("--batches", default=3, help="batches with and without the connector (default 3)")
    add("--seed", default=secrets.randbelow(1 << 32), help="of the prompts (default: a new one)")
    parser.add_argument("--gap", type=float, default=1.2, metavar="S", help="pause before a request (1.2)")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), metavar="LIST", help=f"sections to run ({','.join(SECTIONS)})"
    )
    parser.add_argument("--restart", action="store_true", help="restart each part in turn, under traffic")
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this model directory")
    parser.add_argument("--valkey", metavar="URL", help="use this server instead of starting one")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument("--json", action="store_true", help="figures and raw samples as JSON")
    parser.add_argument("--keep-logs", action="store_true", help="leave the run directory")


def main(args: argparse.Namespace) -> int:
    """Run it. Exit code 1 when a pair did not measure what it should; a missed aim is shown, not failed."""
    sections = _sections(args.only)
    for name in ("prefixes", "repeats", "cold", "batches"):
        if not 1 <= getattr(args, name) <= MAX_ROUNDS:
            raise MisconfiguredError(f"--{name} {getattr(args, name)}: between 1 and {MAX_ROUNDS}")
    for name, highest in (("tokens", MAX_TOKENS), ("cold_tokens", MAX_TOKENS), ("gap", MAX_GAP_S)):
        lowest = 0 if name == "gap" else 1
        if not lowest <= getattr(args, name) <= highest:
            flag = "--" + name.replace("_", "-")
            raise MisconfiguredError(f"{flag} {getattr(args, name)}: between {lowest} and {highest}")
    if args.valkey is not None:
        parse_valkey(args.valkey, "--valkey")
    if args.report is not None:
        check_writable(args.report)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    if args.restart:
        return _restart(args, say=say)
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="kvferry-times-") as times:
        try:
            settings = FleetSettings(
                model=demo_model(chosen=args.model, say=say),
                replicas=_replicas(sections),
                storage=StorageSettings(at_start=False) if "deep" in sections else None,
                valkey_url=args.valkey,
                connector=hook_times.CONNECTOR,
                engine_environment=((hook_times.DIRECTORY_VARIABLE, times),),
            )
            results = _measure(settings, sections, args=args, times=Path(times), say=say)
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED
    return _publish(results, args, seconds=time.monotonic() - begun)


def _measure(
    settings: FleetSettings,
    sections: tuple[str, ...],
    *,
    args: argparse.Namespace,
    times: Path,
    say: Callable[[str], None],
) -> Results:
    results = Results()
    with Fleet(settings, say=say) as fleet:
        fleet.keep_directory = args.keep_logs
        fleet.start()
        arms = Arms(
            fleet=fleet,
            prompts=Prompts(args.seed),
            block_tokens=block_tokens_of(fleet.replicas["A"].metrics()),
            gap_s=args.gap,
            say=say,
            hooks_s=partial(hook_times.total_seconds, times),
        )
        arms.warm_up()
        for section in sections:
            _SECTIONS[section](arms, results, args)
        fleet.keep_directory |= bool(engine_report.faults(results))
    return results


def _fixed(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    for _ in range(args.prefixes):
        results.pairs += arms.pairs(engine_report.FIXED, prefix_tokens=args.tokens, repeats=args.repeats)


def _random(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    for _ in range(args.prefixes):
        length = arms.prompts.length(*RANDOM_TOKENS)
        results.pairs += arms.pairs(engine_report.RANDOM, prefix_tokens=length, repeats=args.repeats)


def _deep(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    arms.fleet.start_keeper(objects=True)  # not before: it would copy while other sections are timed
    arms = replace(arms, tiers=(VALKEY, DISK, OBJECTS))
    for _ in range(args.prefixes):
        results.pairs += arms.pairs(engine_report.DEEP, prefix_tokens=args.tokens, repeats=args.repeats)


def _cold(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    for number in range(args.cold):
        results.versus.append(arms.cold(tokens=args.cold_tokens, first_with=number % 2 == 0))


def _throughput(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    for number in range(args.batches):
        results.versus.append(
            arms.throughput(
                requests=BATCH_REQUESTS,
                tokens=BATCH_TOKENS,
                concurrency=BATCH_CONCURRENCY,
                first_with=number % 2 == 0,
            )
        )


def _idle(arms: Arms, results: Results, args: argparse.Namespace) -> None:
    time.sleep(args.gap)
    results.idle = idle_node(int(arms.fleet.node_view.status()["pid"]), seconds=IDLE_S)


_SECTIONS: dict[str, Callable[[Arms, Results, argparse.Namespace], None]] = {
    "fixed": _fixed,
    "random": _random,
    "deep": _deep,
    "cold": _cold,
    "throughput": _throughput,
    "idle": _idle,
}


def _sections(only: str) -> tuple[str, ...]:
    chosen = tuple(name for name in only.split(",") if name)
    for name in chosen:
        if name not in SECTIONS:
            raise MisconfiguredError(f"--only {name}: sections are {', '.join(SECTIONS)}")
    return chosen or SECTIONS


def _replicas(sections: tuple[str, ...]) -> tuple[ReplicaPlan, ...]:
    """A and B on a core each; P, without the connector, shares A's when it is needed."""
    first, second = plan_replicas(2)
    if not {"cold", "throughput"} & set(sections):
        return first, second
    return first, second, replace(first, name="P", connected=False)


def _restart(args: argparse.Namespace, *, say: Callable[[str], None]) -> int:
    """All restarts. Exit code 1 when something that was reusable before one is not after it."""
    if args.valkey is not None or args.report is not None:
        raise MisconfiguredError("--restart starts a Valkey of its own and makes no page; see --json")
    with stop_on_signals():
        try:
            settings = FleetSettings(
                model=demo_model(chosen=args.model, say=say),
                replicas=plan_replicas(2),
                storage=StorageSettings(),
            )
            with Fleet(settings, say=say) as fleet:
                fleet.keep_directory = args.keep_logs
                fleet.start()
                tokens = block_tokens_of(fleet.replicas["A"].metrics())
                done = restart.Rolling(fleet, Prompts(args.seed), tokens, say).run()
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED
    wrong = restart.faults(done)
    print(json.dumps(restart.document(done), indent=2) if args.json else f"\n{restart.terminal(done)}\n")
    for fault in wrong:
        print(f"lost: {fault}", file=sys.stderr)
    return EXIT_FAILED if wrong else 0


def _publish(results: Results, args: argparse.Namespace, *, seconds: float) -> int:
    setting: dict[str, Any] = {
        "prefix tokens": args.tokens,
        "pause s": args.gap,
        "seed": args.seed,
        "run s": round(seconds),
    }
    if args.json:
        print(json.dumps(engine_report.document(results, setting), indent=2))
    else:
        print(f"\n{engine_report.terminal(results)}\n")
    if args.report is not None:
        args.report.write_text(engine_report.html(results, setting), encoding="utf-8")
    wrong = engine_report.faults(results)
    for fault in wrong:
        print(f"does not count: {fault}", file=sys.stderr)
    return EXIT_FAILED if wrong else 0
