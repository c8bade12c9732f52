"""One server's work queues and the breaker that guards them."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from kvferry.addresses import Address
from kvferry.breaker import SILENCE, Breaker
from kvferry.tiers.valkey.jobs import Cause, Job, Verdict
from kvferry.tiers.valkey.lanes import LANES, Lane, LaneQueue, Routes
from kvferry.tiers.valkey.lifetimes import Lifetimes, after_info, warning
from kvferry.tiers.valkey.mover import Mover
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tls import Tls

DENIAL_SHOWN_S = 60.0
MAX_DENIALS_LOGGED = 16
MAX_DENIAL_CHARACTERS = 500
OUTAGE_LOGGED_EVERY_S = 60.0  # one that comes and goes does not fill the log
_log = logging.getLogger(__name__)


class Shard:
    """One server address: its queues, its breaker, and the threads that serve them."""

    def __init__(
        self,
        address: Address,
        settings: ValkeySettings,
        *,
        tls: Tls | None,
        routes: Routes,
        lifetimes: Lifetimes | None = None,
    ) -> None:
        """lifetimes: as the server's settings are known so far; None: what is written does not expire."""
        self.address = address
        self.settings = settings
        self.tls = tls
        self.routes = routes
        self.generation = 0
        self.last_error = ""
        self.lifetimes = lifetimes
        self.warning: str | None = None  # None: its settings were not looked at since the start
        self._policy = ""
        self._surveyed_at = time.monotonic()
        self._denial = ""
        self._denied_at = 0.0
        self._denials_logged: set[str] = set()
        self._outage_logged_at: float | None = None
        self._outage_told = False
        self.heard_at = self._checked_at = time.monotonic()
        self._suspected_at: float | None = None
        self._silent_at = 0.0
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._queues = {lane: LaneQueue(settings.queued_stripes) for lane in Lane}
        counts = {
            Lane.FETCH: settings.fetch_connections,
            Lane.STORE: settings.store_connections,
            Lane.SMALL: 1,
        }
        self._movers = {
            lane: [Mover(self, lane, self._queues[lane], number) for number in range(counts[lane])]
            for lane in Lane
        }
        self._started: set[Lane] = set()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the breaker refuses requests."""
        return self._breaker.is_open

    @property
    def inflight_bytes(self) -> int:
        """Payload bytes of commands that were sent and not answered."""
        return sum(mover.inflight_bytes for movers in self._movers.values() for mover in movers)

    @property
    def has_queued(self) -> bool:
        """Whether any job waits."""
        return any(queue.jobs for queue in self._queues.values())

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or is under way. One may come at any moment."""
        movers = (mover for of in self._movers.values() for mover in of)
        return not self.has_queued and not any(mover.is_busy for mover in movers)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs of one lane, or end them as refused."""
        if self.is_open or (self._is_silent and all(job.asks for job in jobs)):
            for job in jobs:
                job.end(Verdict.REFUSED, Cause.BREAKER_OPEN)
            return
        lane = LANES[jobs[0].verb]
        if lane not in self._started:
            self._start(lane)
        cause, left = self._queues[lane].put(jobs)
        for job in left:
            if cause is Cause.CLOSED:
                self.routes.retry(job)  # this shard left the map meanwhile, or the tier closes
            else:
                job.end(Verdict.REFUSED, Cause.QUEUE_FULL)
        self._refuse_if_opened()

    @property
    def _is_silent(self) -> bool:
        """Whether a wait ended in silence, and nothing was heard since: the scout is asking already.

        Whoever only wants to know what is stored need not pay for the same discovery.
        """
        return self._silent_at > self.heard_at

    def fell_silent(self, weight: int, message: str) -> None:
        """A wait ended after a silence of that weight."""
        if weight:
            self._silent_at = time.monotonic()
            self._refuse_questions()
        self.failed(weight, message)

    def _refuse_if_opened(self) -> None:
        """That may have changed since it was asked, and nobody else would empty the queue."""
        if self.is_open:
            self._refuse_queued()
        elif self._is_silent:
            self._refuse_questions()

    def _start(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._started or self._closed:
                return
            for mover in self._movers[lane]:
                mover.start()
            self._started.add(lane)

    def failed(self, weight: int, message: str) -> None:
        """Count a failure against the breaker; refuse what is queued if it opens."""
        self.last_error = message
        if not weight:
            return
        with self._lock:
            self.generation += 1
            opened = self._breaker.failed(weight, time.monotonic())
            if not self.is_open and self._suspected_at is None:
                self._suspected_at = time.monotonic()
        if opened:
            self._refuse_queued()
            self._tell_outage(message)
        self.routes.attention()

    def succeeded(self) -> None:
        """A reply arrived."""
        self.heard_at = time.monotonic()
        with self._lock:
            self._breaker.succeeded()
            self._suspected_at = None
            told, self._outage_told = self._outage_told, False
        if told:
            _log.info("Valkey at %s answers again", self.address)

    def _tell_outage(self, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            last = self._outage_logged_at
            if last is not None and now < last + OUTAGE_LOGGED_EVERY_S:
                return
            self._outage_logged_at, self._outage_told = now, True
        message = self._nameless(_shown(message))
        _log.warning("Valkey at %s is left out until it answers again: %s", self.address, message)

    def _nameless(self, message: str) -> str:
        """For a line that names the server already."""
        return message.removeprefix(f"{self.address}: ")

    def denied(self, message: str) -> None:
        """The server will not have us, or not this command or key: logged once, in the status for a while."""
        message = _shown(message)
        self.last_error = message
        with self._lock:
            self._denial, self._denied_at = message, time.monotonic()
            new = message not in self._denials_logged and len(self._denials_logged) < MAX_DENIALS_LOGGED
            if new:
                self._denials_logged.add(message)
        if new:
            _log.warning("Valkey at %s refuses: %s", self.address, self._nameless(message))

    @property
    def denial(self) -> str:
        """What the server refused lately; empty if nothing."""
        return self._denial if time.monotonic() < self._denied_at + DENIAL_SHOWN_S else ""

    @property
    def suspected(self) -> bool:
        """Whether a failure has been counted since the last success."""
        return self._breaker.weight > 0

    def probe_at(self) -> float:
        """When the next probe is due: the breaker's while open, at once after a failure that did not open it,
        else that of a server long not heard of.
        """
        with self._lock:
            at = self._breaker.next_probe_at()
            if at is None and self._suspected_at is not None and self._checked_at < self._suspected_at:
                return self._suspected_at
        return max(self.heard_at, self._checked_at) + self.settings.idle_s if at is None else at

    def needs_probe(self, now: float) -> bool:
        """Whether to probe now. Work under way finds out by itself how the server is; a suspect is asked."""
        if now < self.probe_at():
            return False
        self._checked_at = now
        return self.is_open or self.suspected or self.is_idle

    def probe_failed(self, message: str, *, since: float) -> None:
        """A probe sent at ``since`` had no good answer: silence, unless an answer came to someone else."""
        if not self.is_open:
            if self.heard_at < since:
                self.failed(SILENCE, message)
            return
        self.last_error = message
        with self._lock:
            self._breaker.probe_failed(time.monotonic())

    def survey_at(self) -> float:
        """When its settings and what they keep are to be looked at again."""
        return self._surveyed_at + self.settings.survey_s

    def begin_survey(self) -> None:
        """They are looked at now, whatever comes of it."""
        self._surveyed_at = time.monotonic()

    def surveyed(self, facts: Mapping[str, str]) -> None:
        """What ``INFO`` says, by name."""
        self.lifetimes = after_info(self.lifetimes, facts)
        found, policy = warning(facts), facts.get("maxmemory_policy", "")
        if policy != self._policy:
            if found and self._policy:
                _log.warning("Valkey at %s: %s", self.address, found)
            self._policy = policy
        self.warning = found

    def _refuse_questions(self) -> None:
        queue = self._queues[Lane.SMALL]
        jobs = queue.drain(close=False)
        _, closed = queue.put([job for job in jobs if not job.asks])
        for job in closed:
            self.routes.retry(job)
        for job in jobs:
            if job.asks:
                job.end(Verdict.REFUSED, Cause.BREAKER_OPEN)

    def _refuse_queued(self) -> None:
        for queue in self._queues.values():
            for job in queue.drain(close=False):
                job.end(Verdict.REFUSED, Cause.BREAKER_OPEN)

    def sweep(self, now: float) -> None:
        """End queued jobs whose time is over: their movers may all be busy."""
        for queue in self._queues.values():
            for job, (verdict, cause) in queue.take_unwanted(now):
                job.end(verdict, cause)

    def close(self) -> None:
        """Hand back what is queued and in flight; ``join`` waits for the threads."""
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            for job in queue.drain(close=True):
                self.routes.retry(job)
        for movers in self._movers.values():
            for mover in movers:
                mover.abort()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for lane in tuple(self._started):
            for mover in self._movers[lane]:
                mover.join()


def _shown(message: str) -> str:
    """What a server said, fit for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in message[:MAX_DENIAL_CHARACTERS])
