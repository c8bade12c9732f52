"""How far a prefix reaches, by what is known to be missing of it. Pure; docs/decisions/kv-groups.md."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.boundaries import start_of, usable_boundaries
from kvferry.node.state import Namespace
from kvferry.node.wire import Reason
from kvferry.pool.entries import Gap


class Lack(NamedTuple):
    """A part that is not there, or not known to be. reason: why it is not known; None: it is not there."""

    position: int
    part: int
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Reach:
    """usable: for each boundary 0 .. chunks, in chunks from the first, a byte: 1 where it is usable.

    boundary: the largest. reason: why it is not larger; ABSENT stands for EVICTED too, COMPLETE for all.
    missing: the first part that was not there, or not known to be, of those that all of it would need.
    """

    usable: bytearray
    boundary: int
    reason: Reason
    missing: Lack | None


def memory_boundary(space: Namespace, chunks: int, gaps: Sequence[Gap]) -> int:
    """The largest boundary for which memory alone suffices. gaps: what it lacks."""
    if not space.trailing:
        return gaps[0].position if gaps else chunks
    lacks = (Lack(gap.position, part, None) for gap in gaps for part in gap.parts)
    return reach(space, chunks, lacks).boundary


def reach(space: Namespace, chunks: int, lacks: Iterable[Lack]) -> Reach:
    """lacks: in order of positions; not read further than the first that no longer prefix can do without.

    A failure is not called a miss: when a longer prefix might be usable, were all that is not known there,
    the reason is why that is not known.
    """
    missing: dict[int, list[int]] = {}  # by trailing number, positions in order
    unknown: dict[int, set[int]] = {}
    read: list[Lack] = []
    end = chunks
    for lack in lacks:
        if lack.position > end:
            break
        read.append(lack)
        trailing = space.trailing_of(lack.part)
        positions = missing.setdefault(trailing, [])
        if not positions or positions[-1] != lack.position:
            positions.append(lack.position)
        if lack.reason is not None:
            unknown.setdefault(trailing, set()).add(lack.position)
        if not trailing:
            end = chunks if lack.position in unknown.get(0, ()) else lack.position
    usable = usable_boundaries(chunks, missing)
    boundary = usable.rfind(1)
    if boundary == chunks:
        return Reach(usable, boundary, Reason.COMPLETE, None)
    known = {
        trailing: [position for position in positions if position not in unknown.get(trailing, ())]
        for trailing, positions in missing.items()
    }
    hopeful = usable_boundaries(chunks, known).rfind(1) if unknown else boundary
    if hopeful > boundary:
        return _ended(space, usable, [lack for lack in read if lack.reason is not None], hopeful)
    return _ended(space, usable, [lack for lack in read if lack.reason is None], chunks)


def _ended(space: Namespace, usable: bytearray, lacks: Sequence[Lack], wanted: int) -> Reach:
    """What was missing: the first that ``wanted`` needs, of what every chunk must have if there is any."""
    needed = [
        lack for lack in lacks if start_of(space.trailing_of(lack.part), wanted) <= lack.position < wanted
    ]
    if not needed:
        raise BrokenError(
            f"no boundary after {usable.rfind(1)} of {len(usable) - 1} chunks, but nothing lacks"
        )
    first = min(needed, key=lambda lack: space.trailing_of(lack.part) > 0)
    return Reach(usable, usable.rfind(1), first.reason or Reason.ABSENT, first)
