"""The fleet of a soak: two replicas with scarce KV memory, a node, Valkey, an engine without a cache."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.addresses import Address
from kvferry.bench.soak.asking import Answer, Question, ask
from kvferry.bench.soak.audit import DIRECTORY_VARIABLE
from kvferry.demo.ask import Replica
from kvferry.demo.engineview import counter_of
from kvferry.demo.fleet import Fleet, FleetSettings, ReplicaPlan, plan_replicas
from kvferry.demo.processes import wait_until
from kvferry.errors import KvferryError, RetryError
from kvferry.testing.holdings import NOTHING, Holdings
from kvferry.testing.servers import must
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.url import ValkeyUrl

REFERENCE = "C"
SERVING = ("A", "B")
CONNECTOR = ("kvferry.bench.soak.audited", "AuditedConnector")
REST_S = 60.0
READY_S = 900.0  # the host is busy with the traffic
VALKEY_S = 10.0
COUNTED = (
    "kvferry_lookups",
    "kvferry_loads",
    "kvferry_loads_failed",
    "kvferry_loaded_tokens",
    "kvferry_stored_chunks",
    "num_preemptions",
)
"""Of the engines, summed over their lives."""
DEFECT = "please report"  # what the connector logs of its own defects


@dataclass(frozen=True, slots=True)
class Size:
    """blocks: of each replica's own KV memory. Bytes of the node's pool and of Valkey. longest: tokens."""

    blocks: int
    pool_bytes: int
    valkey_bytes: int
    longest: int
    dtype: str


class SoakFleet:
    """A context manager. ``ask`` may be called from any thread, the rest from the main one."""

    def __init__(self, model: Path, size: Size, *, notes: Path, say: Callable[[str], None]) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._lives: Counter[str] = Counter()
        self._down: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.fleet = Fleet(
            FleetSettings(
                model=model,
                replicas=tuple(self._plan(plan) for plan in plan_replicas(len(SERVING) + 1)),
                pool_bytes=size.pool_bytes,
                connector=CONNECTOR,
                engine_environment=((DIRECTORY_VARIABLE, str(notes)),),
                ready_s=READY_S,
            ),
            say=say,
        )

    def _plan(self, plan: ReplicaPlan) -> ReplicaPlan:
        serves = plan.name in SERVING
        arguments = ["--dtype", self._size.dtype, "--skip-tokenizer-init", "--max-num-seqs", "8"]
        arguments += ["--max-model-len", str(self._size.longest), "--max-logprobs", "2"]
        if serves:
            arguments += ["--num-gpu-blocks-override", str(self._size.blocks)]
            arguments += ["--scheduling-policy", "priority"]
        return ReplicaPlan(plan.name, plan.core, connected=serves, arguments=tuple(arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fleet.__exit__(kind, error, trace)

    def start(self) -> None:
        """All of it."""
        self.fleet.start_valkey()
        self._valkey("CONFIG", "SET", "maxmemory", str(self._size.valkey_bytes))
        self.fleet.start_node()
        self.fleet.start_replicas([*SERVING, REFERENCE])

    # -- asking ------------------------------------------------------------------------------------

    def ask(self, replica: str, question: Question) -> Answer | None:
        """None: the replica was ended meanwhile, and so was the request. Otherwise as ``asking.ask``."""
        with self._lock:
            life = self._lives[replica]
            up = replica not in self._down
        if not up:
            return None
        try:
            return ask(self.fleet.replicas[replica].port, question)
        except (KvferryError, KeyError) as error:
            with self._lock:
                ended = life != self._lives[replica]
            if ended:
                return None
            raise RetryError(f"replica {replica}: {error}") from error

    def reference(self, question: Question) -> Answer:
        """Of the engine without a cache of ours."""
        return ask(self.fleet.replicas[REFERENCE].port, question)

    # -- what happens to it ------------------------------------------------------------------------

    def drop_memory(self) -> None:
        """Of the node."""
        self.fleet.node_view.drop_memory()

    def restart_node(self) -> None:
        """Killed."""
        self._count_node()
        self.fleet.kill_node()
        self.fleet.start_node()

    def flush_valkey(self) -> None:
        """All values gone."""
        self._valkey("FLUSHALL")

    def forget(self, replica: str) -> None:
        """Its own prefix cache, if nothing runs; a busy engine says no."""
        with contextlib.suppress(RetryError):
            self.fleet.replicas[replica].reset_prefix_cache(timeout_s=0.0)

    def restart_engine(self, replica: str, *, kill: bool) -> None:
        """What runs in it ends."""
        self._count_engine(self.fleet.replicas[replica])
        with self._ended(replica):
            if kill:
                self.fleet.kill_replica(replica)
            else:
                self.fleet.stop_replica(replica)
            self.fleet.start_replicas([replica])

    @contextlib.contextmanager
    def _ended(self, replica: str) -> Iterator[None]:
        with self._lock:
            self._lives[replica] += 1
            self._down.add(replica)
        yield
        with self._lock:
            self._down.discard(replica)

    # -- the end -----------------------------------------------------------------------------------

    def left_behind(self) -> list[str]:
        """With nobody asking: what engines and node still hold, in words. Forgets all that is cached."""
        found: list[str] = []
        for name in SERVING:
            replica = self.fleet.replicas[name]
            self._count_engine(replica)
            try:  # vLLM resets only when every one of its blocks is free
                replica.reset_prefix_cache(timeout_s=REST_S)
            except RetryError as error:
                found.append(f"blocks of replica {name} are not free: {error}")
        view = self.fleet.node_view
        self._count_node()
        with contextlib.suppress(RetryError):
            wait_until(lambda: not Holdings.of(view.status()).beyond(NOTHING), what="rest", timeout_s=REST_S)
        status = view.status()
        found += [f"the node: {held}" for held in Holdings.of(status).beyond(NOTHING)]
        if status["defects"]:
            found.append(f"the node counted {status['defects']} defects")
        view.drop_memory()
        used = view.status()["catalogue"]["used_bytes"]
        if used:
            found.append(f"the node: {used} bytes of slots in use after all parts were dropped")
        return found

    def complaints(self) -> list[str]:
        """What the connector logged as a defect of its own."""
        return [
            f"{log.name}: {line[:300]}"
            for log in sorted(self.fleet.directory.glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if DEFECT in line
        ]

    def _count_engine(self, replica: Replica) -> None:
        page = replica.metrics()
        for name in COUNTED:
            self.counts[name] += int(counter_of(page, f"vllm:{name}"))

    def _count_node(self) -> None:
        status = self.fleet.node_view.status()
        self.counts["node_evicted_parts"] += int(status["catalogue"].get("evicted_parts", 0))
        self.counts["valkey_hit_chunks"] += int(status["counters"]["hit_chunks"].get("valkey", 0))
        self.counts["memory_hit_chunks"] += int(status["counters"]["hit_chunks"].get("memory", 0))

    def valkey_evicted(self) -> int:
        """Values that Valkey put out."""
        info = self._valkey("INFO", "stats")
        text = info.decode() if isinstance(info, bytes) else ""
        return int(text.partition("evicted_keys:")[2].partition("\r")[0] or 0)

    def _valkey(self, *words: str) -> object:
        deadline = time.monotonic() + VALKEY_S
        address = Address("127.0.0.1", int(self.fleet.valkey_url.rpartition(":")[2]))
        settings = ValkeySettings(ValkeyUrl((address,)))
        connection = Connection.open(address, settings, tls=None, deadline=deadline)
        try:
            return must(connection.request(*[word.encode() for word in words], patience=Until(deadline)))
        finally:
            connection.close()
