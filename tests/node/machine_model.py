"""What the node's state machine expects: a model in dictionaries, and the checks after every step."""

import math
from collections import Counter
from collections.abc import Sequence

from tests.node.machine_held import Asked, Loading, Writing
from tests.node.machine_keepers import ScriptedKeepers
from tests.node.machine_tier import ScriptedTier
from tests.node.machine_world import CHECKSUMS, CONTENT, KEYS, POOL_BYTES, SPACES, Clock, Peer, World

from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.node.app import snapshot
from kvferry.node.framing import split_checksums
from kvferry.node.keepers import TIERS
from kvferry.node.loading import LEASE_GRACE_S
from kvferry.node.pins import SHARE_DIVISOR
from kvferry.node.saves import QUARANTINE_S, RESERVATION_LEASE_S
from kvferry.node.state import Namespace
from kvferry.node.wire import (
    Answer,
    Attached,
    FromNode,
    LoadEnded,
    Matched,
    PartsReady,
    Place,
    Reason,
    Reserved,
    ReserveOutcome,
    Role,
    Tier,
)
from kvferry.observe.metric import Kind
from kvferry.observe.metrics import METRICS

NO_MISS = {Reason.ENDED, Reason.COMPLETE, Reason.EXPIRED, Reason.EPOCH}  # that need no counter of failures
MISSES = {Reason.ABSENT, Reason.EVICTED}
NO_FAILURE = {*MISSES, Reason.CHEAPER}  # for which an answer is short


