"""What a node tells those who follow it, gathered on its own thread and handed over once a turn.

What memory holds is noted by the pool itself (``pool.changes``); what the tier holds is seen by a wrapper
(``feedtier``). While nobody follows, requests are not told of, and what changes in memory is gathered in the
pool until it is much: a router that comes later needs only what is there then.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from kvferry.addresses import Address
from kvferry.feed.framing import split
from kvferry.feed.parts import Sighting
from kvferry.feed.wire import (
    AnyEvent,
    EngineDown,
    EngineUp,
    Gone,
    Held,
    Level,
    Prefetch,
    Prompt,
    Rate,
    Result,
    Space,
    Speed,
)
from kvferry.identity.names import DIGEST_BYTES, PartRef
from kvferry.keeper.wire import Where
from kvferry.node.feedserver import FeedServer, FeedStatistics
from kvferry.node.prefetch import Prefetches
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import Attach, Came, Lookup, Prefill, Report, Role
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import EntryState
from kvferry.tiers.contract import Outcome

MAX_CHANGED_PER_TURN = 512
"""Looked at in one turn of the loop, at one to five microseconds each."""
MAX_PENDING = 1 << 16
"""Events that wait to be handed over: beyond it those of requests are left out."""
RATES_S = 1.0
NOTICED = 0.1
"""A rate or speed that changed by this fraction is told anew."""
MAX_PREFETCHES = 16
PREFETCH_CHUNKS = 1024
PREFETCH_PARTS = 256
"""Asked for in one turn of the loop, at about five microseconds each."""
PREFETCH_S = 5.0
SPARED_S = 60.0
"""What was stored or used within this time is not evicted for what a router expects."""

_LEVELS = {"valkey": Level.VALKEY, "disk": Level.DISK, "objects": Level.OBJECTS}
_THERE = {Outcome.OK: True, Outcome.MISS: False, Outcome.CORRUPT: False}
T = TypeVar("T")
_DEEP = {Where.DISK: Level.DISK, Where.OBJECTS: Level.OBJECTS}


class Feed:
    """Loop thread only, but for ``seen``."""

    def __init__(self, server: FeedServer, catalogue: Catalogue, *, level: Level = Level.VALKEY) -> None:
        """level: of the tier behind memory."""
        self._server = server
        self._level = level
        self._changes = catalogue.watch()
        self._state: NodeState | None = None
        self._prefetches: Prefetches | None = None
        self._ages: Callable[[float], int] = lambda when: 0
        self._spaces: dict[bytes, int] = {}
        self._engines: dict[Connection, int] = {}
        self._speeds: dict[int, Prefill] = {}
        self._rates: dict[Level, tuple[float, float]] = {}
        self._rates_due = 0.0
        self._pending: list[AnyEvent] = []
        self._engine_number = 0
        self._expected: deque[Prefetch] = deque()  # from the feed's thread to the loop's
        self._prefetching = 0
        self.dropped_events = 0
        self.prefetches = 0
        self.prefetches_declined = 0

    def begin(self, state: NodeState, prefetches: Prefetches, mark_at: Callable[[float], int]) -> None:
        """The node is whole now. mark_at: of the pool, by time (``ages``)."""
        self._state, self._prefetches, self._ages = state, prefetches, mark_at

    def start(self) -> None:
        """Let routers in."""
        self._server.start(prefetch=self.prefetch, joined=self.joined)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._server.close()

    @property
    def address(self) -> Address:
        """Where routers find it."""
        return self._server.address

    def statistics(self) -> FeedStatistics:
        """A snapshot, from any thread."""
        return self._server.statistics(
            dropped_events=self.dropped_events,
            prefetches=self.prefetches,
            prefetches_declined=self.prefetches_declined,
        )

    # ---- engines and their requests

    def attached(self, connection: Connection, message: Attach, space: Namespace) -> None:
        """An engine has declared a namespace."""
        number = self._space(space)
        hello = connection.hello
        if hello is None or hello.role is not Role.SCHEDULER:
            return
        engine = self._engines.get(connection)
        if engine is None:
            self._engine_number += 1
            engine = self._engines[connection] = self._engine_number
        self._pending.append(EngineUp(engine, hello.engine, number, message.cache_tokens))

    def closed(self, connection: Connection) -> None:
        """A client is gone."""
        engine = self._engines.pop(connection, None)
        if engine is not None:
            self._speeds.pop(engine, None)
            self._pending.append(EngineDown(engine))

    def asked(self, connection: Connection, asked: Lookup, space: Namespace) -> None:
        """A request is looked up."""
        self._prompt(
            connection, asked, space, max(asked.engine_tokens, asked.first_chunk * space.chunk_tokens)
        )
        engine, speed = self._engines.get(connection), asked.prefill
        if engine is not None and _differs(_numbers(self._speeds.get(engine)), _numbers(speed)):
            self._speeds[engine] = speed
            self._pending.append(Speed(engine, speed.base_s, speed.per_token_s, speed.per_token2_s))

    def came(self, connection: Connection, came: Came, space: Namespace) -> None:
        """A request has come for which nothing is looked up."""
        self._prompt(connection, came, space, came.engine_tokens)

    def reported(self, connection: Connection, report: Report) -> None:
        """An engine said what became of a request."""
        engine = self._engines.get(connection)
        if engine is not None and self._room_for_requests():
            self._pending.append(
                Result(
                    engine,
                    report.request_id,
                    report.prompt_tokens,
                    report.engine_tokens,
                    report.loaded_tokens,
                    report.failed_tokens,
                    report.reason,
                )
            )

    def _prompt(
        self, connection: Connection, asked: Lookup | Came, space: Namespace, engine_tokens: int
    ) -> None:
        engine = self._engines.get(connection)
        if engine is not None and self._room_for_requests():
            self._pending.append(
                Prompt(
                    engine,
                    self._space(space),
                    asked.request_id,
                    asked.chunks,
                    asked.prompt_tokens,
                    engine_tokens,
                )
            )

    def _room_for_requests(self) -> bool:
        """Whether anybody wants to hear of a request, and can."""
        if not self._server.followed:
            return False
        if len(self._pending) >= MAX_PENDING:
            self.dropped_events += 1
            return False
        return True

    def _space(self, space: Namespace) -> int:
        number = self._spaces.get(space.namespace)
        if number is None:
            number = self._spaces[space.namespace] = len(self._spaces) + 1
            self._server.space(number, space.part_bytes, space.trailing)
            self._pending.append(
                Space(number, space.namespace, space.label, space.chunk_tokens, space.chunk_bytes)
            )
        return number

    # ---- what is where

    def seen(self, refs: Sequence[PartRef], outcomes: Sequence[Outcome]) -> None:
        """See ``feedtier.Seen``. From any thread."""
        self._server.saw(self._level, partial(self._sightings, refs, outcomes, _THERE.get))

    def located(self, refs: Sequence[PartRef], where: Sequence[Where]) -> None:
        """Keepers said where they have these, which the tier has not."""
        for level in _DEEP.values():
            self._server.saw(level, partial(self._sightings, refs, where, partial(_is_there, level)))

    def _sightings(
        self, refs: Sequence[PartRef], said: Sequence[T], there: Callable[[T], bool | None]
    ) -> Iterator[Sighting]:
        """On the feed's thread; spaces are only ever added. there: None: nothing follows from it."""
        spaces = self._spaces
        for ref, one in zip(refs, said, strict=True):
            is_there = there(one)
            if is_there is not None and ref.key.namespace in spaces:
                yield spaces[ref.key.namespace], ref.key.chunk, ref.key.part, is_there

    # ---- handing over

    def after_turn(self) -> None:
        """At the end of every wake-up of the loop."""
        changes = self._changes
        if not self._server.followed:
            if len(changes) < MAX_CHANGED_PER_TURN and len(self._pending) < MAX_CHANGED_PER_TURN:
                return
        elif self._state is not None and self._state.loop.clock() >= self._rates_due:
            self._look_at_rates(self._state)
        if self._server.busy:
            return
        if changes:
            self._tell_changed()
        if self._pending:
            pending, self._pending = self._pending, []
            self._server.publish(pending)

    def joined(self) -> None:
        """From the feed's thread: somebody follows from now on, and a turn is needed to hand things over."""
        if self._state is not None:
            self._state.loop.post(self._nothing)

    def _nothing(self) -> None:
        """For the turn that it takes."""

    def _tell_changed(self) -> None:
        held: dict[int, list[bytes]] = {}
        gone: dict[int, list[bytes]] = {}
        for namespace, chunk, whole in self._changes.take(MAX_CHANGED_PER_TURN):
            number = self._spaces.get(namespace)
            if number is not None:
                (held if whole else gone).setdefault(number, []).append(chunk)
        for number, chunks in gone.items():
            self._pending.append(Gone(Level.MEMORY, 0, number, b"".join(chunks)))
        for number, chunks in held.items():
            self._pending.append(Held(Level.MEMORY, 0, number, b"".join(chunks)))
        if self._changes and self._state is not None:  # the rest in the next turn
            self._state.loop.post(self._nothing)

    def _look_at_rates(self, state: NodeState) -> None:
        now = state.loop.clock()
        self._rates_due = now + RATES_S
        for name, estimate in state.rates().items():
            rate, level = estimate.rate(now), _LEVELS.get(name)
            if level is None or rate.bytes_per_s is None:
                continue
            found = (rate.latency_s, rate.bytes_per_s)
            if _differs(self._rates.get(level, ()), found):
                self._rates[level] = found
                self._pending.append(Rate(level, *found))

    # ---- what routers expect

    def prefetch(self, message: Prefetch) -> None:
        """From the feed's thread: a request for these chunks is on its way here."""
        if self._state is None:
            return
        if len(self._expected) >= MAX_PREFETCHES:
            self.prefetches_declined += 1
            return
        self._expected.append(message)
        self._state.loop.post(partial(self._begin_prefetch, self._state))

    def _begin_prefetch(self, state: NodeState) -> None:
        message = self._expected.popleft()
        space = state.namespaces.get(message.namespace)
        if space is None or state.tier is None:
            return
        if self._prefetching >= MAX_PREFETCHES:
            self.prefetches_declined += 1
            return
        self._prefetching += 1
        self.prefetches += 1
        chunks = split(message.chunks[: PREFETCH_CHUNKS * DIGEST_BYTES])
        now = state.loop.clock()
        mark = self._ages(now - SPARED_S) or 1
        self._bring(state, _Bringing(space.refs(chunks), mark, now + PREFETCH_S))

    def _bring(self, state: NodeState, bringing: "_Bringing") -> None:
        """A few parts; the others in later turns, so that lookups need not wait for them.

        The tier is asked for them first: nothing is evicted for what exists nowhere, whatever routers say.
        """
        refs = list(islice(bringing.refs, PREFETCH_PARTS))
        if not refs or state.tier is None:
            self._brought(bringing)
            return
        bringing.open += 1
        state.loop.post(partial(self._bring, state, bringing))
        wanted = [ref for ref in refs if state.catalogue.state(ref.key) is EntryState.ABSENT]

        def found(outcomes: Sequence[Outcome]) -> None:
            there = [ref for ref, outcome in zip(wanted, outcomes, strict=True) if outcome is Outcome.OK]
            state.loop.post(partial(self._fetch, state, bringing, there))

        if wanted:
            state.tier.probe(wanted, deadline=bringing.deadline, done=found)
        else:
            self._brought(bringing)

    def _fetch(self, state: NodeState, bringing: "_Bringing", refs: Sequence[PartRef]) -> None:
        """What the tier has of them."""
        within_s = bringing.deadline - state.loop.clock()
        if not refs or within_s <= 0 or self._prefetches is None:
            self._brought(bringing)
            return
        done = partial(self._brought, bringing)
        self._prefetches.begin(refs, within_s=within_s, mark=bringing.mark, done=done)

    def _brought(self, bringing: "_Bringing", counts: object = None) -> None:
        del counts
        bringing.open -= 1
        if not bringing.open:
            self._prefetching -= 1


@dataclass(slots=True)
class _Bringing:
    """What one router expects. open: questions to the tier without an answer, and one until all are asked."""

    refs: Iterator[PartRef]
    mark: int
    deadline: float
    open: int = 1


def _is_there(level: Level, where: Where) -> bool | None:
    return None if where is Where.UNKNOWN else _DEEP.get(where) is level


def _numbers(speed: Prefill | None) -> tuple[float, ...]:
    return () if speed is None else (speed.base_s, speed.per_token_s, speed.per_token2_s)


def _differs(old: Sequence[float], new: Sequence[float]) -> bool:
    """Whether it is worth telling."""
    if not old:
        return any(new)
    return any(abs(a - b) > NOTICED * max(abs(a), abs(b)) for a, b in zip(old, new, strict=True))
