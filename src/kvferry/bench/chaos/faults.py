"""Every kind of fault, as a procedure that yields the seconds until it wants to go on.

A procedure begins the fault, lifts it, sets ``lifted`` at the moment from which reuse can return, and ends
when what it broke is whole again, so that the next fault of the same part may begin.
"""

import enum
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from kvferry.bench.chaos import damage
from kvferry.bench.chaos.cluster import MEMORY_MB, Member, Shard, ValkeyCluster
from kvferry.bench.chaos.processes import EngineProcess, NodeProcess
from kvferry.client.admin import AdminClient
from kvferry.errors import KvferryError
from kvferry.testing.servers import must

POLL_S = 0.1
TAKEOVER_S = 15.0
WHOLE_S = 60.0
MOVED_SLOTS = 4
MOVED_KEYS = 8  # at a time
SHORT_LINGER_S = 0.3
LEASE_S = 66.0
LEASE_SHARE = 0.03

Procedure = Iterator[float]


class FaultKind(enum.StrEnum):
    """What is done. The first three are kills."""

    NODE_KILL = "node-kill"
    ENGINE_KILL = "engine-kill"
    PRIMARY_KILL = "primary-kill"
    NODE_STOP = "node-stop"
    NODE_RESTART = "node-restart"
    NODE_DROP = "node-drop"
    NODE_FLIP = "node-flip"
    ENGINE_STOP = "engine-stop"
    PRIMARY_STOP = "primary-stop"
    SHARD_KILL = "shard-kill"
    FAILOVER = "failover"
    MIGRATE = "migrate"
    FLUSH = "flush"
    DISCONNECT = "disconnect"
    PAUSE = "pause"
    FULL = "full"
    EVICT = "evict"
    FLIP = "flip"
    TRUNCATE = "truncate"
    SWAP = "swap"


KILLS = (FaultKind.NODE_KILL, FaultKind.ENGINE_KILL, FaultKind.PRIMARY_KILL)
OTHERS = tuple(kind for kind in FaultKind if kind not in KILLS)


@dataclass(slots=True)
class Fault:
    """One fault that was done. target: what was hit. lifted: when it was over; reuse_s: from then on.

    node, engine: whose reuse is watched for; both None for that from Valkey.
    """

    kind: FaultKind
    target: str
    began: float
    node: int | None = None
    engine: int | None = None
    lifted: float | None = None
    ended: float | None = None
    reuse_s: float | None = None
    note: str = ""


@dataclass(slots=True)
class World:
    """Everything that can be broken, and the randomness that decides how."""

    cluster: ValkeyCluster
    nodes: list[NodeProcess]
    engines: list[EngineProcess]
    rng: random.Random
    busy: set[str] = field(default_factory=set)

    def begin(self, kind: FaultKind) -> "tuple[Fault, str, Procedure] | None":
        """A fault of that kind on something that no other fault has at present; None when all are taken."""
        candidates = _targets(self, kind)
        free = [target for target in candidates if target not in self.busy]
        if not free:
            return None
        target = self.rng.choice(free)
        fault = Fault(kind, target, monotonic())
        if target.startswith("node"):
            fault.node = int(target.split("-")[1])
        elif target.startswith("engine"):
            fault.engine = int(target.split("-")[1])
        self.busy.add(target)
        return fault, target, _PROCEDURES[kind](self, fault)

    def pick_shard(self) -> Shard:
        """One that has a replica. Raises KvferryError when the Cluster does not say."""
        shards = [shard for shard in self.cluster.shards() if shard.replicas]
        return self.rng.choice(shards or self.cluster.shards())

    def primary(self, fault: Fault) -> Member:
        """A primary to hit."""
        member = self.cluster.members[self.pick_shard().primary]
        fault.target = f"valkey-{member.index}"
        return member


def _targets(world: World, kind: FaultKind) -> Sequence[str]:
    if kind.value.startswith("node"):
        return [f"node-{node.index}" for node in world.nodes]
    if kind.value.startswith("engine"):
        return [f"engine-{engine.index}" for engine in world.engines]
    return ["valkey"]


def _node_of(world: World, fault: Fault) -> NodeProcess:
    return world.nodes[fault.node or 0]


def _node_kill(world: World, fault: Fault) -> Procedure:
    node = _node_of(world, fault)
    node.kill()
    yield world.rng.uniform(0.0, 1.5)
    fault.lifted = monotonic()
    node.start()
    yield from _until(lambda: node.status() is not None, TAKEOVER_S)


