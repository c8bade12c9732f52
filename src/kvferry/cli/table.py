"""Plain text tables and numbers for people, at most ``COLUMNS`` wide."""

import re
import textwrap
from collections.abc import Sequence

from kvferry.identity.names import DOMAIN_TAG_BYTES

COLUMNS = 100
_NUMBER = re.compile(r"[\d.,]+(?!\w)")
_LABEL = 10  # columns of a label before its text
LINE_COLUMNS = COLUMNS - _LABEL


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a head. Cells that start with a number are set flush right, as is their head."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    numeric = [
        bool(rows) and all(row[column] == "-" or _NUMBER.match(row[column]) is not None for row in rows)
        for column in range(len(head))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def count(number: float) -> str:
    """``12,345``."""
    return f"{number:,.0f}"


def compact(number: float) -> str:
    """In few columns: ``123,456``, ``12.3 mn`` (million), ``1.2 bn`` (10^9), ``5.0 tn`` (10^12).

    Not K, M or G: those are powers of 1,024 in lengths of prompts.
    """
    if round(number) < 1e6:
        return count(number)
    for size, unit in ((1e6, "mn"), (1e9, "bn")):
        if round(number / size, 1) < 1000:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e12:.1f} tn"


def plain(number: float) -> str:
    """``0.85``, ``20,000``, ``1,234,567``: six digits or all before the point, and no exponent above 1."""
    return f"{number:,.0f}" if abs(number) >= 1e5 else f"{number:,.6g}"


def per_second(rate: float) -> str:
    """``120 a second``, ``0.19 a second``, ``4.3 an hour``."""
    if rate >= 100:
        return f"{count(rate)} a second"
    if rate >= 0.01:
        return f"{rate:.2g} a second"
    return f"{rate * 3600:.2g} an hour"


def clip(text: str, width: int) -> str:
    """At most ``width`` columns: what is too much goes out of the middle, for names differ at both ends."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def short_namespace(namespace: str) -> str:
    """Enough of a namespace in hexadecimal to tell those of a node apart; ``drop`` takes it.

    All of one node begin with its domain's tag, so it is what follows.
    """
    return namespace[2 * DOMAIN_TAG_BYTES :][:8] or "-"


def labelled(label: str, text: str) -> str:
    """``label     text``, wrapped; words are left whole, that they can be copied."""
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=label.ljust(_LABEL - 1) + " ",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def share(part: float, whole: float) -> str:
    """``31%``, or ``-`` of nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def duration(seconds: float | None) -> str:
    """``12 ms``, ``3.4 s``, ``5 min``, ``7.2 h``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def causes(counts: dict[str, int]) -> str:
    """``deadline 3, corrupt 1``, the most frequent first; ``none``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{cause} {count(number)}" for cause, number in ranked if number) or "none"
