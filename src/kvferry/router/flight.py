"""A request at a worker, and what its course teaches: paces, lengths, what the worker's cache holds. Pure.

sent ──► waiting ──first_byte──► decoding ──end──► over
           │ how long the prefill took ▲     ▲ how much was cached, how long tokens took
           └──────────── end ────────────────┘ (never computed: nothing is there of it)
"""

import math
from dataclasses import dataclass

from kvferry.costs import PrefillModel
from kvferry.errors import BrokenError
from kvferry.router.contract import Asked, Ended, Usage
from kvferry.router.explain import ExplainRing, Record
from kvferry.router.knowledge import Knowledge
from kvferry.router.knowledge.knowledge import Worker
from kvferry.router.knowledge.seen import Mark
from kvferry.router.load import CountedFlight, Loads
from kvferry.router.pace import Decodes, Pace, Prefills, Typical

TELLING_TOKENS = 4  # of an answer, with no prefill beside, for them to say how fast decode is


@dataclass(slots=True, eq=False)
class Known:
    """A worker as a pool sees it."""

    url: str
    worker: Worker
    pace: Pace
    told: PrefillModel | None = None  # what its engine says how fast it is


@dataclass(frozen=True, slots=True)
class PrefetchWish:
    """These chunks will be asked for at that node. digests: the prefix's, in order."""

    node: str
    namespace: bytes
    digests: bytes


class Pool:
    """What is known of the workers of one model. busy: how many of them have a prefill to do."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.loads = Loads()
        self.prefills = Prefills()
        self.decodes = Decodes()
        self.typical = Typical()  # of workers whose engines do not say how fast they are,
        self.typical_told = Typical()  # and of those whose do
        self.ring = ExplainRing()
        self.workers: dict[str, Known] = {}
        self.busy = 0

    def know(self, url: str) -> Known:
        """Made when there is none."""
        known = self.workers.get(url)
        if known is None:
            known = self.workers[url] = Known(url, self.knowledge.worker(url), Pace(self.typical))
        return known

    def lose(self, url: str) -> bool:
        """It is gone or another one. Returns whether it was known."""
        self.loads.removed(url)
        self.knowledge.worker_lost(url)
        known = self.workers.pop(url, None)
        if known is not None and known.pace.busy:
            self.busy -= 1
        return known is not None

    def joins(self, known: Known, flight: "CostFlight", work_s: float, now: float) -> None:
        """A prefill is sent there."""
        if not known.pace.busy and self._is_current(known):
            self.busy += 1
        known.pace.begin(flight, work_s, now)

    def leaves(self, known: Known, flight: "CostFlight", now: float) -> None:
        """It is done, or left."""
        if known.pace.over(flight, now) and self._is_current(known):
            self.busy -= 1

    def observe(self, known: Known, new_tokens: int, context_tokens: int, seconds: float, now: float) -> None:
        """A prefill that waited for nothing took so long."""
        prefills = self.prefills
        tokens = int(prefills.typical_tokens)
        before = prefills.model.seconds(tokens)
        if prefills.observe(new_tokens, context_tokens, seconds, now):
            ratio = prefills.model.seconds(tokens) / before
            self.typical.log -= math.log(ratio)
            for other in self.workers.values():
                if other.told is None:
                    other.pace.rescale(ratio)

    def prefill(self, known: Known) -> PrefillModel:
        """What predicts its prefills, but for the worker's factor."""
        told = self.knowledge.prefill(known.worker)
        if told is not known.told:
            self._told(known, told)
        return told or self.prefills.model

    def _told(self, known: Known, told: PrefillModel | None) -> None:
        """A newer model leaves expectations as they are; the first or the last one ends what was learned."""
        before, known.told = known.told, told
        if before is None or told is None:
            known.pace.begin_anew(self.typical if told is None else self.typical_told)
            return
        tokens = int(self.prefills.typical_tokens)
        then, now = before.seconds(tokens), told.seconds(tokens)
        if then > 0 and now > 0:
            known.pace.rescale(now / then)

    def _is_current(self, known: Known) -> bool:
        return self.workers.get(known.url) is known


