"""What the events of a feed say is where, and the same as a snapshot in slices. Pure.

A snapshot may be taken while events go on being applied: what is said after it began is said again to whoever
takes it, in order, and what was said of each chunk last counts. So a slice may be of any moment since.

What others share is known to each node in part only: what one of them has put there, another may find gone.
"""

from collections.abc import Iterator, Sequence

from kvferry.feed.framing import split
from kvferry.feed.wire import (
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Gone,
    Held,
    Level,
    Rate,
    Space,
    Speed,
)

BUCKETS = 256
MAX_SHARED_CHUNKS = 1 << 18
"""Known of each shared level, some 32 MiB; nothing else bounds what many hosts write to one server."""
SLICE_DIGESTS = 2048

Shelf = tuple[Level, int, int]
"""Level, engine (0 but at the level ENGINE) and space."""


class _Chunks:
    """A set in buckets, by the digest's first byte: one can be read while others change."""

    __slots__ = ("buckets", "count")

    def __init__(self) -> None:
        self.buckets: list[dict[bytes, None]] = [{} for _ in range(BUCKETS)]
        self.count = 0

    def add(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those that were not there."""
        new = []
        for digest in digests:
            bucket = self.buckets[digest[0]]
            if digest not in bucket:
                bucket[digest] = None
                new.append(digest)
        self.count += len(new)
        return new

    def remove(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those that were there."""
        old = []
        for digest in digests:
            bucket = self.buckets[digest[0]]
            if digest in bucket:
                del bucket[digest]
                old.append(digest)
        self.count -= len(old)
        return old

    def oldest_of(self, digest: bytes) -> bytes:
        """In the bucket of this one, which is in it."""
        return next(iter(self.buckets[digest[0]]))


class Picture:
    """max_shared_chunks: of each level from VALKEY on; those beyond it that came first are forgotten."""

    def __init__(self, *, max_shared_chunks: int = MAX_SHARED_CHUNKS) -> None:
        self._max_shared = max_shared_chunks
        self._spaces: dict[int, Space] = {}
        self._engines: dict[int, EngineUp] = {}
        self._rates: dict[Level, Rate] = {}
        self._speeds: dict[int, Speed] = {}
        self._shelves: dict[Shelf, _Chunks] = {}

    def apply(self, event: AnyEvent) -> list[AnyEvent]:
        """What of it is new, as events for those who follow; nothing when it says what was said before."""
        match event:
            case Held():
                return self._held(event)
            case Gone():
                return self._gone(event)
            case Cleared(level=level, engine=engine):
                for name in [name for name in self._shelves if name[:2] == (level, engine)]:
                    del self._shelves[name]
            case Space(space=space):
                if self._spaces.get(space) == event:
                    return []
                self._spaces[space] = event
            case EngineUp(engine=engine):
                if self._engines.get(engine) == event:
                    return []
                self._engines[engine] = event
            case EngineDown(engine=engine):
                if self._engines.pop(engine, None) is None:
                    return []
                self._speeds.pop(engine, None)
                for name in [name for name in self._shelves if name[:2] == (Level.ENGINE, engine)]:
                    del self._shelves[name]
            case Rate(level=level):
                self._rates[level] = event
            case Speed(engine=engine):
                self._speeds[engine] = event
            case _:  # of requests: nothing that lasts
                pass
        return [event]

    def count(self, level: Level) -> int:
        """How many chunks are known to be at this level. From any thread."""
        return sum(chunks.count for (at, _, _), chunks in list(self._shelves.items()) if at is level)

    def chunks(self, level: Level, space: int, engine: int = 0) -> set[bytes]:
        """All of them, for tests."""
        found = self._shelves.get((level, engine, space))
        return set() if found is None else {digest for bucket in found.buckets for digest in bucket}

    def slices(self) -> Iterator[tuple[AnyEvent, ...]]:
        """All that is known, a little at a time; each is of the moment when it is asked for."""
        yield (
            *self._spaces.values(),
            *self._engines.values(),
            *self._rates.values(),
            *self._speeds.values(),
        )
        for name in list(self._shelves):
            yield from self._slices_of(name)

    def _slices_of(self, name: Shelf) -> Iterator[tuple[AnyEvent, ...]]:
        gathered: list[bytes] = []
        for at in range(BUCKETS):
            chunks = self._shelves.get(name)
            if chunks is None:  # cleared meanwhile, which is told
                return
            gathered += chunks.buckets[at]
            if len(gathered) >= SLICE_DIGESTS or (at == BUCKETS - 1 and gathered):
                yield (Held(*name, b"".join(gathered)),)
                gathered = []

    def _held(self, event: Held) -> list[AnyEvent]:
        name = _shelf(event)
        chunks = self._shelves.get(name)
        if chunks is None:
            chunks = self._shelves[name] = _Chunks()
        new = chunks.add(split(event.digests))
        if not new:
            return []
        found: list[AnyEvent] = [Held(*name, b"".join(new))]
        if event.level >= Level.VALKEY and (over := self.count(event.level) - self._max_shared) > 0:
            forgotten = [old for digest in new[:over] for old in chunks.remove([chunks.oldest_of(digest)])]
            found.append(Gone(*name, b"".join(forgotten)))
        return found

    def _gone(self, event: Gone) -> list[AnyEvent]:
        shelf = self._shelves.get(_shelf(event))
        old = [] if shelf is None else shelf.remove(split(event.digests))
        if event.level >= Level.VALKEY:  # another node may have said that they are there
            return [event]
        return [Gone(event.level, event.engine, event.space, b"".join(old))] if old else []


def _shelf(event: Held | Gone) -> Shelf:
    return event.level, event.engine, event.space
