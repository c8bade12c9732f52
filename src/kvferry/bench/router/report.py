"""The report: tables, what was wanted, and what falls short of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.router.choice import Comparison
from kvferry.bench.router.latency import Cell
from kvferry.bench.router.memory import Growth
from kvferry.bench.router.routers import CACHE_AWARE, DIRECT, OURS, ROUND_ROBIN
from kvferry.cli.table import table

PEERS = (CACHE_AWARE.name, ROUND_ROBIN.name)
JUDGED_BYTES = 16 << 10  # and above: no worse than the peers
P50_STREAMS = 64
P50_S = 1e-3
MEAN_WITH_TIER, P99_WITH_TIER = 0.8, 0.6
GROWTH = 0.05


@dataclass(slots=True)
class Report:
    """What was measured; empty parts were not."""

    latency: list[Cell] = field(default_factory=list[Cell])
    tokens: list[Cell] = field(default_factory=list[Cell])
    saturated: list[Cell] = field(default_factory=list[Cell])
    choices: list[Comparison] = field(default_factory=list[Comparison])
    memory: list[Growth] = field(default_factory=list[Growth])
    setting: dict[str, Any] = field(default_factory=dict[str, Any])

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "setting": self.setting,
            "latency": [cell.document() for cell in self.latency],
            "tokens": [cell.document() for cell in self.tokens],
            "saturated": [cell.document() for cell in self.saturated],
            "choices": [comparison.document() for comparison in self.choices],
            "memory": [growth.document() for growth in self.memory],
            "short": shortfalls(self),
        }


def shortfalls(report: Report) -> list[str]:
    """One line for each figure that is not what was wanted."""
    found = [line for cell in report.latency for line in _late(cell)]
    found += [line for comparison in report.choices for line in _worse(comparison)]
    found += [
        f"memory of {growth.arm} grew by {growth.late:.0%} over the last three tenths of the prefixes"
        for growth in report.memory
        if growth.arm == OURS.name and growth.late > GROWTH
    ]
    return found


def _late(cell: Cell) -> list[str]:
    if not {OURS.name, DIRECT.name} <= set(cell.runs):
        return []
    load, found = cell.load, []
    where = f"{load.streams} streams of {size(load.nbytes)}"
    if load.streams == P50_STREAMS and (added := cell.added_s(OURS.name, "ttft_p50_s")) >= P50_S:
        found.append(f"{where}: adds {ms(added)} ms at the median, wanted below {ms(P50_S)}")
    for peer in PEERS:
        if peer not in cell.runs or load.nbytes < JUDGED_BYTES:
            continue
        for what in ("ttft_p50_s", "ttft_p99_s"):
            ours, theirs = cell.added_s(OURS.name, what), cell.added_s(peer, what)
            if ours > theirs:
                found.append(f"{where}: {what[5:8]} adds {ms(ours)} ms, {peer} {ms(theirs)}")
        ours, theirs = (cell.median(arm, "cpu_request_s") for arm in (OURS.name, peer))
        if ours > theirs:
            found.append(f"{where}: CPU {ms(ours)} ms per request, {peer} {ms(theirs)}")
    return found


def _worse(comparison: Comparison) -> list[str]:
    arms = comparison.arms()
    if not {OURS.name, CACHE_AWARE.name} <= set(arms):
        return []
    shared = "no shared tier" not in comparison.setting
    wanted = (MEAN_WITH_TIER, P99_WITH_TIER) if shared else (1.0, 1.0)
    found = []
    for what, most in zip(("mean_s", "p99_s"), wanted, strict=True):
        ratio = comparison.ratio(OURS.name, what, to=CACHE_AWARE.name)
        if ratio > most:
            found.append(
                f"{comparison.setting}: {what[:-2]} TTFT {ratio:.2f} of cache_aware's, wanted {most:g}"
            )
    return found


def terminal(report: Report) -> str:
    """All tables, and what falls short."""
    parts = []
    if report.latency:
        parts.append(_latencies("Added time to first token (ms) and CPU per request (ms)", report.latency))
    if report.saturated:
        parts.append(_saturated(report.saturated))
    if report.tokens:
        parts.append(_tokens(report.tokens))
    parts += [_choice(comparison) for comparison in report.choices]
    if report.memory:
        parts.append(_memory(report.memory))
    short = shortfalls(report)
    parts.append("\n".join(f"short: {line}" for line in short) if short else "nothing falls short")
    return "\n\n".join(parts)


def _latencies(title: str, cells: Sequence[Cell]) -> str:
    head = ("streams", "prompt", "router", "p50", "p99", "CPU", "requests/s", "direct p50", "direct p99")
    rows = []
    for cell in cells:
        for arm in cell.runs:
            if arm == DIRECT.name:
                continue
            direct = [ms(cell.median(DIRECT.name, what)) for what in ("ttft_p50_s", "ttft_p99_s")]
            rows.append(
                (
                    str(cell.load.streams),
                    size(cell.load.nbytes),
                    arm,
                    ms(cell.added_s(arm, "ttft_p50_s")),
                    ms(cell.added_s(arm, "ttft_p99_s")),
                    ms(cell.median(arm, "cpu_request_s")),
                    f"{cell.median(arm, 'requests_s'):.0f}",
                    *direct,
                )
            )
    return f"{title}\n{table(head, rows)}"


def _saturated(cells: Sequence[Cell]) -> str:
    head = ("streams", "prompt", "router", "requests/s", "CPU ms", "TTFT p50 ms", "p99 ms")
    rows = [
        (
            str(cell.load.streams),
            size(cell.load.nbytes),
            arm,
            f"{cell.median(arm, 'requests_s'):.0f}",
            ms(cell.median(arm, "cpu_request_s")),
            ms(cell.median(arm, "ttft_p50_s")),
            ms(cell.median(arm, "ttft_p99_s")),
        )
        for cell in cells
        for arm in cell.runs
    ]
    return f"As fast as it goes: answers of one token, asked anew at once\n{table(head, rows)}"


def _tokens(cells: Sequence[Cell]) -> str:
    head = ("streams", "router", "tokens/s", "tokens per core-second")
    rows = [
        (
            str(cell.load.streams),
            arm,
            f"{cell.median(arm, 'tokens_s'):,.0f}",
            f"{cell.median(arm, 'tokens_core_s'):,.0f}",
        )
        for cell in cells
        for arm in cell.runs
        if arm != DIRECT.name
    ]
    return f"Streaming\n{table(head, rows)}"


def _choice(comparison: Comparison) -> str:
    head = ("router", "mean ms", "p50 ms", "p99 ms", "hit", "quick/slow", "mean ratio", "p99 ratio")
    peer = CACHE_AWARE.name if CACHE_AWARE.name in comparison.arms() else comparison.arms()[0]
    rows = []
    for arm in comparison.arms():
        counts = [sum(each) for each in zip(*(found.workers for found in comparison.of(arm)), strict=True)]
        rows.append(
            (
                arm,
                *(f"{comparison.median(arm, what) * 1e3:.0f}" for what in ("mean_s", "p50_s", "p99_s")),
                f"{comparison.median(arm, 'hit'):.0%}",
                "/".join(map(str, counts)),
                *(f"{comparison.ratio(arm, what, to=peer):.2f}" for what in ("mean_s", "p99_s")),
            )
        )
    tuned = f"; cache_aware tuned: {comparison.tuned}" if comparison.tuned is not None else ""
    return f"TTFT, {comparison.setting}{tuned}\n{table(head, rows)}"


def _memory(growths: Sequence[Growth]) -> str:
    head = ("router", "prefixes", *(f"{share}0%" for share in (0, 2, 4, 6, 8, 10)))
    rows = []
    for growth in growths:
        at = [growth.resident_bytes[round(x * (len(growth.resident_bytes) - 1) / 5)] for x in range(6)]
        rows.append((growth.arm, f"{growth.prefixes[-1]:,}", *(f"{nbytes / 1e6:.0f}" for nbytes in at)))
    return f"Memory in MB by the share of distinct prefixes seen\n{table(head, rows)}"


def ms(seconds: float) -> str:
    """In milliseconds."""
    return f"{seconds * 1e3:.2f}"


def size(nbytes: int) -> str:
    """200 B, 16 KiB."""
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB"
