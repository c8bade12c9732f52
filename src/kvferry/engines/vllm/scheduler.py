"""The scheduler side: follows every request, plans loads and saves, keeps the engine's books."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.client.messages import LookupAnswer, Reason, Report
from kvferry.engines.planning import ChunkGeometry, Eligibility, LoadPlan, tokens_by_tier
from kvferry.engines.vllm.asker import Asker
from kvferry.engines.vllm.counters import Counts, failure
from kvferry.engines.vllm.foreign import ForeignLoads
from kvferry.engines.vllm.loading import load_spec
from kvferry.engines.vllm.lookups import Lookups
from kvferry.engines.vllm.messages import Assignment, LoadSpec, StepPlan, WorkerReport
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission, Phase, Tracked, rest_s
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.engines.vllm.saving import SavePlanner

GENERATION_BYTES = 16


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
        self._saves = SaveBook(pins, groups=len(geometry.groups), counted=geometry.counted_group)
        self._saving = SavePlanner(geometry, admission, self._saves)
        self._foreign = ForeignLoads(steps_in_flight=steps_in_flight)
        self._prefill = prefill
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._lookups = Lookups(
            geometry=geometry,
            client=client,
            requests=self._tracked,
            saves=self._saves,
            prefill=prefill,
            counts=self.counts,
            deadline_cap_s=deadline_cap_s,
            clock=clock,
        )
        self._loads: list[LoadSpec] = []
        self._cancelled: list[str] = []
        self._step = 0
        self._epoch = 0
        self._weights = 0

    # -- requests ----------------------------------------------------------------------------------

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
            if not tracked.reads:
                self._lookups.tell(tracked, local_tokens)
            return 0, False
        return self._lookups.matched_tokens(tracked, local_tokens, now=now)

    def _track(self, request: Any, now: float) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._admission.admit(request, now=now)
            self._tracked[request.request_id] = tracked
            if tracked.eligibility is not Eligibility.YES or not tracked.reads:
                self.counts.add("ineligible")
        return tracked

    @property
    def rested_s(self) -> float:
        """Seconds in which an engine that ran nothing waited for answers inside a step."""
        return self._lookups.rested_s

    # -- loads -------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> bool:
        """vLLM gave the request its blocks, by group. Whether a load of what was promised goes out next."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        answer, load = tracked.answer, tracked.load
        if not external_tokens:
            if tracked.phase is Phase.ANSWERED:
                self._lookups.drop(tracked)
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
            self._lookups.drop(tracked)
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
        self._lookups.drop(tracked)
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
        self._lookups.renew()
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
        self._lookups.cancel(tracked)
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
            if tracked.phase is not Phase.LOADING:
                self._lookups.cancel(tracked)
                tracked.settle("cache reset")

    def close(self) -> None:
        """Idempotent; joins threads."""
        self._prefill.close()
        self._client.close()
