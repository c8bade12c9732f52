"""How far a prefix reaches: memory says at once, the tier and then the keepers within a bounded wait.

in memory ──all──► found
    └──► the tier is probed ──all, or nobody else to ask──► found
              │      └──► keepers are asked ──► found: what memory, the tier and they have
              │                 └──late──► found: what memory and the tier have
              └──late──► found: what memory has
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.wire import Where
from kvferry.loop import Timer
from kvferry.node.keepers import TIERS
from kvferry.node.reach import Lack, Reach, memory_boundary, reach
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import Reason, Tier
from kvferry.pool.entries import Gap
from kvferry.tiers.contract import Outcome

MAX_PENDING_PER_CONNECTION = 1024
MAX_PENDING_CHUNKS_PER_CONNECTION = 1 << 18
MAX_PENDING_CHUNKS = 1 << 20  # of all connections together
MAX_WAIT_S = 10.0  # whatever a client asks for
MAX_PROBED_PARTS = 65536

_UNKNOWN = {
    Outcome.MISS: None,
    Outcome.LATE: Reason.DEADLINE,
    Outcome.REFUSED: Reason.TIER_DOWN,
    Outcome.FAILED: Reason.TIER_DOWN,
    Outcome.CORRUPT: Reason.CORRUPT,
    Outcome.OVER_QUOTA: Reason.LIMIT,
}
_NO_FAILURE = (Reason.COMPLETE, Reason.ABSENT, Reason.EVICTED)


@dataclass(slots=True, eq=False)
class Search:
    """chunks: the prefix, from the first chunk that the engine has not got. prompt_chunks: with those it has.

    gaps: what memory lacks of them, up to where nothing more can be used. memory: how far it alone reaches.
    probed: positions and parts that the tier was asked for, and what it said. known: how far it and memory
    reach, set while keepers are asked. deep: where they have what the tier has not. unsaid: what they could
    not tell.
    """

    connection: Connection
    space: Namespace
    chunks: Sequence[bytes]
    prompt_chunks: int
    started: float
    gaps: list[Gap] = field(default_factory=list[Gap])
    memory: int = 0
    unprobed: Sequence[Gap] = ()  # which the limit left out
    deadline: float = 0.0
    probed: Sequence[tuple[int, int]] = ()
    outcomes: Sequence[Outcome] = ()
    known: Reach | None = None
    deep: dict[tuple[int, int], Tier] = field(default_factory=dict[tuple[int, int], Tier])
    unsaid: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    timer: Timer | None = None
    found: Callable[[Reach], None] | None = None  # set while the tier is asked
    gone: Callable[[], None] | None = None

    def leads_on(self, position: int, part: int, *, beyond: int | None = None) -> bool:
        """Whether a boundary after that one, or that of memory alone, needs that part."""
        trailing = self.space.trailing_of(part)
        return not trailing or position + trailing > (self.memory if beyond is None else beyond)

    def refs(self, wanted: Iterable[tuple[int, int]]) -> list[PartRef]:
        """Of these positions and parts."""
        namespace, chunks, sizes = self.space.namespace, self.chunks, self.space.part_bytes
        return [PartRef(PartKey(namespace, chunks[at], part), sizes[part]) for at, part in wanted]

    def lacks(self) -> Iterator[Lack]:
        """What the tier was asked for and has not, nor any keeper."""
        for at, outcome in zip(self.probed, self.outcomes, strict=True):
            if outcome is Outcome.OK or at in self.deep:
                continue
            yield Lack(*at, Reason.TIER_DOWN if at in self.unsaid else _UNKNOWN[outcome])


class Searches:
    """All that wait for a probe; loop thread only."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._pending: dict[Connection, dict[Search, None]] = {}
        self._chunks: Counter[Connection] = Counter()  # of the prompts in it

    def over_limit(self, connection: Connection, chunks: int) -> bool:
        """Whether this connection, or all together, ask for more than the node keeps track of."""
        return (
            len(self._pending.get(connection, ())) >= MAX_PENDING_PER_CONNECTION
            or self._chunks[connection] + chunks > MAX_PENDING_CHUNKS_PER_CONNECTION
            or self._chunks.total() + chunks > MAX_PENDING_CHUNKS
        )

    def in_memory(self, search: Search) -> None:
        """Look into the catalogue."""
        space, behind = search.space, self._state.tier is not None
        for gap in self._state.catalogue.gaps(space.namespace, search.chunks):
            search.gaps.append(gap)
            if not behind and not all(space.trailing and space.trailing[part] for part in gap.parts):
                break  # no boundary after it
        search.memory = memory_boundary(space, len(search.chunks), search.gaps)

    def memory_reach(self, search: Search) -> Reach:
        """How far memory alone reaches, and why no further as far as it knows."""
        lacks = (Lack(gap.position, part, None) for gap in search.gaps for part in gap.parts)
        return self._with_evictions(search, reach(search.space, len(search.chunks), lacks))

    def ask_tier(
        self, search: Search, *, max_wait_s: float, found: Callable[[Reach], None], gone: Callable[[], None]
    ) -> None:
        """Ask for what could lead further than memory does, keepers for what the tier has not.

        ``found`` is called once, in time.

        gone: called instead when the connection is lost before.
        """
        tier = self._state.tier
        if tier is None or search.memory == len(search.chunks):
            found(self.memory_reach(search))
            return
        search.found, search.gone = found, gone
        self._pending.setdefault(search.connection, {})[search] = None
        self._chunks[search.connection] += search.prompt_chunks
        search.probed = self._questions(search)
        search.deadline = search.started + min(max_wait_s, MAX_WAIT_S)
        post = self._state.loop.post
        search.timer = self._state.loop.at(search.deadline, partial(self._late, search))
        tier.probe(
            search.refs(search.probed),
            deadline=search.deadline,
            done=lambda outcomes: post(partial(self._probed, search, outcomes)),
        )

    def disconnected(self, connection: Connection) -> None:
        """Nobody waits for its searches any more."""
        del self._chunks[connection]
        for search in self._pending.pop(connection, {}):
            if search.timer is not None:
                search.timer.cancel()
            if search.gone is not None:
                search.gone()

    def _questions(self, search: Search) -> list[tuple[int, int]]:
        """Positions and parts that memory lacks and a boundary beyond its own needs, within the limit."""
        questions: list[tuple[int, int]] = []
        for at, gap in enumerate(search.gaps):
            wanted = [(gap.position, part) for part in gap.parts if search.leads_on(gap.position, part)]
            if questions and len(questions) + len(wanted) > MAX_PROBED_PARTS:
                search.unprobed = search.gaps[at:]
                break
            questions += wanted
        return questions

    def _late(self, search: Search) -> None:
        """The wait is over: the answer is what is known, memory's share at least."""
        found = self._settle(search)
        if found is not None:
            self._state.counters.failed[Reason.DEADLINE.value] += 1
            known = self.memory_reach(search) if search.known is None else search.known
            found(replace(known, reason=Reason.DEADLINE))

    def _probed(self, search: Search, outcomes: Sequence[Outcome]) -> None:
        if not self._waits(search):
            return  # too late, or the engine is gone
        search.outcomes = outcomes
        reached, keepers = self._reach(search), self._state.keepers
        asked = [] if keepers is None else _deep_questions(search, reached)
        if keepers is None or not asked:
            self._tell(search, reached)
            return
        search.known = reached
        post = self._state.loop.post
        keepers.locate(
            search.refs(asked),
            deadline=search.deadline,
            done=lambda where: post(partial(self._located, search, asked, where)),
        )

    def _located(self, search: Search, asked: Sequence[tuple[int, int]], where: Sequence[Where]) -> None:
        if self._state.located is not None:
            self._state.located(search.refs(asked), where)
        if not self._waits(search):
            return
        for at, place in zip(asked, where, strict=True):
            if place in TIERS:
                search.deep[at] = TIERS[place]
            elif place is not Where.ABSENT:
                search.unsaid.add(at)
        self._tell(search, self._reach(search))

    def _reach(self, search: Search) -> Reach:
        """By what is known of the tier and of what lies behind it."""
        lacks: Iterable[Lack] = chain(search.lacks(), _unprobed(search))
        if search.space.trailing and search.memory:
            lacks = heapq.merge(lacks, _unasked(search))
        return self._with_evictions(search, reach(search.space, len(search.chunks), lacks))

    def _tell(self, search: Search, reached: Reach) -> None:
        found = self._settle(search)
        if found is None:
            return
        if reached.reason not in _NO_FAILURE:
            self._state.counters.failed[reached.reason.value] += 1
        found(reached)

    def _waits(self, search: Search) -> bool:
        """Whether somebody still waits for its answer."""
        return search in self._pending.get(search.connection, {})

    def _settle(self, search: Search) -> Callable[[Reach], None] | None:
        """Whom to tell, if somebody still waits; nobody does any more."""
        if not self._waits(search):
            return None
        del self._pending[search.connection][search]
        self._chunks[search.connection] -= search.prompt_chunks
        if search.timer is not None:
            search.timer.cancel()
        return search.found

    def _with_evictions(self, search: Search, reached: Reach) -> Reach:
        """Say of what is absent whether memory held it lately."""
        lack, space = reached.missing, search.space
        if reached.reason is not Reason.ABSENT or lack is None:
            return reached
        evicted = self._state.evictions.has(
            space.namespace, search.chunks[lack.position], space.trailing_of(lack.part)
        )
        return replace(reached, reason=Reason.EVICTED) if evicted else reached


