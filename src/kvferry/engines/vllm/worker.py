"""The worker side: runs each step's loads and saves off the engine's thread."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.client.messages import Reason
from kvferry.engines.vllm.copy import BlockCopier, Fence
from kvferry.engines.vllm.memory import place_thread
from kvferry.engines.vllm.messages import (
    Assignment,
    LoadResult,
    LoadSpec,
    SaveResult,
    SaveSpec,
    StepPlan,
    WorkerPart,
    WorkerReport,
)
from kvferry.engines.vllm.tally import LoadTally
from kvferry.engines.vllm.transfers import Loader, LoadJob, SaveJob, Saver, Store, declined

if TYPE_CHECKING:
    from kvferry.engines.vllm.cuda_copy import PinnedMemory

_log = logging.getLogger("vllm.kvferry")

# A copying thread that needs the GIL for a moment between two copies waits up to one interval for it.
SWITCH_INTERVAL_S = 0.0005

Connect = Callable[[Assignment, int], Store]


class Memory(Protocol):
    """What is used of ``KvMemory``. copiers: by KV group; None where this rank has none of its layers.

    cores: for copying threads. device: "cpu", "cuda".
    """

    @property
    def copiers(self) -> Sequence[BlockCopier | None]: ...

    cores: frozenset[int]
    device: str

    def fence(self) -> Fence | None:
        """What the engine has queued so far; None where it works synchronously."""

    def close(self) -> None:
        """Before the engine's memory goes away."""


