"""``kvferry demo``: a fleet on this machine that proves reuse with a real model and a real engine."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.config import parse_valkey
from kvferry.demo import report
from kvferry.demo.fleet import Fleet, FleetSettings, plan_replicas
from kvferry.demo.model import demo_model
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.demo.scenario import Scenario, model_label
from kvferry.demo.steps import Step
from kvferry.demo.storage import StorageSettings
from kvferry.errors import MisconfiguredError

EXIT_FAILED = 1
EXIT_CHECKED = 3
POOL_BYTES = 320 << 20  # RAM that the demo's documents overflow
VALKEY_MEMORY = "400mb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's arguments; all have defaults."""
    parser.add_argument("--valkey", metavar="URL", help="use this server instead of starting one")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="vLLM replicas (default 2)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="serve this model directory instead")
    parser.add_argument(
        "--report", type=Path, default=Path("kvferry-demo.html"), metavar="FILE", help="HTML report to write"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on standard output")
    # For ./demo, which installs the engine only for a command line that makes sense.
    parser.add_argument("--check-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="leave the fleet up at the end, until Ctrl-C")


def main(args: argparse.Namespace) -> int:
    """Run it. Exit code 0 when everything was proved, 1 when something was not, 130 when stopped.

    With ``--check-only``, EXIT_CHECKED when the arguments are good, and nothing is started.
    """
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    check_writable(args.report)
    if args.valkey is not None:
        parse_valkey(args.valkey, "--valkey")
    replicas = plan_replicas(args.replicas)
    if args.check_only:
        return EXIT_CHECKED
    with stop_on_signals():
        try:
            settings = FleetSettings(
                model=demo_model(chosen=args.model, say=say),
                replicas=replicas,
                pool_bytes=POOL_BYTES,
                valkey_url=args.valkey,
                valkey_memory=VALKEY_MEMORY,
                storage=StorageSettings(),
            )
            with Fleet(settings, say=say) as fleet:
                fleet.start()
                scenario = Scenario(fleet, say=say)
                steps = _run(scenario, say=say)
                setting = _setting(scenario, seconds=time.monotonic() - begun)
                code = _publish(steps, setting, args=args, say=say)
                fleet.keep_directory = code != 0
                if args.keep:
                    _keep(fleet, scenario, say=say)
                return code
        except StoppedError as stopped:
            say(f"{stopped}; everything it started has been stopped")
            return EXIT_INTERRUPTED


def _run(scenario: Scenario, *, say: Callable[[str], None]) -> list[Step]:
    steps = []
    for step in scenario.run():
        steps.append(step)
        say("  ".join(cell for cell in report.row(step) if cell))
        for problem in step.problems:
            say(f"  PROBLEM: {problem}")
    return steps


def _setting(scenario: Scenario, *, seconds: float) -> report.Setting:
    settings = scenario.fleet.settings
    return report.Setting(
        model=model_label(settings.model),
        replicas=len(settings.replicas),
        cores=len(os.sched_getaffinity(0)),
        prompt_tokens=max(len(prompt) for prompt in scenario.prompts.prompts),
        boundary_tokens=scenario.boundary,
        block_tokens=scenario.block_tokens,
        seconds=seconds,
    )


def _publish(
    steps: Sequence[Step], setting: report.Setting, *, args: argparse.Namespace, say: Callable[[str], None]
) -> int:
    """Print, write the report, and give the exit code."""
    if args.json:
        print(json.dumps(report.document(steps, setting), indent=2))
    else:
        print(f"\n{report.terminal(steps)}\n\n{setting.line()}", flush=True)
    args.report.write_text(report.html(steps, setting), encoding="utf-8")
    say(f"report: {args.report.resolve()}")
    wrong = report.problems(steps)
    for problem in wrong:
        say(f"FAILED: {problem}")
    return EXIT_FAILED if wrong else 0


def _keep(fleet: Fleet, scenario: Scenario, *, say: Callable[[str], None]) -> None:
    """Wait for Ctrl-C with the fleet up."""
    fleet.keep_directory = True
    last = scenario.story_id or "REQUEST"
    ports = ", ".join(f"{name} http://127.0.0.1:{replica.port}" for name, replica in fleet.replicas.items())
    python = f"{sys.executable} -m kvferry"
    print(
        f"""
The fleet is up: replicas {ports}, Valkey {fleet.valkey_url}. Try:

  {python} status --socket {fleet.socket_path}
  {python} explain {last} --socket {fleet.socket_path}
  curl -s http://127.0.0.1:{fleet.replicas["A"].port}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "demo", "max_tokens": 32, "prompt": "A ferry is"}}'
  tail -f {fleet.directory}/*.log

Ctrl-C stops everything.""",
        file=sys.stderr,
        flush=True,
    )
    say("waiting")
    while True:
        time.sleep(3600)


def check_writable(path: Path) -> None:
    """Better now than after the run. Raises MisconfiguredError."""
    directory = path.resolve().parent
    if path.is_dir():
        raise MisconfiguredError(f"--report {path} is a directory; name a file")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise MisconfiguredError(
            f"--report {path}: cannot write into {directory}: {error.strerror}; name another file"
        ) from error
