"""What the threads of a disk tier share: the log, the queues, the breaker and the counts, under one lock.

Nothing here touches a file. Whatever a caller is to be told comes back as reports, or is left to the clock
thread (``tell``), so that no callback runs under the lock.
"""

import contextlib
import enum
import errno
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.breaker import FAILURE, SILENCE, Breaker
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk.format import record_bytes
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.marks import Marks
from kvferry.tiers.disk.moving import Hand, Moving
from kvferry.tiers.disk.places import Lack, Place, Reservation
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.trouble import Episodes, Trouble
from kvferry.tiers.disk.work import Drop, Item, Removal, Report, WorkQueue

log = logging.getLogger("kvferry.tiers.disk")

MAX_READ_FAILURES = 3
"""A record that cannot be read so often is given up: its place on the disk may be bad."""
FULL_S = 1.0
"""So long nothing is written, or the file system not asked for another segment, after it said it is full."""
DROP_S = 60.0
"""After so long a drop that is not wholly written down is LATE."""
LEFT_OUT_S = 2.0
"""So long a drop waits for a disk that is left out: it would be REFUSED in the end."""
SWEEP_REST_S = 0.001
"""Between two looks at what a drop is about, so that others have the lock."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Cause(enum.Enum):
    """Why something failed; each is a counter's label."""

    LATE = "late"
    BREAKER_OPEN = "breaker_open"
    QUEUE_FULL = "queue_full"
    DISK_FULL = "disk_full"
    TOO_LARGE = "too_large"  # for a segment
    NO_PART = "no_part"  # of a size that no part has
    CORRUPT = "corrupt_record"
    READ_ONLY = "read_only"
    IO_ERROR = "io_error"


@dataclass(slots=True)
class Counts:
    """Since start. written_bytes: records as they lie on the disk, those carried over included."""

    fetched: list[int] = field(default_factory=lambda: [0, 0])
    stored: list[int] = field(default_factory=lambda: [0, 0])
    missed: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    written_bytes: int = 0
    carried_bytes: int = 0
    evicted_parts: int = 0


def is_full(error: OSError) -> bool:
    """Whether the file system has no room, which is no fault of the disk."""
    return error.errno in _FULL


