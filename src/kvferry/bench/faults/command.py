"""``kvferry bench faults``: what a fault costs a request, the requests after it, and how reuse returns."""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.bench.faults import report
from kvferry.bench.faults.kinds import KINDS, Kind, Moment
from kvferry.bench.faults.stage import Stage
from kvferry.bench.faults.trial import Trial, Trials
from kvferry.bench.prompts import Prompts
from kvferry.demo.engineview import block_tokens_of
from kvferry.demo.model import demo_model
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError, RetryError

TAIL_TOKENS = 20
MAX_ROUNDS = 100
MAX_TOKENS = 100_000
MIN_TOKENS = 512
EXIT_WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All have defaults; the whole takes about ten minutes on two cores."""
    add = partial(parser.add_argument, type=int, metavar="N")
    add("--rounds", default=1, help="trials of each fault before and during a load (default 1)")
    add("--tokens", default=1536, help="of a prompt, rounded down to whole blocks (default 1536)")
    add("--seed", default=secrets.randbelow(1 << 32), help="of the prompts (default: a new one)")
    names = ", ".join(_word(kind) for kind in KINDS)
    parser.add_argument("--only", default="", metavar="LIST", help=f"faults to try: {names}")
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this model directory")
    parser.add_argument("--json", action="store_true", help="figures and every trial as JSON")
    parser.add_argument("--keep-logs", action="store_true", help="leave the run directory")


def main(args: argparse.Namespace) -> int:
    """Run it. Exit code 1 for a wrong answer or a trial that failed; a bound that is passed is marked."""
    kinds = _kinds(args.only)
    for name, lowest, highest in (("rounds", 1, MAX_ROUNDS), ("tokens", MIN_TOKENS, MAX_TOKENS)):
        if not lowest <= getattr(args, name) <= highest:
            raise MisconfiguredError(f"--{name} {getattr(args, name)}: between {lowest} and {highest}")
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="kvferry-times-") as times:
        try:
            stage = Stage(demo_model(chosen=args.model, say=say), times=Path(times), say=say)
            trials = _measure(stage, kinds, args=args, say=say)
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED
    setting: dict[str, Any] = {
        "tokens": args.tokens,
        "rounds": args.rounds,
        "seed": args.seed,
        "run s": round(time.monotonic() - begun),
    }
    print(
        json.dumps(report.document(trials, setting), indent=2)
        if args.json
        else f"\n{report.terminal(trials)}\n"
    )
    wrong = report.problems(trials)
    for problem in wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    return EXIT_WRONG if wrong else 0


def _measure(
    stage: Stage, kinds: tuple[Kind, ...], *, args: argparse.Namespace, say: Callable[[str], None]
) -> list[Trial]:
    found: list[Trial] = []
    with stage:
        stage.fleet.keep_directory = args.keep_logs
        stage.start()
        block_tokens = block_tokens_of(stage.a.metrics())
        tokens = args.tokens // block_tokens * block_tokens + TAIL_TOKENS
        trials = Trials(stage, Prompts(args.seed), tokens=tokens, block_tokens=block_tokens)
        trials.warm_up()
        plan = [(kind, moment) for kind in kinds for moment in Moment for _ in range(args.rounds)]
        for kind, moment in plan:
            try:
                found.append(trials.run(kind, moment))
            except RetryError as error:  # something never came back: what follows would measure that
                found.append(Trial(kind.name, moment.value, problems=[str(error)]))
                break
            say(_line(found[-1]))
        stage.fleet.keep_directory |= bool(report.problems(found))
    return found


def _line(trial: Trial) -> str:
    usual, lost, spent = (
        ", ".join(f"{seconds * 1e3:.1f}" for seconds in found)
        for found in (
            [paid.lost_s for paid in trial.usual],
            [paid.lost_s for paid in trial.after],
            [paid.spent_s for paid in trial.after],
        )
    )
    back = "never" if trial.back_s is None else f"{trial.back_s:.1f} s"
    back += f" (until then: {', '.join(trial.back_reasons)})" if trial.back_reasons else ""
    wrong = f"; WRONG: {'; '.join(trial.problems)}" if trial.problems else ""
    return (
        f"{trial.fault} {trial.moment}: {trial.ttft_s:.2f} s, at most {trial.bound_s:.2f} s; "
        f"{trial.loaded_blocks} of {trial.wanted_blocks} blocks loaded; later requests lost {lost} ms "
        f"(before it {usual}) and spent {spent} on loads; "
        f"reuse back after {back}{wrong}"
    )


def _word(kind: Kind) -> str:
    return kind.name.lower().replace(" ", "-")


def _kinds(only: str) -> tuple[Kind, ...]:
    words = [word for word in only.split(",") if word]
    known = {_word(kind): kind for kind in KINDS}
    for word in words:
        if word not in known:
            raise MisconfiguredError(f"--only {word}: faults are {', '.join(known)}")
    return tuple(known[word] for word in words) or KINDS
