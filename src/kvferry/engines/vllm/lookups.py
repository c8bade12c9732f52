"""What the node has of each request: asked, waited for, offered to vLLM, given back.

The scheduler's thread waits only in a step of an engine that runs nothing, for some milliseconds.
"""

from collections.abc import Callable

from kvferry.client.messages import LookupAnswer, LookupRequest, Reason
from kvferry.engines.planning import ChunkGeometry, Eligibility, plan_load, plan_lookup
from kvferry.engines.vllm.asker import Asker, Patience
from kvferry.engines.vllm.counters import Counts, failure
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Phase, Tracked
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.errors import RefusedError

ANSWER_MAX_AGE_S = 10.0  # below the node's lease on a load: an older answer is asked for anew
LOOKUP_MAX_S = 1.0  # behind the client's own, shorter bound
MAX_QUEUED_COUNTED = 64
# Prompts are named in the scheduler's thread, at some 20 ns per token. vLLM asks for every waiting request in
# one go, so a burst would hold a step up; what is over is asked for with the next steps.
MAX_NAMED_TOKENS_PER_STEP = 1 << 17
_MISSES = (Reason.COMPLETE, Reason.ABSENT, Reason.EVICTED)


class Lookups:
    """Takes requests from NEW to ANSWERED or SETTLED.

    requests: all that the scheduler side remembers, only read here. saves: told what turns out to be lost.
    """

    def __init__(
        self,
        *,
        geometry: ChunkGeometry,
        client: Asker,
        requests: dict[str, Tracked],
        saves: SaveBook,
        prefill: PrefillWatch,
        counts: Counts,
        deadline_cap_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._geometry = geometry
        self._client = client
        self._requests = requests
        self._saves = saves
        self._prefill = prefill
        self._counts = counts
        self._deadline_cap_s = deadline_cap_s
        self._clock = clock
        self._patience = Patience()
        self._named_tokens = 0

    def renew(self) -> None:
        """A step begins."""
        self._named_tokens = 0
        self._patience.renew()

    @property
    def rested_s(self) -> float:
        """Seconds in which an engine that ran nothing waited for answers inside a step."""
        return self._patience.rested_s

    def matched_tokens(self, tracked: Tracked, local_tokens: int, *, now: float) -> tuple[int | None, bool]:
        """For a request that is looked up: as vLLM wants it, (None, False) while it is not known."""
        if tracked.phase is Phase.ANSWERED and not self._still_usable(tracked, local_tokens, now):
            self.drop(tracked)
            tracked.phase = Phase.NEW
        if tracked.phase is Phase.NEW:
            if self._named_tokens >= MAX_NAMED_TOKENS_PER_STEP:
                return None, False
            if not self._ask(tracked, local_tokens, now):
                return 0, False
        if tracked.phase is Phase.ASKED:
            self._take_answer(tracked, now)
        return self._offer(tracked, local_tokens)

    def tell(self, tracked: Tracked, local_tokens: int) -> None:
        """Those who follow the node hear of each request, also of one that is not looked up."""
        if tracked.told or not self._client.followed:
            return
        tracked.told = True
        request, chunk_tokens = tracked.request, self._geometry.chunk_tokens
        chunks = int(request.num_prompt_tokens) // chunk_tokens
        self._named_tokens += chunks * chunk_tokens
        try:
            digests = tracked.digests(chunks, chunk_tokens=chunk_tokens)
        except RefusedError:
            digests = []
        self._client.came(
            tracked.request_id,
            digests,
            prompt_tokens=int(request.num_prompt_tokens),
            engine_tokens=local_tokens,
        )

    def cancel(self, tracked: Tracked) -> None:
        """Whatever was asked or answered is not wanted any more."""
        if tracked.phase is Phase.ASKED:
            self._client.cancel(tracked.request_id)
        self.drop(tracked)

    def drop(self, tracked: Tracked) -> None:
        """Give the lease of its answer back, if it has one."""
        if tracked.answer is not None:
            self._end(tracked.answer)
            tracked.answer = None

    def _offer(self, tracked: Tracked, local_tokens: int) -> tuple[int | None, bool]:
        """What the request's state says to vLLM."""
        if tracked.phase is not Phase.ANSWERED:
            return (None if tracked.phase is Phase.ASKED else 0), False
        answer = tracked.answer
        load = answer and plan_load(
            self._geometry, first_chunk=answer.first_chunk, count=answer.count, local_tokens=local_tokens
        )
        if not load:
            self.drop(tracked)
            tracked.settle("in the engine itself")
            return 0, False
        if not tracked.cap.allows(load.external_tokens):  # the engine has lost some of its own since it asked
            self.drop(tracked)
            tracked.phase = Phase.NEW
            return None, False
        tracked.load = load
        return load.external_tokens, True

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
        sizes = {"prompt_tokens": request.num_tokens, "local_tokens": local_tokens}
        plan = plan_lookup(self._geometry, **sizes, cap=tracked.cap)
        if plan is None:
            self.tell(tracked, local_tokens)
            if plan_lookup(self._geometry, **sizes) is not None:
                self._counts.add("capped")
                tracked.settle("capped by the request")
            else:
                tracked.settle("in the engine itself" if local_tokens else "shorter than a chunk")
            return False
        self._named_tokens += plan.chunks * self._geometry.chunk_tokens
        try:
            digests = tracked.digests(plan.chunks, chunk_tokens=self._geometry.chunk_tokens)
        except RefusedError:
            tracked.eligibility = Eligibility.TOKENS
            self._counts.add("ineligible")
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
                engine_tokens=local_tokens,
            )
        )
        self._counts.add("lookups")
        tracked.phase, tracked.asked_at = Phase.ASKED, now
        return True

    def _queued_s(self, asking: Tracked) -> float:
        """Prefill seconds of the requests that wait besides this one, from the latest back."""
        total, counted = 0.0, 0
        for tracked in reversed(self._requests.values()):
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
                self._counts.add("unanswered")
                tracked.settle(Reason.TIMEOUT)
            return
        self._waited(tracked, now, answer.reason, found=answer.count)
        self._learn(tracked, answer)
        if answer.count:
            self._counts.add("hits")
            tracked.phase, tracked.answer, tracked.answered_at = Phase.ANSWERED, answer, now
            tracked.story.reason = answer.reason
            return
        if answer.reason is Reason.CHEAPER:
            self._counts.add("cheaper")
        else:
            self._counts.add("misses" if answer.reason in _MISSES else "unanswered")
        self._end(answer)
        tracked.settle(answer.reason)

    def _runs_something(self) -> bool:
        return any(tracked.scheduled and not tracked.finished for tracked in self._requests.values())

    def _waited(self, tracked: Tracked, now: float, reason: Reason, *, found: int = 0) -> None:
        """The wait for an answer of so many chunks is over; ``reason`` says why it does not reach further."""
        tracked.story.lookup_s += now - tracked.asked_at
        self._counts.add("lookup_seconds", now - tracked.asked_at)
        if not found:
            self._counts.add("lookup_lost_seconds", now - tracked.asked_at)
        if reason not in (*_MISSES, Reason.CHEAPER):
            self._counts.add(failure(reason))

    def _learn(self, tracked: Tracked, answer: LookupAnswer) -> None:
        """What the answer says about chunks that were thought to be stored."""
        if answer.reason in _MISSES and tracked.chain is not None:
            self._saves.forget(tracked.chain.digests[answer.first_chunk + answer.count :])

    def _end(self, answer: LookupAnswer) -> None:
        if answer.load_id:
            self._client.end(answer.load_id)
