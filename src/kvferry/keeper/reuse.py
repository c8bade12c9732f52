"""Which parts were used most, lately: a bounded table. Pure.

A use counts half as much after every half-life, so that yesterday's favourites fade. The table keeps what was
used last; what was never used a second time never gets in, since a keeper is told of uses only.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.identity.names import PartRef

HALF_LIFE_S = 12 * 3600.0


class Use(NamedTuple):
    """How much a part was used, as of its last use, and when that was."""

    ref: PartRef
    weight: float
    at: float


@dataclass(slots=True)
class _Uses:
    weight: float
    at: float
    order: int


class ReuseTable:
    """At most ``max_parts`` parts. Times are monotonic seconds."""

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._uses: OrderedDict[PartRef, _Uses] = OrderedDict()
        self._order = 0

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, refs: Sequence[PartRef], now: float) -> None:
        """They were used together, the head of the prompt first."""
        for ref in refs:
            self._order += 1
            found = self._uses.get(ref)
            if found is None:
                self._uses[ref] = _Uses(1.0, now, self._order)
                continue
            self._uses.move_to_end(ref)
            found.weight = _faded(found, now) + 1.0
            found.at, found.order = now, self._order
        while len(self._uses) > self._max_parts:
            self._uses.popitem(last=False)

    def most(self, *, within_s: float, max_bytes: int, namespace: bytes | None, now: float) -> list[PartRef]:
        """Used within so many seconds, the most used first, of at most so many bytes together.

        Of equals those used last come first, and of one call's the head of the prompt.
        """
        recent = [
            (ref, uses)
            for ref, uses in self._uses.items()
            if now - uses.at <= within_s and (namespace is None or ref.key.namespace == namespace)
        ]
        recent.sort(key=lambda item: (-_faded(item[1], now), -item[1].at, item[1].order))
        chosen: list[PartRef] = []
        for ref, _ in recent:
            if ref.nbytes > max_bytes:
                break
            max_bytes -= ref.nbytes
            chosen.append(ref)
        return chosen

    def all(self) -> list[Use]:
        """The least recent first."""
        return [Use(ref, uses.weight, uses.at) for ref, uses in self._uses.items()]

    def restore(self, found: Sequence[Use]) -> None:
        """What ``all`` gave once."""
        for use in found[-self._max_parts :]:
            self._order += 1
            self._uses[use.ref] = _Uses(use.weight, use.at, self._order)

    def forget(self, refs: Sequence[PartRef]) -> None:
        """They are deleted."""
        for ref in refs:
            self._uses.pop(ref, None)

    def forget_namespace(self, namespace: bytes | None) -> None:
        """Those of a namespace, or all."""
        for ref in [r for r in self._uses if namespace is None or r.key.namespace == namespace]:
            del self._uses[ref]


def _faded(uses: _Uses, now: float) -> float:
    return uses.weight * math.exp2(-max(0.0, now - uses.at) / HALF_LIFE_S)
