"""Which parts were used most, lately: a bounded table. Pure.

A use counts half as much after every half-life, so that yesterday's favourites fade. The table keeps what was
used last; what was never used a second time never gets in, since a keeper is told of uses only.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.identity.names import PartRef

HALF_LIFE_S = 12 * 3600.0


class Use(NamedTuple):
    """How much a part was used, as of its last use, and when that was."""

    ref: PartRef
    weight: float
    at: float


class ReuseTable:
    """At most ``max_parts`` parts. Times are monotonic seconds."""

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._uses: OrderedDict[PartRef, Use] = OrderedDict()  # the least recent first

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, refs: Sequence[PartRef], now: float) -> None:
        """They were used together, the head of the prompt first."""
        for ref in refs:
            found = self._uses.pop(ref, None)
            weight = 1.0 if found is None else _faded(found, now) + 1.0
            self._uses[ref] = Use(ref, weight, now)
        while len(self._uses) > self._max_parts:
            self._uses.popitem(last=False)

    def all(self) -> list[Use]:
        """The least recent first. A copy, and cheap."""
        return list(self._uses.values())

    def restore(self, found: Sequence[Use]) -> None:
        """What ``all`` gave once."""
        for use in found[-self._max_parts :]:
            self._uses[use.ref] = use

    def forget(self, refs: Sequence[PartRef]) -> None:
        """They are deleted."""
        for ref in refs:
            self._uses.pop(ref, None)

    def forget_namespace(self, namespace: bytes | None) -> None:
        """Those of a namespace, or all."""
        for ref in [r for r in self._uses if namespace is None or r.key.namespace == namespace]:
            del self._uses[ref]


def most_used(
    uses: Sequence[Use], *, within_s: float, max_bytes: int, namespace: bytes | None, now: float
) -> list[PartRef]:
    """Of what ``all`` gave: used within so many seconds, the most used first, of at most so many bytes.

    Of equals those used last come first, and of one call's the head of the prompt.
    """
    recent = [
        use
        for use in uses
        if now - use.at <= within_s and (namespace is None or use.ref.key.namespace == namespace)
    ]
    recent.sort(key=lambda use: (-_faded(use, now), -use.at))  # stable: the order of the uses decides then
    chosen: list[PartRef] = []
    for use in recent:
        if use.ref.nbytes > max_bytes:
            break
        max_bytes -= use.ref.nbytes
        chosen.append(use.ref)
    return chosen


def _faded(uses: Use, now: float) -> float:
    return uses.weight * math.exp2(-max(0.0, now - uses.at) / HALF_LIFE_S)
