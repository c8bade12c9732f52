"""Everything that runs: the Cluster, two nodes, their engines; started together, watched, stopped."""

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.chaos.cluster import ValkeyCluster, running_cluster
from kvferry.bench.chaos.faults import Fault
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import Kind
from kvferry.bench.chaos.processes import NODE_COMMAND, EngineProcess, NodeProcess, Process
from kvferry.bench.chaos.rig import EngineSettings
from kvferry.bench.chaos.tally import Tally
from kvferry.demo.processes import Children
from kvferry.errors import RetryError

ENGINES_OF_NODES = (2, 1)  # the second host has one: what it reuses of the first came through Valkey
TICK_S = 0.02
WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """kills: processes to kill; the other kinds of fault go between. seconds: no fault begins later.

    pace_s: mean time between the starts of two faults. settle_s: how long a node at rest may take to let go
    of everything. tick_s: how often the driver looks; progress_s: how often it says so. plant: a defect in
    engine-0; node_command: another node. The rest: see ``EngineSettings``.
    """

    kills: int = 8
    seconds: float = float("inf")
    seed: int = 1
    pace_s: float = 1.0
    settle_s: float = 75.0
    users: int = 2
    pause_s: float = 0.05
    warm_requests: int = 0
    conversations: int = 24
    lasts_s: float = 60.0
    heartbeat_s: float = 0.01
    tick_s: float = 0.02
    progress_s: float = 5.0
    plant: str = ""
    node_command: Sequence[str] = NODE_COMMAND


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
            wait(lambda engine=engine: engine.ready, f"{engine.name} to begin", tick)  # type: ignore[misc]
            engine.pause()
        for engine in self.engines:
            wait(
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
        warm_requests=plan.warm_requests,
        conversations=plan.conversations,
        lasts_s=plan.lasts_s,
        heartbeat_s=plan.heartbeat_s,
        plant="" if index else plan.plant,
    )


def wait(ready: Callable[[], bool], what: str, tick: Callable[[], None], timeout_s: float = WAIT_S) -> None:
    """RetryError when it does not happen."""
    give_up = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > give_up:
            raise RetryError(f"waited {timeout_s:.0f} s in vain for {what}")
        tick()
        time.sleep(TICK_S)
