"""``kvferry bench router``: what the router costs and what its choice is worth."""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.router import choice, latency, memory, report, routers
from kvferry.bench.router.latency import Load
from kvferry.bench.router.report import Report
from kvferry.bench.router.routers import CACHE_AWARE, DIRECT, OURS, ROUND_ROBIN, Arm
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError

SECTIONS = ("latency", "tokens", "saturated", "choice", "memory", "replicas")
SIZES = (200, 16 << 10, 220 << 10)
TOKENS = {1: 2, 64: 40, 256: 100}  # of an answer: the more streams, the longer they last
STEP_S = 0.025
QUICK_STEP_S = 0.01
MAX_ROUNDS = 100
REPLICAS_ROUNDS = 2  # at most: each arm takes four minutes
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What all sections need to know."""

    args: argparse.Namespace
    peer: str
    directory: Path
    say: Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All have defaults; the whole takes two and a half hours on two cores."""
    add = parser.add_argument
    add("--only", default=",".join(SECTIONS), metavar="LIST", help=f"sections to run ({','.join(SECTIONS)})")
    add("--vllm-router", metavar="PATH", help="the command of the router to compare with")
    add("--without-peer", action="store_true", help="measure ours alone")
    add("--rounds", type=int, default=3, metavar="N", help="of each measurement (default 3)")
    add("--seconds", type=float, default=4.0, metavar="S", help="of each run of latency and tokens (4)")
    add("--streams", default="1,64,256", metavar="N,N", help="at a time (1,64,256)")
    add("--bytes", default=",".join(map(str, SIZES)), metavar="N,N", help="of the prompts (200,16384,225280)")
    add("--prefixes", type=int, default=1_000_000, metavar="N", help="of section memory (a million)")
    add("--seed", type=int, default=secrets.randbelow(1 << 32), metavar="N", help="default: a new one")
    add("--json", action="store_true", help="all figures, for programs")


def main(args: argparse.Namespace) -> int:
    """Run it. A figure that is short of what is wanted is shown, not failed."""
    sections = tuple(name for name in args.only.split(",") if name)
    for name in sections:
        if name not in SECTIONS:
            raise MisconfiguredError(f"--only {name}: sections are {', '.join(SECTIONS)}")
    if not 1 <= args.rounds <= MAX_ROUNDS:
        raise MisconfiguredError(f"--rounds {args.rounds}: between 1 and {MAX_ROUNDS}")
    peer = "" if args.without_peer else routers.vllm_router(args.vllm_router)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    found = Report(setting={"seed": args.seed, "rounds": args.rounds, "seconds": args.seconds})
    with stop_on_signals(), tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        setting = Setting(args, peer, Path(directory), say)
        try:
            for name in sections:
                _SECTIONS[name](found, setting)
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED
    found.setting["run_s"] = round(time.monotonic() - begun)
    print(json.dumps(found.document(), indent=2) if args.json else f"\n{report.terminal(found)}\n")
    return 0


def arms_of(setting: Setting, *wanted: Arm) -> list[Arm]:
    """These, without vllm-router where that is left out."""
    return [arm for arm in wanted if setting.peer or arm.kind != "vllm-router"]


def _numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise MisconfiguredError(f"{flag} {text}: numbers with commas between") from error
    if min(numbers) < 1:
        raise MisconfiguredError(f"{flag} {text}: at least 1")
    return numbers


def _cells(loads: list[Load], setting: Setting) -> list[latency.Cell]:
    return latency.measure(
        loads,
        arms_of(setting, DIRECT, OURS, CACHE_AWARE, ROUND_ROBIN),
        rounds=setting.args.rounds,
        seconds=setting.args.seconds,
        seed=setting.args.seed,
        directory=setting.directory,
        peer=setting.peer,
        say=setting.say,
    )


def _latency(found: Report, setting: Setting) -> None:
    loads = [
        Load(streams, nbytes, TOKENS.get(streams, max(2, min(100, streams))), STEP_S)
        for streams in _numbers(setting.args.streams, "--streams")
        for nbytes in _numbers(setting.args.bytes, "--bytes")
    ]
    found.latency = _cells(loads, setting)


def _tokens(found: Report, setting: Setting) -> None:
    found.tokens = _cells([Load(64, 200, 200, QUICK_STEP_S)], setting)


def _saturated(found: Report, setting: Setting) -> None:
    found.saturated = _cells([Load(64, nbytes, 1, 0.0) for nbytes in SIZES], setting)


def _choice(found: Report, setting: Setting) -> None:
    for tier in (choice.TIER, None):
        found.choices.append(
            choice.measure(
                arms_of(setting, OURS, CACHE_AWARE, ROUND_ROBIN),
                tier=tier,
                rounds=setting.args.rounds,
                seed=setting.args.seed,
                directory=setting.directory,
                peer=setting.peer,
                say=setting.say,
            )
        )


def _memory(found: Report, setting: Setting) -> None:
    found.memory = memory.measure(
        arms_of(setting, OURS, CACHE_AWARE),
        prefixes=setting.args.prefixes,
        directory=setting.directory,
        peer=setting.peer,
        say=setting.say,
    )


def _replicas(found: Report, setting: Setting) -> None:
    from kvferry.bench.router import replicas

    for shared in (True, False):
        found.choices.append(
            replicas.measure(
                arms_of(setting, OURS, CACHE_AWARE),
                shared=shared,
                rounds=min(setting.args.rounds, REPLICAS_ROUNDS),
                seed=setting.args.seed,
                directory=setting.directory,
                peer=setting.peer,
                say=setting.say,
            )
        )


_SECTIONS: dict[str, Callable[[Report, Setting], Any]] = {
    "latency": _latency,
    "tokens": _tokens,
    "saturated": _saturated,
    "choice": _choice,
    "memory": _memory,
    "replicas": _replicas,
}
