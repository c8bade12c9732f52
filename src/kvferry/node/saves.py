"""Reservations and commits of engines, and the write-back of what they commit."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvferry.errors import BrokenError, RefusedError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.loop import Timer
from kvferry.node.framing import split_checksums, split_digests
from kvferry.node.ledger import ChunkName
from kvferry.node.loading import Loads
from kvferry.node.server import Connection
from kvferry.node.state import WRITER, Limits, Namespace, NodeState
from kvferry.node.telling import Telling
from kvferry.node.wire import Abandon, Commit, Reserve, Reserved, ReservedPlace, ReserveOutcome
from kvferry.node.writeback import Unsaved, WriteBack
from kvferry.node.writerate import WriteRate
from kvferry.pool.entries import Declined, DeclineReason, Owner
from kvferry.pool.entries import Reserved as Granted
from kvferry.tiers.contract import Outcome, StoreItem

MAX_RESERVATIONS_PER_CONNECTION = 8192
CONNECTION_DIVISOR = 4  # one connection may hold this fraction of the pool in slots that it has not filled
RESERVED_DIVISOR = 2  # all of them together, with those of lost connections, this one
RESERVATION_LEASE_S = 60.0
QUARANTINE_S = 3.0  # a client that lost its connection may still be copying into slots that it held
PROBE_DEADLINE_S = 2.0
STORE_DEADLINE_S = 30.0
RETRY_S = 1.0
MAX_TRIES = 4
BACKLOG_DIVISOR = 2  # the backlog may pin this fraction of the pool
MAX_BATCH_BYTES = 256 << 20
QUOTA_DIVISOR = 4  # so much of the tier's quota may be under way at a time
RATED_BATCH_S = 1.0  # with a write rate, what is under way at a time takes so long
RATED_BACKLOG_S = 30.0  # and what waits, so long: more would be written when nobody remembers it

_OUTCOMES = {
    DeclineReason.EXISTS: ReserveOutcome.EXISTS,
    DeclineReason.FILLING: ReserveOutcome.BUSY,
    DeclineReason.UNLINKED: ReserveOutcome.BUSY,
    DeclineReason.FULL: ReserveOutcome.FULL,
    DeclineReason.TOO_LARGE: ReserveOutcome.TOO_LARGE,
}
_NO_ROOM = Declined(DeclineReason.FULL)
_FULL = ReservedPlace(ReserveOutcome.FULL, 0)
_BUSY = ReservedPlace(ReserveOutcome.BUSY, 0)


def _backlog(pool_bytes: int, limits: Limits) -> WriteBack:
    """A fraction of the pool; less where a rate or a quota is set. One part always fits (``WriteBack``)."""
    waiting = pool_bytes // BACKLOG_DIVISOR
    batch = min(MAX_BATCH_BYTES, waiting)
    if limits.write_rate is not None:
        waiting = min(waiting, int(limits.write_rate * RATED_BACKLOG_S))
        batch = min(batch, int(limits.write_rate * RATED_BATCH_S))
    if limits.tier_quota is not None:
        batch = min(batch, limits.tier_quota // QUOTA_DIVISOR)
    return WriteBack(max_bytes=waiting, max_batch_bytes=batch)


class _Held(NamedTuple):
    """What a connection has reserved and not filled."""

    slots: int
    nbytes: int


class _Lease(NamedTuple):
    """expires: when the slot is taken back. position: how many chunks of the prompt come before this one.

    likely: that the part will be wanted again.
    """

    expires: float
    position: int
    likely: bool


_NOTHING = _Held(0, 0)


class Saves:
    """All reservations and the backlog of a node; loop thread only."""

    def __init__(self, state: NodeState, loads: Loads, telling: Telling) -> None:
        self._state = state
        self._loads = loads
        self._telling = telling
        self._owners: dict[Connection, Owner] = {}
        self._leases: OrderedDict[tuple[Connection, PartKey], _Lease] = OrderedDict()
        self._overdue: dict[tuple[Connection, PartKey], int] = {}  # offset of a slot whose lease has ended
        self._held: dict[Connection, _Held] = {}  # leases and overdue slots together
        self._reserved_bytes = 0  # of all, with those in quarantine
        self._timer: Timer | None = None
        self._resume: Timer | None = None  # set while the tier is left alone
        self._rate = WriteRate(state.limits.write_rate)
        self._backlog = _backlog(state.arena.nbytes, state.limits)

    @property
    def backlog(self) -> WriteBack:
        """What is on its way to the tier."""
        return self._backlog

    def count(self, connection: Connection) -> int:
        """Slots that this connection has reserved and not yet filled, overdue ones included."""
        held = self._held.get(connection)
        return 0 if held is None else held.slots

    @property
    def overdue(self) -> int:
        """Slots out of use because an engine that let its reservation expire may still be writing there."""
        return len(self._overdue)

    def reserve(self, connection: Connection, message: Reserve, space: Namespace) -> None:
        """Answer with a slot, or with why not, for each wanted chunk."""
        state = self._state
        if message.part >= len(space.part_bytes):
            raise RefusedError(f"part {message.part} of chunks that have {len(space.part_bytes)}")
        wanted = split_digests(message.chunks)
        prompt = [*split_digests(message.prefix), *wanted]
        mark = state.catalogue.refresh(space.namespace, prompt, new=len(wanted))
        if state.quota is not None:
            state.quota.extends([ChunkName(space.namespace, chunk) for chunk in prompt])
        owner = self._owners.get(connection)
        if owner is None:
            owner = self._owners[connection] = next(state.owners)
        nbytes = space.part_bytes[message.part]
        likely = self._telling.likely(space.namespace, prompt)
        expires = state.loop.clock() + RESERVATION_LEASE_S
        places: list[ReservedPlace] = []
        for position, chunk in enumerate(wanted, len(prompt) - len(wanted)):
            key = PartKey(space.namespace, chunk, message.part)
            if self._over_limit(connection, nbytes):
                state.counters.reserve_declined["limit"] += 1
                places.append(_FULL)
                continue
            if (connection, key) in self._overdue:
                state.counters.reserve_declined["overdue"] += 1
                places.append(_BUSY)  # else its commit could mean either slot
                continue
            given = state.catalogue.reserve(key, nbytes, owner, spare_from=mark)
            if given == _NO_ROOM and state.tier is not None:
                # The prefix is larger than the pool. Its head is in the tier: the tail may push it out.
                given = state.catalogue.reserve(key, nbytes, owner)
            if isinstance(given, Declined):
                state.counters.reserve_declined[given.reason.value] += 1
                places.append(ReservedPlace(_OUTCOMES[given.reason], 0))
            else:
                places.append(self._granted(connection, key, given, _Lease(expires, position, likely)))
        state.note_evictions()
        self._watch_leases()
        connection.send(Reserved(ticket=message.ticket, places=tuple(places)))

    def commit(self, connection: Connection, message: Commit, space: Namespace) -> None:
        """Publish, and queue for the tier. A slot whose lease has ended is counted and forgotten."""
        state = self._state
        stripes = self._stripes(space, message.part)
        entries = [(filled.digest, split_checksums(filled.checksums)) for filled in message.filled]
        for _, checksums in entries:
            if len(checksums) != stripes:
                raise RefusedError(f"{len(checksums)} checksums for a part of {stripes} stripes")
        for digest, checksums in entries:
            key = PartKey(space.namespace, digest, message.part)
            lease = self._release(connection, key)
            if lease is None:
                self._reclaim(connection, key)
                state.counters.store_failed["lease-ended"] += 1
                continue
            state.catalogue.commit(key, self._owners[connection], checksums)
            state.counters.committed_parts += 1
            state.counters.committed_bytes += space.part_bytes[message.part]
            self._offer(PartRef(key, space.part_bytes[message.part]), checksums, lease)
        self._loads.room_changed()
        self._write_back()

    def abandon(self, connection: Connection, message: Abandon, space: Namespace) -> None:
        """Take slots back."""
        for chunk in split_digests(message.chunks):
            key = PartKey(space.namespace, chunk, message.part)
            if self._release(connection, key):
                self._state.catalogue.abandon(key, self._owners[connection])
                self._state.counters.store_failed["abandoned"] += 1
            else:
                self._reclaim(connection, key)
        self._loads.room_changed()

    def disconnected(self, connection: Connection) -> None:
        """Reserved slots come back, once nobody can be writing to them any more."""
        owner = self._owners.pop(connection, None)
        if owner is None:
            return
        held = self._held.pop(connection, None)
        if held is None or not held.slots:
            return
        for lease in [lease for lease in self._leases if lease[0] is connection]:
            del self._leases[lease]
            self._state.counters.store_failed["engine-gone"] += 1
        for overdue in [overdue for overdue in self._overdue if overdue[0] is connection]:
            del self._overdue[overdue]
        when = self._state.loop.clock() + QUARANTINE_S
        self._state.loop.at(when, partial(self._release_owner, owner, held.nbytes))

    def _release_owner(self, owner: Owner, nbytes: int) -> None:
        self._reserved_bytes -= nbytes
        self._state.catalogue.release_owner(owner)
        self._loads.room_changed()

    def _over_limit(self, connection: Connection, nbytes: int) -> bool:
        """Whether one more slot would be more than this connection, or all, may hold. One always fits."""
        held, pool_bytes = self._held.get(connection, _NOTHING), self._state.arena.nbytes
        return (
            held.slots >= MAX_RESERVATIONS_PER_CONNECTION
            or (held.slots > 0 and held.nbytes + nbytes > pool_bytes // CONNECTION_DIVISOR)
            or (self._reserved_bytes > 0 and self._reserved_bytes + nbytes > pool_bytes // RESERVED_DIVISOR)
        )

    def _granted(self, connection: Connection, key: PartKey, given: Granted, lease: _Lease) -> ReservedPlace:
        self._leases[connection, key] = lease
        self._hold(connection, 1, given.slot.nbytes)
        self._state.counters.reserved_parts += 1
        return ReservedPlace(ReserveOutcome.RESERVED, given.slot.offset)

    def _release(self, connection: Connection, key: PartKey) -> _Lease | None:
        """This reservation, if it was there; it is not any more."""
        lease = self._leases.pop((connection, key), None)
        if lease is not None:
            self._hold(connection, -1, -self._nbytes(key))
        return lease

    def _hold(self, connection: Connection, slots: int, nbytes: int) -> None:
        held = self._held.get(connection, _NOTHING)
        self._held[connection] = _Held(held.slots + slots, held.nbytes + nbytes)
        self._reserved_bytes += nbytes

    def _nbytes(self, key: PartKey) -> int:
        return self._state.namespaces[key.namespace].part_bytes[key.part]

    def _reclaim(self, connection: Connection, key: PartKey) -> None:
        """The engine is done with this part: its overdue slot, if there is one, may be used again."""
        offset = self._overdue.pop((connection, key), None)
        if offset is not None:
            self._hold(connection, -1, -self._nbytes(key))
            self._state.catalogue.reclaim(offset, self._owners[connection])

    def _watch_leases(self) -> None:
        """One timer, for the oldest lease: all leases are equally long."""
        if self._timer is None and self._leases:
            self._timer = self._state.loop.at(next(iter(self._leases.values())).expires, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._state.loop.clock()
        while self._leases:
            (connection, key), lease = next(iter(self._leases.items()))
            if lease.expires > now:
                break
            del self._leases[connection, key]
            # A writer that was stopped may go on at any time: the part is free for others, the slot is not.
            self._overdue[connection, key] = self._state.catalogue.retire(key, self._owners[connection])
            self._state.counters.reservations_expired += 1
            self._loads.room_changed()
        self._watch_leases()

    def _stripes(self, space: Namespace, part: int) -> int:
        if part >= len(space.part_bytes):
            raise RefusedError(f"part {part} of chunks that have {len(space.part_bytes)}")
        return len(stripe_plan(space.part_bytes[part]))

    # ---- write-back

    def _offer(self, ref: PartRef, checksums: tuple[bytes, ...], lease: _Lease) -> None:
        if self._state.tier is None:
            return
        slot = self._state.catalogue.pin(ref.key, WRITER)
        if slot is None:
            return  # unlinked while it was being filled
        unsaved = Unsaved(ref, slot.offset, checksums, lease.position, likely=lease.likely)
        if not self._backlog.offer(unsaved):
            self._state.catalogue.unpin(ref.key, WRITER)
            self._state.counters.store_dropped_parts += 1

    def _write_back(self) -> None:
        """Put the next batch under way: first ask which parts are there already."""
        tier = self._state.tier
        if tier is None or self._resume is not None:
            return
        if (wait_s := self._rate.wait_s(self._state.loop.clock())) > 0:
            if self._backlog.backlog_parts:
                self._pause(wait_s)
            return
        batch = self._backlog.take()
        if not batch:
            return
        post = self._state.loop.post
        tier.probe(
            [unsaved.ref for unsaved in batch],
            deadline=self._state.loop.clock() + PROBE_DEADLINE_S,
            done=lambda outcomes: post(partial(self._checked, batch, outcomes)),
        )

    def _checked(self, batch: Sequence[Unsaved], outcomes: Sequence[Outcome]) -> None:
        tier = self._state.tier
        if tier is None:
            raise BrokenError("a write-back without a tier")
        missing: list[Unsaved] = []
        for unsaved, outcome in zip(batch, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._state.counters.store_present_parts += 1
                self._telling.stored(unsaved)
                self._done_with(unsaved)
            elif outcome in (Outcome.MISS, Outcome.CORRUPT):
                missing.append(unsaved)
            else:
                self._stored(unsaved, outcome)
        if missing:
            self._rate.spend(sum(unsaved.ref.nbytes for unsaved in missing), self._state.loop.clock())
            items = [
                StoreItem(
                    u.ref,
                    self._state.arena.view(u.offset, u.ref.nbytes).toreadonly(),
                    u.checksums,
                    u.position,
                )
                for u in missing
            ]
            post = self._state.loop.post
            tier.store(
                items,
                deadline=self._state.loop.clock() + STORE_DEADLINE_S,
                done=lambda index, outcome: post(partial(self._stored, missing[index], outcome)),
            )
        self._write_back()

    def _stored(self, unsaved: Unsaved, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self._state.counters.stored_parts += 1
            self._state.counters.stored_bytes += unsaved.ref.nbytes
            self._telling.stored(unsaved)
        elif unsaved.tries + 1 < MAX_TRIES and self._passing(outcome):
            self._backlog.again(unsaved)
            self._pause(RETRY_S)
            return
        else:
            self._state.counters.store_failed[outcome.value] += 1
        self._done_with(unsaved)
        self._write_back()

    def _passing(self, outcome: Outcome) -> bool:
        """Whether it may succeed soon: a server that is full, say, refuses for longer than we keep parts."""
        tier = self._state.tier
        if outcome is Outcome.REFUSED and tier is not None:
            return tier.statistics().state != "up"
        return outcome in (Outcome.FAILED, Outcome.LATE)

    def _pause(self, seconds: float) -> None:
        """Leave the tier alone for a moment."""
        if self._resume is None:
            self._resume = self._state.loop.at(self._state.loop.clock() + seconds, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        self._write_back()

    def _done_with(self, unsaved: Unsaved) -> None:
        self._state.catalogue.unpin(unsaved.ref.key, WRITER)
        self._backlog.finished(unsaved)
        self._loads.room_changed()
