"""Which chunks a tier has whole, from what is seen of their parts. Pure."""

from collections.abc import Iterable

from kvferry.feed.picture import MAX_SHARED_CHUNKS
from kvferry.feed.wire import AnyEvent, Gone, Held, Level
from kvferry.identity.boundaries import core_parts

Sighting = tuple[int, bytes, int, bool]
"""Space, chunk, part, and whether that part is there."""


class Parts:
    """Of one level. A space whose chunks have one part that counts costs nothing here."""

    def __init__(self, level: Level, *, max_chunks: int = MAX_SHARED_CHUNKS) -> None:
        self._level = level
        self._max_chunks = max_chunks
        self._whole: dict[int, int] = {}  # by space: a bit for each part that counts
        self._some: dict[tuple[int, bytes], int] = {}  # the parts that were seen, oldest first

    def space(self, space: int, part_bytes: tuple[int, ...], trailing: tuple[int, ...]) -> None:
        """What its chunks consist of. Idempotent."""
        self._whole[space] = sum(1 << part for part in core_parts(part_bytes, trailing))

    def seen(self, sightings: Iterable[Sighting]) -> list[AnyEvent]:
        """What follows for chunks, in order; some of it may be known already."""
        states: dict[tuple[int, bytes], bool] = {}
        for space, chunk, part, there in sightings:
            whole, bit = self._whole.get(space, 0), 1 << part
            if not whole & bit:
                continue
            if not there:
                states[space, chunk] = False
                if (some := self._some.get((space, chunk))) is not None:
                    self._some[space, chunk] = some & ~bit
            elif whole == bit or self._all_but(space, chunk, bit) == whole & ~bit:
                states[space, chunk] = True
        return self._events(states)

    def _all_but(self, space: int, chunk: bytes, bit: int) -> int:
        """The other parts of it that were seen; this one is remembered."""
        name = (space, chunk)
        some = self._some.pop(name, 0)
        self._some[name] = some | bit
        if len(self._some) > self._max_chunks:
            del self._some[next(iter(self._some))]
        return some & ~bit

    def _events(self, states: dict[tuple[int, bytes], bool]) -> list[AnyEvent]:
        held: dict[int, list[bytes]] = {}
        gone: dict[int, list[bytes]] = {}
        for (space, chunk), whole in states.items():
            (held if whole else gone).setdefault(space, []).append(chunk)
        return [
            *(Gone(self._level, 0, space, b"".join(chunks)) for space, chunks in gone.items()),
            *(Held(self._level, 0, space, b"".join(chunks)) for space, chunks in held.items()),
        ]
