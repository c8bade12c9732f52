"""A tier beside a bare path to the same store: turns, what they come to, and a table of it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.tier_arms import Parts


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One operation at one part size. cpu_s_gb: of this process. ratio: of the tier to the bare path."""

    operation: str
    part_mib: float
    bare_gb_s: float
    tier_gb_s: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    bare_cpu_s_gb: float
    tier_cpu_s_gb: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's. cpu_s_gb: of this process."""

    gb_s: float
    cpu_s_gb: float


def take_turn(work: Callable[[Parts], None], parts: Parts) -> Turn:
    """All parts once."""
    cpu_s, began = time.process_time(), time.perf_counter()
    work(parts)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return Turn(parts.nbytes / elapsed_s / 1e9, cpu_s / (parts.nbytes / 1e9))


def beside(operation: str, part_mib: float, bare: Sequence[Turn], tier: Sequence[Turn]) -> BesideRow:
    """Medians; the ratio is that of the pairs' own."""
    ratios = [ours.gb_s / limit.gb_s for limit, ours in zip(bare, tier, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return BesideRow(
        operation=operation,
        part_mib=part_mib,
        bare_gb_s=statistics.median(turn.gb_s for turn in bare),
        tier_gb_s=statistics.median(turn.gb_s for turn in tier),
        ratio=statistics.median(ratios),
        ratio_quartiles=(quartiles[0], quartiles[2]),
        bare_cpu_s_gb=statistics.median(turn.cpu_s_gb for turn in bare),
        tier_cpu_s_gb=statistics.median(turn.cpu_s_gb for turn in tier),
    )


def beside_lines(name: str, rows: Sequence[BesideRow], wanted_ratio: float) -> list[str]:
    """As text; what falls short is marked."""
    if not rows:
        return []
    lines = [_line((name, "part MiB", "bare", "kvferry", "ratio", "quartiles", "CPU s/GB", "(bare)"))]
    for row in rows:
        low, high = row.ratio_quartiles
        cells = [row.operation, f"{row.part_mib:g}", f"{row.bare_gb_s:.2f}", f"{row.tier_gb_s:.2f}"]
        cells += [f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}"]
        cells += [f"{row.tier_cpu_s_gb:.3f}", f"{row.bare_cpu_s_gb:.3f}"]
        lines.append(_line(cells) + ("  short" if row.ratio < wanted_ratio else ""))
    return [*lines, f"GB/s; wanted: ratio {wanted_ratio:.2f}", ""]


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>11}" if place else f"{cell:8}" for place, cell in enumerate(cells))