class Books:
    """Every method takes the lock itself, but for those that say otherwise."""

    def __init__(self, settings: DiskSettings, log: SegmentLog) -> None:
        self.settings = settings
        self.log = log
        self.lock = threading.RLock()
        self.readers = threading.Condition(self.lock)
        self.writers = threading.Condition(self.lock)
        self.janitor = threading.Condition(self.lock)
        self.clock = threading.Condition(self.lock)
        self.reads = WorkQueue(settings.queued_items)
        self.writes = WorkQueue(settings.queued_items)
        self.told: deque[Report] = deque()
        self.marks = Marks(log, self.tell)
        self.breaker = Breaker()
        self.counts = Counts()
        self.closed = False
        self.ended = False  # nothing more will be told
        self.full_until = 0.0
        self.stuck = False  # nothing can be evicted, and no segment made
        self.inflight_bytes = 0
        self.last_error = ""
        self.clock_until = math.inf  # when the clock thread looks next
        self.moving = Moving(settings)
        self._episodes = Episodes(settings.directory)

    # -- what callers ask ----------------------------------------------------------------------------

    def refusal(self, deadline: float) -> tuple[Outcome, Cause] | None:
        """How an operation ends that is not even begun. Under the lock."""
        if self.closed or time.monotonic() >= deadline:
            return Outcome.LATE, Cause.LATE
        if self.breaker.is_open:
            return Outcome.REFUSED, Cause.BREAKER_OPEN
        return None

    def queue(self, item: Item) -> None:
        """Under the lock. It is read or written, or ended by its deadline."""
        (self.writes if item.write else self.reads).put(item)
        if item.operation.deadline < self.clock_until:
            self.clock.notify()
        (self.writers if item.write else self.readers).notify()

    def tell(self, report: Report) -> None:
        """Let the clock thread call it. Under the lock."""
        self.told.append(report)
        self.clock.notify()

    def wake_clock(self) -> None:
        with self.lock:
            self.clock.notify()

    # -- what readers and writers do -------------------------------------------------------------------

    def take_read(self) -> tuple[Item, Place] | None:
        """Waits for something to read, whose place is then pinned. None: the tier is closed."""
        with self.lock:
            while not self.closed:
                if not self.reads:
                    self.readers.wait()
                    continue
                item = self.reads.take()
                if item.operation.over(time.monotonic()):
                    self.tell(self.ending(item, Outcome.LATE, Cause.LATE))
                    continue
                place = self.log.pin(item.ref)
                if place is not None:
                    self.log.use(item.ref)
                    self.moving.begin(item.ref.nbytes, Hand.READER)
                    return item, place
                self.tell(self.ending(item, Outcome.MISS))
            return None

    def take_write(self) -> tuple[Item, Reservation] | None:
        """Waits for something to write, and room for it. None: the tier is closed."""
        with self.lock:
            while not self.closed:
                found = self._next_write()
                if found is not None:
                    self.moving.begin(found[0].ref.nbytes, Hand.WRITER)
                    return found
                self.writers.wait()
            return None

    def read_ended(
        self, item: Item, place: Place, found: tuple[bytes, ...] | None, error: OSError | None
    ) -> Report:
        """found: its checksums; None: it is corrupt, or an error says why it could not be read."""
        with self.lock:
            self.moving.end()
            self.unpin(place)
            if found is not None:
                self._went_well()
                return self.ending(item, Outcome.OK, checksums=found)
            record = self.log.find(item.ref)
            if error is None and not self.log.lies_at(item.ref, place):
                return self.ending(item, Outcome.MISS)  # it was removed meanwhile
            if error is None:
                self.remove_corrupt(item)
                return self.ending(item, Outcome.CORRUPT, Cause.CORRUPT)
            if record is not None and record.place == place:
                record.failures += 1
                if record.failures >= MAX_READ_FAILURES:
                    self.remove_corrupt(item)
            self.went_wrong(error, FAILURE)
            return self.ending(item, Outcome.FAILED, _cause(error))

    def write_ended(self, item: Item, reservation: Reservation, error: OSError | None) -> Report:
        """error: why it could not be written."""
        with self.lock:
            self.moving.end()
            if error is None:
                self._went_well()
                self.counts.written_bytes += record_bytes(item.ref.nbytes)
                self.committed(reservation)
                return self.ending(item, Outcome.OK)
            self.abandoned(reservation, error)
            self.janitor.notify()
            if is_full(error):
                self.has_no_room(error)
                return self.ending(item, Outcome.REFUSED, Cause.DISK_FULL)
            self.went_wrong(error, SILENCE)
            return self.ending(item, Outcome.FAILED, _cause(error))

    def committed(self, reservation: Reservation) -> None:
        """Under the lock."""
        marks = self.log.commit(reservation)
        if marks:
            self.mark(Removal(marks, time.monotonic(), None))
        self.writers.notify_all()  # one may wait for this very part
        self.clock.notify()  # so may a drop

    def abandoned(self, reservation: Reservation, error: OSError) -> None:
        """It could not be written. Under the lock."""
        self.log.abandon(reservation, again=is_full(error))
        self.writers.notify_all()
        self.clock.notify()  # a drop may wait for it

    def mark(self, removal: Removal) -> None:
        """Write down what was removed; there may be room for others now. Under the lock."""
        self.marks.add(removal)
        self.writers.notify_all()
        self.janitor.notify()
        self.clock.notify()

    def drop(self, namespace: bytes | None, latest: float | None, done: Callable[[Dropped], None]) -> None:
        """See ``SegmentLog.drop``. Under the lock."""
        if self.marks.may_drop:
            sweep = self.log.drop(namespace, latest)
            wait_s = LEFT_OUT_S if self.breaker.is_open else DROP_S
            self.marks.add_drop(Drop(sweep, time.monotonic() + wait_s, done))
            self.clock.notify()
        else:
            self.tell(partial(done, Dropped(0, 0, Outcome.REFUSED)))

    def sweep(self) -> None:
        """Go on with what is dropped, a little. Under the lock."""
        if self.marks.sweep():
            self.writers.notify_all()
            self.janitor.notify()

    def remove_corrupt(self, item: Item) -> None:
        """Under the lock."""
        _, places = self.log.remove(item.ref)
        if places:
            self.mark(Removal(places, time.monotonic(), None))

    def unpin(self, place: Place) -> None:
        """Under the lock."""
        self.log.segments.unpin(place)
        if self.log.segments.leaving:
            self.janitor.notify()

    # -- how the disk does -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self, nbytes: int) -> Iterator[None]:
        """Around other reads and writes of a thread: one that takes too long is noticed."""
        with self.lock:
            self.moving.begin(nbytes, Hand.JANITOR)
        try:
            yield
        finally:
            with self.lock:
                self.moving.end()

    def _went_well(self) -> None:
        if not self.breaker.is_open:
            self.breaker.succeeded()

    def went_wrong(self, error: OSError, weight: int) -> None:
        """Where that opens the breaker, nobody waits any longer. Under the lock."""
        self.last_error = str(error)
        now = time.monotonic()
        if self.breaker.failed(weight, now):
            for item in self.reads.take_all() + self.writes.take_all():
                self.tell(self.ending(item, Outcome.REFUSED, Cause.BREAKER_OPEN))
            self.marks.hurry(now + LEFT_OUT_S)
            self._say(self._episodes.left_out(error, now))
            self.janitor.notify()
            self.clock.notify()
        elif not self.breaker.is_open:
            self._say(self._episodes.met(Trouble.UNREADABLE, error, now))

    def is_back(self) -> None:
        """It was left out, and works again. Under the lock."""
        self.breaker.succeeded()
        self._say(self._episodes.back())
        self.writers.notify_all()
        self.readers.notify_all()

    def has_no_room(self, error: OSError) -> None:
        """The file system is full as it is written to: nothing is written for a while. Under the lock."""
        now = time.monotonic()
        self.full_until, self.last_error = now + FULL_S, str(error)
        self._say(self._episodes.met(Trouble.FULL, error, now))

    def cannot_grow(self, error: OSError) -> None:
        """No segment could be made, for whatever reason. Under the lock."""
        self.log.segments.may_grow = False
        self.last_error = str(error)
        self._say(self._episodes.met(Trouble.CRAMPED, error, time.monotonic()))

    def _say(self, line: str | None) -> None:
        """From the clock thread: whoever reads the log may be slow. Under the lock."""
        if line is not None:
            self.tell(partial(log.warning, "%s", line))

    # -- ends ------------------------------------------------------------------------------------------

    def ending(
        self, item: Item, outcome: Outcome, cause: Cause | None = None, *, checksums: tuple[bytes, ...] = ()
    ) -> Report:
        """Count how it ended; returns what tells its caller. Under the lock."""
        self.inflight_bytes -= item.ref.nbytes
        if outcome is Outcome.OK:
            counter = self.counts.stored if item.write else self.counts.fetched
            counter[0] += 1
            counter[1] += item.ref.nbytes
        self.count(outcome, cause)
        return partial(item.ended, outcome, checksums)

    def count(self, outcome: Outcome, cause: Cause | None) -> None:
        """What is no success of the item itself. Under the lock."""
        if outcome is Outcome.MISS:
            self.counts.missed += 1
        elif cause is not None:
            self.counts.failed[cause.value] += 1

    def overdue(self, now: float) -> list[Report]:
        """Of what waited in vain. Under the lock."""
        items = self.reads.take_over(now) + self.writes.take_over(now)
        reports = [self.ending(item, Outcome.LATE, Cause.LATE) for item in items]
        outcome = Outcome.REFUSED if self.breaker.is_open else Outcome.LATE
        return reports + self.marks.overdue(now, outcome)

    def next_due(self, now: float) -> float:
        """When the clock thread looks again: at the next deadline, and often while the disk is at work.
        Under the lock."""
        dues = [self.marks.next_deadline()]
        dues += [self.reads.next_deadline(), self.writes.next_deadline()]
        if self.reads or self.writes or self.moving:
            dues.append(now + self.settings.stall_s / 2)
        if self.marks.sweeping:
            dues.append(now + SWEEP_REST_S)
        return min(dues)

    def close(self) -> Sequence[Report]:
        """Nothing is begun any more. Empty when it was closed before."""
        with self.lock:
            if self.closed:
                return ()
            self.closed = True
            items = self.reads.take_all() + self.writes.take_all()
            reports = [self.ending(item, Outcome.LATE, Cause.LATE) for item in items]
            for everyone in (self.readers, self.writers, self.janitor, self.clock):
                everyone.notify_all()
            return reports

    def _next_write(self) -> tuple[Item, Reservation] | None:
        now = time.monotonic()
        found: tuple[Item, Reservation] | None = None
        ended: list[tuple[Item, Outcome, Cause | None]] = []
        for item in self.writes:
            if item.operation.over(now):
                ended.append((item, Outcome.LATE, Cause.LATE))
                continue
            if now < self.full_until or self.stuck:
                ended.append((item, Outcome.REFUSED, Cause.DISK_FULL))
                continue
            place = self.log.reserve(item.ref)
            if isinstance(place, Reservation):
                found = item, place
                break
            if place is Lack.NO_ROOM:
                self.janitor.notify()
                break
            if place is Lack.PRESENT:
                ended.append((item, Outcome.OK, None))
            elif place is Lack.TOO_LARGE:
                ended.append((item, Outcome.REFUSED, Cause.TOO_LARGE))
        self._leave_writes(item for item, _, _ in ended)
        for item, outcome, cause in ended:
            self.tell(self.ending(item, outcome, cause))
        if found is not None:
            self._leave_writes([found[0]])
        return found

    def _leave_writes(self, items: Iterable[Item]) -> None:
        for item in items:
            self.writes.take_this(item)


def _cause(error: OSError) -> Cause:
    return Cause.READ_ONLY if error.errno == errno.EROFS else Cause.IO_ERROR
