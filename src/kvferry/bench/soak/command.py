"""``kvferry bench soak``: conversations on real engines; no answer and no byte may be wrong."""

import argparse
import json
import secrets
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.bench.soak import report
from kvferry.bench.soak.fleet import Size
from kvferry.bench.soak.judging import MAX_TIE, MAX_TIE_16_BIT
from kvferry.bench.soak.run import LONG, SHORT, Plan, run
from kvferry.demo.model import demo_model
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError

MAX_MINUTES = 10_000.0
SHORT_S = 120.0  # below that no engine is restarted, and something happens oftener
SHORT_PACE_S = 5.0
PACE_S = 20.0
MAX_USERS = 256
LONGEST = 1280
BLOCKS = 14
POOL_MB = 64
VALKEY_MB = 32
EXIT_WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All have defaults."""
    add = partial(parser.add_argument, type=int, metavar="N")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="of traffic (default 20)")
    add("--seed", default=secrets.randbelow(1 << 32), help="of traffic and events (default: a new one)")
    add("--users", default=10, help="that talk at once (default 10)")
    add("--blocks", default=BLOCKS, help=f"of each engine's own KV memory: scarce (default {BLOCKS})")
    add("--pool-mb", default=POOL_MB, help=f"the node's host memory (default {POOL_MB})")
    add("--valkey-mb", default=VALKEY_MB, help=f"(default {VALKEY_MB})")
    add("--longest", default=LONGEST, help=f"tokens of prompt and answer (default {LONGEST})")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="float32 (default): rounding decides next to nothing, so answers can be compared",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this model directory")
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    parser.add_argument("--keep-logs", action="store_true", help="leave the run directory")


def main(args: argparse.Namespace) -> int:
    """Run it. Exit code 1 for a wrong answer, a wrong block, or anything that was not given back."""
    _check(args)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    with stop_on_signals():
        try:
            outcome = run(_plan(args, _model(args.model, say)), say=say, keep_logs=args.keep_logs)
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED
    setting = {key: str(value) for key, value in vars(args).items() if key not in ("json", "keep_logs")}
    print(
        json.dumps(report.document(outcome, setting), indent=2)
        if args.json
        else f"\n{report.terminal(outcome)}\n"
    )
    for problem in outcome.problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return EXIT_WRONG if outcome.problems else 0


def _check(args: argparse.Namespace) -> None:
    if not 0.0 < args.minutes <= MAX_MINUTES:
        raise MisconfiguredError(f"--minutes {args.minutes}: more than 0, at most {MAX_MINUTES:.0f}")
    bounds = (
        ("users", 1, MAX_USERS),
        ("longest", LONGEST // 2, 1 << 20),
        ("blocks", 8, 1 << 24),
        ("pool_mb", 64, 1 << 20),
        ("valkey_mb", 1, 1 << 20),
    )
    for name, lowest, highest in bounds:
        if not lowest <= getattr(args, name) <= highest:
            flag = "--" + name.replace("_", "-")
            raise MisconfiguredError(f"{flag} {getattr(args, name)}: between {lowest} and {highest}")


def _model(chosen: Path | None, say: Any) -> Path:
    """A directory with weights; prompts are token ids, so it needs no tokenizer."""
    if chosen is None:
        return demo_model(chosen=None, say=say)
    if not (chosen / "config.json").is_file() or not any(chosen.glob("*.safetensors")):
        raise MisconfiguredError(f"--model {chosen}: no config.json and *.safetensors there")
    return chosen.resolve()


def _plan(args: argparse.Namespace, model: Path) -> Plan:
    seconds = args.minutes * 60.0
    short = seconds < SHORT_S
    config = json.loads((model / "config.json").read_text())
    return Plan(
        model=model,
        vocabulary=int((config.get("text_config") or config)["vocab_size"]),
        seconds=seconds,
        seed=args.seed,
        users=args.users,
        size=Size(
            blocks=args.blocks,
            pool_bytes=args.pool_mb << 20,
            valkey_bytes=args.valkey_mb << 20,
            longest=args.longest,
            dtype=args.dtype,
        ),
        tie=MAX_TIE if args.dtype == "float32" else MAX_TIE_16_BIT,
        pace_s=SHORT_PACE_S if short else PACE_S,
        events=SHORT if short else LONG,
    )