def _node_restart(world: World, fault: Fault) -> Procedure:
    node = _node_of(world, fault)
    node.terminate()
    fault.lifted = monotonic()
    node.start()
    yield from _until(lambda: node.status() is not None, TAKEOVER_S)


def _node_stop(world: World, fault: Fault) -> Procedure:
    node = _node_of(world, fault)
    node.send_signal(signal.SIGSTOP)
    yield world.rng.choice((0.1, 0.4, 1.0, 2.5, 6.0))
    node.send_signal(signal.SIGCONT)
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _node_drop(world: World, fault: Fault) -> Procedure:
    node = _node_of(world, fault)
    try:
        admin = AdminClient(node.socket)
        try:
            fault.note = str(admin.drop("memory"))
        finally:
            admin.close()
    except KvferryError as error:
        fault.note = f"not done: {error}"
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _node_flip(world: World, fault: Fault) -> Procedure:
    pid = _node_of(world, fault).pid
    fault.note = f"{damage.flip_pool(pid, world.rng) if pid else 0} bits"
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _engine_kill(world: World, fault: Fault) -> Procedure:
    engine = world.engines[fault.engine or 0]
    engine.kill()
    yield world.rng.uniform(0.0, 1.0)
    fault.lifted = monotonic()
    engine.start()
    yield from _until(lambda: engine.ready, TAKEOVER_S)


def _engine_stop(world: World, fault: Fault) -> Procedure:
    engine = world.engines[fault.engine or 0]
    engine.send_signal(signal.SIGSTOP)
    # Once in a while longer than a reservation's lease: what it held has gone to others when it goes on.
    yield LEASE_S if world.rng.random() < LEASE_SHARE else world.rng.choice((0.1, 0.5, 1.5, 4.0))
    engine.send_signal(signal.SIGCONT)
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _primary_kill(world: World, fault: Fault) -> Procedure:
    member = world.primary(fault)
    member.kill()
    if world.rng.random() < 0.8:
        yield from _until(lambda: _lost_its_slots(world, member), TAKEOVER_S)
        fault.lifted = monotonic()
        fault.note = "its replica took over"
        yield world.rng.uniform(0.0, 1.0)
    else:
        yield world.rng.uniform(0.0, 1.0)  # back before anyone took over, and empty
        fault.lifted = monotonic()
        fault.note = "came back empty"
    member.start()
    yield from _until(world.cluster.whole, WHOLE_S)
    member.start_again()


def _shard_kill(world: World, fault: Fault) -> Procedure:
    """A primary and its replica: what they held is gone, and for a while nobody serves their slots."""
    shard = world.pick_shard()
    members = [world.cluster.members[index] for index in (shard.primary, *shard.replicas)]
    fault.target = " and ".join(f"valkey-{member.index}" for member in members)
    for member in members:
        member.kill()
    yield world.rng.uniform(0.5, 4.0)
    for member in members:
        member.start()
    yield from _until(world.cluster.whole, WHOLE_S)
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _lost_its_slots(world: World, member: Member) -> bool:
    try:
        others = [m for m in world.cluster.members if m is not member]
        view = ValkeyCluster(others).shards()
        return len(view) == len(world.cluster.members) // 2
    except KvferryError:
        return False


def _primary_stop(world: World, fault: Fault) -> Procedure:
    member = world.primary(fault)
    member.send_signal(signal.SIGSTOP)
    yield world.rng.choice((0.2, 0.6, 1.2, 4.0))
    member.send_signal(signal.SIGCONT)
    fault.lifted = monotonic()
    yield from _until(world.cluster.whole, WHOLE_S)


def _failover(world: World, fault: Fault) -> Procedure:
    shard = world.pick_shard()
    replica = world.cluster.members[world.rng.choice(shard.replicas)]
    fault.target = f"valkey-{replica.index}"
    must(replica.ask("CLUSTER", "FAILOVER"))
    fault.lifted = monotonic()
    yield SHORT_LINGER_S
    yield from _until(world.cluster.whole, WHOLE_S)


