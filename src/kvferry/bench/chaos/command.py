"""``kvferry bench chaos``: engines that check every byte, while nodes, engines and Valkey are broken."""

import argparse
import json
import sys

from kvferry.bench.chaos import report
from kvferry.bench.chaos.run import Plan, run
from kvferry.demo.processes import StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count

KILLS = 8
EXIT_BAD = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--kills", default=str(KILLS), metavar="N", help=f"kills (default {KILLS})")
    parser.add_argument("--seconds", metavar="S", help="no fault begins later than this")
    parser.add_argument("--seed", default="1", metavar="N", help="decides the faults (default 1)")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Run and print. 1 for wrong bytes, leaks, or processes that ended by themselves."""
    plan = Plan(
        kills=_count("--kills", args.kills, 100_000),
        seed=_count("--seed", args.seed, 1 << 32),
        seconds=float(_count("--seconds", args.seconds, 1_000_000)) if args.seconds else float("inf"),
    )
    try:
        with stop_on_signals():
            outcome = run(plan, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except StoppedError as stopped:
        print(f"{stopped}; everything it started has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(report.document(outcome), indent=2) if args.json else report.render(outcome))
    return 0 if outcome.good else EXIT_BAD


def _count(flag: str, text: str, highest: int) -> int:
    try:
        return parse_count(text, lowest=0, highest=highest)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error
