"""Finds what a keeper's disk has and the bucket lacks: what waited for it when the last keeper was killed.

A page of the disk's index at a time, on the keeper's thread; only what was stored or used lately, and only
while few others wait for objects. It reads no disk and sends no request: both tiers know what they have.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvferry.identity.names import PartRef
from kvferry.keeper.below import Below
from kvferry.keeper.copies import Copies
from kvferry.loop import Loop, Timer
from kvferry.tiers.awaited import AwaitedTier
from kvferry.tiers.contract import Tier

LATELY_S = 86400.0
"""What was neither stored nor used for longer is not worth an upload."""
PAGE_PARTS = 512
PAGE_S = 0.1
"""Between two pages."""
REST_S = 600.0
"""Between two passes."""
ROOM_DIVISOR = 4
"""Of the backlog's room, which is for what nodes tell: as much as this takes at most."""


@runtime_checkable
class Listing(Protocol):
    """A tier that can name what it holds, without any I/O."""

    def parts_within(self, seconds: float) -> Iterator[Sequence[PartRef]]:
        """Stored or last used within so long. What changes meanwhile may be left out."""
        ...


@runtime_checkable
class Knowing(Protocol):
    """A tier that knows what it lacks, without any I/O."""

    def lacks(self, refs: Sequence[PartRef]) -> Sequence[PartRef]:
        """Those it has not and has room for; none while it cannot tell. No use of the others."""
        ...


class Reconciler:
    """On the keeper's thread. It does nothing where one of the two tiers is missing."""

    def __init__(
        self,
        *,
        loop: Loop,
        below: Below,
        copies: Copies,
        dropping: Callable[[Sequence[PartRef]], frozenset[PartRef]],
        room_parts: int,
    ) -> None:
        """dropping: which parts are being deleted now. room_parts: of the backlog."""
        self._loop = loop
        self._below = below
        self._copies = copies
        self._dropping = dropping
        self._room_parts = max(1, room_parts // ROOM_DIVISOR)
        self._page_parts = min(PAGE_PARTS, self._room_parts)
        self._pages: Iterator[Sequence[PartRef]] | None = None
        self._timer: Timer | None = None
        self._closed = False

    def begin(self) -> None:
        """The first pass, which follows a start."""
        if not self._closed and self._below.disk is not None and self._below.objects is not None:
            self._turn()

    def close(self) -> None:
        """Look no further."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        rest_s = self._page()
        self._timer = self._loop.at(self._loop.clock() + rest_s, self._turn)

    def _page(self) -> float:
        """Look at one. Returns how long to rest."""
        disk, objects = _real(self._below.disk), _real(self._below.objects)
        flush = self._copies.flush
        if not isinstance(disk, Listing) or not isinstance(objects, Knowing) or flush is None:
            return PAGE_S if disk is None or objects is None else REST_S
        if flush.paused or self._copies.disk_hangs or flush.parts + self._page_parts > self._room_parts:
            return PAGE_S
        if self._pages is None:
            self._pages = _pages(disk.parts_within(LATELY_S), self._page_parts)
        page = next(self._pages, None)
        if page is None:
            self._pages = None
            return REST_S
        going = self._dropping(page)
        self._copies.missing([ref for ref in objects.lacks(page) if ref not in going])
        return PAGE_S


def _pages(listed: Iterator[Sequence[PartRef]], count: int) -> Iterator[Sequence[PartRef]]:
    """So many parts at a time."""
    parts = itertools.chain.from_iterable(listed)
    while page := list(itertools.islice(parts, count)):
        yield page


def _real(tier: Tier | None) -> object:
    """The tier itself, once it answers."""
    return tier.tier if isinstance(tier, AwaitedTier) else tier
