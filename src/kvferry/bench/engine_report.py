"""The figures of ``kvferry bench engines``: medians with quartiles, against what is aimed for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvferry
from kvferry.bench.engine_arms import DISK, MEMORY, OBJECTS, VALKEY, Pair, Results, Versus
from kvferry.bench.spread import Spread, spread
from kvferry.demo import page
from kvferry.demo.page import Column
from kvferry.demo.svg import Bar, bar_chart

FIXED = "fixed length"
RANDOM = "random lengths"
DEEP = "fixed length, deep tiers"
_LIMITS: dict[tuple[str, str], float | None] = {
    (FIXED, MEMORY): 1.15,
    (FIXED, VALKEY): 1.30,
    (RANDOM, MEMORY): 1.25,
    (RANDOM, VALKEY): 1.40,
    (DEEP, VALKEY): None,
    (DEEP, DISK): 1.6,
    (DEEP, OBJECTS): 2.5,
}
_VERSUS_LIMIT = 1.03
_VERSUS: tuple[tuple[str, str, float | None], ...] = (
    ("cold", "cold TTFT", None),
    ("throughput", "batch of new prompts", _VERSUS_LIMIT),
)
_IDLE_CPU_PERCENT = 1.0
_IDLE_RSS_MB = 80.0
_COLUMNS = (
    Column("figure"),
    Column("n", numeric=True),
    Column("measured", numeric=True),
    Column("against", numeric=True),
    Column("ratio", numeric=True),
    Column("quartiles", numeric=True),
    Column("aim", numeric=True),
    Column("met"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. measured, against: medians in ``unit``; ratio: of the pairs' own ratios; limit: the aim."""

    name: str
    unit: str
    measured: float
    against: float | None
    ratio: Spread
    limit: float | None

    @property
    def met(self) -> bool | None:
        """Whether the median is within the aim; None without one."""
        return None if self.limit is None else self.ratio.median <= self.limit

    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        digits = 2 if self.unit != "%" else 3
        return (
            self.name,
            str(self.ratio.n),
            f"{self.measured:.3f} {self.unit}",
            "" if self.against is None else f"{self.against:.3f} {self.unit}",
            "" if self.against is None else f"{self.ratio.median:.3f}",
            f"{self.ratio.low:.3f} - {self.ratio.high:.3f}",
            "" if self.limit is None else f"{self.limit:.{digits}f}",
            {None: "", True: "yes", False: "NO"}[self.met],
        )


def figures(results: Results) -> list[Figure]:
    """All rows for which something was measured."""
    rows: list[Figure | None] = []
    for (section, tier), limit in _LIMITS.items():
        pairs = [p for p in results.pairs if (p.section, p.tier, p.fault) == (section, tier, "")]
        rows.append(_pair_figure(f"TTFT from {tier}, {section}", pairs, limit))
        rows.append(_alone(f"  added, {tier}, {section}", "ms", [p.added_s * 1e3 for p in pairs]))
        rows.append(_alone(f"  end to end, {tier}, {section}", "GB/s", [p.gb_s for p in pairs if p.nbytes]))
    for section, text, aim in _VERSUS:
        pairs_v = [v for v in results.versus if v.section == section]
        rows.append(_versus_figure(f"{text}, with against without", pairs_v, aim))
    # End to end, two engine processes on one core differ by several percent, either way, from start to start.
    hooks = [100.0 * v.hooks_s / v.with_s for v in results.versus if v.hooks_s]
    rows.append(_alone("  cold TTFT, added by timestamps", "%", hooks, limit=100.0 * (_VERSUS_LIMIT - 1)))
    if results.idle:
        idle = results.idle
        rows.append(_alone("idle node, CPU", "%", [idle["cpu_percent"]], limit=_IDLE_CPU_PERCENT))
        rows.append(
            _alone(
                "idle node, memory besides the pool", "MB", [idle["rss_besides_pool_mb"]], limit=_IDLE_RSS_MB
            )
        )
    return [row for row in rows if row is not None]


