"""Which chunks are where: for each chunk one integer, a bit for each place that holds it. Pure.

A place is a level of somebody: host memory of a node, the own cache of an engine, a tier shared by those
behind one Valkey. To forget a whole place its bit is retired, which costs nothing; a sweep, a few chunks with
every call, makes retired bits new again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvferry.feed.wire import Level

MAX_CHUNKS = 1 << 19  # of all places together; the longest unused is forgotten
MAX_RETIRED = 64  # bits, before a sweep begins
SWEPT_PER_CALL = 512


class Place(NamedTuple):
    """who: the node, the Valkey, or the node and engine."""

    level: Level
    who: str
    engine: int = 0


class Holders:
    """Chunks by number (the head of their digest). Numbers may collide, which costs speed only."""

    def __init__(self, limit: int = MAX_CHUNKS) -> None:
        self._limit = limit
        self._masks: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[Place, int] = {}
        self._places: dict[int, Place] = {}  # by number of the bit
        self._free: list[int] = []
        self._used = 0
        self._retired = 0
        self._swept = 0
        self._sweep: Iterator[int] | None = None

    def __len__(self) -> int:
        return len(self._masks)

    def bit(self, place: Place) -> int:
        """The mask that has the place's bit alone. It changes when the place is forgotten."""
        bit = self._bits.get(place)
        if bit is None:
            if not self._free:
                self._free.append(self._used)
                self._used += 1
            number = self._free.pop()
            self._places[number] = place
            bit = self._bits[place] = 1 << number
        return bit

    def place(self, number: int) -> Place | None:
        """Whose bit this is."""
        return self._places.get(number)

    def known(self, place: Place) -> int:
        """Its bit, or 0 where nothing was ever heard of it."""
        return self._bits.get(place, 0)

    def forget(self, place: Place) -> None:
        """Nothing is there any more."""
        bit = self._bits.pop(place, None)
        if bit is not None:
            self._retired |= bit
            del self._places[bit.bit_length() - 1]

    def held(self, place: Place, chunks: Iterable[int]) -> None:
        """They are there."""
        bit, masks = self.bit(place), self._masks
        for chunk in chunks:
            masks[chunk] = masks.get(chunk, 0) | bit
            masks.move_to_end(chunk)
        while len(masks) > self._limit:
            masks.popitem(last=False)
        self._go_on()

    def gone(self, place: Place, chunks: Iterable[int]) -> None:
        """They are not."""
        bit = self._bits.get(place, 0)
        if bit:
            for chunk in chunks:
                mask = self._masks.get(chunk)
                if mask is not None:
                    self._put(chunk, mask & ~bit)
        self._go_on()

    def mask(self, chunk: int) -> int:
        """Where it is. Bits of forgotten places may be among them; nobody asks for those."""
        return self._masks.get(chunk, 0)

    def used(self, chunks: Iterable[int]) -> None:
        """They are worth remembering."""
        masks = self._masks
        for chunk in chunks:
            if chunk in masks:
                masks.move_to_end(chunk)

    def _put(self, chunk: int, mask: int) -> None:
        if mask:
            self._masks[chunk] = mask
        else:
            del self._masks[chunk]

    def _go_on(self) -> None:
        """A bit of a sweep, if one is due."""
        if self._sweep is None:
            if self._retired.bit_count() < MAX_RETIRED:
                return
            self._swept = self._retired
            self._sweep = iter(list(self._masks))
        for _ in range(SWEPT_PER_CALL):
            chunk = next(self._sweep, None)
            if chunk is None:
                self._sweep = None
                self._retired &= ~self._swept
                self._free += [place for place in range(self._used) if self._swept >> place & 1]
                return
            mask = self._masks.get(chunk)
            if mask is not None and mask & self._swept:
                self._put(chunk, mask & ~self._swept)
