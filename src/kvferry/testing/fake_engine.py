"""An engine that computes nothing but keeps vLLM's books: queues, blocks, prefix cache, hook order.

A block's right content is a function of the whole prefix that ends with it, so after any sequence of
loads, failures, aborts and preemptions ``check`` can say whether every cached block holds its own bytes.
Modelled on vLLM 0.32's scheduler with asynchronous loads and the recompute policy.
"""

import time
from collections.abc import Callable, Sequence

from kvferry.errors import BrokenError
from kvferry.identity.geometry import KvGroup
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
from kvferry.testing.engine_tables import Tables, full_attention

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
    """memories: one per rank, (layers, blocks and the null block, bytes). tokens_per_step: the budget.

    groups, extents: its KV groups and what of the memory each uses; one of full attention, unless said.
    shards: which share of the KV each rank holds, where some hold the same.
    """

    def __init__(
        self,
        *,
        memories: Sequence[Kv],
        block_tokens: int,
        scheduler: SchedulerHooks,
        workers: Sequence[WorkerHooks],
        tokens_per_step: int = 64,
        groups: Sequence[KvGroup] = (),
        extents: Sequence[tuple[int, int]] | None = None,
        shards: Sequence[int] | None = None,
    ) -> None:
        held = groups or [full_attention(block_tokens)]
        self._tables = Tables(memories, held, extents=extents, shards=shards)
        self.pool = self._tables.pool
        self.requests: dict[str, FakeRequest] = {}
        self.recomputed: list[str] = []
        self._block_tokens = self._tables.unit
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
                tokens = self._share(request, budget)
                if tokens and self._grow(request, request.num_computed_tokens + tokens):
                    scheduled[request.request_id] = tokens
                    budget -= tokens
        for name, tokens in scheduled.items():
            self._tables.cache(self.requests[name], self.requests[name].num_computed_tokens + tokens)
        tables = {name: tuple(list(t) for t in self.requests[name].tables) for name in scheduled}
        state = StepOutput({}, None, tables, boundary_state_offloads=self._tables.take_handed())
        plan = self._scheduler.plan_step(StepOutput(scheduled, state))
        finished: list[set[str]] = []
        failed: set[int] = set()
        lost: set[str] = set()
        reports = []
        for rank, worker in enumerate(self._workers):
            worker.begin_step(plan)
            for name, tokens in scheduled.items():
                request = self.requests[name]
                self._tables.forward(rank, request, end=request.num_computed_tokens + tokens)
            worker.end_step()
            finished.append(worker.finished_loads())
            lost |= worker.failed_requests()
            failed |= worker.failed_blocks()
            reports.append(worker.report())
        self._lose(lost)
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
        if request.num_computed_tokens == 0 and not any(request.tables):
            local = self._tables.local_hit(request)
            external, loads = self._scheduler.matched_tokens(request, local)
            if external is None:
                return False
            if request.skip_reading_prefix_cache:
                external, loads = 0, False
            if local + external >= request.num_tokens:
                raise BrokenError("a hit left no token to compute")
            if not self._tables.allocate(request, local=local, external=external):
                return False
            self._scheduler.allocated(request, request.tables, external)
            request.num_computed_tokens = local + external
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
        self._tables.cache(request, request.num_computed_tokens)

    def _share(self, request: FakeRequest, budget: int) -> int:
        """Tokens of the step's budget. With recurrent state, a prefill stops where it may be kept."""
        start = request.num_computed_tokens
        end = min(start + budget, request.num_tokens)
        last = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        if self._tables.has_states and start < last:
            end = min(end, last) // self._block_tokens * self._block_tokens
        return max(0, end - start)

    def _grow(self, request: FakeRequest, tokens: int) -> bool:
        if not self._tables.grow(request, tokens):
            self.preempt(request)
            return False
        return True

    def _lose(self, lost: set[str]) -> None:
        """Loads that failed as a whole: nothing of the request is computed, not even its own prefix."""
        for request in self.requests.values():
            if request.request_id in lost and request.status is Status.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self._failed.add(request.request_id)

    def _invalidate(self, failed: set[int]) -> None:
        if failed and len(self._tables.groups) > 1:
            raise BrokenError("blocks of several groups were reported as failed: whose are they?")
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
            self._tables.cache(request, request.num_computed_tokens)
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
        self._tables.free(request)
