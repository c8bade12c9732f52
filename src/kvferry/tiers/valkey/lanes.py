"""Queues of jobs, one per kind of work, and what a mover needs of the shard it works for."""

import enum
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvferry.addresses import Address
from kvferry.tiers.valkey.jobs import Cause, Job, Verb, Verdict
from kvferry.tiers.valkey.lifetimes import Lifetimes
from kvferry.tiers.valkey.resp import ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tls import Tls


class Lane(enum.Enum):
    """Kinds of work with connections of their own, so that a question never waits behind megabytes."""

    FETCH = "fetch"
    STORE = "store"
    SMALL = "small"


LANES = {Verb.GET: Lane.FETCH, Verb.SET: Lane.STORE, Verb.TOUCH: Lane.SMALL, Verb.UNLINK: Lane.SMALL}


class Routes(Protocol):
    """What a shard asks of the router when a job cannot end where it is."""

    def dispatch(self, job: Job) -> None:
        """Queue the job at the shard that serves its slot."""

    def retry(self, job: Job) -> None:
        """The same, after looking again which shard that is; LATE once the tier is closed."""

    def redirect(self, job: Job, error: ServerError) -> None:
        """Follow a MOVED or ASK reply."""

    def attention(self) -> None:
        """A breaker opened."""


class Home(Protocol):
    """The shard, as its movers see it. ``generation`` grows with every connection lost.

    ``heard_at``: monotonic time of the latest answer. ``lifetimes``: of what is written; None: no expiry.
    """

    address: Address
    settings: ValkeySettings
    tls: Tls | None
    routes: Routes
    generation: int
    last_error: str
    heard_at: float
    lifetimes: Lifetimes | None

    def denied(self, message: str) -> None:
        """The server will not have us, or not this command or key."""

    @property
    def suspected(self) -> bool:
        """Whether a failure has been counted since the last success."""
        ...

    def failed(self, weight: int, message: str) -> None:
        """A connection was lost or given up."""

    def fell_silent(self, weight: int, message: str) -> None:
        """A wait ended after a silence of that weight."""

    def succeeded(self) -> None:
        """A reply arrived."""


class LaneQueue:
    """A bounded first-in first-out queue of jobs with a lock of its own."""

    def __init__(self, limit: int) -> None:
        self.ready = threading.Condition()
        self.jobs: deque[Job] = deque()
        self.limit = limit
        self.closed = False

    def put(self, jobs: Sequence[Job]) -> tuple[Cause | None, Sequence[Job]]:
        """Queue ``jobs``; those that were not, and why. One wake-up for all of them."""
        with self.ready:
            if self.closed:
                return Cause.CLOSED, jobs
            room = max(self.limit - len(self.jobs), 0)
            self.jobs.extend(jobs[:room])
            self.ready.notify(len(jobs))
        return (Cause.QUEUE_FULL, jobs[room:]) if len(jobs) > room else (None, ())

    def take(self, most: int, most_bytes: int, *, wait: bool) -> list[Job] | None:
        """Up to ``most`` jobs of ``most_bytes`` (always one if ``wait``); None once closed."""
        taken: list[Job] = []
        with self.ready:
            while wait and not self.jobs and not self.closed:
                self.ready.wait()
            if self.closed:
                return None
            while self.jobs and len(taken) < most:
                most_bytes -= self.jobs[0].payload_bytes
                if most_bytes < 0 and (taken or not wait):
                    break
                taken.append(self.jobs.popleft())
        return taken

    def drain(self, *, close: bool) -> list[Job]:
        """Take everything out; with ``close``, for ever."""
        with self.ready:
            jobs = list(self.jobs)
            self.jobs.clear()
            if close:
                self.closed = True
                self.ready.notify_all()
        return jobs

    def take_unwanted(self, now: float) -> list[tuple[Job, tuple[Verdict, Cause]]]:
        """Take out the jobs that should not be sent any more, with how each should end."""
        unwanted: list[tuple[Job, tuple[Verdict, Cause]]] = []
        with self.ready:
            kept: deque[Job] = deque()
            for job in self.jobs:
                ending = job.unwanted(now)
                if ending is None:
                    kept.append(job)
                else:
                    unwanted.append((job, ending))
            if unwanted:
                self.jobs = kept
        return unwanted
