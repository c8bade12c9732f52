"""What the model knows of what is under way: questions, loads and reservations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.node.machine_keepers import Locate
from tests.node.machine_tier import Probe
from tests.node.machine_world import Peer

from kvferry.identity.names import PartKey
from kvferry.keeper.wire import Where
from kvferry.node import search
from kvferry.node.state import Namespace
from kvferry.node.wire import Place
from kvferry.tiers.contract import Outcome

WHERE = {
    Where.ABSENT: Outcome.MISS,
    Where.DISK: Outcome.OK,
    Where.OBJECTS: Outcome.OK,
    Where.UNKNOWN: Outcome.FAILED,
}


@dataclass(eq=False)
class Asked:
    """A lookup without an answer.

    memory: positions and parts that the pool held when it came. crowded: whether its connection wanted more
    than its share then; a load that has ended since left no room for what was not held in time.
    """

    peer: Peer
    space: Namespace
    wanted: Sequence[bytes]
    first_chunk: int
    bound: float
    memory: set[tuple[int, int]]
    probe: Probe | None = None
    locate: Locate | None = None
    crowded: bool = False

    def largest(self, there: Callable[[int, int], bool]) -> int:
        """The largest boundary for which all that it needs is there, by position and part."""
        return max(
            boundary
            for boundary in range(len(self.wanted) + 1)
            if all(there(at, part) for at, part in needed(self.space, boundary))
        )

    def available(self) -> tuple[int, bool]:
        """How far the answer may reach, and whether what is beyond is a miss: all that matters is known."""
        memory = self.largest(lambda at, part: (at, part) in self.memory)
        if self.probe is None or self.probe.answered is None:
            return memory, self.probe is None
        ends = self.ends()

        unasked = self._unasked(memory)

        def end(at: int, part: int) -> Outcome | None:
            if (at, part) in self.memory:
                return Outcome.OK
            if at >= unasked:
                return None
            return ends.get(PartKey(self.space.namespace, self.wanted[at], part))

        def possible(at: int, part: int) -> bool:
            number = self.space.trailing_of(part)
            alike = [other for other in self.space.parts if self.space.trailing_of(other) == number]
            unknown = any(end(at, other) not in (Outcome.OK, Outcome.MISS) for other in alike)
            return unknown or end(at, part) is Outcome.OK

        known = self.largest(lambda at, part: end(at, part) is Outcome.OK)
        assert known >= memory
        silent = self.locate is not None and self.locate.answered is None
        return known, not silent and self.largest(possible) == known

    def ends(self) -> dict[PartKey, Outcome]:
        """What is known of what the tier was asked for, its keepers' word included."""
        if self.probe is None or self.probe.answered is None:
            return {}
        ends = dict(zip((ref.key for ref in self.probe.refs), self.probe.answered, strict=True))
        if self.locate is not None and self.locate.answered is not None:
            for ref, where in zip(self.locate.refs, self.locate.answered, strict=True):
                ends[ref.key] = WHERE[where]
        return ends

    def places(self, at: int) -> set[Where]:
        """Where keepers have something of that chunk."""
        if self.locate is None or self.locate.answered is None:
            return set()
        places = zip(self.locate.refs, self.locate.answered, strict=True)
        return {where for ref, where in places if ref.key.chunk == self.wanted[at]}

    def to_locate(self) -> set[PartKey]:
        """What keepers should be asked for, once the tier has answered: what could lead on."""
        known, _ = self.available()
        ends, unasked = self.ends(), self._unasked(self.largest(lambda at, part: (at, part) in self.memory))

        def hopeless(at: int, part: int) -> bool:
            if (at, part) in self.memory or self.space.trailing_of(part):
                return False
            outcome = ends.get(PartKey(self.space.namespace, self.wanted[at], part))
            return at >= unasked or outcome not in (Outcome.OK, Outcome.MISS)

        end = next(
            (at for at in range(len(self.wanted)) if any(hopeless(at, part) for part in self.space.parts)),
            len(self.wanted),
        )
        wanted = {pair for boundary in range(known + 1, end + 1) for pair in needed(self.space, boundary)}
        keys = {
            PartKey(self.space.namespace, self.wanted[at], part)
            for at, part in wanted
            if (at, part) not in self.memory
        }
        return {key for key in keys if ends.get(key) is Outcome.MISS}

    def _unasked(self, memory: int) -> int:
        """The first position that the limit on what a lookup asks for left out."""
        asked = 0
        for at in range(len(self.wanted)):
            numbers = [
                self.space.trailing_of(part) for part in self.space.parts if (at, part) not in self.memory
            ]
            leading_on = sum(1 for number in numbers if not number or at + number > memory)
            if asked and asked + leading_on > search.MAX_PROBED_PARTS:
                return at
            asked += leading_on
        return len(self.wanted)


@dataclass(eq=False)
class Loading:
    """A load that runs.

    places: given to some worker, and nobody has said that they are copied. joined: who listens for which
    part, and the first chunk that it was told will not come. end: how many of its chunks come, as far as
    the node knows.
    """

    load_id: int
    peer: Peer
    space: Namespace
    chunks: Sequence[bytes]
    first_chunk: int
    deadline: float
    places: dict[tuple[int, int], Place] = field(default_factory=dict[tuple[int, int], Place])
    given: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    end: int = 0
    joined: dict[tuple[Peer, int], int] = field(default_factory=dict[tuple[Peer, int], int])

    @property
    def needed(self) -> set[tuple[int, int]]:
        """Chunks and parts that it has to bring."""
        pairs = needed(self.space, len(self.chunks))
        return {(self.first_chunk + at, part) for at, part in pairs}

    def key(self, chunk: int, part: int) -> PartKey:
        """The name of a place."""
        return PartKey(self.space.namespace, self.chunks[chunk - self.first_chunk], part)


@dataclass(eq=False)
class Writing:
    """A slot that an engine may write to, until it says that it is done, or ``until`` has come."""

    peer: Peer
    key: PartKey
    view: memoryview
    expires: float
    until: float = math.inf


def needed(space: Namespace, boundary: int) -> list[tuple[int, int]]:
    """Positions and parts that a boundary after so many chunks needs."""
    return [
        (at, part)
        for at in range(boundary)
        for part in space.parts
        if not space.trailing_of(part) or at >= boundary - space.trailing_of(part)
    ]
