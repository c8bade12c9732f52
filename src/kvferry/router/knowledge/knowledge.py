"""Everything known of prefixes, bounded. Pure.

    request sent ──────────► Seen: the worker should hold its prefixes      (names of text)
    Prompt of its id ──────► Links: these names are those chunks;           worker = engine of that node
    Prompt, Held, Gone ────► Told: chunk ► engines, host memories, shared tiers
    next request ──────────► names ► chunks ► who holds how many of them from the start

Feeds say what nodes and shared tiers hold; what was sent says the rest. Stale knowledge costs speed only, and
events may come twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from kvferry.costs import PrefillModel
from kvferry.feed import wire
from kvferry.feed.wire import Level
from kvferry.router.contract import Asked, Key
from kvferry.router.knowledge.holders import Place
from kvferry.router.knowledge.links import Links
from kvferry.router.knowledge.nodes import TierSpeed
from kvferry.router.knowledge.seen import Mark, Seen, Sighting, numbers
from kvferry.router.knowledge.sent import Sent, SentRequests
from kvferry.router.knowledge.sight import Depths, Held
from kvferry.router.knowledge.told import Emptied, Followed, Prompted, Sized, Told

ASSUMED_TOKENS_PER_LENGTH = 0.25
RATIO_MEMORY = 0.9
MAX_MODELS = 256
ASSUMED_SHORTFALL = 8.0  # tokens of a hit that an engine computes anew: it keeps whole blocks only
MOST_SHORTFALL = 512.0
SHORTFALL_STEP = 0.1

_NOTHING = Held(0, 0, 0)


@dataclass(slots=True, eq=False)
class Worker:
    """number: of its bit in masks. node: whose host it is on; engine: which one it is there, once known."""

    url: str
    number: int
    node: str | None = None
    engine: int | None = None


class Sight(msgspec.Struct, frozen=True):
    """Of one prompt. tokens: up to the end of each of its prefixes. seen: those that workers should hold."""

    prompt_tokens: int
    tokens: Sequence[int]
    depths: Mapping[int, Depths]
    seen: Sequence[Sighting]

    def seen_tokens(self, number: int) -> int:
        """What the worker's own cache should hold, by what was sent there."""
        for place, mask in self.seen:
            if mask >> number & 1:
                return self.tokens[place]
        return 0


