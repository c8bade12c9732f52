"""``kvferry bench chaos``: engines that check every byte, while nodes, engines and Valkey are broken."""

import argparse
import json
import sys

from kvferry.bench.chaos import report
from kvferry.bench.chaos.fleet import Plan
from kvferry.bench.chaos.run import run
from kvferry.bench.chaos.soak import WARM_REQUESTS, soak
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count

KILLS = 8
MAX_KILLS = 100_000
MAX_SECONDS = 1_000_000
EXIT_BAD = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--kills", metavar="N", help=f"processes to kill, among other faults (default {KILLS})"
    )
    parser.add_argument("--seconds", metavar="S", help="no fault begins later (default: when all are done)")
    parser.add_argument("--seed", default="1", metavar="N", help="decides which faults when (default 1)")
    parser.add_argument("--soak", metavar="S", help="instead: gentle load and few faults for so long")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Run and print. 1 for wrong bytes, leaks, or processes that ended by themselves."""
    if args.soak is not None and (args.kills is not None or args.seconds is not None):
        raise MisconfiguredError("--soak has faults and a length of its own; leave out --kills and --seconds")
    seed = _count("--seed", args.seed, highest=1 << 32)
    try:
        with stop_on_signals():
            if args.soak is not None:
                seconds = _count("--soak", args.soak, highest=MAX_SECONDS)
                outcome, trends = soak(soak_plan(seconds, seed), progress=_tell)
                found = report.document(outcome) | report.trends_document(trends)
                text = report.render(outcome, trends)
            else:
                outcome = run(_plan(args, seed), progress=_tell)
                found, text = report.document(outcome), report.render(outcome)
    except StoppedError as stopped:
        print(f"{stopped}; everything it started has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(found, indent=2) if args.json else text)
    return 0 if outcome.good else EXIT_BAD


def soak_plan(seconds: int, seed: int) -> Plan:
    """After the warm-up a request every second and engine, and a fault every two minutes."""
    return Plan(
        seconds=float(seconds),
        seed=seed,
        pace_s=120.0,
        users=1,
        pause_s=1.0,
        warm_requests=WARM_REQUESTS,
        lasts_s=600.0,
        heartbeat_s=0.05,
        tick_s=0.25,
        progress_s=60.0,
    )


def _plan(args: argparse.Namespace, seed: int) -> Plan:
    kills = KILLS if args.kills is None else _count("--kills", args.kills, highest=MAX_KILLS)
    if args.seconds is None:
        return Plan(kills=kills, seed=seed)
    return Plan(kills=kills, seed=seed, seconds=float(_count("--seconds", args.seconds, highest=MAX_SECONDS)))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _count(flag: str, text: str, *, highest: int) -> int:
    try:
        return parse_count(text, lowest=0, highest=highest)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error
