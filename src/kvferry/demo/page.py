"""One self-contained HTML page: style, tables and charts inline, nothing fetched from anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --soft: #5b6775; --line: #d8dee6; --paper: #fff;
  --computed: #b4532a; --own: #8a94a0; --memory: #1f7a5c; --valkey: #2f5fa8; --disk: #7a4fa3;
  --objects: #9a7b1c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --soft: #9aa6b4; --line: #333c47;
  --paper: #14191f; --computed: #e08a5f; --own: #8a94a0; --memory: #58b896; --valkey: #7fa6e6;
  --disk: #b795dc; --objects: #d3b453; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2.5rem auto;
  max-width: 62rem; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: left; padding: .4rem .6rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); } .num { text-align: right; white-space: nowrap; }
.chart { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
.chart .label { text-anchor: end; fill: var(--ink); } .chart .value { fill: var(--ink); }
.chart .tick { text-anchor: middle; fill: var(--soft); font-size: 11px; }
.chart .grid { stroke: var(--line); } .chart .whisker { stroke: var(--ink); fill: none; stroke-width: 1.4; }
.chart .computed { fill: var(--computed); } .chart .own { fill: var(--own); }
.chart .memory { fill: var(--memory); } .chart .valkey { fill: var(--valkey); }
.chart .disk { fill: var(--disk); } .chart .objects { fill: var(--objects); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.key.computed { background: var(--computed); } .key.own { background: var(--own); }
.key.memory { background: var(--memory); } .key.valkey { background: var(--valkey); }
.key.disk { background: var(--disk); } .key.objects { background: var(--objects); }
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; numbers stand to the right."""

    title: str
    numeric: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain texts; cells are escaped."""
    head = "".join(f"<th{_number(column)}>{escape(column.title)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_number(column)}>{escape(cell)}</td>" for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def paragraph(text: str, *, kind: str = "") -> str:
    """One paragraph of plain text."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str], *, kind: str = "") -> str:
    """A list of plain texts."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{escape(kind)}">{items}</ul>'


def legend(kinds: Sequence[tuple[str, str]]) -> str:
    """Colour keys: (CSS class, text)."""
    return (
        '<p class="soft">'
        + " &nbsp; ".join(f'<span class="key {escape(kind)}"></span>{escape(text)}' for kind, text in kinds)
        + "</p>"
    )


def section(title: str, *content: str) -> str:
    """A heading with what belongs under it."""
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(content) + "</section>"


def page(title: str, lead: str, *sections: str) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(lead)}</p>\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def text_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a terminal."""
    widths = [
        max([len(column.title)] + [len(row[place]) for row in rows]) for place, column in enumerate(columns)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.numeric else cell.ljust(width)
            for cell, column, width in zip(cells, columns, widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line([column.title for column in columns]), rule, *(line(row) for row in rows)])


def _number(column: Column) -> str:
    return ' class="num"' if column.numeric else ""
