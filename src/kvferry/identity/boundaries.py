"""Where a prefix may end, and what it needs for that: by part numbers, whatever the groups are. Pure.

Each part number has a *trailing* number (``Geometry.trailing``): 0 where a boundary needs the part of every
chunk before it, n where it needs those of the last n chunks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """A run of chunks, by position, of each of which these part numbers are needed."""

    chunks: range
    parts: tuple[int, ...]


def start_of(trailing: int, boundary: int) -> int:
    """The first chunk that a boundary after ``boundary`` chunks needs of a part."""
    return max(0, boundary - trailing) if trailing else 0


def core_parts(part_bytes: Sequence[int], trailing: Sequence[int]) -> tuple[int, ...]:
    """The parts that a boundary needs of every chunk before it; where there are none such, all that exist."""
    parts = tuple(part for part, nbytes in enumerate(part_bytes) if nbytes)
    return tuple(part for part in parts if not (trailing and trailing[part])) or parts


def needed_spans(boundary: int, parts: Sequence[int], trailing: Sequence[int]) -> list[Span]:
    """What a boundary after ``boundary`` chunks needs, in order; chunks of which it needs nothing left out.

    parts: numbers of the parts that exist. trailing: by part number; empty when all are 0.
    """
    if not trailing:
        return [Span(range(boundary), tuple(parts))] if boundary else []
    starts = {part: start_of(trailing[part], boundary) for part in parts}
    cuts = sorted({*starts.values(), boundary})
    spans = (
        Span(range(begin, end), tuple(part for part in parts if starts[part] <= begin))
        for begin, end in pairwise(cuts)
    )
    return [span for span in spans if span.parts]


def usable_boundaries(chunks: int, missing: Mapping[int, Sequence[int]]) -> bytearray:
    """For each boundary 0 .. ``chunks`` one byte: 1 where all that it needs is there. 0 always is.

    missing: by trailing number, the positions of chunks that lack a part of that number, ascending.
    """
    usable = bytearray(b"\1") * (chunks + 1)
    for trailing, positions in missing.items():
        done = 0  # boundaries before this one have been looked at
        for position in positions:
            begin = max(position + 1, done)
            end = min(position + trailing, chunks) + 1 if trailing else chunks + 1
            if begin < end:
                usable[begin:end] = bytes(end - begin)
                done = end
            if done > chunks:
                break
    return usable