class CostFlight(CountedFlight):
    """A ``contract.Flight``. wish: what the worker's node should bring into memory for it."""

    __slots__ = (
        "_ahead_s",
        "_asked",
        "_at",
        "_first_at",
        "_known",
        "_last_at",
        "_mark",
        "_pool",
        "_price",
        "_quiet",
        "_quiet_s",
        "_quiet_tokens",
        "_record",
        "_streams",
        "_tokens",
        "_told",
        "wish",
    )

    def __init__(
        self,
        pool: Pool,
        asked: Asked,
        known: Known,
        record: Record,
        now: float,
        *,
        wish: PrefetchWish | None,
    ) -> None:
        price = record.expected
        new_tokens = max(record.prompt_tokens - price.cached_tokens, 0)
        super().__init__(known.url, pool.loads, prefill_tokens=new_tokens, hit_tokens=price.cached_tokens)
        self.wish = wish
        self._pool, self._asked, self._known, self._record, self._price = pool, asked, known, record, price
        self._at = self._last_at = now
        self._ahead_s = known.pace.ahead_s()
        self._mark: Mark | None = None
        pool.knowledge.later(self._note)
        self._told: tuple[float, float] | None = None
        self._first_at: float | None = None
        self._tokens = self._streams = self._quiet = self._quiet_tokens = 0
        self._quiet_s = 0.0
        if asked.streamed:
            pool.joins(known, self, price.prefill_s / price.factor, now)
        else:
            known.pace.begin_unseen(price.prefill_s / price.factor, now, price.factor)

    def sent(self) -> None:
        """See ``Flight``."""
        if self._mark is None:
            self._pool.knowledge.settle()

    def _note(self) -> None:
        """For the next choices, and for who asks why: when it was sent, since nothing of it helps that."""
        self._pool.ring.add(self._record)
        self._mark = self._pool.knowledge.sent(
            self._asked,
            self._known.worker,
            new_tokens=self._prefill_tokens,
            engine_tokens=self._price.engine_tokens,
        )

    def _noted(self) -> Mark:
        self.sent()
        if self._mark is None:
            raise BrokenError("a choice that was never noted")
        return self._mark

    def first_byte(self, now: float) -> None:
        """See ``Flight``."""
        if self._first_at is not None:
            return
        self.sent()
        super().first_byte(now)
        self._first_at = self._last_at = now
        self._streams = self._load.decoding
        self._pool.leaves(self._known, self, now)
        self._quiet = self._known.pace.quiet

    def token(self, now: float) -> None:
        """See ``Flight``. Only of a stream does the first byte tell how long a prefill took."""
        quiet = self._known.pace.quiet
        if quiet == self._quiet > 0 and self._tokens:
            self._quiet_s += now - self._last_at
            self._quiet_tokens += 1
        self._quiet = quiet
        self._last_at = now
        self._tokens += 1
        if self._tokens == 1 and self._first_at is not None:
            self._record.ttft_s = seconds = self._first_at - self._at
            if self._asked.keys:
                price = self._price
                predicted = self._predicted_s(price.prefill_s / price.factor)
                self._told = self._known.pace.took(seconds - self._loading_s(), predicted, now)

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """See ``Flight``."""
        super().end(how, now, usage)
        if not self._asked.streamed:
            self._known.pace.over_unseen()
        self._record.ended = how.value
        pool, knowledge = self._pool, self._pool.knowledge
        if self._first_at is None:
            pool.leaves(self._known, self, now)
            knowledge.seen.taken_back(self._asked.keys, self._noted())
            return
        if how is Ended.FAILED or how is Ended.REFUSED:
            knowledge.seen.taken_back(self._asked.keys, self._noted())
        if self._quiet_tokens >= TELLING_TOKENS and not self._known.pace.unseen:
            streams = (self._streams + self._load.decoding + 1) / 2 - 1
            pool.decodes.observe(max(streams, 0.0), self._quiet_s / self._quiet_tokens)
        if usage is not None and usage.prompt_tokens > 0 and self._asked.keys:
            self._learn(usage, now)

    def _loading_s(self) -> float:
        """Of the expected time: what was a load's, not a prefill's."""
        return max(self._price.load_s - self._price.wait_s, 0.0)

    def _predicted_s(self, prefill_s: float) -> float:
        """Until the first token, by the model, with what was ahead of it; without the factor."""
        return prefill_s + self._price.wait_s / self._price.factor

    def _learn(self, usage: Usage, now: float) -> None:
        """From what the answer says of the prompt."""
        pool, knowledge, record, price = self._pool, self._pool.knowledge, self._record, self._price
        record.seen_prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        knowledge.tokens_seen(self._asked, usage.prompt_tokens)
        knowledge.seen.computed(self._known.worker.number, usage.completion_tokens)
        cached = usage.cached_tokens if usage.cached_tokens is not None else price.cached_tokens
        new_tokens = max(usage.prompt_tokens - cached, 1)
        seconds = record.ttft_s
        loading_s = self._loading_s() if cached > price.engine_tokens // 2 else 0.0
        if self._ahead_s == 0.0 and seconds is not None:
            pool.observe(self._known, new_tokens, cached, seconds - loading_s, now)
        if usage.cached_tokens is None:
            return
        if price.cached_tokens == price.engine_tokens:
            knowledge.hit_seen(price.engine_tokens, usage.cached_tokens)
        if self._told is not None and seconds is not None and usage.cached_tokens < price.cached_tokens // 2:
            actual = pool.prefill(self._known).seconds(new_tokens, cached)
            self._known.pace.corrected(self._told, seconds - loading_s, self._predicted_s(actual))
        if price.engine_tokens < price.cached_tokens // 2 and usage.cached_tokens < price.cached_tokens // 2:
            knowledge.load_missed(self._known.worker)
        knowledge.judged(
            self._known.worker,
            self._noted(),
            expected_tokens=price.engine_tokens,
            cached_tokens=usage.cached_tokens,
        )
