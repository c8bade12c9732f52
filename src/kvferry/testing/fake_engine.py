"""An engine that computes nothing but keeps vLLM's books: queues, blocks, prefix cache, hook order.

A block's right content is a function of the whole prefix that ends with it, so after any sequence of
loads, failures, aborts and preemptions ``check`` can say whether every cached block holds its own bytes.
Modelled on vLLM 0.32's scheduler with asynchronous loads and the recompute policy.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.errors import BrokenError
from kvferry.testing.engine_books import (
    Block,
    BlockPool,
    FakeRequest,
    Kv,
    SchedulerHooks,
    Status,
    StepOutput,
    WorkerHooks,
)

__all__ = [
    "Block",
    "BlockPool",
    "FakeEngine",
    "FakeRequest",
    "Kv",
    "SchedulerHooks",
    "Status",
    "StepOutput",
    "WorkerHooks",
]

IDLE_S = 0.0002
MAX_STEPS = 200_000
"""After so many steps a state that does not come is taken to never come: 40 s and more of idle steps."""


class FakeEngine:
    """memories: one per rank. tokens_per_step: the batch's token budget."""

    def __init__(
        self,
        *,
        memories: Sequence[Kv],
        block_tokens: int,
        scheduler: SchedulerHooks,
        workers: Sequence[WorkerHooks],
        tokens_per_step: int = 64,
    ) -> None:
        self.pool = BlockPool(memories[0].shape[1])
        self.requests: dict[str, FakeRequest] = {}
        self.recomputed: list[str] = []
        self._memories = memories
        self._block_tokens = block_tokens
        self._scheduler = scheduler
        self._workers = workers
        self._budget = tokens_per_step
        self._ranks_left: dict[str, int] = {}
        self._recved: set[str] = set()
        self._failed: set[str] = set()

    # -- from outside ------------------------------------------------------------------------------

    def add(self, request: FakeRequest) -> FakeRequest:
        """Queue a request."""
        self.requests[request.request_id] = request
        return request

    def abort(self, request: FakeRequest) -> None:
        """As when a client disconnects."""
        if request.status is Status.FINISHED:
            return
        waits = request.status is Status.WAITING_FOR_REMOTE_KVS and request.request_id not in self._recved
        self._recved.discard(request.request_id)
        self._finish(request, keep_blocks=waits)

    def preempt(self, request: FakeRequest) -> None:
        """As when blocks run out."""
        if request.status is Status.RUNNING:
            self._free(request)
            request.status, request.num_computed_tokens = Status.WAITING, 0
            request.num_preemptions += 1

    def run(self, done: Callable[[], bool], *, steps: int = 0) -> None:
        """Step until ``done()``. Raises BrokenError when it does not come in ``steps`` (MAX_STEPS).

        An engine with nothing to compute idles a moment per step, as a real one does.
        """
        for _ in range(steps or MAX_STEPS):
            if done():
                return
            if not self.step():
                time.sleep(IDLE_S)
        waiting = {name: request.status.value for name, request in self.requests.items()}
        raise BrokenError(f"the engine did not get there in {steps or MAX_STEPS} steps: {waiting}")

    def complete(self, *requests: FakeRequest) -> None:
        """Run until these are finished."""
        self.run(lambda: all(request.status is Status.FINISHED for request in requests))

    # -- one step ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, hooks of every rank round a forward pass, then the results. Whether it computed."""
        scheduled: dict[str, int] = {}
        budget = self._budget
        for request in list(self.requests.values()):
            if budget and request.status is not Status.FINISHED and self._admit(request):
                tokens = min(budget, request.num_tokens - request.num_computed_tokens)
                if self._grow(request, request.num_computed_tokens + tokens):
                    scheduled[request.request_id] = tokens
                    budget -= tokens
        tables: dict[str, tuple[list[int], ...]] = {
            name: (list(self.requests[name].blocks),) for name in scheduled
        }
        plan = self._scheduler.plan_step(StepOutput(scheduled, StepOutput({}, None, tables)))
        finished: list[set[str]] = []
        failed: set[int] = set()
        reports = []
        for rank, worker in enumerate(self._workers):
            worker.begin_step(plan)
            self._forward(rank, scheduled)
            worker.end_step()
            finished.append(worker.finished_loads())
            failed |= worker.failed_blocks()
            reports.append(worker.report())
        self._invalidate(failed)
        for report in reports:
            if report is not None:
                self._scheduler.absorb(report)
        self._receive(finished)
        self._advance(scheduled)
        return bool(scheduled)

    def _admit(self, request: FakeRequest) -> bool:
        """Whether the request may run in this step."""
        if request.status is Status.RUNNING:
            return True
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self._recved:
                return False
            self._promote(request)
        if request.num_computed_tokens == 0 and not request.blocks:
            local = self._local_hit(request)
            external, loads = self._scheduler.matched_tokens(request, len(local) * self._block_tokens)
            if external is None:
                return False
            if request.skip_reading_prefix_cache:
                external, loads = 0, False
            if len(local) * self._block_tokens + external >= request.num_tokens:
                raise BrokenError("a hit left no token to compute")
            if not self._allocate(request, local, external):
                return False
            self._scheduler.allocated(request, (request.blocks,), external)
            request.num_computed_tokens = len(local) * self._block_tokens + external
            request.external_tokens = external
            if loads:
                request.status = Status.WAITING_FOR_REMOTE_KVS
                return False
        request.status = Status.RUNNING
        return True

    def _promote(self, request: FakeRequest) -> None:
        """A load has ended; what is valid of it becomes part of the prefix cache."""
        self._recved.discard(request.request_id)
        request.status = Status.WAITING
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            self.recomputed.append(request.request_id)
            if not request.num_computed_tokens:
                self._free(request)
        self._cache(request, request.num_computed_tokens)

    def _local_hit(self, request: FakeRequest) -> list[int]:
        hit: list[int] = []
        if request.skip_reading_prefix_cache:
            return hit
        for index in range((request.num_tokens - 1) // self._block_tokens):
            block = self.pool.cached.get(self._name(request, index))
            if block is None:
                break
            hit.append(block)
        return hit

    def _allocate(self, request: FakeRequest, local: list[int], external: int) -> bool:
        self.pool.touch([self.pool.blocks[number] for number in local])
        taken = self.pool.take(-(-external // self._block_tokens))
        if taken is None:
            self.pool.free_blocks([self.pool.blocks[number] for number in local])
            return False
        request.blocks = local + taken
        return True

    def _grow(self, request: FakeRequest, tokens: int) -> bool:
        taken = self.pool.take(max(0, -(-tokens // self._block_tokens) - len(request.blocks)))
        if taken is None:
            self.preempt(request)
            return False
        request.blocks += taken
        return True

    def _forward(self, rank: int, scheduled: dict[str, int]) -> None:
        for name, tokens in scheduled.items():
            request = self.requests[name]
            self._check_prefix(rank, request)
            first = request.num_computed_tokens // self._block_tokens
            last = (request.num_computed_tokens + tokens) // self._block_tokens
            for index in range(first, last):
                self._memories[rank][:, request.blocks[index]] = self._content(
                    rank, self._name(request, index)
                )

    def _check_prefix(self, rank: int, request: FakeRequest) -> None:
        """What a forward pass reads must be this request's own prefix."""
        for index in range(request.num_computed_tokens // self._block_tokens):
            found = self._memories[rank][:, request.blocks[index]]
            if not np.array_equal(found, self._content(rank, self._name(request, index))):
                raise BrokenError(f"{request.request_id} reads another prefix's KV in its block {index}")

    def _invalidate(self, failed: set[int]) -> None:
        for request in self.requests.values():
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            blocks = request.blocks[: -(-request.num_computed_tokens // self._block_tokens)]
            bad = next((at for at, block in enumerate(blocks) if block in failed), None)
            if bad is not None:
                request.num_computed_tokens = bad * self._block_tokens
                self._failed.add(request.request_id)

    def _receive(self, finished: list[set[str]]) -> None:
        for name in (name for ids in finished for name in ids):
            left = self._ranks_left.get(name, len(self._workers)) - 1
            self._ranks_left[name] = left
            if left:
                continue
            del self._ranks_left[name]
            if name not in self.requests:
                raise BrokenError(f"{name} was reported as received but is not there")
            self._scheduler.load_finished(name)
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._recved.add(name)
            elif request.status is Status.FINISHED:
                self._free(request)
                del self.requests[name]
            else:
                raise BrokenError(f"{name} was reported as received but does not wait")

    def _advance(self, scheduled: dict[str, int]) -> None:
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            self._cache(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(1_000 + request.num_tokens)
                if request.num_tokens - request.num_prompt_tokens >= request.output_tokens:
                    self._finish(request, keep_blocks=False)

    def _finish(self, request: FakeRequest, *, keep_blocks: bool) -> None:
        request.status = Status.FINISHED
        self._scheduler.finished(request)
        if not keep_blocks:
            self._free(request)
            self.requests.pop(request.request_id, None)

    def _free(self, request: FakeRequest) -> None:
        self.pool.free_blocks([self.pool.blocks[number] for number in reversed(request.blocks)])
        request.blocks = []

    def _cache(self, request: FakeRequest, tokens: int) -> None:
        for index in range(tokens // self._block_tokens):
            block = self.pool.blocks[request.blocks[index]]
            name = self._name(request, index)
            if block.name is None and name not in self.pool.cached:
                block.name = name
                self.pool.cached[name] = block.block_id

    def _name(self, request: FakeRequest, index: int) -> bytes:
        prefix = request.all_token_ids[: (index + 1) * self._block_tokens]
        adapter = request.lora_request.lora_path if request.lora_request is not None else None
        text = repr((prefix, str(request.cache_salt), adapter))
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()

    def _content(self, rank: int, name: bytes) -> Kv:
        layers, _, nbytes = self._memories[rank].shape
        seed = int.from_bytes(hashlib.blake2b(name + bytes([rank]), digest_size=8).digest(), "little")
        return np.random.default_rng(seed).integers(0, 256, (layers, nbytes), dtype=np.uint8)
