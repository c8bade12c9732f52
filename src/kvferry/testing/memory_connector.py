"""A connector over a dictionary: the smallest that keeps the contract, to read and to plant defects in.

scheduler ── plan of a step: loads, saves, cancelled ──► worker of each rank ── copies ──► KvStore
    ▲                                                        │
    └──────────────── finished loads, failed blocks, saves ──┘
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvferry.engines.loadcap import load_cap
from kvferry.engines.planning import external_blocks
from kvferry.testing.engine_books import BlockPool, FakeRequest, Kv, StepOutput
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.memory_kv import BLOCK_TOKENS, KvStore, digests_of

LAYERS, BLOCK_BYTES = 3, 64
_POLL_S = 0.002


class Load(NamedTuple):
    """Fill these engine blocks."""

    request_id: str
    digests: tuple[bytes, ...]
    blocks: tuple[int, ...]


class Save(NamedTuple):
    """Store these engine blocks once the step has computed them."""

    save_id: int
    digests: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one step, for every rank."""

    loads: tuple[Load, ...]
    saves: tuple[Save, ...]
    cancelled: tuple[str, ...]


@dataclass(slots=True)
class _Tracked:
    """A request the scheduler side knows. settled_at: preemptions when its last load ended."""

    request: FakeRequest
    offered: tuple[bytes, ...] = ()
    loading: bool = False
    finished: bool = False
    settled_at: int = -1


@dataclass(slots=True)
class _Pin:
    blocks: list[Any]
    ranks_left: int


@dataclass(slots=True)
class _Job:
    load: Load
    cancelled: bool = False
    failed: set[int] = field(default_factory=set)


