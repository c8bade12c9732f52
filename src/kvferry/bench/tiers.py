"""``kvferry bench tiers``: parts between Valkey and pool memory, against bare sockets in the same run.

Arms take turns within a round, so that a busy machine hits them alike; figures are medians over rounds,
and a ratio is the median of the rounds' own ratios, shown with its quartiles.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from kvferry.bench.tier_arms import Arm, BareArm, Parts, TierArm, glide_sync, parts_in_memory, valkey_py
from kvferry.bench.tier_beside import BesideRow, beside_lines
from kvferry.bench.tier_checks import (
    MAX_OVERHEAD,
    ROOM,
    SHARDS,
    allocator_overhead,
    shards_add_up,
)
from kvferry.bench.tier_disk import measure_disk
from kvferry.bench.tier_disk_upkeep import Upkeep, measure_upkeep, upkeep_lines
from kvferry.bench.tier_keeper import FlushRow, flush_lines, measure_flush
from kvferry.bench.tier_objects import measure_objects
from kvferry.bench.tier_protection import Protected, measure_protection, protection_lines
from kvferry.demo.processes import EXIT_INTERRUPTED, StoppedError, stop_on_signals
from kvferry.errors import MisconfiguredError
from kvferry.testing.servers import Server, running_server
from kvferry.tiers.valkey.tier import ValkeyTier

PART_MIB = (2.5, 4.0, 6.0, 10.0, 32.0)
ROUNDS = 9
SAMPLE_BYTES = 256 << 20
CHECKS = ("transfers", "protection", "allocator", "shards", "disk", "objects", "keeper")
SHARD_PARTS = 32
MIN_PART_MIB = 0.01
MAX_PART_MIB = 256
MAX_ROUNDS = 1000
MAX_SAMPLE_MIB = 65536
WANTED_RATIO = 0.90
WANTED_OBJECTS_RATIO = 0.85
WANTED_GET_CPU_S_GB = 0.22
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: bytes per second, and CPU seconds of this process per byte."""

    gb_s: float
    cpu_s_gb: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """One operation at one part size. gb_s and cpu_s_gb per arm; ratio of the tier to bare sockets."""

    operation: str
    part_mib: float
    gb_s: dict[str, float]
    cpu_s_gb: dict[str, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


@dataclass(slots=True)
class Report:
    """Everything measured; ``not_measured`` names a check and why it did not run."""

    server: str = ""
    rounds: int = 0
    sample_mib: int = 0
    transfers: list[Transfers] = field(default_factory=list)
    protection: list[Protected] = field(default_factory=list)
    allocator_overhead: dict[str, float] = field(default_factory=dict)
    shards: dict[str, float] = field(default_factory=dict)
    disk: list[BesideRow] = field(default_factory=list)
    disk_upkeep: Upkeep | None = None
    objects: list[BesideRow] = field(default_factory=list)
    keeper: FlushRow | None = None
    not_measured: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvferry bench tiers``."""
    sizes = ",".join(f"{mib:g}" for mib in PART_MIB)
    checks = ",".join(CHECKS)
    sample_mib = SAMPLE_BYTES >> 20
    parser.add_argument("--parts", default=sizes, metavar="MIB,...", help=f"part sizes (default {sizes})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"turns (default {ROUNDS})")
    parser.add_argument(
        "--sample-mib", type=int, default=sample_mib, metavar="N", help=f"MiB per turn (default {sample_mib})"
    )
    parser.add_argument("--only", default=checks, metavar="CHECK,...", help=f"some of {checks}")
    parser.add_argument("--no-peers", action="store_true", help="leave out valkey-py and valkey-glide")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; figures that fall short are marked, not failed."""
    try:
        part_mib = tuple(float(text) for text in args.parts.split(","))
    except ValueError as error:
        raise MisconfiguredError(f"--parts {args.parts!r}: give sizes in MiB, as in 2.5,10") from error
    checks = tuple(args.only.split(","))
    unknown = [check for check in checks if check not in CHECKS]
    if unknown:
        raise MisconfiguredError(f"--only {unknown[0]!r}: checks are {', '.join(CHECKS)}")
    for text, mib in zip(args.parts.split(","), part_mib, strict=True):
        if not MIN_PART_MIB <= mib <= MAX_PART_MIB:
            raise MisconfiguredError(f"--parts {text!r}: between {MIN_PART_MIB} and {MAX_PART_MIB} MiB")
    for flag, number, highest in (
        ("--rounds", args.rounds, MAX_ROUNDS),
        ("--sample-mib", args.sample_mib, MAX_SAMPLE_MIB),
    ):
        if not 1 <= number <= highest:
            raise MisconfiguredError(f"{flag} {number}: between 1 and {highest}")
    try:
        with stop_on_signals():
            report = run(
                part_mib=part_mib,
                rounds=args.rounds,
                sample_bytes=args.sample_mib << 20,
                checks=checks,
                peers=not args.no_peers,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except StoppedError as stopped:
        print(f"{stopped}; its servers have been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    return 0


def run(
    *,
    part_mib: Sequence[float] = PART_MIB,
    rounds: int = ROUNDS,
    sample_bytes: int = SAMPLE_BYTES,
    checks: Sequence[str] = CHECKS,
    peers: bool = True,
    progress: Progress = lambda line: None,
) -> Report:
    """Measure everything in ``checks`` on servers of its own. ``progress`` gets a line now and then."""
    report = Report(rounds=rounds, sample_mib=sample_bytes >> 20)
    if "transfers" in checks:
        with running_server(*ROOM) as server:
            _measure_transfers(report, server, part_mib, rounds, sample_bytes, peers=peers, progress=progress)
    if "protection" in checks:
        with _or_why(report, "protection"):
            progress("checksum, AES-GCM, TLS")
            report.protection = measure_protection(rounds, sample_bytes, room=ROOM)
    if "allocator" in checks:
        with _or_why(report, "allocator"):
            progress("allocator overhead")
            found = allocator_overhead(sample_bytes)
            report.allocator_overhead = {f"{size / (1 << 20):g}": share for size, share in found.items()}
    if "shards" in checks:
        with _or_why(report, "shards"):
            progress(f"{SHARDS} throttled shards")
            one, three = shards_add_up(max(1, min(sample_bytes >> 20, SHARD_PARTS)), min(rounds, 5))
            report.shards = {
                "one_mb_s": statistics.median(one) / 1e6,
                "three_mb_s": statistics.median(three) / 1e6,
                "ratio": statistics.median(b / a for a, b in zip(one, three, strict=True)),
            }
    if "disk" in checks:
        with _or_why(report, "disk"):
            progress("disk")
            report.disk = measure_disk(part_mib, rounds, sample_bytes)
            progress("disk: what it writes beside, and a start")
            report.disk_upkeep = measure_upkeep(sample_bytes)
    if "objects" in checks:
        with _or_why(report, "objects"):
            progress("objects")
            report.objects = measure_objects(part_mib, rounds, sample_bytes)
    if "keeper" in checks:
        with _or_why(report, "keeper"):
            progress("reads beside a keeper that copies")
            report.keeper = measure_flush(rounds, sample_bytes)
    return report


@contextlib.contextmanager
def _or_why(report: Report, check: str) -> Iterator[None]:
    try:
        yield
    except MisconfiguredError as error:
        report.not_measured[check] = str(error)


def _measure_transfers(
    report: Report,
    server: Server,
    part_mib: Sequence[float],
    rounds: int,
    sample_bytes: int,
    *,
    peers: bool,
    progress: Progress,
) -> None:
    tier = ValkeyTier.connect(server.settings())
    report.server = tier.statistics().detail["server"]
    arms: list[Arm] = [BareArm(server.address), TierArm(tier)]
    for make in (valkey_py, glide_sync) if peers else ():
        with _or_why(report, make.__name__):
            arms.append(make(server.address))
    try:
        for mib in part_mib:
            progress(f"parts of {mib:g} MiB")
            report.transfers += _compare(server, arms, mib, rounds, sample_bytes)
    finally:
        for arm in arms:
            arm.close()


def _compare(
    server: Server, arms: Sequence[Arm], part_mib: float, rounds: int, sample_bytes: int
) -> list[Transfers]:
    """GET and SET with every arm in turn. The second arm is compared with the first."""
    with parts_in_memory(int(part_mib * (1 << 20)), sample_bytes) as parts:
        try:
            sets = _take_turns(server, arms, parts, rounds, operation="SET")
            server.ask("FLUSHALL", "SYNC")
            for arm in arms[1:]:
                arm.prepare(parts)
            gets = _take_turns(server, arms, parts, rounds, operation="GET")
            parts.verify()
            server.ask("FLUSHALL", "SYNC")
        except BaseException:
            arms[1].close()  # joins the threads that may still read or fill the parts' memory
            raise
    return [_summary("GET", part_mib, arms, gets), _summary("SET", part_mib, arms, sets)]


def _take_turns(
    server: Server, arms: Sequence[Arm], parts: Parts, rounds: int, *, operation: str
) -> list[list[Sample]]:
    """Samples per arm. The first round warms up and is not counted."""
    samples: list[list[Sample]] = [[] for _ in arms]
    for number in range(rounds + 1):
        order = list(enumerate(arms))
        for index, arm in order if number % 2 else reversed(order):
            if index >= 2 and number % 3 != 1 and rounds > 3:
                continue  # the peers are slow and only for orientation: a third of the rounds
            if operation == "SET":
                server.ask("FLUSHALL", "SYNC")
            sample = _sample(arm.get if operation == "GET" else arm.set, parts)
            if number:
                samples[index].append(sample)
    return samples


def _sample(work: Callable[[Parts], None], parts: Parts) -> Sample:
    cpu_s, began = time.process_time(), time.perf_counter()
    work(parts)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return Sample(parts.nbytes / elapsed_s / 1e9, cpu_s / (parts.nbytes / 1e9))


def _summary(
    operation: str, part_mib: float, arms: Sequence[Arm], samples: Sequence[Sequence[Sample]]
) -> Transfers:
    ratios = [ours.gb_s / bare.gb_s for bare, ours in zip(samples[0], samples[1], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    found = {arm.name: of for arm, of in zip(arms, samples, strict=True) if of}
    return Transfers(
        operation=operation,
        part_mib=part_mib,
        gb_s={name: statistics.median(s.gb_s for s in of) for name, of in found.items()},
        cpu_s_gb={name: statistics.median(s.cpu_s_gb for s in of) for name, of in found.items()},
        ratio=statistics.median(ratios),
        ratio_quartiles=(quartiles[0], quartiles[2]),
    )


def render(report: Report) -> str:
    """The report as text."""
    where = f"{report.server}, loopback" if report.server else "one machine"
    lines = [f"{where}, {report.rounds} rounds of {report.sample_mib} MiB", ""]
    if report.transfers:
        lines += _transfer_lines(report.transfers)
    lines += protection_lines(report.protection)
    lines += beside_lines("disk", report.disk, WANTED_RATIO)
    lines += upkeep_lines(report.disk_upkeep)
    lines += beside_lines("objects", report.objects, WANTED_OBJECTS_RATIO)
    lines += flush_lines(report.keeper)
    if report.allocator_overhead:
        shares = ", ".join(f"{mib} MiB {share:.1%}" for mib, share in report.allocator_overhead.items())
        worst = max(report.allocator_overhead.values())
        mark = "" if worst <= MAX_OVERHEAD else f"   (above {MAX_OVERHEAD:.0%})"
        lines.append(f"allocator overhead on jemalloc: {shares}{mark}")
    if report.shards:
        one, three, ratio = (report.shards[name] for name in ("one_mb_s", "three_mb_s", "ratio"))
        lines.append(f"throttled shards: one {one:.0f} MB/s, {SHARDS} {three:.0f} MB/s, {ratio:.2f} times")
    lines += [f"{check}: not measured: {why}" for check, why in report.not_measured.items()]
    return "\n".join(lines)


def _transfer_lines(rows: Sequence[Transfers]) -> list[str]:
    peers = [name for name in rows[0].gb_s if name not in ("bare", "kvferry")]
    head = ("", "part MiB", "bare", "kvferry", "ratio", "quartiles", "CPU s/GB", "(bare)", *peers)
    lines = [_line(head)]
    for row in rows:
        low, high = row.ratio_quartiles
        cpu = row.cpu_s_gb["kvferry"]
        short = row.ratio < WANTED_RATIO or (row.operation == "GET" and cpu > WANTED_GET_CPU_S_GB)
        cells = [row.operation, f"{row.part_mib:g}", f"{row.gb_s['bare']:.2f}", f"{row.gb_s['kvferry']:.2f}"]
        cells += [f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}", f"{cpu:.3f}", f"{row.cpu_s_gb['bare']:.3f}"]
        cells += [f"{row.gb_s[name]:.2f}" if name in row.gb_s else "-" for name in peers]
        lines.append(_line(cells) + ("  short" if short else ""))
    return [*lines, f"GB/s; wanted: ratio {WANTED_RATIO:.2f}, GET at {WANTED_GET_CPU_S_GB} CPU s/GB", ""]


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>11}" if place else f"{cell:4}" for place, cell in enumerate(cells))
