"""Answers lookups: memory at once, Valkey by a bounded probe, then the choice to load or recompute."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.identity.names import PartKey
from kvferry.node.estimate import Estimator, Verdict
from kvferry.node.framing import split_digests
from kvferry.node.ledger import ChunkName
from kvferry.node.loading import MAX_LOADS, MAX_LOADS_PER_CONNECTION, Loads
from kvferry.node.loads import At
from kvferry.node.loop import Timer
from kvferry.node.recency import RecencyRefresh
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import Answer, Lookup, Match, Matched, Reason, Tier
from kvferry.pool.entries import Owner, Slot
from kvferry.tiers.contract import Outcome

MAX_PENDING_PER_CONNECTION = 1024
MAX_PENDING_CHUNKS_PER_CONNECTION = 1 << 18
MAX_PENDING_CHUNKS = 1 << 20  # of all connections together
MAX_WAIT_S = 10.0  # whatever a lookup asks for
MAX_PROBED_PARTS = 65536

_UNKNOWN = {
    Outcome.LATE: Reason.DEADLINE,
    Outcome.REFUSED: Reason.TIER_DOWN,
    Outcome.FAILED: Reason.TIER_DOWN,
    Outcome.CORRUPT: Reason.CORRUPT,
    Outcome.OVER_QUOTA: Reason.LIMIT,
}
_NO_FAILURE = (Reason.COMPLETE, Reason.ABSENT, Reason.EVICTED)


@dataclass(slots=True, eq=False)
class _Pending:
    """A lookup on its way. memory: contiguous chunks there; owner holds pins on all their parts."""

    connection: Connection
    asked: Lookup
    space: Namespace
    prompt: list[bytes]
    wanted: list[bytes]  # of the prompt, what the engine has not got
    owner: Owner
    pinned: dict[At, Slot]
    memory: int
    started: float
    probed: Sequence[int] = ()  # positions, counted from first_chunk
    unprobed: int | None = None  # the first position that the limit left out
    timer: Timer | None = None


class Lookups:
    """All lookups that wait for a probe; loop thread only."""

    def __init__(self, state: NodeState, loads: Loads, estimator: Estimator) -> None:
        self._state = state
        self._loads = loads
        self._estimator = estimator
        self._recency = RecencyRefresh()
        self._pending: dict[Connection, dict[_Pending, None]] = {}
        self._chunks: Counter[Connection] = Counter()  # of the prompts in it

    def lookup(self, connection: Connection, asked: Lookup, space: Namespace) -> None:
        """Answer now, or within ``max_wait_s`` when Valkey has to be asked."""
        state = self._state
        state.counters.lookups += 1
        prompt = split_digests(asked.chunks)
        lookup = _Pending(
            connection=connection,
            asked=asked,
            space=space,
            prompt=prompt,
            wanted=prompt[asked.first_chunk :],
            owner=next(state.owners),
            pinned={},
            memory=0,
            started=state.loop.clock(),
        )
        state.pins.open(lookup.owner, connection)
        if self._over_limit(connection, len(prompt)):
            state.counters.failed[Reason.LIMIT.value] += 1
            self._answer_none(lookup, Reason.LIMIT)
            return
        wanted = lookup.wanted
        lookup.memory = state.catalogue.run(space.namespace, wanted)
        state.catalogue.touch(space.namespace, prompt[: asked.first_chunk + lookup.memory])
        for position in range(lookup.memory):
            self._pin(lookup, position)
        if lookup.memory == len(wanted) or state.tier is None:
            self._decide(lookup, lookup.memory, self._missing_reason(lookup, lookup.memory))
            return
        self._pending.setdefault(connection, {})[lookup] = None
        self._chunks[connection] += len(prompt)
        self._probe(lookup)

    def match(self, connection: Connection, asked: Match, space: Namespace) -> None:
        """Say how far memory reaches."""
        chunks = split_digests(asked.chunks)
        count = self._state.catalogue.run(space.namespace, chunks)
        reason = Reason.COMPLETE if count == len(chunks) else Reason.ABSENT
        connection.send(Matched(ticket=asked.ticket, count=count, reason=reason))

    def _over_limit(self, connection: Connection, chunks: int) -> bool:
        """Whether this connection, or all together, ask for more than the node keeps track of."""
        return (
            len(self._pending.get(connection, ())) >= MAX_PENDING_PER_CONNECTION
            or self._chunks[connection] + chunks > MAX_PENDING_CHUNKS_PER_CONNECTION
            or self._chunks.total() + chunks > MAX_PENDING_CHUNKS
            or self._loads.count(connection) >= MAX_LOADS_PER_CONNECTION
            or len(self._loads) >= MAX_LOADS
        )

    def disconnected(self, connection: Connection) -> None:
        """Its pending lookups let go of what they pinned."""
        del self._chunks[connection]
        for lookup in self._pending.pop(connection, {}):
            if lookup.timer is not None:
                lookup.timer.cancel()
            self._state.pins.release(lookup.owner)
            self._loads.room_changed()

    def _pin(self, lookup: _Pending, position: int) -> None:
        chunk = lookup.wanted[position]
        for part in lookup.space.parts:
            key = PartKey(lookup.space.namespace, chunk, part)
            nbytes = lookup.space.part_bytes[part]
            slot = self._state.pins.pin_in_share(key, nbytes, lookup.owner)
            if slot is not None:  # what is over the share the load takes when there is room
                lookup.pinned[At(position, part)] = slot

    def _probe(self, lookup: _Pending) -> None:
        """Ask the tier for every part of the chunks that memory has not got."""
        tier = self._state.tier
        if tier is None:
            return
        space = lookup.space
        wanted = lookup.wanted
        most = max(1, MAX_PROBED_PARTS // len(space.parts))
        missing = [
            position
            for position in range(lookup.memory, len(wanted))
            if not self._state.catalogue.run(space.namespace, [wanted[position]])
        ]
        lookup.probed = missing[:most]
        lookup.unprobed = missing[most] if len(missing) > most else None
        refs = space.refs([wanted[position] for position in lookup.probed])
        deadline = lookup.started + min(lookup.asked.max_wait_s, MAX_WAIT_S)
        post = self._state.loop.post
        lookup.timer = self._state.loop.at(deadline, partial(self._probe_late, lookup))
        tier.probe(
            refs,
            deadline=deadline,
            done=lambda outcomes: post(partial(self._probed, lookup, outcomes)),
        )

    def _probe_late(self, lookup: _Pending) -> None:
        """The wait is over: memory's share is the answer."""
        if self._settle(lookup):
            self._state.counters.failed[Reason.DEADLINE.value] += 1
            self._decide(lookup, lookup.memory, Reason.DEADLINE)

    def _probed(self, lookup: _Pending, outcomes: Sequence[Outcome]) -> None:
        if not self._settle(lookup):
            return  # too late, or the engine is gone
        parts = len(lookup.space.parts)
        count, reason = len(lookup.wanted), Reason.COMPLETE
        if lookup.unprobed is not None:
            count, reason = lookup.unprobed, Reason.LIMIT
        for at, position in enumerate(lookup.probed):
            bad = [o for o in outcomes[at * parts : (at + 1) * parts] if o is not Outcome.OK]
            if bad:
                count = position
                unknown = [outcome for outcome in bad if outcome is not Outcome.MISS]
                reason = _UNKNOWN[unknown[0]] if unknown else self._missing_reason(lookup, position)
                break
        if reason not in _NO_FAILURE:
            self._state.counters.failed[reason.value] += 1
        for position in range(lookup.memory, count):
            self._pin(lookup, position)
        self._decide(lookup, count, reason)

    def _settle(self, lookup: _Pending) -> bool:
        """Whether it was still waiting; it is not any more."""
        waiting = self._pending.get(lookup.connection, {})
        if lookup not in waiting:
            return False
        del waiting[lookup]
        self._chunks[lookup.connection] -= len(lookup.prompt)
        if lookup.timer is not None:
            lookup.timer.cancel()
        return True

    def _missing_reason(self, lookup: _Pending, position: int) -> Reason:
        if position >= len(lookup.wanted):
            return Reason.COMPLETE
        evicted = self._state.evictions.has(lookup.space.namespace, lookup.wanted[position])
        return Reason.EVICTED if evicted else Reason.ABSENT

    def _decide(self, lookup: _Pending, available: int, reason: Reason) -> None:
        """Choose how much to load, and start."""
        asked, space = lookup.asked, lookup.space
        self._count_missing(lookup, available, reason)
        tiers = [
            Tier.MEMORY
            if at < lookup.memory or all(At(at, part) in lookup.pinned for part in space.parts)
            else Tier.VALKEY
            for at in range(available)
        ]
        verdict = self._estimator.decide(asked, space, tiers)
        if verdict.load_chunks < available:
            self._state.counters.recomputed_chunks += available - verdict.load_chunks
            reason = Reason.CHEAPER
        if verdict.load_chunks == 0:
            self._answer_none(lookup, reason, verdict)
            return
        self._start(lookup, tiers[: verdict.load_chunks], reason, verdict)

    def _start(self, lookup: _Pending, tiers: list[Tier], reason: Reason, verdict: Verdict) -> None:
        state = self._state
        count = len(tiers)
        for at in [at for at in lookup.pinned if at.position >= count]:
            del lookup.pinned[at]
            state.pins.unpin(
                PartKey(lookup.space.namespace, lookup.wanted[at.position], at.part), lookup.owner
            )
        live = self._loads.start(
            connection=lookup.connection,
            request_id=lookup.asked.request_id,
            space=lookup.space,
            owner=lookup.owner,
            chunks=tuple(lookup.wanted[:count]),
            pinned=lookup.pinned,
            first_chunk=lookup.asked.first_chunk,
            deadline_s=verdict.deadline_s,
            stall_s=verdict.stall_s,
        )
        if live.load.end < count:  # the pool has no room for more
            reason = live.load.reason
            count = live.load.end
            del tiers[count:]
        if count == 0:
            self._loads.end(live.load_id)
            self._answer_none(lookup, reason, verdict)
            return
        ready = self._loads.announce(live)
        self._count_hits(lookup, tiers)
        self._explain(lookup, tiers, reason, verdict)
        lookup.connection.send(
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

    def _answer_none(self, lookup: _Pending, reason: Reason, verdict: Verdict | None = None) -> None:
        self._state.pins.release(lookup.owner)
        self._loads.room_changed()
        self._explain(lookup, [], reason, verdict)
        lookup.connection.send(
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

    def _count_missing(self, lookup: _Pending, available: int, reason: Reason) -> None:
        counters = self._state.counters
        missing = len(lookup.wanted) - available
        counters.lookup_chunks += len(lookup.wanted)
        if reason in (Reason.ABSENT, Reason.EVICTED):
            counters.missed_chunks += missing
            counters.missed_tokens += missing * lookup.space.chunk_tokens

    def _count_hits(self, lookup: _Pending, tiers: Sequence[Tier]) -> None:
        counters = self._state.counters
        for tier in Tier:
            chunks = sum(1 for found in tiers if found is tier)
            if chunks:
                name = tier.name.lower()
                counters.hit_chunks[name] += chunks
                counters.hit_tokens[name] += chunks * lookup.space.chunk_tokens
                counters.hit_bytes[name] += chunks * lookup.space.chunk_bytes

    def _explain(
        self, lookup: _Pending, tiers: Sequence[Tier], reason: Reason, verdict: Verdict | None
    ) -> None:
        now = self._state.loop.clock()
        asked, space = lookup.asked, lookup.space
        record = self._state.explain.record(asked.request_id, now)
        hello = lookup.connection.hello
        record.engine = hello.engine if hello is not None else ""
        record.namespace = space.namespace.hex()
        record.model = space.label
        record.chunk_tokens = space.chunk_tokens
        record.prompt_tokens = asked.prompt_tokens
        record.chunks = len(lookup.prompt)
        record.engine_chunks = asked.first_chunk
        record.lookups += 1
        record.lookup_s = now - lookup.started
        record.reason = reason.value
        record.reused_chunks = {
            tier.name.lower(): sum(1 for found in tiers if found is tier) for tier in Tier
        }
        record.reused_bytes = {name: n * space.chunk_bytes for name, n in record.reused_chunks.items()}
        reach = asked.first_chunk + len(tiers)
        record.first_missing_chunk = reach if reach < len(lookup.prompt) else None
        if verdict is not None:
            record.load_estimate_s = verdict.load_s or 0.0
            record.recompute_estimate_s = verdict.recompute_s or 0.0
            record.choice = verdict.choice.value
            record.deadline_s = verdict.deadline_s

    def _refresh_recency(self, lookup: _Pending, tiers: Sequence[Tier]) -> None:
        """What memory serves must not look cold in the tier behind it."""
        tier = self._state.tier
        if tier is None:
            return
        space = lookup.space
        reach = [lookup.wanted[at] for at, found in enumerate(tiers) if found is Tier.MEMORY]
        served = lookup.prompt[: lookup.asked.first_chunk] + reach
        if self._state.quota is not None:
            self._state.quota.used([ChunkName(space.namespace, chunk) for chunk in served])
        due = self._recency.due(space.namespace, served, self._state.loop.clock())
        if due:
            tier.touch(space.refs(due))
