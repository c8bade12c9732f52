"""One load: a run of chunks on its way from the tiers to the workers of one engine. Pure.

Every part goes through

    WANTED ──fetch begun──► FETCHING ──arrived──► READY ──copied──► COPIED
       └───────────found in the pool─────────────────┘

in chunk order, inside a window of bytes that are FETCHING or READY, so that a prefix larger than the
pool streams through it. A failed part cuts the load: chunks from it on will not come, those before it
still do. The driver performs what the methods return; nothing here pins, fetches or sends.
"""

import enum
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.boundaries import start_of
from kvferry.node.wire import Reason


class PartState(enum.Enum):
    """Of one part of a load."""

    WANTED = "wanted"
    FETCHING = "fetching"
    READY = "ready"
    COPIED = "copied"


class At(NamedTuple):
    """A part inside a load. position: of its chunk, counted from the load's first."""

    position: int
    part: int


class LeftOver(NamedTuple):
    """What a cut or an end leaves: pins to give back, and fetches this load no longer waits for."""

    ready: tuple[At, ...]
    fetching: tuple[At, ...]


class Load:
    """chunks: digests in order. part_bytes: by part number, 0 where there is none. window_bytes: above.

    trailing: as of the namespace. Where there are any, chunks lack parts that the load does not need, which
    count as COPIED, and a cut is one at the start: a boundary with less is another, which needs others.
    """

    def __init__(
        self,
        *,
        chunks: tuple[bytes, ...],
        part_bytes: tuple[int, ...],
        window_bytes: int,
        trailing: tuple[int, ...] = (),
    ) -> None:
        self.chunks = chunks
        self.part_bytes = part_bytes
        self.reason = Reason.COMPLETE
        self._end = len(chunks)
        self._parts = len(part_bytes)
        chunk = [PartState.WANTED if nbytes else PartState.COPIED for nbytes in part_bytes]
        self._states = chunk * len(chunks)
        for part, number in enumerate(trailing):
            start = start_of(number, len(chunks))
            self._states[part : start * self._parts : self._parts] = [PartState.COPIED] * start
        self._whole_only = bool(trailing)
        self._cursor = 0  # every index before it has left WANTED
        self._held_bytes = 0
        self._window_bytes = window_bytes

    @property
    def end(self) -> int:
        """Position of the first chunk that will not come; the number of chunks when all will."""
        return self._end

    @property
    def held_bytes(self) -> int:
        """Bytes of this load that are FETCHING or READY."""
        return self._held_bytes

    def state(self, at: At) -> PartState:
        """Of one part."""
        return self._states[self._index(at)]

    def next_wanted(self) -> At | None:
        """The next part to get, or None: all are under way, or the window is full for now."""
        last = self._end * self._parts
        while self._cursor < last and self._states[self._cursor] is not PartState.WANTED:
            self._cursor += 1
        if self._cursor >= last:
            return None
        position, part = divmod(self._cursor, self._parts)
        nbytes = self.part_bytes[part]
        if self._held_bytes and self._held_bytes + nbytes > self._window_bytes:
            return None
        return At(position, part)

    def waits_for_room(self) -> bool:
        """Parts are wanted and this load holds some: it can go on when those are copied."""
        return self._held_bytes > 0

    def fetching(self, at: At) -> None:
        """WANTED to FETCHING."""
        self._move(at, PartState.WANTED, PartState.FETCHING)
        self._held_bytes += self.part_bytes[at.part]

    def found(self, at: At) -> None:
        """WANTED to READY: it was in the pool and is pinned now."""
        self._move(at, PartState.WANTED, PartState.READY)
        self._held_bytes += self.part_bytes[at.part]

    def arrived(self, at: At) -> None:
        """FETCHING to READY: it is pinned now."""
        self._move(at, PartState.FETCHING, PartState.READY)

    def wanted_again(self, at: At) -> None:
        """FETCHING to WANTED: another load's fetch, which this one waited for, ended early."""
        self._move(at, PartState.FETCHING, PartState.WANTED)
        self._held_bytes -= self.part_bytes[at.part]
        self._cursor = min(self._cursor, self._index(at))

    def copied(self, at: At) -> None:
        """READY to COPIED: the pin is to be given back. Raises BrokenError on anything else."""
        self._move(at, PartState.READY, PartState.COPIED)
        self._held_bytes -= self.part_bytes[at.part]

    def cut(self, position: int, reason: Reason) -> LeftOver:
        """Chunks from ``position`` on will not come. Cuts only ever move towards the start."""
        if position >= self._end:
            return LeftOver((), ())
        position = 0 if self._whole_only else position
        left = self._leave(position)
        self._end = position
        self.reason = reason
        return left

    def finish(self, reason: Reason) -> LeftOver:
        """The load is over, whatever its state."""
        left = self._leave(0)
        if self._end:
            self.reason = reason
        self._end = 0
        return left

    def window_full(self) -> bool:
        """Parts are wanted that the window has no room for."""
        return self._cursor < self._end * self._parts

    def first_missing(self) -> int | None:
        """Position of the first chunk that has not wholly arrived, or None."""
        for index in range(self._end * self._parts):
            if self._states[index] in (PartState.WANTED, PartState.FETCHING):
                return index // self._parts
        return None

    def is_fetching(self) -> bool:
        """Some part is on its way."""
        return PartState.FETCHING in self._states[: self._end * self._parts]

    def settled(self) -> bool:
        """Every part up to the end has been copied."""
        return all(state is PartState.COPIED for state in self._states[: self._end * self._parts])

    def _leave(self, position: int) -> LeftOver:
        ready: list[At] = []
        fetching: list[At] = []
        for index in range(position * self._parts, self._end * self._parts):
            state = self._states[index]
            at = At(*divmod(index, self._parts))
            if state is PartState.READY:
                ready.append(at)
            elif state is PartState.FETCHING:
                fetching.append(at)
            else:
                continue
            self._states[index] = PartState.COPIED
            self._held_bytes -= self.part_bytes[at.part]
        return LeftOver(tuple(ready), tuple(fetching))

    def _index(self, at: At) -> int:
        if not (0 <= at.position < len(self.chunks) and 0 <= at.part < self._parts):
            raise BrokenError(f"{at} is outside this load of {len(self.chunks)} x {self._parts} parts")
        return at.position * self._parts + at.part

    def _move(self, at: At, before: PartState, after: PartState) -> None:
        index = self._index(at)
        if self._states[index] is not before:
            raise BrokenError(f"{at} is {self._states[index].value}, not {before.value}")
        self._states[index] = after
