"""``kvferry bench lmcache``: LMCache's own ``bench l2`` over its Valkey adapters and over ours, in turn.

Every turn runs ``lmcache bench l2 --no-skip-verify`` once per arm, each in a process of its own against a
server of its own. The arm ``bare`` is the limit of server and loopback: one socket that moves the same
objects and verifies nothing. A figure is the median over turns of the median round that LMCache reports; a
ratio is the median of the turns' own ratios, shown with its quartiles.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.bench.tier_arms import BareArm, parts_in_memory
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.testing.servers import Server, running_server

OURS = "kvferry"
KEYS = 64
DATA_KIB = 2560
ROUNDS = 6
TURNS = 7
MAX_KEYS = 4096
MAX_DATA_KIB = 1 << 20
MAX_ROUNDS = 1000
RUN_S = 600.0
TAIL_CHARACTERS = 2000
WARMUP_ROUNDS = 1
SERVER_ROOM = 1.5
"""Of what is stored in one run: so much memory the server may take before it would evict."""
WANTED_LOAD = {"resp": 1.25, "resp-2": 1.25, "valkey": 2.2}
WANTED_STORE = 1.0
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """adapter: LMCache's ``--l2-adapter`` for a server's port. needs: a package; empty: none."""

    name: str
    adapter: Callable[[int], dict[str, Any]]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one arm, in GB/s of the median round."""

    store_gb_s: float
    load_gb_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One operation: GB/s per arm; and per peer the ratio of ours to it, with its quartiles."""

    operation: str
    gb_s: dict[str, float]
    ratio: dict[str, float]
    quartiles: dict[str, tuple[float, float]]


@dataclass(slots=True)
class Report:
    """Everything measured; ``not_measured`` names an arm and why it did not run."""

    server: str = ""
    turns: int = 0
    rounds: int = 0
    keys: int = 0
    data_kib: int = 0
    operations: list[Compared] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)


def _resp(port: int, **extra: int) -> dict[str, Any]:
    return {"type": "resp", "host": "127.0.0.1", "port": port, **extra}


def _ours(port: int, **params: int) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvferry.engines.lmcache.adapter",
        "class_name": "KvferryL2Adapter",
        "adapter_params": {"valkey": f"valkey://127.0.0.1:{port}", **params},
    }


ARMS = (
    Arm(OURS, _ours),
    Arm("resp", _resp),
    Arm("resp-2", lambda port: _resp(port, num_workers=2)),
    Arm("valkey", lambda port: {"type": "valkey", "startup_nodes": f"127.0.0.1:{port}"}, needs="glide_sync"),
)
BARE = "bare"
# For tuning: another number of connections than the default.
VARIANTS = tuple(
    Arm(f"{OURS}-{n}", partial(_ours, fetch_connections=n, store_connections=n)) for n in (1, 2, 3, 4)
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvferry bench lmcache``."""
    names = ",".join((*(arm.name for arm in ARMS), BARE))
    for flag, default, what in (
        ("--turns", TURNS, "runs of each arm"),
        ("--rounds", ROUNDS, "rounds within a run"),
        ("--keys", KEYS, "objects per round"),
        ("--data-kib", DATA_KIB, "KiB per object"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default {default})")
    variants = f"{VARIANTS[0].name} to {VARIANTS[-1].name}"
    parser.add_argument(
        "--arms",
        default=names,
        metavar="ARM,...",
        help=f"some of {names}, or {variants} for so many connections each way",
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; figures that fall short are marked, not failed."""
    for flag, number, highest in (
        ("--turns", args.turns, MAX_ROUNDS),
        ("--rounds", args.rounds, MAX_ROUNDS),
        ("--keys", args.keys, MAX_KEYS),
        ("--data-kib", args.data_kib, MAX_DATA_KIB),
    ):
        if not 1 <= number <= highest:
            raise MisconfiguredError(f"{flag} {number}: between 1 and {highest}")
    chosen = args.arms.split(",")
    known: dict[str, Arm | None] = {arm.name: arm for arm in (*ARMS, *VARIANTS)} | {BARE: None}
    for name in chosen:
        if name not in known:
            raise MisconfiguredError(f"--arms {name!r}: arms are {', '.join(known)}")
    if importlib.util.find_spec("lmcache") is None:
        raise MisconfiguredError("LMCache is not installed: pip install --no-deps -r locks/lmcache.txt")
    report = Report(turns=args.turns, rounds=args.rounds, keys=args.keys, data_kib=args.data_kib)
    try:
        with stop_on_signals():
            run(
                report,
                [arm for name in chosen if (arm := known[name]) is not None],
                bare=BARE in chosen,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except StoppedError as stopped:
        print(f"{stopped}; its server has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    return 0


def run(
    report: Report,
    arms: Sequence[Arm],
    *,
    bare: bool = False,
    progress: Progress = lambda line: None,
) -> None:
    """Fill in the report. Raises BrokenError where LMCache finds that bytes came back different."""
    ways: dict[str, Callable[[], Run]] = {}
    for arm in arms:
        if arm.needs and importlib.util.find_spec(arm.needs) is None:
            report.not_measured[arm.name] = f"{arm.needs} is not installed"
        else:
            ways[arm.name] = partial(_measure, arm, report)
    if bare:
        ways[BARE] = partial(_measure_bare, report)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(report.turns):
        for name in ways if turn % 2 else reversed(ways):
            found = ways[name]()
            runs[name].append(found)
            progress(
                f"turn {turn + 1}/{report.turns} {name}: "
                f"load {found.load_gb_s:.2f}, store {found.store_gb_s:.2f} GB/s"
            )
    report.operations = [
        _compared("load", {name: [one.load_gb_s for one in of] for name, of in runs.items()}),
        _compared("store", {name: [one.store_gb_s for one in of] for name, of in runs.items()}),
    ]


def _server(report: Report) -> contextlib.AbstractContextManager[Server]:
    """One for each run, so that none meets what another has left."""
    stored_bytes = (report.rounds + WARMUP_ROUNDS) * report.keys * report.data_kib << 10
    room = max(int(stored_bytes * SERVER_ROOM), 64 << 20)
    return running_server("--maxmemory", str(room), "--maxmemory-policy", "allkeys-lru")


def _measure_bare(report: Report) -> Run:
    part_bytes, nbytes = report.data_kib << 10, report.keys * report.data_kib << 10
    store_s: list[float] = []
    load_s: list[float] = []
    with _server(report) as server, parts_in_memory(part_bytes, nbytes) as made:
        arm, parts = BareArm(server.address), made
        try:
            for _ in range(WARMUP_ROUNDS + report.rounds):
                for view in parts.target:
                    view[:] = bytes(view.nbytes)  # what does not arrive is seen
                began = time.perf_counter()
                arm.set(parts)
                stored = time.perf_counter()
                arm.get(parts)
                load_s.append(time.perf_counter() - stored)
                store_s.append(stored - began)
                parts.verify()
                parts = parts.renamed()
        finally:
            arm.close()
    medians = [statistics.median(times[WARMUP_ROUNDS:]) for times in (store_s, load_s)]
    return Run(store_gb_s=nbytes / medians[0] / 1e9, load_gb_s=nbytes / medians[1] / 1e9)


def _measure(arm: Arm, report: Report) -> Run:
    with (
        _server(report) as server,
        tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory,
    ):
        report.server = report.server or _version(server)
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify"]
        command += ["--l2-adapter", json.dumps(arm.adapter(server.port)), "--num-keys", str(report.keys)]
        command += ["--data-size-kb", str(report.data_kib), "--rounds", str(report.rounds)]
        command += ["--warmup-rounds", str(WARMUP_ROUNDS), "--format", "json", "--output", str(result)]
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, env=env)
        except subprocess.TimeoutExpired as error:
            raise BrokenError(f"{arm.name}: lmcache bench l2 did not end within {RUN_S:.0f} s") from error
        if ran.returncode != 0 or "data verified OK" not in ran.stdout:
            tail = (ran.stdout + ran.stderr)[-TAIL_CHARACTERS:]
            raise BrokenError(f"{arm.name}: lmcache bench l2 ended with {ran.returncode}: {tail}")
        return _parsed(arm, json.loads(result.read_text()), report)


def _parsed(arm: Arm, document: Any, report: Report) -> Run:
    """Of what ``--format json`` writes. BrokenError unless every object was stored and loaded."""
    found: dict[str, float] = {}
    nbytes = report.keys * report.data_kib << 10
    for section in document["metrics"].values():
        operation = section.get("operation")
        if operation in ("Store", "Load"):
            if section["total_success"] != report.rounds * report.keys:
                raise BrokenError(f"{arm.name}: {operation}: only {section['total_success']} objects")
            found[operation] = nbytes / max(section["duration_p50_ms"], 0.01) / 1e6
    return Run(store_gb_s=found["Store"], load_gb_s=found["Load"])


def _version(server: Server) -> str:
    reply = server.ask("INFO", "server")
    lines = reply.decode("utf-8", "replace").splitlines() if isinstance(reply, bytes) else []
    versions = [line for line in lines if line.startswith(("valkey_version:", "redis_version:"))]
    return versions[-1].replace("_version:", " ") if versions else "unknown"


def _compared(operation: str, gb_s: dict[str, list[float]]) -> Compared:
    ours = gb_s.get(OURS, [])
    ratio: dict[str, float] = {}
    quartiles: dict[str, tuple[float, float]] = {}
    for peer, theirs in gb_s.items():
        if peer != OURS and ours:
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            cut = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            ratio[peer], quartiles[peer] = statistics.median(ratios), (cut[0], cut[2])
    medians = {name: statistics.median(values) for name, values in gb_s.items()}
    return Compared(operation, medians, ratio, quartiles)


def render(report: Report) -> str:
    """The report as text."""
    lines = [
        f"{report.server}, {report.turns} turns of {report.rounds} rounds of {report.keys} x "
        f"{report.data_kib / 1024:g} MiB, one machine, loopback",
        "",
        f"{'GB/s':6}{'':>16}{OURS:>10}{'ratio':>8}{'quartiles':>14}{'wanted':>8}",
    ]
    for row in report.operations:
        for peer, ratio in row.ratio.items():
            low, high = row.quartiles[peer]
            line = (
                f"{row.operation:6}{peer:>10}{row.gb_s[peer]:>6.2f}{row.gb_s[OURS]:>10.2f}{ratio:>8.2f}"
                f"{f'{low:.2f}-{high:.2f}':>14}"
            )
            if peer != BARE:
                wanted = WANTED_LOAD.get(peer, 1.0) if row.operation == "load" else WANTED_STORE
                line += f"{wanted:>8.2f}" + ("" if ratio >= wanted else "  short")
            lines.append(line)
    lines += [f"{arm}: not measured: {why}" for arm, why in report.not_measured.items()]
    return "\n".join(lines)
