"""What the feeds of nodes have said: events in; what follows from them for the rest, out. Pure.

Numbers of engines and spaces are of one node's epoch. What is said of a shared tier by one node is so for
all behind the same Valkey, until one of them says it is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.costs import PrefillModel
from kvferry.feed import wire
from kvferry.feed.wire import Level
from kvferry.router.knowledge.holders import Holders, Place
from kvferry.router.knowledge.links import Link, chunk_numbers
from kvferry.router.knowledge.nodes import (
    MAX_ENGINE_CHUNKS,
    MAX_ENGINES,
    MAX_NODES,
    MAX_SPACES,
    Engine,
    EngineChunks,
    Node,
    Space,
    TierSpeed,
)
from kvferry.router.knowledge.sight import Depths, follow

SHARED = (Level.VALKEY, Level.DISK, Level.OBJECTS)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request was looked up there."""

    node: str
    engine: int
    space: Space
    event: wire.Prompt


@dataclass(frozen=True, slots=True)
class Emptied:
    """An engine holds nothing any more. gone: nor is it there itself."""

    node: str
    engine: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Sized:
    """An engine is there. cache_tokens: how many its own cache holds; 0: it does not say."""

    node: str
    engine: int
    cache_tokens: int


Followed = Prompted | Emptied | Sized


