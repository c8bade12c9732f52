"""A plan as one HTML page with charts, to pass on: no script, no network."""

import re
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, BAR, GAP, LEFT, RIGHT = 760, 22, 10, 150, 110
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707f; --line: #d9dee6; --paper: #fff;
  --good: #1b7f5c; --one: #2458c5; --two: #b4571a; --tint: #f3f5f9; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ee; --soft: #9aa4b2; --line: #38404d; --paper: #14181f;
  --good: #4cc397; --one: #7da4ff; --two: #f0995c; --tint: #1d232d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 820px;
  margin: 32px auto; padding: 0 16px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 6px; }
p { color: var(--soft); margin: 4px 0 12px; }
li { margin: 2px 0; }
.verdict { background: var(--tint); border-left: 4px solid var(--good); padding: 10px 14px; color: var(--ink);
  font-size: 17px; } .no { border-color: var(--two); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; } td.set { min-width: 170px; } code { font-size: 13px; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 12.5px; fill: var(--ink); }
svg .soft { fill: var(--soft); } rect { fill: var(--one); } rect.good { fill: var(--good); }
rect.two { fill: var(--two); } .grid { stroke: var(--line); }
pre { font-size: 12.5px; overflow-x: auto; background: var(--tint); padding: 10px; }
.small { font-size: 13px; color: var(--soft); }
"""
_CODE = re.compile(r"`([^`]+)`")
Bar = tuple[str, float, str, str]  # its name, its length, what is written behind it, its class


def page(
    found: dict[str, Any],
    *,
    summary: Sequence[tuple[str, str]],
    verdict: str,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    names: dict[str, str],
    version: str,
) -> str:
    """The page. summary, verdict, tables, names: as they are written in the terminal."""
    name = escape(found["model"]["name"])
    advised = found["shared_tier_advised"]
    reasons = "".join(
        f"<li>{_prose(reason['text'])}. <b>What would change it:</b> "
        f"{_prose(reason['what_would_change_it'])}.</li>"
        for reason in found["why_not"]
    )
    layers = "".join(
        f"<tr><td><b>{escape(layer['layer'])}</b></td><td "
        f'class="set">{"<br>".join(map(_prose, layer["set"]))}'
        f"</td><td>{' '.join(map(_prose, layer['why']))}</td></tr>"
        for layer in found["layers"]
    )
    flags = "".join(
        f"<h2>{escape(names[kind])}</h2><pre>{escape(chr(10).join(command['lines']))}</pre>"
        for kind, command in found["flags"].items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>KV cache plan: {name}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>KV cache plan: {name}</h1>"
        f"<p>kvferry plan, version {escape(version)}; estimates, with what they rest on below</p>"
        f"<ul>{''.join(f'<li><b>{escape(label)}</b>: {escape(text)}</li>' for label, text in summary)}</ul>"
        f'<p class="verdict{"" if advised else " no"}">{escape(verdict)}</p><ul>{reasons}</ul>'
        f"{_charts(found)}"
        "<h2>Layers, bottom up</h2><p>Each multiplies those above it.</p>"
        f"<table><tr><th>layer</th><th>set</th><th>why</th></tr>{layers}</table>{flags}"
        f"{''.join(_table(*table) for table in tables)}"
        f"<h2>Assumed</h2><ul>{_items(found['assumptions'])}</ul>"
        f'<h2>Where the numbers are from</h2><ul class="small">{_items(found["explanation"])}</ul></html>\n'
    )


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{_prose(text)}</li>" for text in texts)


def _prose(text: str) -> str:
    """What stands between backticks is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _charts(found: dict[str, Any]) -> str:
    expected = found["expected"]
    parts = [
        "<h2>Hit rate by where KV is kept</h2><p>Share of input tokens that are not computed again.</p>",
        bars(
            "Hit rate",
            [
                (row["kv_in"], row["hit_rate"], f"{100 * row['hit_rate']:.1f}%", _shade(row))
                for row in expected
            ],
            most=1.0,
        ),
    ]
    if expected[0]["most_requests_per_s"] is not None:
        asked = found["workload"]["requests_s"]["value"]
        parts += [
            f"<h2>Requests a second that the fleet can serve</h2><p>{asked:,.3g} are asked for.</p>",
            bars(
                "Requests a second",
                [
                    (
                        row["kv_in"],
                        row["most_requests_per_s"],
                        f"{row['most_requests_per_s']:,.3g}",
                        _shade(row),
                    )
                    for row in expected
                ],
            ),
        ]
    sizes = found["shared_tier_sizes"]
    if len(sizes) > 1:
        parts += [
            "<h2>Hit rate by the size of a shared tier</h2><p>As the trace has it; planned memory, 30% on "
            "top.</p>",
            bars(
                "Hit rate by size",
                [
                    (
                        f"{row['planned_bytes'] / 1e9:,.0f} GB",
                        row["hit_rate"],
                        f"{100 * row['hit_rate']:.1f}%",
                        "good",
                    )
                    for row in sizes
                ],
                most=1.0,
            ),
        ]
    for row in found["returns"]:
        ways = (
            ("own cache", "own_cache", "good"),
            ("host memory", "host_memory", "one"),
            ("shared tier", "shared_tier", "one"),
            ("computed again", "computed", "two"),
        )
        parts += [
            f"<h2>TTFT of a return of {row['input_tokens']:,.0f} tokens</h2><p>One request on an idle "
            "replica, by where its prefix lies; seconds.</p>",
            bars(
                "Time to the first token",
                [
                    (name, row[f"ttft_{way}_s"], f"{row[f'ttft_{way}_s']:,.2f} s", shade)
                    for name, way, shade in ways
                ],
            ),
        ]
    return "".join([*parts, _money(found["price"])])


def _money(price: dict[str, Any]) -> str:
    if price["benefit_usd_per_month"] is None:
        return ""
    rows = [
        ("it brings", price["benefit_usd_per_month"], "good"),
        ("it costs", price["shared_tier_usd_per_month"], "two"),
    ]
    return "<h2>A shared tier in a month</h2><p>US dollars; 730 hours.</p>" + bars(
        "A month", [(name, usd, f"${usd:,.0f}", shade) for name, usd, shade in rows]
    )


def _shade(row: dict[str, Any]) -> str:
    return "good" if row["kv_in"].endswith("tier") else "one"


def bars(title: str, rows: Sequence[Bar], *, most: float = 0.0) -> str:
    """Bars from the left, each with its name and figure. most: the length of the whole width."""
    top = most or max((length for _, length, _, _ in rows), default=0.0) or 1.0
    height = len(rows) * (BAR + GAP) + GAP
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<path class="grid" d="M{LEFT} 0V{height}"/>')
    for place, (name, length, figure, shade) in enumerate(rows):
        y = GAP + place * (BAR + GAP)
        width = (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, length) / top)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="{shade}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>')
        parts.append(f'<text class="soft" x="{LEFT + width + 8:.1f}" y="{y + 16}">{escape(figure)}</text>')
    return "".join([*parts, "</svg>"])


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [all(row[column][:1] in "0123456789-$" for row in rows) for column in range(len(head))]
    marks = [' class="number"' if number else "" for number in numeric]
    top = "".join(f"<th{mark}>{escape(cell)}</th>" for cell, mark in zip(head, marks, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<h2>{escape(title.rstrip(':'))}</h2><table><tr>{top}</tr>{body}</table>"
