"""Answers lookups: memory at once, what lies behind it within a bounded wait; then load or recompute."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.identity.boundaries import start_of
from kvferry.identity.names import PartKey
from kvferry.node.estimate import Estimator, Verdict
from kvferry.node.framing import split_digests
from kvferry.node.ledger import ChunkName
from kvferry.node.loading import MAX_LOADS, MAX_LOADS_PER_CONNECTION, Loads
from kvferry.node.loads import At
from kvferry.node.reach import Reach
from kvferry.node.recency import RecencyRefresh
from kvferry.node.search import Search, Searches
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.telling import Telling
from kvferry.node.wire import Answer, Lookup, Match, Matched, Reason, Tier
from kvferry.pool.entries import Owner, Slot


@dataclass(slots=True, eq=False)
class _Pending:
    """A lookup on its way. search: for what it wants, the chunks that the engine has not got.

    owner: holds pins on what the boundary ``tried`` needs of it, as far as memory has that.
    """

    asked: Lookup
    prompt: list[bytes]
    search: Search
    owner: Owner
    pinned: dict[At, Slot] = field(default_factory=dict[At, Slot])
    tried: int = 0  # the boundary for which pins were taken last

    @property
    def space(self) -> Namespace:
        """Of its prompt."""
        return self.search.space


class Lookups:
    """All lookups that wait for a probe; loop thread only."""

    def __init__(self, state: NodeState, loads: Loads, estimator: Estimator, telling: Telling) -> None:
        self._state = state
        self._loads = loads
        self._estimator = estimator
        self._telling = telling
        self._recency = RecencyRefresh()
        self._searches = Searches(state)

    def lookup(self, connection: Connection, asked: Lookup, space: Namespace) -> None:
        """Answer now, or within ``max_wait_s`` when Valkey has to be asked."""
        state = self._state
        state.counters.lookups += 1
        prompt = split_digests(asked.chunks)
        wanted = prompt[asked.first_chunk :]
        search = Search(connection, space, wanted, len(prompt), state.loop.clock())
        lookup = _Pending(asked, prompt, search, next(state.owners))
        state.pins.open(lookup.owner, connection)
        if (
            self._searches.over_limit(connection, len(prompt))
            or self._loads.count(connection) >= MAX_LOADS_PER_CONNECTION
            or len(self._loads) >= MAX_LOADS
        ):
            state.counters.failed[Reason.LIMIT.value] += 1
            self._answer_none(lookup, Reason.LIMIT)
            return
        state.prompts.remember(asked.request_id, space.namespace, asked.chunks)
        self._searches.in_memory(search)
        state.catalogue.touch(space.namespace, prompt[: asked.first_chunk + search.memory])
        self._pin(lookup, search.memory)
        self._searches.ask_tier(
            search,
            max_wait_s=asked.max_wait_s,
            found=partial(self._decide, lookup),
            gone=partial(self._gone, lookup),
        )

    def match(self, connection: Connection, asked: Match, space: Namespace) -> None:
        """As a lookup, but nothing is held, weighed or begun for the answer."""
        chunks = split_digests(asked.chunks)
        search = Search(connection, space, chunks, len(chunks), self._state.loop.clock())

        def found(reach: Reach) -> None:
            connection.send(Matched(ticket=asked.ticket, count=reach.boundary, reason=reach.reason))

        if self._searches.over_limit(connection, len(chunks)):
            self._state.counters.failed[Reason.LIMIT.value] += 1
            connection.send(Matched(ticket=asked.ticket, count=0, reason=Reason.LIMIT))
            return
        self._searches.in_memory(search)
        self._searches.ask_tier(search, max_wait_s=asked.max_wait_s, found=found, gone=lambda: None)

    def disconnected(self, connection: Connection) -> None:
        """Its pending lookups let go of what they pinned."""
        self._searches.disconnected(connection)

    def _gone(self, lookup: _Pending) -> None:
        self._state.pins.release(lookup.owner)
        self._loads.room_changed()

    def _pin(self, lookup: _Pending, boundary: int) -> None:
        """What memory has of what this boundary needs, and nothing else."""
        space, pins, owner, pinned = lookup.space, self._state.pins, lookup.owner, lookup.pinned
        namespace, wanted, sizes = space.namespace, lookup.search.chunks, space.part_bytes
        if space.trailing or boundary < lookup.tried:
            self._unpin(lookup, boundary)
        new = 0 if space.trailing else lookup.tried
        lookup.tried = boundary
        for span in space.needed(boundary):
            for position in span.chunks[new:]:
                for part in span.parts:
                    at = At(position, part)
                    if at in pinned:
                        continue
                    slot = pins.pin_in_share(PartKey(namespace, wanted[position], part), sizes[part], owner)
                    if slot is not None:  # what is over the share the load takes when there is room
                        pinned[at] = slot

    def _unpin(self, lookup: _Pending, boundary: int) -> None:
        """What this boundary does not need."""
        space, chunks = lookup.space, lookup.search.chunks
        starts = {part: start_of(space.trailing_of(part), boundary) for part in space.parts}
        unneeded = [at for at in lookup.pinned if not starts[at.part] <= at.position < boundary]
        for at in unneeded:
            del lookup.pinned[at]
            self._state.pins.unpin(PartKey(space.namespace, chunks[at.position], at.part), lookup.owner)
        if unneeded:
            self._loads.room_changed()

    def _decide(self, lookup: _Pending, reach: Reach) -> None:
        """Choose how much to load, and start."""
        asked, space, search, reason = lookup.asked, lookup.space, lookup.search, reach.reason
        self._count_missing(lookup, reach)
        self._telling.found(space, lookup.prompt, asked.first_chunk + reach.boundary)
        tiers: list[Tier] = []
        if space.trailing:
            verdict = self._estimator.decide_among(
                asked, space, gaps=search.gaps, usable=reach.usable, deep=search.deep
            )
        else:
            self._pin(lookup, reach.boundary)
            tiers = self._tiers(lookup, reach.boundary)
            verdict = self._estimator.decide(asked, space, tiers)
        count = verdict.load_chunks
        if count < reach.boundary:
            self._state.counters.recomputed_chunks += reach.boundary - count
            reason = Reason.CHEAPER
        if count == 0:
            self._answer_none(lookup, reason, verdict, reach)
            return
        self._pin(lookup, count)
        if space.trailing:
            tiers = self._tiers(lookup, count)
            if count != search.memory:  # so far what that boundary needs was called used
                self._state.catalogue.touch(space.namespace, lookup.prompt[: asked.first_chunk + count])
        self._start(lookup, tiers[:count], reason, verdict, reach)

    def _tiers(self, lookup: _Pending, count: int) -> list[Tier]:
        """Where the chunks of a load lie, by the slowest part.

        One of which nothing is needed is where the next one is.
        """
        tiers = [Tier.MEMORY] * count
        deep, behind = lookup.search.deep, self._state.behind
        pinned, memory = lookup.pinned, 0 if lookup.space.trailing else lookup.search.memory
        spans = lookup.space.needed(count)
        for span in spans:
            for position in span.chunks[max(0, memory - span.chunks.start) :]:
                for part in span.parts:
                    if (at := At(position, part)) not in pinned:
                        tiers[position] = max(tiers[position], deep.get(at, behind))
        needless = spans[0].chunks.start if spans else 0
        tiers[:needless] = [tiers[needless]] * needless if needless < count else []
        return tiers

    def _start(
        self, lookup: _Pending, tiers: list[Tier], reason: Reason, verdict: Verdict, reach: Reach
    ) -> None:
        state = self._state
        count = len(tiers)
        live = self._loads.start(
            connection=lookup.search.connection,
            request_id=lookup.asked.request_id,
            space=lookup.space,
            owner=lookup.owner,
            chunks=tuple(lookup.search.chunks[:count]),
            pinned=lookup.pinned,
            first_chunk=lookup.asked.first_chunk,
            deadline_s=verdict.deadline_s,
            stall_s=verdict.stall_s,
            deep=lookup.search.deep,
        )
        if live.load.end < count:  # the pool has no room for more
            reason = live.load.reason
            count = live.load.end
            del tiers[count:]
        if count == 0:
            self._loads.end(live.load_id)
            self._answer_none(lookup, reason, verdict, reach)
            return
        ready = self._loads.announce(live)
        self._count_hits(lookup, tiers)
        self._explain(lookup, tiers, reason, verdict, reach)
        lookup.search.connection.send(
            Answer(
                ticket=lookup.asked.ticket,
                request_id=lookup.asked.request_id,
                epoch=state.epoch,
                load_id=live.load_id,
                first_chunk=lookup.asked.first_chunk,
                count=count,
                tiers=bytes(tiers),
                ready=ready,
                deadline_s=verdict.deadline_s,
                stall_s=verdict.stall_s,
                reason=reason,
            )
        )
        self._refresh_recency(lookup, tiers)

    def _answer_none(
        self,
        lookup: _Pending,
        reason: Reason,
        verdict: Verdict | None = None,
        reach: Reach | None = None,
    ) -> None:
        self._state.pins.release(lookup.owner)
        self._loads.room_changed()
        self._explain(lookup, [], reason, verdict, reach)
        lookup.search.connection.send(
            Answer(
                ticket=lookup.asked.ticket,
                request_id=lookup.asked.request_id,
                epoch=self._state.epoch,
                load_id=0,
                first_chunk=lookup.asked.first_chunk,
                count=0,
                tiers=b"",
                ready=(),
                deadline_s=0.0,
                stall_s=0.0,
                reason=reason,
            )
        )

    def _count_missing(self, lookup: _Pending, reach: Reach) -> None:
        counters, wanted = self._state.counters, len(lookup.search.chunks)
        missing = wanted - reach.boundary
        counters.lookup_chunks += wanted
        if reach.reason in (Reason.ABSENT, Reason.EVICTED):
            counters.missed_chunks += missing
            counters.missed_tokens += missing * lookup.space.chunk_tokens

    def _count_hits(self, lookup: _Pending, tiers: Sequence[Tier]) -> None:
        counters = self._state.counters
        nbytes = _bytes_by_tier(lookup.space, tiers)
        for tier in Tier:
            if chunks := tiers.count(tier):
                name = tier.name.lower()
                counters.hit_chunks[name] += chunks
                counters.hit_tokens[name] += chunks * lookup.space.chunk_tokens
                counters.hit_bytes[name] += nbytes.get(tier, 0)

    def _explain(
        self,
        lookup: _Pending,
        tiers: Sequence[Tier],
        reason: Reason,
        verdict: Verdict | None,
        reach: Reach | None,
    ) -> None:
        now = self._state.loop.clock()
        asked, space = lookup.asked, lookup.space
        record = self._state.explain.record(asked.request_id, now)
        hello = lookup.search.connection.hello
        record.engine = hello.engine if hello is not None else ""
        record.namespace = space.namespace.hex()
        record.model = space.label
        record.chunk_tokens = space.chunk_tokens
        record.prompt_tokens = asked.prompt_tokens
        record.chunks = len(lookup.prompt)
        record.engine_chunks = asked.first_chunk
        record.lookups += 1
        record.lookup_s = now - lookup.search.started
        record.reason = reason.value
        nbytes = _bytes_by_tier(space, tiers)
        possible = (Tier.MEMORY, self._state.behind) if self._state.keepers is None else tuple(Tier)
        record.reused_chunks = {tier.name.lower(): tiers.count(tier) for tier in possible}
        record.reused_bytes = {tier.name.lower(): nbytes.get(tier, 0) for tier in possible}
        end = asked.first_chunk + len(tiers)
        record.first_missing_chunk = end if end < len(lookup.prompt) else None
        lack = reach.missing if reach is not None and reason is reach.reason else None
        record.missing_part = lack.part if lack is not None else None
        record.missing_trailing = space.trailing_of(lack.part) if lack is not None else None
        if verdict is not None:
            record.load_estimate_s = verdict.load_s or 0.0
            record.recompute_estimate_s = verdict.recompute_s or 0.0
            record.choice = verdict.choice.value
            record.deadline_s = verdict.deadline_s

    def _refresh_recency(self, lookup: _Pending, tiers: Sequence[Tier]) -> None:
        """What memory serves must not look cold in the tier behind it."""
        behind = self._state.tier
        if behind is None:
            return
        space, first = lookup.space, lookup.asked.first_chunk
        found = zip(lookup.search.chunks, tiers, strict=False)
        served = lookup.prompt[:first] + [chunk for chunk, tier in found if tier is Tier.MEMORY]
        if self._state.quota is not None:
            self._state.quota.used([ChunkName(space.namespace, chunk) for chunk in served])
        due = self._recency.due(space.namespace, served, self._state.loop.clock())
        if due and space.trailing:
            behind.touch(list(space.refs(lookup.prompt[: first + len(tiers)], of=set(due))))
        elif due:
            behind.touch(list(space.refs(due)))


def _bytes_by_tier(space: Namespace, tiers: Sequence[Tier]) -> dict[Tier, int]:
    """Of what a load of so many chunks needs."""
    nbytes: dict[Tier, int] = {}
    for span in space.needed(len(tiers)):
        chunk_bytes = sum(space.part_bytes[part] for part in span.parts)
        found = tiers[span.chunks.start : span.chunks.stop]
        for tier in Tier:
            nbytes[tier] = nbytes.get(tier, 0) + found.count(tier) * chunk_bytes
    return nbytes