def _flush(world: World, fault: Fault) -> Procedure:
    must(world.primary(fault).ask("FLUSHALL", world.rng.choice(("SYNC", "ASYNC"))))
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _disconnect(world: World, fault: Fault) -> Procedure:
    """Every client of one server, wherever its replies are."""
    reply = must(world.primary(fault).ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    fault.note = f"{reply!r} connections"
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _pause(world: World, fault: Fault) -> Procedure:
    """The server answers nobody for a while, and then everything that was asked."""
    pause_ms = world.rng.choice((100, 400, 1500))
    must(world.primary(fault).ask("CLIENT", "PAUSE", str(pause_ms), "ALL"))
    yield pause_ms / 1000
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _full(world: World, fault: Fault) -> Procedure:
    member = world.primary(fault)
    member.limit("1mb", "noeviction")
    yield world.rng.uniform(0.5, 3.0)
    member.limit(f"{MEMORY_MB}mb", "allkeys-lru")
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _evict(world: World, fault: Fault) -> Procedure:
    member = world.primary(fault)
    used = int(member.info("memory")["used_memory"])
    member.limit(str(max(used // 2, 4 << 20)), "allkeys-lru")
    yield world.rng.uniform(0.3, 1.0)
    member.limit(f"{MEMORY_MB}mb", "allkeys-lru")
    fault.lifted = monotonic()
    yield SHORT_LINGER_S


def _damage(how: Callable[[Member, random.Random], int]) -> Callable[[World, Fault], Procedure]:
    def procedure(world: World, fault: Fault) -> Procedure:
        fault.note = f"{how(world.primary(fault), world.rng)} values"
        fault.lifted = monotonic()
        yield SHORT_LINGER_S

    return procedure


def _migrate(world: World, fault: Fault) -> Procedure:
    """Slots that hold keys, one after the other, slowly enough that others meet them half moved."""
    shards = world.cluster.shards()
    world.rng.shuffle(shards)
    source, target = (world.cluster.members[shard.primary] for shard in shards[:2])
    fault.target = f"valkey-{source.index} to valkey-{target.index}"
    slots: set[int] = set()
    for _ in range(MOVED_SLOTS):
        key = source.ask("RANDOMKEY")
        if isinstance(key, bytes):
            slot = must(source.ask("CLUSTER", "KEYSLOT", key))
            slots |= {slot} if isinstance(slot, int) else set()
    moved = 0
    try:
        for slot in sorted(slots):
            number = str(slot)
            must(target.ask("CLUSTER", "SETSLOT", number, "IMPORTING", source.node_id()))
            must(source.ask("CLUSTER", "SETSLOT", number, "MIGRATING", target.node_id()))
            yield world.rng.uniform(0.0, 0.2)
            while names := _keys_in(source, number):
                for name in names:
                    must(source.ask("MIGRATE", "127.0.0.1", str(target.port), name, "0", "5000", "REPLACE"))
                    moved += 1
                yield world.rng.uniform(0.0, 0.1)
            identity = target.node_id()
            must(target.ask("CLUSTER", "SETSLOT", number, "NODE", identity))
            must(source.ask("CLUSTER", "SETSLOT", number, "NODE", identity))
    finally:
        fault.note = f"{len(slots)} slots, {moved} keys"
        fault.lifted = monotonic()
    yield from _until(world.cluster.whole, WHOLE_S)


def _keys_in(server: Member, slot: str) -> list[bytes]:
    keys = must(server.ask("CLUSTER", "GETKEYSINSLOT", slot, str(MOVED_KEYS)))
    return [key for key in keys if isinstance(key, bytes)] if isinstance(keys, list) else []


def _until(ready: Callable[[], bool], timeout_s: float) -> Procedure:
    """Wait for it, for a bounded time; what is not whole then is noticed at the end of the run."""
    give_up = monotonic() + timeout_s
    while not ready() and monotonic() < give_up:
        yield POLL_S


_PROCEDURES: dict[FaultKind, Callable[[World, Fault], Procedure]] = {
    FaultKind.NODE_KILL: _node_kill,
    FaultKind.ENGINE_KILL: _engine_kill,
    FaultKind.PRIMARY_KILL: _primary_kill,
    FaultKind.NODE_STOP: _node_stop,
    FaultKind.NODE_RESTART: _node_restart,
    FaultKind.NODE_DROP: _node_drop,
    FaultKind.NODE_FLIP: _node_flip,
    FaultKind.ENGINE_STOP: _engine_stop,
    FaultKind.PRIMARY_STOP: _primary_stop,
    FaultKind.SHARD_KILL: _shard_kill,
    FaultKind.FAILOVER: _failover,
    FaultKind.MIGRATE: _migrate,
    FaultKind.FLUSH: _flush,
    FaultKind.DISCONNECT: _disconnect,
    FaultKind.PAUSE: _pause,
    FaultKind.FULL: _full,
    FaultKind.EVICT: _evict,
    FaultKind.FLIP: _damage(damage.flip_bits),
    FaultKind.TRUNCATE: _damage(damage.truncate),
    FaultKind.SWAP: _damage(damage.swap),
}