class Told:
    """By node."""

    def __init__(self) -> None:
        self.holders = Holders()
        self.nodes: dict[str, Node] = {}
        self._spaces: dict[bytes, int] = {}
        self._next_space = 0
        self.numbered: dict[int, Space] = {}  # namespaces, by number
        self._engines = 0
        self._shared_bits = 0
        self._members: dict[int, int] = {}  # who can get from these shared tiers; emptied when that changes

    def engine(self, node: str | None, number: int | None) -> Engine | None:
        """One that is connected."""
        if node is None or number is None:
            return None
        known = self.nodes.get(node)
        return None if known is None else known.engines.get(number)

    def met(self, node: str, *, behind: str) -> None:
        """It has said what is behind it: which Valkey, or a disk of its own."""
        self._node(node).behind = behind
        self._members.clear()

    def reset(self, node: str) -> list[Emptied]:
        """What it said counts no more: its state follows, or it has none."""
        known = self.nodes.get(node)
        if known is None:
            return []
        self.holders.forget(Place(Level.MEMORY, node))
        gone = [self._down(known, number) for number in list(known.engines)]
        known.spaces.clear()
        known.tiers.clear()
        self._members.clear()
        return [emptied for emptied in gone if emptied is not None]

    def lost(self, node: str) -> None:
        """Its feed is not followed now. What it said stays: most of it is still so."""
        known = self.nodes.get(node)
        if known is not None:
            known.followed = False

    def removed(self, node: str) -> list[Emptied]:
        """It is gone for good."""
        emptied = self.reset(node)
        known = self.nodes.pop(node, None)
        if known is not None and all(other.behind != known.behind for other in self.nodes.values()):
            for level in SHARED:  # nobody is left who could bring it
                self._forget(Place(level, known.behind))
        return emptied

    def apply(self, node: str, event: wire.AnyEvent) -> Followed | None:
        """One event. Of numbers it never explained, nothing is learned."""
        known = self._node(node)
        known.followed = True
        match event:
            case wire.Held() | wire.Gone():
                self._moved(known, event)
            case wire.Prompt():
                return self._prompt(known, event)
            case wire.Space():
                self._space(known, event)
            case wire.EngineUp():
                return self._up(known, event)
            case wire.EngineDown():
                return self._down(known, event.engine)
            case wire.Cleared():
                return self._cleared(known, event)
            case wire.Rate():
                known.tiers[event.level] = TierSpeed(event.latency_s, event.bytes_per_s)
            case wire.Speed():
                engine = known.engines.get(event.engine)
                if engine is not None:
                    model = PrefillModel(event.base_s, event.per_token_s, event.per_token2_s)
                    engine.prefill = model if model.seconds(1) > 0 else None  # it has measured nothing
            case wire.Result():
                pass
        return None

    def depths(self, space: int, link: Link) -> Depths | None:
        """Who has, or can get, how much of the prefix."""
        known = self.numbered.get(space)
        if known is None:
            return None
        numbers = chunk_numbers(link.digests)
        local, reach = follow(numbers, self.holders.mask, shared=self._shared_bits, members=self._who)
        self.holders.used(numbers)
        return Depths(known, link, local, reach)

    def emptied(self, node: str, number: int) -> None:
        """The engine turned out to hold nothing."""
        self.holders.forget(Place(Level.ENGINE, node, number))
        engine = self.engine(node, number)
        if engine is not None:
            engine.chunks = EngineChunks()

    def _node(self, name: str) -> Node:
        node = self.nodes.get(name)
        if node is None:
            while len(self.nodes) >= MAX_NODES:
                self.removed(next(iter(self.nodes)))
            node = self.nodes[name] = Node(name)
        return node

    def _space(self, node: Node, event: wire.Space) -> None:
        if not event.chunk_tokens:
            return
        if event.space not in node.spaces and len(node.spaces) >= MAX_SPACES:
            used = _used(node)
            oldest = next((at for at, space in node.spaces.items() if space.number not in used), None)
            if oldest is None:
                return
            del node.spaces[oldest]
        number = self._number(event.namespace)
        if number is not None:
            space = Space(number, event.namespace, event.label, event.chunk_tokens, event.chunk_bytes)
            node.spaces[event.space] = self.numbered[number] = space

    def _number(self, namespace: bytes) -> int | None:
        """For all nodes. The oldest that no engine has any more makes room; no number is given twice."""
        number = self._spaces.get(namespace)
        if number is None:
            if len(self._spaces) >= MAX_SPACES:
                used = set[int]().union(*map(_used, self.nodes.values()))
                oldest = next((at for at in self.numbered if at not in used), None)
                if oldest is None:
                    return None
                del self._spaces[self.numbered.pop(oldest).namespace]
            number = self._spaces[namespace] = self._next_space
            self._next_space += 1
        return number

    def _up(self, node: Node, event: wire.EngineUp) -> Sized | None:
        engine = node.engines.get(event.engine)
        if engine is None:
            if len(node.engines) >= MAX_ENGINES:
                return None
            engine = node.engines[event.engine] = Engine(event.name)
            self._engines += 1
        engine.space = node.spaces.get(event.space, engine.space)
        engine.cache_tokens = event.cache_tokens or engine.cache_tokens
        return Sized(node.name, event.engine, engine.cache_tokens)

    def _down(self, node: Node, number: int) -> Emptied | None:
        engine = node.engines.pop(number, None)
        self.holders.forget(Place(Level.ENGINE, node.name, number))
        if engine is None:
            return None
        self._engines -= 1
        return Emptied(node.name, number, gone=True)

    def _place(self, node: Node, level: Level, engine: int) -> Place:
        if level is Level.ENGINE:
            return Place(level, node.name, engine)
        if level is Level.MEMORY:
            return Place(level, node.name)
        return Place(level, node.behind)

    def _moved(self, node: Node, event: wire.Held | wire.Gone) -> None:
        if event.level is Level.ENGINE:
            engine = node.engines.get(event.engine)
            if engine is None:
                return
            engine.tells = True
        place = self._place(node, event.level, event.engine)
        if isinstance(event, wire.Gone):
            self.holders.gone(place, chunk_numbers(event.digests))
            return
        if event.level is not Level.ENGINE and not self.holders.known(place):
            if event.level in SHARED:
                self._shared_bits |= self.holders.bit(place)
            self._members.clear()
        self.holders.held(place, chunk_numbers(event.digests))

    def _cleared(self, node: Node, event: wire.Cleared) -> Emptied | None:
        place = self._place(node, event.level, event.engine)
        self._forget(place)
        if event.level is not Level.ENGINE or event.engine not in node.engines:
            return None
        self.emptied(node.name, event.engine)
        return Emptied(node.name, event.engine, gone=False)

    def _forget(self, place: Place) -> None:
        """Nothing is there any more, and nobody gets anything from there."""
        self._shared_bits &= ~self.holders.known(place)
        self._members.clear()
        self.holders.forget(place)

    def _who(self, shared: int) -> int:
        """The host memories (a mask) that the shared tiers of this mask can fill."""
        members = self._members.get(shared)
        if members is None:
            if len(self._members) >= MAX_NODES:
                self._members.clear()
            members = 0
            for node in self.nodes.values():
                if any(shared & self.holders.known(Place(level, node.behind)) for level in SHARED):
                    members |= self.holders.bit(Place(Level.MEMORY, node.name))
            self._members[shared] = members
        return members

    def _prompt(self, node: Node, event: wire.Prompt) -> Prompted | None:
        engine, space = node.engines.get(event.engine), node.spaces.get(event.space)
        if engine is None or space is None:
            return None
        engine.space = space
        if not engine.tells:
            self._derive(node, event, engine, space, chunk_numbers(event.digests))
        return Prompted(node.name, event.engine, space, event)

    def _derive(
        self, node: Node, event: wire.Prompt, engine: Engine, space: Space, numbers: Sequence[int]
    ) -> None:
        """The engine is about to hold all of the prompt, as far as its cache goes."""
        place = Place(Level.ENGINE, node.name, event.engine)
        limit = MAX_ENGINE_CHUNKS // max(self._engines, 1)
        if engine.cache_tokens:
            limit = min(limit, max(engine.cache_tokens // space.chunk_tokens, 1))
        self.holders.held(place, numbers)
        self.holders.gone(place, engine.chunks.used(numbers, limit=limit))


def _used(node: Node) -> set[int]:
    """Numbers of the namespaces of its engines."""
    return {engine.space.number for engine in node.engines.values() if engine.space is not None}