class Knowledge:
    """One for all models: names of prefixes differ where models do."""

    def __init__(self) -> None:
        self.told = Told()
        self.links = Links()
        self.seen = Seen()
        self._sent = SentRequests()
        self._workers: dict[str, Worker] = {}
        self._free: list[int] = []
        self._paired: dict[tuple[str, int], Worker] = {}
        self._hosts: dict[str, dict[int, Worker]] = {}  # by node, by number
        self._spaces: dict[str, set[int]] = {}  # by model: namespaces that have chunks of it
        self._ratios: dict[str, float] = {}
        self._shortfall = ASSUMED_SHORTFALL
        self._later: Callable[[], None] | None = None  # what the last choice left to be done

    # Workers

    def worker(self, url: str) -> Worker:
        """Made when there is none."""
        worker = self._workers.get(url)
        if worker is None:
            number = self._free.pop() if self._free else len(self._workers)
            worker = self._workers[url] = Worker(url, number)
        return worker

    def worker_lost(self, url: str) -> None:
        """It is gone or may have restarted: its cache is empty, and which engine it is must be seen anew."""
        self.settle()
        worker = self._workers.pop(url, None)
        if worker is not None:
            self.emptied(worker)
            self._part(worker)
            node = worker.node
            self._move(worker, None)
            self.seen.renew(worker.number)
            self._free.append(worker.number)
            self._leave(node)

    def near(self, url: str, node: str) -> None:
        """The worker is on that node's host."""
        worker = self.worker(url)
        if worker.engine is None:
            self._move(worker, node)
            self._guess(node)

    def emptied(self, worker: Worker) -> None:
        """Its own cache turned out to be empty."""
        self.seen.forget(worker.number)
        if worker.node is not None and worker.engine is not None:
            self.told.emptied(worker.node, worker.engine)

    def capacity(self, url: str, tokens: int) -> None:
        """The worker has said how much its own cache holds."""
        self.seen.told(self.worker(url).number, tokens)

    def prefill(self, worker: Worker) -> PrefillModel | None:
        """As its engine measured it."""
        engine = self.told.engine(worker.node, worker.engine)
        return None if engine is None else engine.prefill

    def tiers(self, worker: Worker) -> Mapping[Level, TierSpeed]:
        """How fast those of its host are."""
        node = self.told.nodes.get(worker.node) if worker.node is not None else None
        return {} if node is None else node.tiers

    def held(self, worker: Worker, sight: Sight) -> tuple[Held, Depths | None]:
        """How many tokens of the prompt it has or can get, and the chunks that this is about."""
        seen = max(sight.seen_tokens(worker.number) - int(self._shortfall), 0)
        depths, held = None, _NOTHING
        if worker.node is not None and sight.depths:
            engine = self.told.engine(worker.node, worker.engine)
            if engine is not None and engine.space is not None:
                depths = sight.depths.get(engine.space.number)
            elif len(sight.depths) == 1:
                depths = next(iter(sight.depths.values()))
            if depths is not None:
                known = self.told.holders.known
                bit = (
                    known(Place(Level.ENGINE, worker.node, worker.engine)) if worker.engine is not None else 0
                )
                held = depths.held(bit, known(Place(Level.MEMORY, worker.node)))
        if seen > held.engine:
            held = Held(seen, max(seen, held.memory), max(seen, held.shared))
        return held, depths

    # What feeds say

    def met(self, node: str, *, behind: str) -> None:
        """The node has said what is behind it."""
        self.told.met(node, behind=behind)

    def apply(self, node: str, event: wire.AnyEvent) -> None:
        """What a node's feed says."""
        followed = self.told.apply(node, event)
        if followed is not None:
            self._follow(followed)

    def reset(self, node: str) -> None:
        """Its feed begins anew: its state follows. What was sent to its engines still counts."""
        for emptied in self.told.reset(node):
            worker = self._paired.get((emptied.node, emptied.engine))
            if worker is not None:
                self._part(worker)

    def lost(self, node: str) -> None:
        """Its feed is not followed now. What it said stays: most of it is still so."""
        self.told.lost(node)
        self._leave(node)

    def load_missed(self, worker: Worker) -> None:
        """An answer showed that its node did not bring what was expected.

        One that is followed says so itself; of one that is not, nothing that it said counts any more.
        """
        known = self.told.nodes.get(worker.node) if worker.node is not None else None
        if known is not None and not known.followed:
            self.reset(known.name)

    def removed(self, node: str) -> None:
        """It is gone for good."""
        self.reset(node)
        self.told.removed(node)
        for worker in list(self._hosts.get(node, {}).values()):
            self._move(worker, None)

    def _leave(self, node: str | None) -> None:
        """A node that nobody follows, on a host without workers, is gone for good."""
        known = self.told.nodes.get(node) if node is not None else None
        if known is not None and not known.followed and known.name not in self._hosts:
            self.removed(known.name)

    def _follow(self, followed: Followed) -> None:
        worker = self._paired.get((followed.node, followed.engine))
        match followed:
            case Emptied():
                if worker is not None:
                    self.seen.forget(worker.number)
                    if followed.gone:
                        self._part(worker)
            case Sized():
                self._guess(followed.node)
                if worker is not None and followed.cache_tokens:
                    self.seen.told(worker.number, followed.cache_tokens)
            case Prompted():
                self._prompted(followed)

    def _prompted(self, prompted: Prompted) -> None:
        self.settle()
        event = prompted.event
        sent = self._sent.told(event.request_id)
        if sent is None:
            return
        worker = self._workers.get(sent.worker)
        if worker is not None:  # else it was removed meanwhile
            self._shown(worker, sent, prompted)
        if sent.model not in self._spaces and len(self._spaces) >= MAX_MODELS:
            self._spaces.clear()
        spaces = self._spaces.setdefault(sent.model, set())
        if prompted.space.number not in spaces:
            spaces.intersection_update(self.told.numbered)
            spaces.add(prompted.space.number)
        self.links.learn(
            prompted.space.number,
            sent.keys,
            event.digests,
            prompt_tokens=event.prompt_tokens,
            chunk_tokens=prompted.space.chunk_tokens,
        )
        self._length(sent.model, sent.keys, event.prompt_tokens)

    def _shown(self, worker: Worker, sent: Sent, prompted: Prompted) -> None:
        """Which engine the worker is, and how much it had of what it should have."""
        if (worker.node, worker.engine) != (prompted.node, prompted.engine):
            self._pair(worker, prompted.node, prompted.engine)
        engine = self.told.engine(prompted.node, prompted.engine)
        tells = engine is not None and engine.tells  # who follows its KV events learns not how much it had
        if sent.mark.worker == worker.number and not tells:
            cached = prompted.event.engine_tokens
            self.judged(worker, sent.mark, expected_tokens=sent.engine_tokens, cached_tokens=cached)

    def _guess(self, node: str) -> None:
        """The only worker of a host is its only engine, until a request shows otherwise."""
        workers, known = self._hosts.get(node, {}), self.told.nodes.get(node)
        if known is not None and len(workers) == 1 == len(known.engines):
            [worker], [engine] = workers.values(), known.engines
            if worker.engine is None:
                self._pair(worker, node, engine)

    def _pair(self, worker: Worker, node: str, engine: int) -> None:
        before = self._paired.get((node, engine))
        if before is not None:
            self._part(before)
        self._part(worker)
        self._move(worker, node)
        worker.engine = engine
        self._paired[node, engine] = worker
        known = self.told.engine(node, engine)
        if known is not None and known.cache_tokens:
            self.seen.told(worker.number, known.cache_tokens)

    def _part(self, worker: Worker) -> None:
        """Which engine it is must be seen anew; that it is on the node's host is likely still."""
        if worker.node is not None and worker.engine is not None:
            if self._paired.get((worker.node, worker.engine)) is worker:
                del self._paired[worker.node, worker.engine]
            worker.engine = None

    def _move(self, worker: Worker, node: str | None) -> None:
        if worker.node is not None:
            here = self._hosts.get(worker.node)
            if here is not None:
                here.pop(worker.number, None)
                if not here:
                    del self._hosts[worker.node]
        worker.node = node
        if node is not None:
            self._hosts.setdefault(node, {})[worker.number] = worker

    # What was sent, and what answers say

    def later(self, write: Callable[[], None]) -> None:
        """Of a choice just made: to be called by ``settle``, and before anything asks what it writes."""
        self.settle()
        self._later = write

    def settle(self) -> None:
        """What was left to be done is done."""
        later, self._later = self._later, None
        if later is not None:
            later()

    def sent(self, asked: Asked, worker: Worker, *, new_tokens: float, engine_tokens: int = 0) -> Mark:
        """The request is on its way to this worker, whose own cache should have so many tokens of it."""
        mark = self.seen.sent(asked.keys, worker.number, new_tokens=new_tokens)
        if self.told.nodes and asked.keys:
            self._sent.add(asked.request_id, Sent(worker.url, asked.model, asked.keys, mark, engine_tokens))
        return mark

    def judged(self, worker: Worker, mark: Mark, *, expected_tokens: int, cached_tokens: int) -> None:
        """Somebody said how much of an expected hit the worker's own cache had."""
        if self.seen.answered(mark, expected_tokens=expected_tokens, cached_tokens=cached_tokens):
            self.emptied(worker)

    def tokens_seen(self, asked: Asked, prompt_tokens: int) -> None:
        """An answer said how long the prompt was."""
        self._length(asked.model, asked.keys, prompt_tokens)

    def hit_seen(self, expected_tokens: int, cached_tokens: int) -> None:
        """An answer said how much of an expected hit there was."""
        missed = expected_tokens - cached_tokens
        if expected_tokens and abs(missed) < MOST_SHORTFALL and cached_tokens >= expected_tokens / 2:
            self._shortfall += SHORTFALL_STEP * missed
            self._shortfall = min(max(self._shortfall, 0.0), MOST_SHORTFALL)

    def _length(self, model: str, keys: Sequence[Key], prompt_tokens: int) -> None:
        if not keys or prompt_tokens <= 0:
            return
        ratio = prompt_tokens / max(keys[-1].length, 1)
        known = self._ratios.get(model)
        if known is None and len(self._ratios) >= MAX_MODELS:
            self._ratios.clear()
        self._ratios[model] = ratio if known is None else RATIO_MEMORY * known + (1 - RATIO_MEMORY) * ratio

    # What the choice asks

    def look(self, asked: Asked, workers: int) -> Sight:
        """What is where of this prompt. workers: a mask of those in question."""
        self.settle()
        keys = asked.keys
        if not keys:
            return Sight(0, (), {}, ())
        depths: dict[int, Depths] = {}
        known_length = known_tokens = 0
        for space in self._spaces.get(asked.model, ()):
            found = self.links.longest(space, keys)
            if found is None:
                continue
            length, link = keys[found[0]].length, found[1]
            if length > known_length:
                known_length, known_tokens = length, link.tokens
            depth = self.told.depths(space, link)
            if depth is not None:
                depths[space] = depth
        ratio = self._ratios.get(asked.model, ASSUMED_TOKENS_PER_LENGTH)
        before = known_tokens / known_length if known_length else ratio
        past = known_tokens - known_length * ratio
        tokens = [
            int(length * before if length <= known_length else past + length * ratio) for _, length in keys
        ]
        return Sight(max(tokens[-1], 1), tokens, depths, self.seen.holds(keys, tokens, workers))

    def holding(self, sight: Sight, *, most: int, turn: int) -> list[int]:
        """Numbers of workers that have the longest parts of the prompt, and then of those that can get them.

        turn: which of very many.
        """
        found: dict[int, None] = {}
        for _, mask in sight.seen:
            if len(found) < most:
                found.update(dict.fromkeys(_some(mask, most=most - len(found), turn=turn)))
        for depths in sight.depths.values():
            for _, mask in (*depths.local, *depths.reach):
                if len(found) >= most:
                    break
                for bit in _some(mask, most=most, turn=turn):
                    place = self.told.holders.place(bit)
                    found.update((worker.number, None) for worker in self._at(place))
        return list(found)[:most]

    def _at(self, place: Place | None) -> Iterable[Worker]:
        if place is None:
            return ()
        if place.level is Level.ENGINE:
            worker = self._paired.get((place.who, place.engine))
            return () if worker is None else (worker,)
        return self._hosts.get(place.who, {}).values() if place.level is Level.MEMORY else ()

    def statistics(self) -> dict[str, int]:
        """How much is known, for status and ``/metrics``."""
        return {
            "chunks": len(self.told.holders),
            "links": len(self.links),
            "names": len(self.seen),
            "nodes": len(self.told.nodes),
            "paired_workers": len(self._paired),
        }


def _some(mask: int, *, most: int, turn: int) -> Iterator[int]:
    """Some of the bits of a mask: of many, those from a certain one on."""
    if mask.bit_count() > most:
        turn %= mask.bit_length()
        later = mask >> turn << turn
        mask = later if later.bit_count() >= most else mask
    return islice(numbers(mask), most)
