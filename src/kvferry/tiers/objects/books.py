"""What the threads of an objects tier share, under one lock: what is where, what waits, what was counted.

Nothing here sends a request, and no callback runs under the lock: what a caller is to be told comes back as
reports.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.breaker import FAILURE, SILENCE, Breaker
from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects.bucket import BucketError, Trouble
from kvferry.tiers.objects.catalogue import Catalogue
from kvferry.tiers.objects.retries import Retries
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.work import Item, Operation, Report, State

log = logging.getLogger("kvferry.tiers.objects")

LONGEST_PROBE_WAIT_S = 5.0
REFUSED_WRITES_S = 5.0
"""So long nothing is written after the store declined to take more."""
_REPLIES = frozenset({Trouble.ABSENT, Trouble.SHORT, Trouble.FULL})
_WEIGHTS = {Trouble.BROKEN: FAILURE, Trouble.SLOW_DOWN: FAILURE}  # of all others: SILENCE
_DECLINED = frozenset({Trouble.SLOW_DOWN, Trouble.DENIED, Trouble.FULL})

LATE = "late"
BREAKER_OPEN = "breaker_open"
QUEUE_FULL = "queue_full"
TOO_LARGE = "too_large"
NO_PART = "no_part"
CORRUPT = "corrupt_record"
DEFECT = "defect"


class Backlog(NamedTuple):
    """What was given to ``store`` and is not in the bucket yet. oldest_s: how long it has waited."""

    parts: int
    nbytes: int
    oldest_s: float


@dataclass(slots=True)
class Counts:
    """Since start."""

    fetched: list[int] = field(default_factory=lambda: [0, 0])
    stored: list[int] = field(default_factory=lambda: [0, 0])
    missed: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    requests: Counter[str] = field(default_factory=Counter[str])
    written_packs: int = 0
    written_bytes: int = 0
    deleted_packs: int = 0


class Books:
    """Methods take the lock themselves, but for those that say otherwise."""

    def __init__(self, settings: ObjectSettings) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.packer = threading.Condition(self.lock)
        self.catalogue = Catalogue()
        self.breaker = Breaker(max_wait_s=LONGEST_PROBE_WAIT_S)
        self.retries = Retries(time.monotonic)
        self.counts = Counts()
        self.reading: set[Item] = set()
        self.writing: dict[Item, None] = {}  # the oldest first
        self.writing_bytes = self.inflight_bytes = 0
        self.writes_refused_until = 0.0
        self.closed = False
        self.last_error = ""
        self.opened: Callable[[], object] = lambda: None  # called when the breaker opens, under the lock

    # -- what callers ask ------------------------------------------------------------------------------

    def refusal(self, deadline: float, *, write: bool = False) -> tuple[Outcome, str] | None:
        """How an operation ends that is not even begun. Under the lock."""
        now = time.monotonic()
        if self.closed or now >= deadline:
            return Outcome.LATE, LATE
        if self.breaker.is_open:
            return Outcome.REFUSED, BREAKER_OPEN
        if write and now < self.writes_refused_until:
            return Outcome.REFUSED, Trouble.FULL.value
        return None

    def begin(self, item: Item) -> bool:
        """Whether there is room for it in the queue. Under the lock."""
        waiting = self.writing if item.write else self.reading
        if len(waiting) >= self.settings.queued_items:
            return False
        if item.write:
            self.writing[item] = None
            self.writing_bytes += item.ref.nbytes
        else:
            self.reading.add(item)
        item.operation.items.add(item)
        self.inflight_bytes += item.ref.nbytes
        return True

    def backlog(self) -> Backlog:
        """Now."""
        with self.lock:
            oldest = next(iter(self.writing), None)
            waited = time.monotonic() - oldest.began if oldest is not None else 0.0
            return Backlog(len(self.writing), self.writing_bytes, waited)

    # -- ends ------------------------------------------------------------------------------------------

    def claim(self, item: Item) -> bool:
        """Whether the caller's memory may be touched now: until ``end`` or ``unclaim``. Under the lock."""
        if item.state is not State.WAITING:
            return False
        item.state = State.MOVING
        return True

    def unclaim(self, item: Item) -> Report | None:
        """Its memory will not be touched any more. Under the lock."""
        item.state = State.WAITING
        if self.closed or item.operation.over:
            return self.end(item, Outcome.LATE, LATE)
        return None

    def end(
        self,
        item: Item,
        outcome: Outcome,
        cause: str = "",
        *,
        checksums: tuple[bytes, ...] = (),
        moved: bool = False,
    ) -> Report | None:
        """Count how it ended; what tells its caller. None: it had ended, or moves. Under the lock.

        moved: by the one who claimed it.
        """
        if item.state is State.ENDED or (item.state is State.MOVING and not moved):
            return None
        item.state = State.ENDED
        self.inflight_bytes -= item.ref.nbytes
        if item in self.writing:
            del self.writing[item]
            self.writing_bytes -= item.ref.nbytes
        self.reading.discard(item)
        item.operation.items.discard(item)
        if outcome is Outcome.OK:
            counter = self.counts.stored if item.write else self.counts.fetched
            counter[0] += 1
            counter[1] += item.ref.nbytes
        self.count(outcome, cause)
        report = partial(item.ended, outcome, checksums)
        item.memory = memoryview(b"")
        return report

    def never_begun(self, item: Item, outcome: Outcome, cause: str) -> Report:
        """One that ``begin`` did not take, or was not given. Under the lock."""
        item.state = State.ENDED
        self.count(outcome, cause)
        return partial(item.ended, outcome, ())

    def count(self, outcome: Outcome, cause: str) -> None:
        """What is no success. Under the lock."""
        if outcome is Outcome.MISS:
            self.counts.missed += 1
        elif outcome is not Outcome.OK:
            self.counts.failed[cause] += 1

    def end_operation(self, operation: Operation) -> list[Report]:
        """All of it that waits, as LATE."""
        with self.lock:
            return self.end_all(operation.items, Outcome.LATE, LATE)

    def end_all(self, items: Iterable[Item], outcome: Outcome, cause: str) -> list[Report]:
        """Under the lock."""
        reports = [self.end(item, outcome, cause) for item in list(items)]
        return [report for report in reports if report is not None]

    # -- how the store does ----------------------------------------------------------------------------

    def went_well(self) -> None:
        """A request had its answer."""
        with self.lock:
            if not self.breaker.is_open:
                self.breaker.succeeded()

    def went_wrong(self, error: BucketError, *, write: bool = False) -> None:
        """One had none, or one that says no. Where that opens the breaker, nobody waits any longer."""
        with self.lock:
            self.counts.requests[error.trouble.value] += 1
            if error.trouble in _REPLIES:
                self.went_well()
            if error.trouble is not Trouble.ABSENT:
                self.last_error = str(error)
            if write and error.trouble in (Trouble.FULL, Trouble.DENIED):
                self.writes_refused_until = time.monotonic() + REFUSED_WRITES_S
            elif error.trouble not in _REPLIES:
                weight = _WEIGHTS.get(error.trouble, SILENCE)
                if self.breaker.failed(weight, time.monotonic()):
                    log.warning("objects at %s are left out: %s", self.settings.url, str(error))
                    self.opened()

    def defect(self, during: str, error: Exception) -> None:
        """Something failed that should not be able to. It is counted, and told in full the first time."""
        with self.lock:
            self.counts.requests[DEFECT] += 1
            first = self.counts.requests[DEFECT] == 1
        told = log.error if first else log.debug
        told("objects at %s: %s failed", self.settings.url, during, exc_info=error)

    def usable(self) -> bool:
        """Whether requests make sense."""
        with self.lock:
            return not self.breaker.is_open and not self.closed


def outcome_of(error: BucketError) -> Outcome:
    """Of an item whose request failed for good."""
    return Outcome.REFUSED if error.trouble in _DECLINED else Outcome.FAILED


def call(report: Report | None) -> None:
    """Tell a caller. What its callback raises is its own defect, and ends no thread of the tier."""
    if report is None:
        return
    try:
        report()
    except Exception:
        log.exception("a callback failed")
