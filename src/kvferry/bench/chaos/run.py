"""One run: everything is started, broken by a seeded schedule, brought to rest, counted and stopped."""

import contextlib
import heapq
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.chaos import leaks
from kvferry.bench.chaos.cluster import ValkeyCluster, running_cluster
from kvferry.bench.chaos.faults import KILLS, OTHERS, Fault, FaultKind, Procedure, World
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import Kind
from kvferry.bench.chaos.processes import NODE_COMMAND, Census, EngineProcess, NodeProcess, Process
from kvferry.bench.chaos.rig import EngineSettings
from kvferry.bench.chaos.tally import Tally
from kvferry.demo.processes import Children
from kvferry.errors import KvferryError, RetryError

ENGINES_OF_NODES = (2, 1)  # the second host has one: what it reuses of the first came through Valkey
KILLS_PER_DECK = 8
TICK_S = 0.02
START_S = 60.0
REUSE_S = 20.0
PROGRESS_S = 5.0
LOG_LINES = 60
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """kills: processes to kill; the other kinds of fault go between. seconds: no fault begins later.

    pace_s: mean time between the starts of two faults. settle_s: how long a node at rest may take to let go
    of everything. plant: a defect in engine-0; node_command: another node. The rest: see ``EngineSettings``.
    """

    kills: int = 8
    seconds: float = float("inf")
    seed: int = 1
    pace_s: float = 1.0
    settle_s: float = 75.0
    users: int = 2
    pause_s: float = 0.05
    conversations: int = 24
    lasts_s: float = 60.0
    heartbeat_s: float = 0.01
    plant: str = ""
    node_command: Sequence[str] = NODE_COMMAND


@dataclass(slots=True)
class Outcome:
    """What a run found out. logs: how those of leaking processes end. census: at rest, before and after."""

    plan: Plan
    tally: Tally
    faults: list[Fault] = field(default_factory=list[Fault])
    leaks: list[str] = field(default_factory=list[str])
    died: list[str] = field(default_factory=list[str])
    logs: dict[str, str] = field(default_factory=dict[str, str])
    census: dict[str, tuple[Census | None, Census | None]] = field(
        default_factory=dict[str, tuple[Census | None, Census | None]]
    )
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """No wrong byte, no leak, no death of its own, no defect."""
        return not (self.tally.wrong or self.leaks or self.died or self.tally.defects)


def run(plan: Plan, *, progress: Progress = lambda line: None) -> Outcome:
    """Do it all. Raises StoppedError and MisconfiguredError; nothing is left running."""
    before = leaks.shared_memory()
    with running_fleet(plan) as fleet:
        outcome = Outcome(plan, fleet.tally, faults=fleet.faults, died=fleet.died)
        driver = Driver(fleet, plan, progress)
        driver.start()
        baseline = driver.rest()
        fleet.resume()
        driver.break_things()
        driver.heal()
        fleet.pause(fleet.tick)
        for node in fleet.nodes:
            outcome.leaks += leaks.at_rest(node, within_s=plan.settle_s, tick=fleet.tick)
        for process in fleet.processes:
            outcome.census[process.name] = (baseline[process.name], process.census())
            outcome.leaks += leaks.beyond(process, baseline[process.name])
        for node in fleet.nodes:
            outcome.leaks += leaks.unaccounted(node)
        outcome.logs = {
            process.name: process.child.tail(LOG_LINES)
            for process in fleet.processes
            if process.child is not None and any(leak.startswith(process.name) for leak in outcome.leaks)
        }
        outcome.seconds = time.monotonic() - fleet.started
    outcome.leaks += [f"/dev/shm/{name}" for name in leaks.shared_memory() - before if "kvferry" in name]
    return outcome