def _deep_questions(search: Search, reached: Reach) -> list[tuple[int, int]]:
    """What the tier has not got and a boundary beyond what was reached needs; nothing past a failure."""
    trailing_of = search.space.trailing_of
    answers = list(zip(search.probed, search.outcomes, strict=True))
    failed = (
        at
        for (at, part), outcome in answers
        if outcome not in (Outcome.OK, Outcome.MISS) and not trailing_of(part)
    )
    left_out = (gap.position for gap in search.unprobed if not all(map(trailing_of, gap.parts)))
    end = min(next(failed, len(search.chunks)), next(left_out, len(search.chunks)))
    if reached.boundary >= end:
        return []
    return [
        (at, part)
        for (at, part), outcome in answers
        if outcome is Outcome.MISS and at < end and search.leads_on(at, part, beyond=reached.boundary)
    ]


def _unprobed(search: Search) -> Iterator[Lack]:
    """What the limit left out, as far as it matters: no boundary is known beyond a part of every chunk."""
    for gap in search.unprobed:
        for part in gap.parts:
            if search.leads_on(gap.position, part):
                yield Lack(gap.position, part, Reason.LIMIT)
        if not all(search.space.trailing_of(part) for part in gap.parts):
            return


def _unasked(search: Search) -> Iterator[Lack]:
    """What memory lacks and the tier was not asked for: of use for boundaries before memory's alone."""
    for gap in search.gaps:
        if gap.position >= search.memory:
            return
        for part in gap.parts:
            if not search.leads_on(gap.position, part):
                yield Lack(gap.position, part, None)
