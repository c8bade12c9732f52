"""The scheduler side: asks the node, plans loads and saves, keeps the engine's books.

Never blocks: only a step of an engine that runs nothing stands still for an answer, for some milliseconds.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.client.messages import LookupAnswer, LookupRequest, Reason, Report
from kvferry.engines.planning import (
    ChunkGeometry,
    Eligibility,
    LoadPlan,
    plan_load,
    plan_lookup,
    tokens_by_tier,
)
from kvferry.engines.vllm.asker import Asker, Patience
from kvferry.engines.vllm.counters import Counts, failure
from kvferry.engines.vllm.foreign import ForeignLoads
from kvferry.engines.vllm.loading import load_spec
from kvferry.engines.vllm.messages import (
    Assignment,
    LoadSpec,
    StepPlan,
    WorkerReport,
)
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission, Phase, Tracked, rest_s
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.engines.vllm.saving import SavePlanner
from kvferry.errors import RefusedError

ANSWER_MAX_AGE_S = 10.0  # below the node's lease on a load: an older answer is asked for anew
LOOKUP_MAX_S = 1.0  # behind the client's own, shorter bound
MAX_QUEUED_COUNTED = 64
# Prompts are named in the scheduler's thread, at some 20 ns per token. vLLM asks for every waiting request in
# one go, so a burst would hold a step up; what is over is asked for with the next steps.
MAX_NAMED_TOKENS_PER_STEP = 1 << 17
GENERATION_BYTES = 16
_MISSES = (Reason.COMPLETE, Reason.ABSENT, Reason.EVICTED)


class SchedulerSide:
    """Driven by vLLM's scheduler, in its thread, one step after the other.

    ranks: workers that report each save and load. request and output objects are vLLM's own.
    """

    def __init__(
        self,
        *,
        assignment: Assignment,
        geometry: ChunkGeometry,
        admission: Admission,
        client: Asker,
        pins: Pins,
        prefill: PrefillWatch,
        deadline_cap_s: float = 0.0,
        steps_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._assignment = assignment
        self._geometry = geometry
        self._admission = admission
        self._client = client
        self._patience = Patience()
        self._saves = SaveBook(pins, groups=len(geometry.groups), counted=geometry.counted_group)
        self._saving = SavePlanner(geometry, admission, self._saves)
        self._foreign = ForeignLoads(steps_in_flight=steps_in_flight)
        self._prefill = prefill
        self._deadline_cap_s = deadline_cap_s
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[LoadSpec] = []
        self._cancelled: list[str] = []
        self._step = 0
        self._named_tokens = 0
        self._epoch = 0
        self._weights = 0

    # -- lookups -----------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded; (None, False): not known yet."""
        now = self._clock()
        tracked = self._track(request, now)
        was = tracked.eligibility
        if not self._admission.ready(tracked, now=now):
            return None, False
        if tracked.eligibility is not was:
            self.counts.add("ineligible")
        tracked.reopen_after_preemption()
        if tracked.eligibility is not Eligibility.YES or not tracked.reads or tracked.phase is Phase.SETTLED:
            return 0, False
        if tracked.phase is Phase.ANSWERED and not self._still_usable(tracked, local_tokens, now):
            self._drop_answer(tracked)
            tracked.phase = Phase.NEW
        if tracked.phase is Phase.NEW:
            if self._named_tokens >= MAX_NAMED_TOKENS_PER_STEP:
                return None, False
            if not self._ask(tracked, local_tokens, now):
                return 0, False
        if tracked.phase is Phase.ASKED:
            self._take_answer(tracked, now)
        return self._offer(tracked, local_tokens)

    def _offer(self, tracked: Tracked, local_tokens: int) -> tuple[int | None, bool]:
        """What the request's state says to vLLM."""
        if tracked.phase is not Phase.ANSWERED:
            return (None if tracked.phase is Phase.ASKED else 0), False
        answer = tracked.answer
        load = answer and plan_load(
            self._geometry, first_chunk=answer.first_chunk, count=answer.count, local_tokens=local_tokens
        )
        if not load:
            self._drop_answer(tracked)
            tracked.settle("in the engine itself")
            return 0, False
        tracked.load = load
        return load.external_tokens, True

    def _track(self, request: Any, now: float) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._admission.admit(request, now=now)
            self._tracked[request.request_id] = tracked
            if tracked.eligibility is not Eligibility.YES or not tracked.reads:
                self.counts.add("ineligible")
        return tracked

    def _still_usable(self, tracked: Tracked, local_tokens: int, now: float) -> bool:
        """An answer kept while vLLM had no room. It may be too old, or no longer connect.

        Half of its deadline must be left: an answer that waited longer is asked for anew, not failed.
        """
        answer = tracked.answer
        return (
            answer is not None
            and now - tracked.answered_at < min(ANSWER_MAX_AGE_S, answer.deadline_s / 2)
            and local_tokens // self._geometry.chunk_tokens >= answer.first_chunk
        )

    def _ask(self, tracked: Tracked, local_tokens: int, now: float) -> bool:
        request = tracked.request
        tracked.story.engine_tokens = local_tokens
        plan = plan_lookup(self._geometry, prompt_tokens=request.num_tokens, local_tokens=local_tokens)
        if plan is None:
            tracked.settle("in the engine itself" if local_tokens else "shorter than a chunk")
            return False
        self._named_tokens += plan.chunks * self._geometry.chunk_tokens
        try:
            digests = tracked.digests(plan.chunks, chunk_tokens=self._geometry.chunk_tokens)
        except RefusedError:
            tracked.eligibility = Eligibility.TOKENS
            self.counts.add("ineligible")
            return False
        self._client.lookup(
            LookupRequest(
                request_id=tracked.request_id,
                chunks=digests,
                first_chunk=plan.first_chunk,
                prompt_tokens=request.num_tokens,
                prefill=self._prefill.prefill(now=now),
                queued_s=self._queued_s(tracked),
                deadline_cap_s=self._deadline_cap_s,
            )
        )
        self.counts.add("lookups")
        tracked.phase, tracked.asked_at = Phase.ASKED, now
        return True

    def _queued_s(self, asking: Tracked) -> float:
        """Prefill seconds of the requests that wait besides this one, from the latest back."""
        total, counted = 0.0, 0
        for tracked in reversed(self._tracked.values()):
            if tracked is asking or tracked.scheduled or tracked.finished or tracked.phase is Phase.LOADING:
                continue
            total += self._prefill.seconds(tracked.request.num_tokens - tracked.story.engine_tokens)
            counted += 1
            if counted == MAX_QUEUED_COUNTED:
                break
        return total

    def _take_answer(self, tracked: Tracked, now: float) -> None:
        """If there is an answer by now, the request is answered, or settled when it has no chunks."""
        if self._patience.spent or self._runs_something():
            answer = self._client.poll(tracked.request_id)
        else:
            answer = self._patience.poll(self._client, tracked.request_id)
            now = self._clock()
        if answer is None:
            if now - tracked.asked_at > LOOKUP_MAX_S:
                self._client.cancel(tracked.request_id)
                self._waited(tracked, now, Reason.TIMEOUT)
                self.counts.add("unanswered")
                tracked.settle(Reason.TIMEOUT)
            return
        self._waited(tracked, now, answer.reason, found=answer.count)
        self._learn(tracked, answer)
        if answer.count:
            self.counts.add("hits")
            tracked.phase, tracked.answer, tracked.answered_at = Phase.ANSWERED, answer, now
            tracked.story.reason = answer.reason
            return
        if answer.reason is Reason.CHEAPER:
            self.counts.add("cheaper")
        else:
            self.counts.add("misses" if answer.reason in _MISSES else "unanswered")
        self._end(answer)
        tracked.settle(answer.reason)

    def _runs_something(self) -> bool:
        return any(tracked.scheduled and not tracked.finished for tracked in self._tracked.values())

    @property
    def rested_s(self) -> float:
        """Seconds in which an engine that ran nothing waited for answers inside a step."""
        return self._patience.rested_s

    def _waited(self, tracked: Tracked, now: float, reason: Reason, *, found: int = 0) -> None:
        """The wait for an answer of so many chunks is over; ``reason`` says why it does not reach further."""
        tracked.story.lookup_s += now - tracked.asked_at
        self.counts.add("lookup_seconds", now - tracked.asked_at)
        if not found:
            self.counts.add("lookup_lost_seconds", now - tracked.asked_at)
        if reason not in (*_MISSES, Reason.CHEAPER):
            self.counts.add(failure(reason))

    def _learn(self, tracked: Tracked, answer: LookupAnswer) -> None:
        """What the answer says about chunks that were thought to be stored."""
        if answer.reason in _MISSES and tracked.chain is not None:
            self._saves.forget(tracked.chain.digests[answer.first_chunk + answer.count :])

    def _drop_answer(self, tracked: Tracked) -> None:
        if tracked.answer is not None:
            self._end(tracked.answer)
            tracked.answer = None

    def _end(self, answer: LookupAnswer) -> None:
        if answer.load_id:
            self._client.end(answer.load_id)

    # -- loads -------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> bool:
        """vLLM gave the request its blocks, by group. Whether a load of what was promised goes out next."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        answer, load = tracked.answer, tracked.load
        if not external_tokens:
            if tracked.phase is Phase.ANSWERED:
                self._drop_answer(tracked)
                tracked.settle("not needed")
            return False
        if tracked.phase is not Phase.ANSWERED or answer is None or load is None:
            return False
        spec = None
        if load.external_tokens == external_tokens:
            spec = load_spec(
                tracked.request_id,
                geometry=self._geometry,
                answer=answer,
                load=load,
                tables=tables,
                null_block=self._saves.null_block,
            )
        if spec is None:
            self._drop_answer(tracked)
            tracked.settle("the engine asked for something else")
            return False
        tracked.filled = tuple(group.first_chunk for group in spec.groups)
        self._loads.append(spec)
        tracked.phase, tracked.load_began = Phase.LOADING, self._clock()
        tracked.results.clear()
        self.counts.add("loads")
        return True

    def hit_sources(self, request: Any, external_tokens: int) -> dict[int, int]:
        """External tokens by ``Tier``."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.answer is None:
            return {}
        return tokens_by_tier(self._geometry, tiers=tracked.answer.tiers, external_tokens=external_tokens)

    def load_finished(self, request_id: str) -> None:
        """Every rank has reported the load. Its lease is given back and the outcome counted."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.phase is not Phase.LOADING:
            return
        answer, load = tracked.answer, tracked.load
        self._drop_answer(tracked)
        if answer is not None and load is not None:
            self._account(tracked, answer, load)
        failed = next((r.reason for r in tracked.results if r.reason != Reason.COMPLETE), "")
        if failed and not tracked.finished:
            self.counts.add(failure(failed))
        if failed in (Reason.STALLED, Reason.DEADLINE):  # behind which may be a node that hangs
            self._client.suspect()
        tracked.settle(f"load failed: {failed}" if failed else tracked.story.reason)
        if tracked.finished:
            self._forget(tracked)

    def _account(self, tracked: Tracked, answer: LookupAnswer, load: LoadPlan) -> None:
        results, first, wanted = tracked.results, load.first_chunk, load.chunks
        loaded = min((result.chunks for result in results), default=0)
        tokens, story = self._geometry.chunk_tokens, tracked.story
        if loaded < wanted:
            self.counts.add("loads_failed")
        story.loaded_tokens += loaded * tokens
        story.failed_tokens += (wanted - loaded) * tokens
        story.loaded_bytes += sum(result.nbytes for result in results)
        story.load_s += self._clock() - tracked.load_began
        self.counts.add("loaded_tokens", loaded * tokens)
        if tracked.chain is not None and answer.epoch == self._epoch:
            for group, filled in enumerate(tracked.filled if loaded else ()):
                self._saves.remember(tracked.chain.digests[filled : first + loaded], group)
            # Damaged, evicted or out of reach: recomputed in any case, so stored again if it is not there.
            self._saves.forget(tracked.chain.digests[first + loaded : first + wanted])

    # -- saves and steps ---------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """What the workers do with this step: loads that begin now, saves once its forward has run."""
        self._step += 1
        self._named_tokens = 0
        self._patience.renew()
        if self._client.epoch != self._epoch:  # what was stored went with its node
            self._epoch = self._client.epoch
            self._saves.forget_all()
        scheduled: list[tuple[Tracked, int]] = []
        prefills: list[tuple[int, int]] = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.scheduled = True
            scheduled.append((tracked, tokens))
            prefills.append((tokens, tracked.request.num_computed_tokens))
        sure = self._foreign.may_store(loads=output.has_sync_kv_loads)
        saves = self._saving.plan(scheduled, output.kv_connector_block_state) if sure else ()
        timed = self._prefill.planned(self._step, prefills, now=self._clock())
        plan = StepPlan(
            step=self._step,
            timed=timed,
            assignment=self._assignment,
            loads=tuple(self._loads),
            saves=saves,
            cancelled=tuple(self._cancelled),
            rest_s=0.0 if output.num_scheduled_tokens else rest_s(self._tracked.values()),
            weights=self._weights,
        )
        self._loads, self._cancelled = [], []
        return plan

    def absorb(self, report: WorkerReport) -> None:
        """What the workers finished, and which timed steps came back."""
        now = self._clock()
        if report.weights > self._weights:
            self._weights = report.weights
            self.reset(os.urandom(GENERATION_BYTES))
        for step in report.steps:
            self._prefill.returned(step, now=now)
        for load in report.loads:
            self.counts.add("loaded_bytes", load.nbytes)
            self.counts.add("load_seconds", load.seconds)
            if load.reason != Reason.COMPLETE:
                self.counts.add("load_lost_seconds", load.seconds)
            tracked = self._tracked.get(load.request_id)
            if tracked is not None:
                tracked.results.append(load)
        # Taken out one by one: should this break off, the rest is still there to be settled, and only that.
        while report.saves:
            save = report.saves.pop(0)
            self.counts.add("stored_bytes", save.nbytes)
            self.counts.add("declined_chunks", save.declined)
            self.counts.add("stored_chunks", self._saves.reported(save))

    # -- ends --------------------------------------------------------------------------------------

    def finished(self, request: Any) -> None:
        """vLLM is done with the request. A load in flight is called off; its blocks wait for its end."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.finished = True
        if tracked.phase is Phase.LOADING:
            self._cancelled.append(tracked.request_id)
            return
        if tracked.phase is Phase.ASKED:
            self._client.cancel(tracked.request_id)
        self._drop_answer(tracked)
        self._forget(tracked)

    def _forget(self, tracked: Tracked) -> None:
        del self._tracked[tracked.request_id]
        story = tracked.story
        self._client.report(
            Report(
                request_id=tracked.request_id,
                prompt_tokens=tracked.request.num_prompt_tokens,
                engine_tokens=story.engine_tokens,
                loaded_tokens=story.loaded_tokens,
                failed_tokens=story.failed_tokens,
                stored_chunks=story.stored_chunks,
                loaded_bytes=story.loaded_bytes,
                lookup_s=story.lookup_s,
                load_s=story.load_s,
                reason=story.reason,
                note=tracked.note,
            )
        )

    def reset(self, generation: bytes) -> None:
        """The engine's cache was reset with its connector, as after a change of weights.

        Requests from now on neither find nor overwrite what was stored before.
        """
        self._admission.generation = generation
        self._saves.forget_all()
        for tracked in self._tracked.values():
            tracked.withdraw()
            if tracked.phase is Phase.ASKED:
                self._client.cancel(tracked.request_id)
            if tracked.phase is not Phase.LOADING:
                self._drop_answer(tracked)
                tracked.settle("cache reset")

    def close(self) -> None:
        """Idempotent; joins threads."""
        self._prefill.close()
        self._client.close()