@dataclass(slots=True)
class Fleet:
    """What runs. ``tick`` reads what the engines say, and must be called often."""

    cluster: ValkeyCluster
    nodes: list[NodeProcess]
    engines: list[EngineProcess]
    tally: Tally
    started: float
    faults: list[Fault] = field(default_factory=list[Fault])
    died: list[str] = field(default_factory=list[str])

    @property
    def processes(self) -> list[Process]:
        """Those of kvferry."""
        return [*self.nodes, *self.engines]

    def tick(self) -> None:
        """Read the journals; bring back what died by itself, which is a defect."""
        for engine in self.engines:
            for operation in engine.journal.read():
                if engine.child is not None and operation.pid == engine.pid:
                    engine.ready = True
                    if operation.kind is Kind.IDLE:
                        engine.idle_since = operation.began
                self.tally.add(operation, engine=engine.index, node=engine.node.index, faults=self.faults)
        for process in self.processes:
            if process.died and process.child is not None:
                self.died.append(f"{process.name} ended by itself: {process.child.tail(3)}")
                process.kill()
                process.start()

    def pause(self, tick: Callable[[], None]) -> None:
        """No engine begins anything until ``resume``; returns when what was under way has ended."""
        for engine in self.engines:
            _wait(lambda engine=engine: engine.ready, f"{engine.name} to begin", tick)  # type: ignore[misc]
            engine.pause()
        for engine in self.engines:
            _wait(
                lambda engine=engine: engine.idle_since is not None,  # type: ignore[misc]
                f"{engine.name} to finish",
                tick,
            )

    def resume(self) -> None:
        """Go on."""
        for engine in self.engines:
            engine.resume()


@contextlib.contextmanager
def running_fleet(plan: Plan) -> Iterator[Fleet]:
    """Cluster, nodes and engines, started; all of it stopped in the end."""
    rng = random.Random(f"fleet {plan.seed}")
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as directory,
        contextlib.closing(Heartbeat(plan.heartbeat_s)) as heartbeat,
        Children(Path(directory)) as children,
        running_cluster(children, rng) as cluster,
    ):
        started = time.monotonic()
        nodes = [
            NodeProcess(index, children, valkey=cluster.url, command=plan.node_command)
            for index in range(len(ENGINES_OF_NODES))
        ]
        engines: list[EngineProcess] = []
        for node, count in zip(nodes, ENGINES_OF_NODES, strict=True):
            for _ in range(count):
                index = len(engines)
                engines.append(EngineProcess(index, node, children, _settings(plan, index, node, started)))
        for process in (*nodes, *engines):
            process.start()
        yield Fleet(cluster, nodes, engines, Tally(heartbeat), started)


def _settings(plan: Plan, index: int, node: NodeProcess, started: float) -> EngineSettings:
    return EngineSettings(
        name=f"engine-{index}",
        socket=str(node.socket),
        journal=str(node.socket.parent.parent / f"engine-{index}.journal"),
        seed=plan.seed,
        start=started,
        users=plan.users,
        pause_s=plan.pause_s,
        conversations=plan.conversations,
        lasts_s=plan.lasts_s,
        heartbeat_s=plan.heartbeat_s,
        plant="" if index else plan.plant,
    )