class Model:
    """The world, and what is known of it."""

    def __init__(self, *, with_tier: bool, tight: bool = False, with_keepers: bool = False) -> None:
        """tight: the node's bounds are so small that an answer need not name all that is ready."""
        self.tight = tight
        self.clock = Clock()
        self.tier = ScriptedTier() if with_tier else None
        self.keepers = ScriptedKeepers(self.tier) if with_keepers and self.tier is not None else None
        self.damaged: set[PartKey] = set()  # of parts whose bytes in memory were changed
        self.tickets = 0
        self.serial = 0
        self.epoch = 1
        self.stale: list[int] = [7]  # ids of loads that are over, or never were
        self.begin()

    def begin(self) -> None:
        """A node process starts; what lies in the tier is from before."""
        self.world = World(self.clock, tier=self.tier, keepers=self.keepers, epoch=self.epoch)
        if self.keepers is not None:
            self.keepers.forget()
        self.peers: list[Peer] = []
        self.asked: dict[tuple[Peer, int], Asked] = {}
        self.loads: dict[int, Loading] = {}
        self.writing: list[Writing] = []
        self.missed = 0
        self.hits: Counter[str] = Counter()
        self.saves: Counter[str] = Counter()
        self.expired_loads = 0
        self.ending: list[Loading] = []  # whose end was asked for
        self.failures: dict[str, int] = {}
        self.page: dict[tuple[str, tuple[str, ...]], float] = {}  # of metrics, as it was

    def restart(self) -> None:
        """The node process is killed and comes back; what clients hold is of another epoch."""
        self.stale += self.loads
        for peer in self.peers:
            peer.alive = False
        self.world.close()
        self.epoch += 1
        self.begin()

    # ---- what happens

    def peer(self, role: Role, which: int) -> Peer:
        """One of the connections of that role; a new one when there is none."""
        known = [peer for peer in self.peers if peer.hello.role is role]
        if not known:
            self.peers.append(self.world.connect(role, f"engine {which}"))
            return self.peers[-1]
        return known[which % len(known)]

    def lease(self, peer: Peer, key: PartKey) -> Writing | None:
        """What that connection may write under that name, overdue or not."""
        return next((w for w in self.writing if w.key == key and w.peer is peer and peer.alive), None)

    def gone(self, peer: Peer) -> None:
        """Its connection has closed, after the world has heard of it."""
        self.peers.remove(peer)
        for asked in [asked for asked in self.asked if asked[0] is peer]:
            del self.asked[asked]
        for loading in [loading for loading in self.loads.values() if loading.peer is peer]:
            self.over(loading)
        for loading in self.loads.values():
            loading.joined = {who: end for who, end in loading.joined.items() if who[0] is not peer}
        for writing in self.writing:
            if writing.peer is peer and writing.until == math.inf:
                self.saves["engine-gone"] += writing.expires > self.clock.now
                writing.until = self.clock.now + QUARANTINE_S

    def over(self, loading: Loading) -> None:
        """That load has ended; every worker that listened must have been told."""
        del self.loads[loading.load_id]
        self.stale.append(loading.load_id)
        for (peer, part), end in loading.joined.items():
            if peer.alive:
                told = [m for m in peer.inbox if isinstance(m, LoadEnded)]
                assert any(m.load_id == loading.load_id and m.part == part for m in told), (peer, part, end)

    def absorb(self) -> None:
        """Read what the node has sent."""
        for peer in self.peers:
            messages, peer.inbox = peer.inbox, []
            for message in messages:
                self._take(peer, message)

    def _take(self, peer: Peer, message: FromNode) -> None:
        match message:
            case Answer():
                self._answered(self.asked.pop((peer, message.ticket)), message)
            case Matched():
                self._matched(self.asked.pop((peer, message.ticket)), message)
            case PartsReady(load_id=load_id, places=places):
                for place in places if load_id in self.loads else ():
                    assert (peer, place.part) in self.loads[load_id].joined
                    self._given(self.loads[load_id], place)
            case LoadEnded(load_id=load_id, part=part, chunk=chunk, reason=reason):
                if reason not in NO_MISS:
                    self.is_counted(reason)
                loading = self.loads.get(load_id)
                if loading is not None:
                    assert chunk <= loading.joined[peer, part]
                    loading.joined[peer, part] = chunk
            case Attached(error=error):
                assert not error, error
            case _:
                pass

    def _given(self, loading: Loading, place: Place) -> None:
        at = (place.chunk, place.part)
        assert at in loading.needed
        assert split_checksums(place.checksums) == CHECKSUMS[loading.key(*at)]
        loading.given.add(at)
        loading.places[at] = place

    def _answered(self, asked: Asked, answer: Answer) -> None:
        """Who is told what, and whether it was rightly counted as a miss."""
        wanted = asked.wanted
        available, missing = asked.available()
        silent = asked.probe is not None and asked.probe.answered is None
        if silent or (asked.locate is not None and asked.locate.answered is None):
            assert self.clock.now >= asked.bound
            self.is_counted(Reason.DEADLINE)
        if asked.probe is None and answer.reason is Reason.LIMIT:
            available, missing = 0, False  # more was asked for than the node keeps track of
        self.missed += len(wanted) - available if missing else 0
        assert answer.count <= available
        assert answer.count == available or answer.reason not in (Reason.COMPLETE, *MISSES)
        assert (answer.epoch, answer.first_chunk) == (self.epoch, asked.first_chunk)
        assert len(answer.tiers) == answer.count
        if answer.count < len(wanted):
            assert answer.reason is not Reason.COMPLETE
            assert missing or answer.reason not in MISSES
            if answer.reason not in NO_FAILURE:
                cause = answer.reason.value
                assert self._failures().get(cause, 0) > self.failures.get(cause, 0), f"nothing counts {cause}"
        self.hits.update(Tier(tier).name.lower() for tier in answer.tiers)
        if not answer.count:
            return
        assert answer.load_id not in self.loads and answer.load_id not in self.stale
        loading = self.loads[answer.load_id] = Loading(
            answer.load_id,
            asked.peer,
            asked.space,
            wanted[: answer.count],
            asked.first_chunk,
            self.clock.now + answer.deadline_s,
            end=answer.count,
        )
        for place in answer.ready:
            self._given(loading, place)
        for at, tier in enumerate(answer.tiers):
            parts = {(chunk, part) for chunk, part in loading.needed if chunk == asked.first_chunk + at}
            whole = bool(parts) and parts <= loading.given
            needless = not parts and tier == answer.tiers[at + 1]  # IndexError: the last chunk is needed
            assert (
                whole
                or needless
                or tier == Tier.VALKEY
                or tier in [TIERS.get(where) for where in asked.places(at)]
                or asked.crowded
                or self.wants_more_than_its_share(asked.peer)
                or self.tight
            )

    def _matched(self, asked: Asked, answer: Matched) -> None:
        """Exactly what a lookup could load at most."""
        available, missing = asked.available()
        if asked.probe is None and answer.reason is Reason.LIMIT:
            available, missing = 0, False
        assert answer.count == available
        assert (answer.reason is Reason.COMPLETE) == (available == len(asked.wanted))
        assert answer.reason is Reason.COMPLETE or missing == (answer.reason in MISSES)

    def wants_more_than_its_share(self, peer: Peer) -> bool:
        """Whether what its loads and lookups want together is more than one connection may hold."""
        wanted = [(loading.space, loading.chunks) for loading in self.loads.values() if loading.peer is peer]
        wanted += [(asked.space, asked.wanted) for asked in self.asked.values() if asked.peer is peer]
        parts = {
            (space.namespace, chunk, part, space.part_bytes[part])
            for space, chunks in wanted
            for chunk in chunks
            for part in space.parts
        }
        return sum(nbytes for *_, nbytes in parts) > POOL_BYTES // SHARE_DIVISOR

    def reserved(self, peer: Peer, keys: Sequence[PartKey]) -> None:
        """Take the answer to a reservation out of the inbox."""
        answer = next(message for message in peer.inbox if isinstance(message, Reserved))
        peer.inbox.remove(answer)
        for key, place in zip(keys, answer.places, strict=True):
            if place.outcome is not ReserveOutcome.RESERVED:
                self.saves["declined"] += 1
                continue
            assert self.lease(peer, key) is None
            view = self.world.arena.view(place.offset, len(CONTENT[key]))
            self.writing.append(Writing(peer, key, view, self.clock.now + RESERVATION_LEASE_S))
            self.saves["reserved"] += 1

    # ---- what must hold after every step

    def check(self) -> None:
        """Raises AssertionError, or BrokenError for the pool's own books."""
        world, now = self.world, self.clock.now
        world.settle()
        assert world.loop.defects == 0
        self._tick(now)
        self._match_locates()
        self.absorb()
        world.state.catalogue.check()
        world.state.pins.check()
        self._bytes_are_right()
        for asked in self.asked.values():
            assert now < asked.bound, "a lookup without an answer"
        for loading in self.loads.values():
            self._is_told(loading)
        self._counts_add_up()
        self._cuts_are_counted()
        self._metrics_are_sane()
        self._nothing_waits_for_the_next_event()

    def _tick(self, now: float) -> None:
        self.writing = [writing for writing in self.writing if writing.until > now]
        for loading in list(self.loads.values()):
            if loading in self.ending:
                self.over(loading)
            elif now >= loading.deadline + LEASE_GRACE_S:
                self.expired_loads += 1
                self.over(loading)
        self.ending.clear()

    def _match_locates(self) -> None:
        """Whose question each new one to the keepers is: they come in the order of the tier's answers."""
        if self.keepers is None:
            return
        waiting = [asked for asked in self.asked.values() if asked.locate is None and asked.probe is not None]
        waiting = [asked for asked in waiting if asked.probe and asked.probe.answered is not None]
        waiting.sort(key=lambda asked: asked.probe.turn if asked.probe is not None else 0)
        known = [asked.locate for asked in self.asked.values()]
        for locate in [locate for locate in self.keepers.asked if locate not in known]:
            keys = {ref.key for ref in locate.refs}
            asked = next(asked for asked in waiting if asked.to_locate() == keys)
            asked.locate = locate
            waiting.remove(asked)
        self.keepers.asked.clear()

    def _bytes_are_right(self) -> None:
        """Whoever may write does; then every reader must see exactly what it was promised."""
        writers = [writing.view for writing in self.writing]
        if self.tier is not None:
            writers += [fetch.item.into for fetch in self.tier.fetches]
        marks: list[bytes] = []
        for view in writers:
            self.serial = self.serial % 250 + 1
            marks.append(bytes([self.serial]) * view.nbytes)
            view[:] = marks[-1]
        for view, mark in zip(writers, marks, strict=True):
            assert bytes(view) == mark, "one slot was given to two writers"
        for key in KEYS:
            seen = self.world.visible(key)
            if seen is not None:
                self._is_right(key, seen[0], seen[1], "the pool")
        for store in self.tier.stores if self.tier is not None else ():
            self._is_right(store.item.ref.key, store.item.data, store.item.checksums, "a store")
        for loading in self.loads.values():
            live = self.world.app.loads._loads[loading.load_id]
            for (chunk, part), place in loading.places.items():
                if chunk < loading.first_chunk + live.load.end:
                    view = self.world.arena.view(place.offset, len(CONTENT[loading.key(chunk, part)]))
                    self._is_right(loading.key(chunk, part), view, split_checksums(place.checksums), "a load")

    def _is_right(self, key: PartKey, view: memoryview, checksums: tuple[bytes, ...], where: str) -> None:
        assert checksums == CHECKSUMS[key], f"{where} promises other bytes"
        right = bytes(view) == CONTENT[key]
        assert right or (key in self.damaged and part_checksums(view) != checksums), (
            f"{where} has wrong bytes"
        )

    def _is_told(self, loading: Loading) -> None:
        """Everyone who listens knows where the load ends, and past its deadline has all that is before it."""
        end = loading.first_chunk + self.world.app.loads._loads[loading.load_id].load.end
        if loading.space.trailing:
            assert end in (loading.first_chunk, loading.first_chunk + len(loading.chunks)), "no boundary"
        for (_, part), told in loading.joined.items():
            assert told == end, f"the load ends at {end}, a worker was told {told}"
            before = {at for at in loading.needed if at[0] < end and at[1] == part}
            late = self.clock.now >= loading.deadline
            assert not late or before <= loading.given, "a load without end"

    def _failures(self) -> dict[str, int]:
        """What is counted of failures, by cause."""
        counters = self.world.state.counters
        return {**counters.failed, "corrupt": counters.failed["corrupt"] + counters.corrupt_parts}

    def _cuts_are_counted(self) -> None:
        """A load that has become shorter since the last step did so for a cause that was counted in it."""
        failures = self._failures()
        for loading in self.loads.values():
            load = self.world.app.loads._loads[loading.load_id].load
            if load.end < loading.end:
                loading.end, cause = load.end, load.reason.value
                assert failures.get(cause, 0) > self.failures.get(cause, 0), f"nothing counts {cause}"
        self.failures = failures

    def is_counted(self, reason: Reason) -> None:
        """A failure that someone was told of has a counter with its name."""
        counters = self.world.state.counters
        if reason is Reason.CORRUPT:
            assert counters.corrupt_parts or counters.failed[reason.value]
        else:
            assert counters.failed[reason.value], f"nothing counts {reason.value}"

    def _counts_add_up(self) -> None:
        counters, app = self.world.state.counters, self.world.app
        assert counters.missed_chunks == self.missed
        assert +counters.hit_chunks == +self.hits
        assert counters.loads_expired == self.expired_loads
        overdue = [w for w in self.writing if w.until == math.inf and w.expires <= self.clock.now]
        assert app.saves.overdue == len(overdue)
        assert len(app.loads) == len(self.loads)
        staging = self.keepers.staging if self.keepers is not None else 0
        assert app.loads.fetches == len(self.tier.fetches if self.tier is not None else ()) + staging
        if self.keepers is not None:
            assert len(self.keepers.told) == counters.stored_parts + counters.store_present_parts
        assert counters.reserved_parts == self.saves["reserved"]
        assert counters.committed_parts == self.saves["committed"]
        assert counters.reserve_declined.total() == self.saves["declined"]
        for cause in ("lease-ended", "engine-gone", "abandoned"):
            assert counters.store_failed[cause] == self.saves[cause], cause
        for peer in self.peers:
            assert app.loads.count(peer) == sum(1 for load in self.loads.values() if load.peer is peer)
            assert app.saves.count(peer) == sum(1 for writing in self.writing if writing.peer is peer)

    def _metrics_are_sane(self) -> None:
        """Nothing on the page is negative, and no counter goes back."""
        statistics = snapshot(
            self.world.app, started=0.0, socket_path="", huge_bytes=0, prepared_bytes=0, quota=None
        )
        for metric in METRICS:
            for labels, value in metric.read(statistics):
                before = self.page.get((metric.name, labels), 0.0)
                assert value >= (before if metric.kind is Kind.COUNTER else 0.0), (metric.name, labels, value)
                self.page[metric.name, labels] = value

    def _nothing_waits_for_the_next_event(self) -> None:
        """A load that could go on was not forgotten: looking at all of them again changes nothing."""
        before = self.world.app.loads.fetches
        self.world.app.loads._room_changed = True
        self.world.loop.turn(0.0)
        assert self.world.app.loads.fetches == before
        assert not any(isinstance(message, PartsReady | LoadEnded) for p in self.peers for message in p.inbox)

    def rest(self) -> None:
        """All clients leave and every transfer ends: nothing may be held any more."""
        for peer in list(self.peers):
            self.world.hang_up(peer)
            self.gone(peer)
        app = self.world.app
        for _ in range(20):
            self.check()
            if self.keepers is not None:
                self.keepers.end_all(None)
            if self.tier is not None:
                self.tier.end_all(None)
            self.clock.now += QUARANTINE_S
        self.check()
        held = self.world.state.catalogue.statistics()
        assert (held.pins, held.filling_parts, held.unlinked_parts) == (0, 0, 0)
        assert (len(app.loads), app.loads.fetches, app.saves.overdue) == (0, 0, 0)
        assert (app.saves.backlog.backlog_bytes, app.saves.backlog.backlog_parts) == (0, 0)
        assert not app.engines()
        assert all(timer.call is None for _, _, timer in self.world.loop._timers)
        self.world.state.catalogue.drop()
        self.world.state.catalogue.check()
        assert self.world.state.catalogue.statistics().used_bytes == 0


def space_of(which: int) -> Namespace:
    """One of the namespaces, the first one most often."""
    return (SPACES[0], SPACES[1], SPACES[0], SPACES[2])[which % 4]
