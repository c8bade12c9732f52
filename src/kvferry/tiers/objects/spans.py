"""Which bytes of which pack to ask for at once. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

GAP_BYTES = 128 << 10
"""What lies between two parts is read with them where it is no more: a request costs more."""
SPAN_BYTES = 8 << 20
"""No further part joins what is as long: its first part should not wait for its last."""


class Wanted(NamedTuple):
    """A record: so many bytes of a pack from ``offset`` on. index: its place in the caller's order."""

    pack: bytes
    offset: int
    nbytes: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Span(NamedTuple):
    """One request. wanted: what is in it, in the order of the pack."""

    pack: bytes
    offset: int
    nbytes: int
    wanted: tuple[Wanted, ...]


def spans(wanted: Iterable[Wanted]) -> list[Span]:
    """Neighbours of a pack together; in the order of the first of each that the caller wants."""
    groups: list[list[Wanted]] = []
    end = 0  # of the last group
    for record in sorted(wanted):
        record_end = record.offset + record.nbytes
        if groups and _joins(groups[-1][0], end, record):
            groups[-1].append(record)
            end = max(end, record_end)
        else:
            groups.append([record])
            end = record_end
    found = [_span(group) for group in groups]
    return sorted(found, key=lambda span: min(record.index for record in span.wanted))


def _joins(first: Wanted, end: int, record: Wanted) -> bool:
    return (
        record.pack == first.pack
        and record.offset - end <= GAP_BYTES
        and max(end, record.offset + record.nbytes) - first.offset <= SPAN_BYTES
    )


def _span(group: list[Wanted]) -> Span:
    start = group[0].offset
    end = max(record.offset + record.nbytes for record in group)
    return Span(group[0].pack, start, end - start, tuple(group))