class Driver:
    """Decides when which fault begins."""

    def __init__(self, fleet: Fleet, plan: Plan, progress: Progress) -> None:
        self._fleet = fleet
        self._plan = plan
        self._progress = progress
        self._rng = random.Random(f"faults {plan.seed}")
        self._world = World(fleet.cluster, fleet.nodes, fleet.engines, self._rng)
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Fault, str, Procedure]] = []
        self._told = 0.0

    def start(self) -> None:
        """Until every engine has been served from the pool, and one host from the other by Valkey."""
        chunks = self._fleet.tally.chunks
        self._wait(lambda: all(engine.ready for engine in self._fleet.engines), "the engines")
        self._wait(lambda: chunks["memory"] > 0 and chunks["valkey"] > 0, "reuse from memory and Valkey")

    def rest(self) -> dict[str, Census | None]:
        """The engines pause, the nodes come to rest; what each process holds then."""
        self._fleet.pause(self._tick)
        for node in self._fleet.nodes:
            left = leaks.at_rest(node, within_s=self._plan.settle_s, tick=self._tick)
            if left:
                raise RetryError(f"not at rest before any fault: {', '.join(left)}")
        return {process.name: process.census() for process in self._fleet.processes}

    def break_things(self) -> None:
        """Every fault of the plan."""
        deadline = time.monotonic() + self._plan.seconds
        deck: list[FaultKind] = []
        kills = self._plan.kills
        begin = time.monotonic()
        while deck or kills > 0:
            now = time.monotonic()
            if now > deadline:
                break
            if not deck:
                deck = _deck(min(kills, KILLS_PER_DECK), self._rng)
                kills -= KILLS_PER_DECK
            if now >= begin and self._begin_one(deck):
                begin = now + self._rng.uniform(0.5, 1.5) * self._plan.pace_s
            self._advance()
            self._tick()
            time.sleep(TICK_S)

    def heal(self) -> None:
        """Let every fault end, see the Cluster whole and reuse return."""
        while self._running:
            self._advance()
            self._tick()
            time.sleep(TICK_S)
        self._wait(self._fleet.cluster.whole, "the Cluster to be whole again")
        with contextlib.suppress(RetryError):
            self._wait(
                lambda: all(fault.reuse_s is not None for fault in self._fleet.faults), "reuse", REUSE_S
            )

    def _begin_one(self, deck: list[FaultKind]) -> bool:
        for kind in deck:
            begun = self._world.begin(kind)
            if begun is not None:
                deck.remove(kind)
                fault, target, procedure = begun
                self._fleet.faults.append(fault)
                heapq.heappush(self._running, (0.0, next(self._numbers), fault, target, procedure))
                return True
        return False

    def _advance(self) -> None:
        """Run every procedure that is due."""
        while self._running and self._running[0][0] <= time.monotonic():
            _, number, fault, target, procedure = heapq.heappop(self._running)
            try:
                wait_s = next(procedure)
            except StopIteration:
                self._ended(fault, target)
            except KvferryError as error:  # a server that is asked to do something may be failing over
                fault.note = f"{fault.note}; ended early: {error}".lstrip("; ")
                self._ended(fault, target)
            else:
                entry = (time.monotonic() + wait_s, number, fault, target, procedure)
                heapq.heappush(self._running, entry)

    def _ended(self, fault: Fault, target: str) -> None:
        fault.ended = time.monotonic()
        fault.lifted = fault.lifted or fault.ended
        self._world.busy.discard(target)

    def _tick(self) -> None:
        self._fleet.tick()
        now = time.monotonic()
        if now > self._told + PROGRESS_S:
            self._told = now
            tally = self._fleet.tally
            active = ", ".join(f"{fault.kind} {fault.target}" for _, _, fault, _, _ in self._running)
            kills = sum(1 for fault in self._fleet.faults if fault.kind in KILLS)
            self._progress(
                f"{now - self._fleet.started:6.0f} s  {kills} kills of {len(self._fleet.faults)} faults, "
                f"{tally.total:,} operations, {tally.wrong} wrong  {active}"
            )

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        _wait(ready, what, self._tick, timeout_s)


def _wait(ready: Callable[[], bool], what: str, tick: Callable[[], None], timeout_s: float = START_S) -> None:
    """RetryError when it does not happen."""
    give_up = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > give_up:
            raise RetryError(f"waited {timeout_s:.0f} s in vain for {what}")
        tick()
        time.sleep(TICK_S)


def _deck(kills: int, rng: random.Random) -> list[FaultKind]:
    """That many kills, of every kind as far as they go, and one of each other fault, shuffled."""
    kinds = itertools.islice(itertools.cycle(KILLS), kills)
    deck = [*kinds, *OTHERS]
    rng.shuffle(deck)
    return deck
