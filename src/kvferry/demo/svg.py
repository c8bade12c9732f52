"""Charts as inline SVG, drawn here: no library, no script, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_LABEL = 335  # 43 characters at the charts' text size
_VALUE = 130
_ROW = 30
_BAR = 16
_AXIS = 26


@dataclass(frozen=True, slots=True)
class Bar:
    """value: in the chart's unit. low, high: quartiles, drawn as a whisker. kind: a CSS class."""

    label: str
    value: float
    kind: str
    text: str
    low: float | None = None
    high: float | None = None


def bar_chart(bars: Sequence[Bar], *, title: str, unit: str) -> str:
    """Horizontal bars from zero on one linear scale; each carries its own figure."""
    top = max([bar.high or bar.value for bar in bars] + [bar.value for bar in bars], default=1.0) or 1.0
    room = WIDTH - _LABEL - _VALUE
    height = len(bars) * _ROW + _AXIS
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" class="chart">',
        f"<title>{escape(title)}</title>",
    ]
    for tick in _ticks(top):
        x = _LABEL + room * tick / top
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - _AXIS + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}">{tick:g} {escape(unit)}</text>')
    for row, bar in enumerate(bars):
        parts += _bar(bar, y=row * _ROW + (_ROW - _BAR) / 2, scale=room / top)
    parts.append("</svg>")
    return "\n".join(parts)


def _bar(bar: Bar, *, y: float, scale: float) -> list[str]:
    length = max(1.5, bar.value * scale)
    middle = y + _BAR / 2
    end = _LABEL + max(length, (bar.high or 0.0) * scale)
    parts = [
        f'<text class="label" x="{_LABEL - 10}" y="{middle + 4:.1f}">{escape(bar.label)}</text>',
        f'<rect class="{escape(bar.kind)}" x="{_LABEL}" y="{y:.1f}" width="{length:.1f}" '
        f'height="{_BAR}" rx="2"/>',
    ]
    if bar.low is not None and bar.high is not None:
        low, high = _LABEL + bar.low * scale, _LABEL + bar.high * scale
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8'
            f'M{high:.1f} {middle - 4:.1f}v8"/>'
        )
    parts.append(f'<text class="value" x="{end + 8:.1f}" y="{middle + 4:.1f}">{escape(bar.text)}</text>')
    return parts


def _ticks(top: float) -> list[float]:
    """About five round numbers from zero to ``top``."""
    step = 1e-6
    factors = (2.0, 2.5, 2.0)
    position = 0
    while top / step > 5:
        step *= factors[position % 3]
        position += 1
    return [round(step * number, 9) for number in range(int(top / step) + 1)]