def _pair_figure(name: str, pairs: Sequence[Pair], limit: float | None) -> Figure | None:
    ratio = spread([pair.ratio for pair in pairs])
    measured, against = spread([p.load_ttft_s for p in pairs]), spread([p.own_ttft_s for p in pairs])
    if ratio is None or measured is None or against is None:
        return None
    return Figure(name, "s", measured.median, against.median, ratio, limit)


def _versus_figure(name: str, found: Sequence[Versus], limit: float | None) -> Figure | None:
    ratio = spread([versus.ratio for versus in found])
    measured, against = spread([v.with_s for v in found]), spread([v.without_s for v in found])
    if ratio is None or measured is None or against is None:
        return None
    return Figure(name, "s", measured.median, against.median, ratio, limit)


def _alone(name: str, unit: str, values: Sequence[float], *, limit: float | None = None) -> Figure | None:
    found = spread(values)
    return None if found is None else Figure(name, unit, found.median, None, found, limit)


def faults(results: Results) -> list[str]:
    """Pairs that did not measure what they should; they count for nothing."""
    return [f"{pair.section}, {pair.tier}: {pair.fault}" for pair in results.pairs if pair.fault]


def terminal(results: Results) -> str:
    """The table."""
    return page.text_table(_COLUMNS, [figure.row() for figure in figures(results)])


def document(results: Results, setting: dict[str, Any]) -> dict[str, Any]:
    """For ``--json``: the figures and every raw sample."""
    return {
        "kvferry": kvferry.__version__,
        "setting": setting,
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures(results)],
        "faults": faults(results),
        "samples": results.document(),
    }


def html(results: Results, setting: dict[str, Any]) -> str:
    """The page."""
    rows = figures(results)
    lead = ", ".join(f"{name} {value}" for name, value in setting.items())
    wrong = faults(results)
    charts = [_chart(results, section) for section in (FIXED, RANDOM, DEEP)]
    return page.page(
        "kvferry bench engines",
        lead,
        page.section("Figures", page.table(_COLUMNS, [row.row() for row in rows]), page.paragraph(_HOW)),
        *(chart for chart in charts if chart),
        *([page.section("Pairs that do not count", page.bullets(wrong, kind="bad"))] if wrong else []),
    )


_HOW = (
    "A load and the own hit beside it are a pair: the same replica, the same new prefix, the same reused "
    "tokens and questions of equal length, with the same pause before each. Between them one more question "
    "is asked: an engine with windows keeps the end of a prefix once two prompts have parted there. A ratio "
    "is the median of the pairs' own ratios, with quartiles. With and without the connector alternate "
    "on two replicas that share a core. Bandwidth is the connector's own timer, from the node's answer to "
    "the last block's copy."
)


def _chart(results: Results, section: str) -> str:
    pairs = [pair for pair in results.pairs if pair.section == section and not pair.fault]
    bars: list[Bar] = []
    arms: tuple[tuple[str, str, Callable[[Pair], float], str], ...] = (
        (MEMORY, "from host memory", lambda pair: pair.load_ttft_s, "memory"),
        (VALKEY, "from Valkey", lambda pair: pair.load_ttft_s, "valkey"),
        (DISK, "from NVMe", lambda pair: pair.load_ttft_s, "disk"),
        (OBJECTS, "from the bucket", lambda pair: pair.load_ttft_s, "objects"),
    )
    for tier, label, value, kind in arms:
        _add(bars, f"{label}", [value(p) for p in pairs if p.tier == tier], kind)
        _add(bars, f"own hit beside {tier}", [p.own_ttft_s for p in pairs if p.tier == tier], "own")
    if not bars:
        return ""
    return page.section(
        f"Time to first token, {section}",
        bar_chart(bars, title=f"Time to first token, {section}: medians and quartiles", unit="s"),
    )


def _add(bars: list[Bar], label: str, values: Sequence[float], kind: str) -> None:
    found = spread(values)
    if found is not None:
        text = f"{found.median:.3f} s (n={found.n})"
        bars.append(Bar(label, found.median, kind, text, low=found.low, high=found.high))
