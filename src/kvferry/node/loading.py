"""Performs loads: pins, reservations, fetches, and the stream of ready parts to the workers."""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from kvferry.errors import BrokenError, RefusedError
from kvferry.identity.names import PartKey, PartRef
from kvferry.node.deep import DeepFetch
from kvferry.node.fetches import Batch, FetchTable, Waiter
from kvferry.node.live import REASONS, LiveLoad, RunningBatch
from kvferry.node.loads import At, LeftOver, Load, PartState
from kvferry.node.server import Connection
from kvferry.node.state import FETCHER, Namespace, NodeState
from kvferry.node.wire import MAX_BATCH, LoadEnded, Place, Reason, Tier
from kvferry.pool.entries import Declined, DeclineReason, Owner, Slot
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, Transfer

MAX_LOADS_PER_CONNECTION = 1024
MAX_LOADS = 4096
LEASE_GRACE_S = 60.0  # after its deadline, a load that nobody ended is reclaimed
WINDOW_DIVISOR = 2  # one load may hold this fraction of the pool while it streams
MAX_TOUCHED = 2048  # chunks whose recency in the tier one load renews


class Loads:
    """All loads of a node. Every method runs on the loop's thread."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._loads: dict[int, LiveLoad] = {}
        self._by_connection: dict[Connection, set[int]] = {}
        self._fetches = FetchTable()
        self._transfers: dict[int, RunningBatch] = {}
        self._blocked: dict[LiveLoad, None] = {}
        self._talking: dict[LiveLoad, None] = {}
        self._room_changed = False
        # Ids of two node processes never meet: an end that comes late must not end another's load.
        self._last_id = secrets.randbits(40) << 20

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def fetches(self) -> int:
        """Parts that are being fetched now."""
        return len(self._fetches)

    def count(self, connection: Connection) -> int:
        """Loads that this connection owns."""
        return len(self._by_connection.get(connection, ()))

    def start(
        self,
        *,
        connection: Connection,
        request_id: str,
        space: Namespace,
        owner: Owner,
        chunks: tuple[bytes, ...],
        pinned: dict[At, Slot],
        first_chunk: int,
        deadline_s: float,
        stall_s: float,
        deep: Mapping[tuple[int, int], Tier],
    ) -> LiveLoad:
        """Begin a load. pinned: parts that ``owner`` holds already. The owner belongs to the load now.

        deep: see ``search.Search``.
        """
        now = self._state.loop.clock()
        window = max(space.chunk_bytes, self._state.arena.nbytes // WINDOW_DIVISOR)
        self._last_id += 1
        live = LiveLoad(
            load_id=self._last_id,
            request_id=request_id,
            connection=connection,
            space=space,
            owner=owner,
            load=Load(
                chunks=chunks, part_bytes=space.part_bytes, window_bytes=window, trailing=space.trailing
            ),
            first_chunk=first_chunk,
            started=now,
            deadline=now + deadline_s,
            stall_s=stall_s,
            progress=now,
            deep=deep,
        )
        self._loads[live.load_id] = live
        self._by_connection.setdefault(connection, set()).add(live.load_id)
        self._state.counters.loads += 1
        for at, slot in pinned.items():
            live.load.found(at)
            self._arrived(live, at, slot)
        self._advance(live)
        if live.load_id in self._loads:
            self._watch(live)
        return live

    def announce(self, live: LiveLoad) -> tuple[Place, ...]:
        """The places for the answer; the rest is pushed to the workers that join."""
        live.unsent.clear()
        return tuple(live.ready.pop(at) for at in sorted(live.ready)[:MAX_BATCH])

    def join(self, connection: Connection, load_id: int, *, epoch: int, part: int) -> None:
        """A worker listens for one part number from now on; other ranks may share it."""
        live = self._loads.get(load_id)
        if live is None or epoch != self._state.epoch:
            reason = Reason.ENDED if epoch == self._state.epoch else Reason.EPOCH
            connection.send(LoadEnded(load_id=load_id, part=part, chunk=0, reason=reason))
            return
        if part >= len(live.space.part_bytes):
            raise RefusedError(f"part {part} of a load whose chunks have {len(live.space.part_bytes)}")
        self._tell(live)
        listeners = live.listeners.setdefault(part, [])
        if connection not in listeners:
            listeners.append(connection)
        live.say([connection], [live.ready[at] for at in sorted(live.ready) if at.part == part])
        live.say_end(part, [connection])

    def copied(self, load_id: int, part: int, chunks: Sequence[int]) -> None:
        """A worker has copied and verified these. Late messages about a load that is over are normal."""
        live = self._loads.get(load_id)
        if live is None:
            return
        for chunk in chunks:
            at = At(chunk - live.first_chunk, part)
            if 0 <= at.position < live.load.end and live.load.state(at) is PartState.READY:
                live.load.copied(at)
                live.ready.pop(at, None)
                self._state.pins.unpin(live.key(at), live.owner)
                live.progress = self._state.loop.clock()
                self._room_changed = True

    def corrupt(self, load_id: int, part: int, chunk: int) -> None:
        """A copy did not match: remove the part everywhere, and end the load there."""
        live = self._loads.get(load_id)
        if live is None:
            return
        at = At(chunk - live.first_chunk, part)
        if not 0 <= at.position < live.load.end or part >= len(live.space.part_bytes):
            return
        self._state.counters.corrupt_parts += 1
        key = live.key(at)
        self._state.catalogue.unlink(key)
        self._remove(PartRef(key, live.space.part_bytes[part]))
        self._cut(live, at.position, Reason.CORRUPT)

    def end(self, load_id: int, reason: Reason = Reason.ENDED, *, asked_by: Connection | None = None) -> None:
        """The load is over: give back all that is left. Unknown ids are loads that ended before.

        asked_by: only the connection that owns the load may end it.
        """
        live = self._loads.get(load_id)
        if live is None or asked_by not in (None, live.connection):
            return
        del self._loads[load_id]
        failed = None
        if live.load.end < len(live.load.chunks):
            failed = live.first_chunk + live.load.end
        outcome = live.load.reason
        if live.fetched_bytes:
            self._put_in_order(live)
        self._give_back(live, live.load.finish(reason))
        self._state.pins.release(live.owner)
        self._room_changed = True
        if live.timer is not None:
            live.timer.cancel()
        self._blocked.pop(live, None)
        self._talking.pop(live, None)
        owned = self._by_connection.get(live.connection)
        if owned is not None:
            owned.discard(load_id)
            if not owned:
                del self._by_connection[live.connection]
        self._state.explain.ended(
            live.request_id,
            load_s=self._state.loop.clock() - live.started,
            reason=outcome if reason is Reason.ENDED else reason,
            failed_chunk=failed,
        )
        for part, listeners in live.listeners.items():
            for connection in list(listeners):
                connection.send(LoadEnded(load_id=load_id, part=part, chunk=live.first_chunk, reason=reason))

    def disconnected(self, connection: Connection) -> None:
        """Its own loads end; loads it listened to go on for the other ranks."""
        for load_id in list(self._by_connection.get(connection, ())):
            self.end(load_id)
        for live in self._loads.values():
            for part, listeners in live.listeners.items():
                live.listeners[part] = [listener for listener in listeners if listener is not connection]

    def room_changed(self) -> None:
        """Pins or reservations elsewhere have ended: blocked loads look again at the end of the turn."""
        self._room_changed = True

    def after_turn(self) -> None:
        """Move blocked loads on, then send what has become ready."""
        if self._room_changed:
            self._room_changed = False
            blocked, self._blocked = self._blocked, {}
            for live in blocked:
                self._advance(live)
        talking, self._talking = self._talking, {}
        for live in talking:
            self._tell(live)

    def _advance(self, live: LiveLoad) -> None:
        """Reserve and fetch what the window allows."""
        state, behind = self._state, self._state.behind
        batches: dict[Tier, tuple[Batch, list[FetchItem]]] = {}
        while (at := live.load.next_wanted()) is not None:
            key, nbytes = live.key(at), live.space.part_bytes[at.part]
            if not state.pins.has_room(key, nbytes, live.owner):  # until its connection's loads have copied
                self._blocked[live] = None
                break
            slot = state.pins.pin(key, live.owner)
            if slot is not None:
                live.load.found(at)
                self._arrived(live, at, slot)
                continue
            if self._fetches.hangs(key, state.loop.clock()):
                self._fail(live, at.position, Reason.STALLED)
                break
            if self._fetches.known(key):
                live.load.fetching(at)
                self._fetches.join(key, Waiter(live.load_id, at))
                state.pins.expect(key, nbytes, live.owner)
                state.counters.shared_fetches += 1
                continue
            if state.tier is None:  # it was there at the lookup, and there was no room to pin it
                self._fail(live, at.position, Reason.GONE)
                break
            given = state.catalogue.reserve(key, nbytes, FETCHER)
            if isinstance(given, Declined):
                if not self._wait_for_room(live, given.reason):
                    self._fail(live, at.position, Reason.POOL_FULL)
                break
            live.load.fetching(at)
            tier = live.deep.get(at, behind)
            batch, items = batches.setdefault(tier, (self._fetches.new_batch(), []))
            self._fetches.begin(key, batch, Waiter(live.load_id, at))
            state.pins.expect(key, nbytes, live.owner)
            items.append(FetchItem(PartRef(key, nbytes), state.arena.view(given.slot.offset, nbytes)))
        else:
            if live.load.window_full():
                self._blocked[live] = None
        state.note_evictions()
        for tier, (batch, items) in batches.items():
            self._fetch(live, tier, batch, items)

    def _wait_for_room(self, live: LiveLoad, reason: DeclineReason) -> bool:
        """Whether this load can go on later: never when nothing that it holds or waits for can end."""
        elsewhere = reason in (DeclineReason.FILLING, DeclineReason.UNLINKED, DeclineReason.EXISTS)
        if elsewhere or live.load.waits_for_room():
            self._blocked[live] = None
            return True
        return False

    def _fetch(self, live: LiveLoad, tier: Tier, batch: Batch, items: list[FetchItem]) -> None:
        """All of it from one tier: from the one behind memory, or through that from a keeper's."""
        state, behind = self._state, self._state.tier
        if behind is None:
            raise BrokenError("a load wants parts from a tier, and there is none")
        keys = [item.ref.key for item in items]
        post = state.loop.post

        def done(index: int, result: FetchResult) -> None:
            post(partial(self._fetched, keys[index], result))

        batch.deadline = live.deadline
        nbytes = sum(item.ref.nbytes for item in items)
        timing = state.rate(tier).begin(nbytes, state.loop.clock())
        transfer: Transfer
        if state.keepers is None:
            transfer = behind.fetch(items, deadline=live.deadline, done=done)
        else:
            transfer = DeepFetch(
                state,
                items,
                keepers=state.keepers,
                tier=behind,
                place=tier,
                deadline=live.deadline,
                done=done,
                lost=lambda indexes: self._staged_again(batch, [keys[index] for index in indexes]),
            )
        self._transfers[batch.number] = RunningBatch(tier, transfer, timing)

    def _staged_again(self, batch: Batch, keys: Sequence[PartKey]) -> None:
        """The tier has lost these since: who waits for them is told that they still come, by a detour."""
        batch.measured = False
        waiting = {waiter.load_id for key in keys for waiter in self._fetches.waiters(key)}
        for live in [self._loads[load_id] for load_id in waiting if load_id in self._loads]:
            live.progress = self._state.loop.clock()
            live.say_that_it_comes()

    def _fetched(self, key: PartKey, result: FetchResult) -> None:
        """The tier is done with one part: its slot is nobody's but ours again."""
        state = self._state
        waiters, batch = self._fetches.finish(key)
        batch.measured &= result.outcome in (Outcome.OK, Outcome.LATE) and not batch.cancelled
        batch.late |= result.outcome is Outcome.LATE
        tier, now = self._transfers[batch.number].tier, state.loop.clock()
        if batch.unfinished == 0:
            self._learn(batch, self._transfers.pop(batch.number))
        self._room_changed = True
        reason = REASONS.get(result.outcome, Reason.GONE)  # OK and gone: unlinked while it was on its way
        as_asked = result.outcome is Outcome.LATE and batch.cancelled
        counted = result.outcome is not Outcome.OK and not as_asked
        if counted:
            state.counters.failed[reason.value] += 1
        if result.outcome is Outcome.OK:
            state.rate(tier).moved(now)
            state.counters.fetched_parts += 1
            state.counters.fetched_bytes[tier.name.lower()] += state.part_bytes(key)
            state.catalogue.commit(key, FETCHER, result.checksums)
        else:
            state.catalogue.abandon(key, FETCHER)
            if result.outcome is Outcome.CORRUPT and state.keepers is not None:
                state.keepers.remove([PartRef(key, state.part_bytes(key))])  # the tier has done so
        for waiter in waiters:
            live = self._loads.get(waiter.load_id)
            if live is None or live.load.state(waiter.at) is not PartState.FETCHING:
                continue  # ended, or cut by a waiter before this one
            slot = state.pins.pin(key, live.owner) if result.outcome is Outcome.OK else None
            if slot is not None:
                live.progress = now
                live.fetched_bytes += slot.nbytes
                live.load.arrived(waiter.at)
                self._arrived(live, waiter.at, slot)
            elif result.outcome is Outcome.LATE and live.deadline > now and batch.ends_before(live.deadline):
                # It was late for the load that began it, not for this one, which fetches it itself.
                live.load.wanted_again(waiter.at)
                self._blocked[live] = None
            elif counted:
                self._cut(live, waiter.at.position, reason)
            else:
                self._fail(live, waiter.at.position, reason)

    def _learn(self, batch: Batch, ended: RunningBatch) -> None:
        """A whole batch is done, or given up: what it says about its tier's speed, once."""
        rate, now = self._state.rate(ended.tier), self._state.loop.clock()
        if ended.timing is None:
            return
        if not batch.measured:
            rate.forget(ended.timing)
        elif batch.late:
            rate.timed_out(ended.timing, now)
        else:
            rate.end(ended.timing, now)

    def _remove(self, ref: PartRef) -> None:
        """Its bytes are wrong somewhere: away with it everywhere behind memory."""
        if self._state.tier is not None:
            self._state.tier.remove([ref])
        if self._state.keepers is not None:
            self._state.keepers.remove([ref])

    def _arrived(self, live: LiveLoad, at: At, slot: Slot) -> None:
        place = live.ready[at] = live.place(at, slot)
        live.unsent.setdefault(at.part, []).append(place)
        self._talking[live] = None

    def _put_in_order(self, live: LiveLoad) -> None:
        """Parts came in as they arrived: renew the prefix's recency, here and in the tier, head last."""
        self._state.catalogue.refresh(live.space.namespace, live.load.chunks)
        if self._state.tier is not None and live.load.end:
            refs = live.space.refs(live.load.chunks[: live.load.end])
            self._state.tier.touch(list(islice(refs, MAX_TOUCHED * len(live.space.parts))))

    def _fail(self, live: LiveLoad, position: int, reason: Reason) -> None:
        """Count why a load ends early, where nothing else has, and cut it there."""
        self._state.counters.failed[reason.value] += 1
        self._cut(live, position, reason)

    def _cut(self, live: LiveLoad, position: int, reason: Reason) -> None:
        overdue = reason in (Reason.DEADLINE, Reason.STALLED)
        self._give_back(live, live.load.cut(position, reason), overdue=overdue)
        self._talking[live] = None

    def _give_back(self, live: LiveLoad, left: LeftOver, *, overdue: bool = False) -> None:
        """overdue: what has not come took too long."""
        for at in left.ready:
            live.ready.pop(at, None)
            self._state.pins.unpin(live.key(at), live.owner)
        for at in left.fetching:
            self._state.pins.forget(live.key(at), live.owner)
            batch = self._fetches.leave(live.key(at), Waiter(live.load_id, at))
            running = None if batch is None else self._transfers.get(batch.number)
            if batch is None or running is None:
                continue
            batch.cancelled_at = self._state.loop.clock()
            if overdue:  # a tier that hangs may never end it
                batch.late = True
                self._learn(batch, running)
                self._transfers[batch.number] = running._replace(timing=None)
            running.transfer.cancel()
        self._room_changed = True

    def _tell(self, live: LiveLoad) -> None:
        """Send the joined workers what is ready for them, and where their part ends if it was cut."""
        unsent, live.unsent = live.unsent, {}
        for part, listeners in list(live.listeners.items()):
            end = live.load.end
            places = [p for p in unsent.get(part, ()) if p.chunk - live.first_chunk < end]
            live.say(listeners, places)
            if live.told_end.get(part) != end:
                live.told_end[part] = end
                live.say_end(part, listeners)

    def _watch(self, live: LiveLoad) -> None:
        """One timer per load: the stall timeout while fetching, the deadline, then the lease."""
        now = self._state.loop.clock()
        if now >= live.deadline + LEASE_GRACE_S:
            self._state.counters.loads_expired += 1
            self.end(live.load_id, Reason.EXPIRED)
            return
        missing = live.load.first_missing()
        if missing is None or live.load.end == 0:
            when = live.deadline + LEASE_GRACE_S
        elif now < live.deadline and not live.load.is_fetching():
            # The window is full until a worker copies: the engine is busy, the tier does not stall.
            live.progress = now
            when = min(live.deadline, now + live.stall_s)
        elif now >= live.deadline or now >= live.progress + live.stall_s:
            reason = Reason.DEADLINE if now >= live.deadline else Reason.STALLED
            self._fail(live, missing, reason)
            when = live.deadline + LEASE_GRACE_S
        else:
            when = min(live.deadline, live.progress + live.stall_s)
        live.timer = self._state.loop.at(when, partial(self._watch, live))