class WorkerSide:
    """Hooks run in vLLM's thread and only hand over; results are collected once per step.

    rank: in all of the engine. by_block: whether failures are told block by block, or by request.
    connect: makes the client once the scheduler side has said where and as whom.
    """

    def __init__(self, memory: Memory, *, rank: int, connect: Connect, by_block: bool = True) -> None:
        self._memory = memory
        self._rank = rank
        self._by_block = by_block
        self._connect = connect
        self._store: Store | None = None
        self._pinned: list[PinnedMemory] = []
        self._pinned_mapping: object | None = None
        self._lock = threading.Condition()
        self._loaded: list[tuple[LoadResult, list[int]]] = []
        self._saved: list[SaveResult] = []
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._tallies: dict[str, LoadTally] = {}
        self._results: list[LoadResult] = []
        self._assignment: Assignment | None = None
        self._plan_step = 0
        self._timed_step = 0
        self._loads: deque[LoadSpec] = deque()
        self._rest_s = 0.0
        self.rested_s = 0.0  # in all: seconds in which a step slept, since nothing could run
        self._saves: deque[SaveSpec] = deque()
        self._loader = Loader(
            on_thread_start=lambda: place_thread(memory.cores, background=False),
            on_done=self._part_done,
        )
        self._saver = Saver(
            on_thread_start=lambda: place_thread(memory.cores, background=True),
            on_done=self._save_done,
        )
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    def connect(self, assignment: Assignment) -> None:
        """Reach the node, in the background: at start-up, so that the first load need not wait for it."""
        if self._store is not None:
            self._store.close()
        self._assignment = assignment
        self._store = self._connect(assignment, self._rank)

    # -- from copying threads ----------------------------------------------------------------------

    def _part_done(self, result: LoadResult, failed: list[int]) -> None:
        """One part of a load has ended: with the last, the load. The rest of a failed one is of no use."""
        with self._lock:
            tally = self._tallies[result.request_id]
            over = tally.add(result, failed)
            if over:
                del self._tallies[result.request_id]
        if over:
            self._load_done(*tally.result())
        elif result.reason != Reason.COMPLETE:
            self._loader.cancel(result.request_id)

    def _load_done(self, result: LoadResult, failed: list[int]) -> None:
        with self._lock:
            self._loaded.append((result, failed))
            self._lock.notify()

    def _save_done(self, result: SaveResult) -> None:
        with self._lock:
            self._saved.append(result)

    # -- one step, in this order -------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """The earliest hook of a step: loads start before the forward pass. Once per plan."""
        if plan.step == self._plan_step:
            return
        self._accept(plan)
        for request_id in plan.cancelled:
            self._loader.cancel(request_id)
        self.fail(plan.failed)
        store, assignment = self._reach(plan), self._assignment
        after = self._memory.fence() if plan.loads else None
        while self._loads:
            spec = self._loads[0]
            if store is None or assignment is None:
                self.fail([(spec.request_id, spec.blocks)])
            else:
                self._load(spec, store, assignment.parts[self._rank], after)
            self._loads.popleft()

    def _load(
        self, spec: LoadSpec, store: Store, parts: Sequence[WorkerPart | None], after: Fence | None
    ) -> None:
        """A job for each part that this rank has something to fill of."""
        held = zip(self._memory.copiers, parts, spec.groups, strict=True)
        wanted = [
            (c, part, group) for c, part, group in held if c is not None and part is not None and group.blocks
        ]
        if not wanted:
            self._load_done(LoadResult(spec.request_id, spec.chunks, 0, 0.0, Reason.COMPLETE), [])
            return
        jobs = [
            LoadJob(
                spec.request_id,
                store.load(spec.tickets[part.number]),
                copier=copier,
                wanted=group,
                part=part,
                after=after,
            )
            for copier, part, group in wanted
        ]
        with self._lock:
            self._tallies[spec.request_id] = LoadTally(spec, parts=len(jobs), whole=not self._by_block)
        for job in jobs:
            self._loader.submit(job)

    def _accept(self, plan: StepPlan) -> None:
        """From here on everything in the plan is owed an answer, whatever goes wrong.

        So is what is left of the plan before, should its step have ended without its last hook.
        """
        self._decline_left()
        self._plan_step = plan.step
        self._timed_step = plan.step if plan.timed else 0
        self._loads = deque(plan.loads)
        self._saves = deque(plan.saves)
        self._rest_s = plan.rest_s

    def end_step(self) -> None:
        """After the forward pass: what it computed may be copied out."""
        if not self._saves:
            return
        store, assignment = self._store, self._assignment
        after = self._memory.fence()
        while self._saves:
            spec = self._saves[0]
            if store is None or assignment is None:
                self._save_done(declined(spec))
            else:
                part, copier = assignment.parts[self._rank][spec.group], self._memory.copiers[spec.group]
                if part is None or copier is None:  # nothing of it is missing here
                    self._save_done(SaveResult(spec.save_id, tuple(c.digest for c in spec.chunks), 0, 0))
                else:
                    self._saver.submit(SaveJob(spec, store, copier, part, self._rank, after))
            self._saves.popleft()

    def finished_loads(self) -> set[str]:
        """Requests whose loads have ended since the last call; their failed blocks come with it.

        A step that has nothing to run sleeps here until a load ends, for ``rest_s`` at most: the engine would
        ask again at once, and its spinning takes the core that node and copies need.
        """
        rest_s, self._rest_s = self._rest_s, 0.0
        with self._lock:
            if rest_s and not self._loaded:
                begun = time.monotonic()
                self._lock.wait(rest_s)
                self.rested_s += time.monotonic() - begun
            loaded, self._loaded = self._loaded, []
        for result, failed in loaded:
            self._results.append(result)
            if self._by_block:
                self._failed_blocks.update(failed)
            elif result.reason != Reason.COMPLETE:
                self._failed_requests.add(result.request_id)
        return {result.request_id for result, _ in loaded}

    def failed_blocks(self) -> set[int]:
        """Blocks of the loads just reported that must be recomputed."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Of the loads just reported, those that must be recomputed as a whole."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self) -> WorkerReport | None:
        """For the scheduler side; None when there is nothing to say."""
        with self._lock:
            saves, self._saved = self._saved, []
        loads, self._results = self._results, []
        steps = [self._timed_step] if self._timed_step else []
        self._timed_step = 0
        return WorkerReport(loads, saves, steps) if loads or saves or steps else None

    def fail(self, loads: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Report loads that were never begun as failed, all of their blocks."""
        for request_id, blocks in loads:
            self._load_done(LoadResult(request_id, 0, 0, 0.0, "not begun"), list(blocks))

    def decline(self, plan: StepPlan | None) -> None:
        """The side is switched off: what is still owed is answered at once, and all of a new plan."""
        if plan is not None and plan.step != self._plan_step:
            self._accept(plan)
            self.fail(plan.failed)
        self._decline_left()

    def _decline_left(self) -> None:
        while self._loads:
            spec = self._loads.popleft()
            self.fail([(spec.request_id, spec.blocks)])
        while self._saves:
            self._save_done(declined(self._saves.popleft()))

    # -- the node ----------------------------------------------------------------------------------

    def _pin_pool(self) -> None:
        """On a GPU, register the pool with the driver; off this thread, since it takes seconds."""
        mapping = getattr(self._store, "mapping", None)
        if mapping is None or mapping is self._pinned_mapping or self._memory.device == "cpu":
            return
        self._pinned_mapping = mapping
        threading.Thread(target=self._pin, args=(mapping,), name="kvferry-pin", daemon=True).start()

    def _pin(self, mapping: Any) -> None:
        from kvferry.engines.vllm.cuda_copy import PinnedMemory

        try:
            # Kept until the process ends: a mapping of a node that is gone may still be read from.
            self._pinned.append(PinnedMemory(mapping.address, mapping.nbytes))
        except OSError as error:
            _log.warning("kvferry: copies between pool and GPU will be slow: %s", error)

    def _reach(self, plan: StepPlan) -> Store | None:
        """The client. The scheduler side's word counts, should it differ from what was assumed."""
        if plan.assignment is not None and plan.assignment != self._assignment:
            self.connect(plan.assignment)
        self._pin_pool()
        return self._store

    def close(self) -> None:
        """Ends transfers, joins threads, closes the connection. Idempotent."""
        self._loader.close()
        self._saver.close()
        if self._store is not None:
            self._store.close()
            self._store = None
        self._memory.close()
