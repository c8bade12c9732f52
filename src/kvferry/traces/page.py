"""The findings as one HTML page with charts, to pass on: no script, no network."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from kvferry.traces.policies import Policy

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 110, 14, 44
_NAMES = {
    Policy.OPTIMUM: "optimum",
    Policy.PRODUCTION: "production",
    Policy.LRU: "LRU",
    Policy.FIFO: "FIFO",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707f; --line: #d9dee6; --paper: #fff;
  --optimum: #1b7f5c; --production: #8a3fb5; --lru: #2458c5; --fifo: #b4571a; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ee; --soft: #9aa4b2; --line: #38404d; --paper: #14181f;
  --optimum: #4cc397; --production: #cf95f2; --lru: #7da4ff; --fifo: #f0995c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 800px;
  margin: 32px auto; padding: 0 16px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 4px; }
p { color: var(--soft); margin: 4px 0 12px; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); } .limit { stroke: var(--soft); stroke-dasharray: 5 4; }
.optimum, .production, .lru, .fifo { fill: none; stroke-width: 2.2; }
.optimum { stroke: var(--optimum); } .production { stroke: var(--production); } .lru { stroke: var(--lru); }
.fifo { stroke: var(--fifo); } rect { fill: var(--lru); } rect.new { fill: var(--fifo); }
pre { font-size: 12.5px; overflow-x: auto; border-top: 1px solid var(--line); padding-top: 12px; }
"""


def page(found: dict[str, Any], *, text: str, held: Callable[[int], str], version: str) -> str:
    """The page. text: what the terminal shows. held: how so many tokens are written, as their KV or bare."""
    reuse = found["reuse"]
    charts: list[str] = []
    if reuse and reuse["by_capacity"]:
        charts += [
            "<h2>Hit rate by capacity</h2><p>Share of input tokens, over the last half of the requests; the "
            "first half fills the cache. Dashed: a cache that never forgets.</p>",
            _capacities(
                reuse["by_capacity"],
                reuse["hit_rate"]["last_half"],
                [held(row["tokens"]) for row in reuse["by_capacity"]],
            ),
            "<h2>Working set over the trace</h2><p>Distinct tokens in use in each part of it; the lower "
            "part was never seen before.</p>",
            _slices(reuse["slices"], held),
        ]
    names = ", ".join(file["path"].rsplit("/", 1)[-1] for file in found["files"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Reuse in {escape(names)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>What {escape(names)} could reuse</h1>"
        f"<p>kvferry analyze, version {escape(version)}</p>{''.join(charts)}"
        f"<h2>All figures</h2><pre>{escape(text)}</pre></html>\n"
    )


def _capacities(rows: Sequence[dict[str, Any]], most: float, label: Sequence[str]) -> str:
    top = max(most, 0.01)
    parts = _frame("Hit rate by capacity", top)
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(rows) - 1)
    every = -(-len(rows) // 8)
    for place, name in enumerate(label):
        if place % every == 0:
            parts.append(_label(_LEFT + place * step, HEIGHT - _BOTTOM + 18, name, "middle"))
    limit = _y(most, top)
    parts.append(f'<path class="limit" d="M{_LEFT} {limit:.1f}H{WIDTH - _RIGHT}"/>')
    for policy, name in _NAMES.items():
        places = [
            (_LEFT + place * step, _y(row[policy]["last_half"], top))
            for place, row in enumerate(rows)
            if policy in row
        ]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="{policy.value}" d="M{line}"><title>{name}</title></path>')
    for number, (policy, name) in enumerate(_NAMES.items()):  # a legend, as the lines meet at their ends
        y = _TOP + 100 + 22 * number
        parts.append(f'<path class="{policy.value}" d="M{WIDTH - _RIGHT + 14} {y}h22"/>')
        parts.append(_label(WIDTH - _RIGHT + 42, y + 4, name, "start"))
    return "".join([*parts, "</svg>"])


def _slices(rows: Sequence[dict[str, Any]], held: Callable[[int], str]) -> str:
    top = max(1, *(row["touched_tokens"] for row in rows))
    parts = _frame("Working set", None)
    step = (WIDTH - _LEFT - _RIGHT) / len(rows)
    bottom = HEIGHT - _BOTTOM
    for place, row in enumerate(rows):
        for kind, tokens in (("used", row["touched_tokens"]), ("new", row["new_tokens"])):
            y = _y(tokens, top)
            parts.append(
                f'<rect class="{kind}" x="{_LEFT + place * step + 3:.1f}" y="{y:.1f}" width="{step - 6:.1f}" '
                f'height="{bottom - y:.1f}"><title>{tokens:,} tokens {kind}</title></rect>'
            )
        parts.append(_label(_LEFT + (place + 0.5) * step, bottom + 18, str(place + 1), "middle"))
    parts.append(_label(_LEFT - 8, _TOP + 4, held(top), "end"))
    for number, (kind, name) in enumerate((("used", "seen before"), ("new", "new"))):
        y = _TOP + 100 + 22 * number
        parts.append(f'<rect class="{kind}" x="{WIDTH - _RIGHT + 14}" y="{y - 6}" width="14" height="12"/>')
        parts.append(_label(WIDTH - _RIGHT + 34, y + 4, name, "start"))
    return "".join([*parts, "</svg>"])


def _frame(title: str, top: float | None) -> list[str]:
    """The axes; with shares up to ``top``, if given."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for number in range(5):
        y = _y(number, 4)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        if top is not None:
            parts.append(_label(_LEFT - 8, y + 4, f"{100 * top * number / 4:.1f}%", "end"))
    return parts


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