class MemoryScheduler:
    """The scheduler's side. ``pool`` is the engine's, bound once there is one."""

    def __init__(self, store: KvStore, *, ranks: int) -> None:
        self.pool: BlockPool | None = None
        self.pins: dict[int, _Pin] = {}
        self.leases = 0
        self._store = store
        self._ranks = ranks
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._cancelled: list[str] = []
        self._written: set[bytes] = set()
        self._epoch = store.epoch
        self._save_id = 0
        self._pinned = 0  # blocks: at most half of the engine's, which must not starve for a slow node

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded; one token at least is left to compute."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        if request.skip_reading_prefix_cache or tracked.settled_at == request.num_preemptions:
            return 0, False
        most = (request.num_tokens - 1) // BLOCK_TOKENS
        if (cap := load_cap(request.kv_transfer_params).tokens) is not None:
            most = min(most, (local_tokens + cap) // BLOCK_TOKENS)
        digests = digests_of(request, most)
        found = self._store.present(digests, ranks=self._ranks)
        self._written.difference_update(digests[found:])
        tracked.offered = digests[local_tokens // BLOCK_TOKENS : found]
        external = len(tracked.offered) * BLOCK_TOKENS
        return external, bool(external)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> object:
        """The engine has blocks for it: the load goes out with the next plan."""
        if external_tokens:
            tracked = self._tracked[request.request_id]
            tracked.loading = True
            self.leases += 1
            self._store.leases += 1
            blocks = external_blocks(tables[0], external_tokens=external_tokens, block_tokens=BLOCK_TOKENS)
            self._loads.append(Load(request.request_id, tracked.offered, blocks))
        return None

    def plan_step(self, output: StepOutput) -> Plan:
        """Loads that begin now and saves of what the step completes."""
        if self._epoch != self._store.epoch:
            self._epoch = self._store.epoch
            self._written.clear()
        saves = [
            save
            for name, tokens in output.num_scheduled_tokens.items()
            if (save := self._save(name, tokens, output))
        ]
        plan = Plan(tuple(self._loads), tuple(saves), tuple(self._cancelled))
        self._loads, self._cancelled = [], []
        return plan

    def _save(self, name: str, tokens: int, output: StepOutput) -> Save | None:
        request, tables = self._tracked[name].request, output.kv_connector_block_state
        if tables is None or self.pool is None:
            return None
        full = min(request.num_tokens, request.num_computed_tokens + tokens) // BLOCK_TOKENS
        table = tables.get_block_ids(name)[0]
        new = [
            (digest, block)
            for digest, block in zip(digests_of(request, full), table, strict=False)
            if digest not in self._written
        ][: len(self.pool.blocks) // 2 - self._pinned]
        if not new:
            return None
        self._save_id += 1
        save = Save(self._save_id, tuple(digest for digest, _ in new), tuple(block for _, block in new))
        self._written.update(save.digests)
        blocks = [self.pool.blocks[block] for block in save.blocks]
        self.pool.touch(blocks)  # not reused before every rank has copied it out
        self.pins[save.save_id] = _Pin(blocks, self._ranks)
        self._pinned += len(blocks)
        return save

    def absorb(self, report: Sequence[int]) -> None:
        """Saves that a rank is done with."""
        for save_id in report:
            pin = self.pins[save_id]
            pin.ranks_left -= 1
            if not pin.ranks_left and self.pool is not None:
                del self.pins[save_id]
                self._pinned -= len(pin.blocks)
                self.pool.free_blocks(reversed(pin.blocks))

    def load_finished(self, request_id: str) -> None:
        """Every rank has reported it, failed or not: it is not asked for again until a preemption."""
        tracked = self._tracked[request_id]
        self._give_back(1)
        arrived = self._store.present(tracked.offered, ranks=self._ranks)
        self._written.difference_update(tracked.offered[arrived:])
        tracked.loading, tracked.settled_at = False, tracked.request.num_preemptions
        if tracked.finished:
            del self._tracked[request_id]

    def finished(self, request: Any) -> None:
        """Ended or aborted. A load in flight is called off; its end is still reported."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.finished = True
        if tracked.loading:
            self._cancelled.append(request.request_id)
        else:
            del self._tracked[request.request_id]

    def killed(self) -> None:
        """The engine is gone; its leases end with it."""
        self._give_back(self.leases)

    def _give_back(self, leases: int) -> None:
        self.leases -= leases
        self._store.leases -= leases


class MemoryWorker:
    """One rank. Loads and saves each have a thread; hooks only hand over and collect."""

    def __init__(self, store: KvStore, memory: Kv, *, rank: int) -> None:
        self._store = store
        self._memory = memory
        self._rank = rank
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._loaded: list[_Job] = []
        self._failed: set[int] = set()
        self._saved: list[int] = []
        self._saves: tuple[Save, ...] = ()
        self._closing = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvferry-memory-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvferry-memory-save")

    def begin_step(self, plan: Plan) -> None:
        """Start the plan's loads."""
        self._saves = plan.saves
        for name in plan.cancelled:
            if name in self._jobs:
                self._jobs[name].cancelled = True
        for load in plan.loads:
            job = self._jobs[load.request_id] = _Job(load)
            self._loader.submit(self._load, job)

    def end_step(self) -> None:
        """The forward pass is over: what it computed may be copied."""
        for save in self._saves:
            self._saver.submit(self._save, save)
        self._saves = ()

    def finished_loads(self) -> set[str]:
        """Of which the transfer has ended since the last call, cancelled ones included."""
        with self._lock:
            loaded, self._loaded = self._loaded, []
        for job in loaded:
            self._failed |= job.failed
            del self._jobs[job.load.request_id]
        return {job.load.request_id for job in loaded}

    def failed_blocks(self) -> set[int]:
        """Of the loads just reported."""
        failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """None: with one group, failures are told block by block."""
        return set()

    def report(self) -> list[int]:
        """Saves that are done with their blocks."""
        with self._lock:
            saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """End both threads. Also how an engine is killed: nothing is reported any more."""
        self._closing = True
        for threads in (self._loader, self._saver):
            threads.shutdown(cancel_futures=True)

    def _load(self, job: _Job) -> None:
        ended = self._passes(self._store.loads, lambda: job.cancelled)
        for digest, block in zip(job.load.digests, job.load.blocks, strict=True):
            data = None if ended or job.failed else self._store.read(self._rank, digest)
            if data is None:
                job.failed.add(block)
            else:
                self._memory[:, block] = np.frombuffer(data, np.uint8).reshape(self._memory[:, block].shape)
        with self._lock:
            self._loaded.append(job)

    def _save(self, save: Save) -> None:
        if not self._passes(self._store.saves, lambda: False):
            for digest, block in zip(save.digests, save.blocks, strict=True):
                self._store.write(self._rank, digest, self._memory[:, block].tobytes())
        with self._lock:
            self._saved.append(save.save_id)

    def _passes(self, gate: threading.Event, cancelled: Callable[[], bool]) -> bool:
        """Wait at a gate. Whether it was left because the transfer is called off."""
        while not gate.wait(_POLL_S):
            if self._closing or cancelled():
                return True
        return self._closing or cancelled()


class MemoryFleet:
    """``ConnectorFleet`` of memory connectors. scheduler, worker, store: these or variants of them."""

    def __init__(
        self,
        *,
        store: type[KvStore] = KvStore,
        scheduler: type[MemoryScheduler] = MemoryScheduler,
        worker: type[MemoryWorker] = MemoryWorker,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._store = store()
        self._sides: dict[int, tuple[MemoryScheduler, list[MemoryWorker]]] = {}

    def engine(self, *, blocks: int = 64, ranks: int = 1, tokens_per_step: int = 64) -> FakeEngine:
        """See the contract."""
        memories = [np.zeros((LAYERS, blocks + 1, BLOCK_BYTES), dtype=np.uint8) for _ in range(ranks)]
        scheduler = self._scheduler(self._store, ranks=ranks)
        workers = [self._worker(self._store, memory, rank=n) for n, memory in enumerate(memories)]
        engine = FakeEngine(
            memories=memories,
            block_tokens=BLOCK_TOKENS,
            scheduler=scheduler,
            workers=workers,
            tokens_per_step=tokens_per_step,
        )
        scheduler.pool = engine.pool
        self._sides[id(engine)] = (scheduler, workers)
        return engine

    def settle(self, engine: FakeEngine) -> None:
        """See the contract."""
        scheduler, _ = self._sides[id(engine)]
        engine.run(lambda: not scheduler.pins and not engine.requests)

    def stop_node(self) -> None:
        """See the contract."""
        self._store.stop()

    def restart_node(self) -> None:
        """See the contract."""
        self._store.restart()

    def damage_node(self, *, rank: int | None = None) -> None:
        """See the contract."""
        self._store.damage(rank=rank)

    def hold_loads(self) -> Callable[[], None]:
        """See the contract."""
        self._store.loads.clear()
        return self._store.loads.set

    def hold_saves(self) -> Callable[[], None]:
        """See the contract."""
        self._store.saves.clear()
        return self._store.saves.set

    def kill_engine(self, engine: FakeEngine) -> None:
        """See the contract."""
        scheduler, workers = self._sides.pop(id(engine))
        for worker in workers:
            worker.close()
        scheduler.killed()

    def at_rest(self) -> None:
        """See the contract."""
        if self._store.leases:
            raise AssertionError(f"{self._store.leases} leases are held by nobody")

    def close(self) -> None:
        """Every engine that is left."""
        for _, workers in self._sides.values():
            for worker in workers:
                worker.close()
