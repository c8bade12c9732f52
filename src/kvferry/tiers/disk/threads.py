"""What the threads of a disk tier do: readers, writers, a janitor for segments, a clock for deadlines.

The clock thread never touches the disk, so that what waits ends on time whatever the disk does.
"""

import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

from kvferry.breaker import FAILURE, SILENCE
from kvferry.errors import CorruptError
from kvferry.identity.names import PartRef
from kvferry.tiers.disk.books import FULL_S, Books, is_full
from kvferry.tiers.disk.files import Buffers, SegmentFiles
from kvferry.tiers.disk.format import BLOCK_BYTES, Mark, pack_segment, record_bytes
from kvferry.tiers.disk.places import Place, Reservation, Step, StepKind
from kvferry.tiers.disk.records import RecordIO
from kvferry.tiers.disk.work import Removal, Report

log = logging.getLogger("kvferry.tiers.disk")


LOOK_S = 5.0
"""How often it is looked whether the files were deleted or unmounted: what is open does not tell."""


def read_parts(books: Books, files: SegmentFiles) -> None:
    """A reader: until the tier is closed."""
    records = RecordIO(files)
    while (taken := books.take_read()) is not None:
        item, place = taken
        found: tuple[bytes, ...] | None = None
        error: OSError | None = None
        try:
            found = records.read(place, item.ref, item.memory)
        except CorruptError as damage:
            log.debug("%s", damage)
        except Exception as failure:  # noqa: BLE001
            error = _as_os_error(failure)
        call(books.read_ended(item, place, found, error))
        del item, taken  # so that no memory of a caller is held while there is nothing to do


def write_parts(books: Books, files: SegmentFiles) -> None:
    """A writer: until the tier is closed."""
    records = RecordIO(files)
    while (taken := books.take_write()) is not None:
        item, reservation = taken
        error: OSError | None = None
        try:
            records.write(reservation, item.memory, item.checksums)
        except Exception as failure:  # noqa: BLE001
            error = _as_os_error(failure)
        call(books.write_ended(item, reservation, error))
        del item, taken


def keep_time(books: Books) -> None:
    """Ends what waited too long, tells callers, and notices a disk that does not answer."""
    while True:
        with books.lock:
            now = time.monotonic()
            if books.moving.stalled(now):
                stall_s = books.settings.stall_s
                books.went_wrong(OSError(errno.ETIMEDOUT, f"no answer within {stall_s:.1f} s"), SILENCE)
            books.sweep()
            reports = [*books.told, *books.overdue(now)]
            books.told.clear()
            if not reports:
                if books.ended:
                    return
                books.clock_until = books.next_due(now)
                books.clock.wait(min(books.clock_until - now, 3600.0))
                books.clock_until = 0.0
        for report in reports:
            call(report)


class _Watched:
    """Files whose every read and write is expected to end soon."""

    def __init__(self, books: Books, files: SegmentFiles) -> None:
        self._books = books
        self._files = files

    def read(self, number: int, buffers: Buffers, offset: int) -> int:
        with self._books.watch(sum(buffer.nbytes for buffer in buffers)):
            return self._files.read(number, buffers, offset)

    def write(self, number: int, buffers: Buffers, offset: int) -> int:
        with self._books.watch(sum(buffer.nbytes for buffer in buffers)):
            return self._files.write(number, buffers, offset)


class Janitor:
    """Begins and evicts segments, writes down removals, and tries a disk that failed."""

    def __init__(self, books: Books, files: SegmentFiles) -> None:
        self._books = books
        self._files = files
        self._records = RecordIO(_Watched(books, files))
        self._grow_at = 0.0
        self._look_at = time.monotonic() + LOOK_S
        self._rest_until = 0.0
        self._marked = False  # removals had their turn

    def run(self) -> None:
        """Until the tier is closed."""
        while (task := self._next_task()) is not None:
            try:
                task()
            except Exception as failure:  # noqa: BLE001
                error = _as_os_error(failure)
                with self._books.lock:
                    if is_full(error):
                        self._has_no_room(error)
                    else:
                        self._books.went_wrong(error, SILENCE)

    def _next_task(self) -> Callable[[], None] | None:
        books = self._books
        with books.lock:
            while not books.closed:
                now = time.monotonic()
                if books.breaker.is_open:
                    if books.breaker.probe_due(now):
                        return self._try_out
                    books.janitor.wait((books.breaker.next_probe_at() or now) - now)
                    continue
                if now < self._rest_until:
                    books.janitor.wait(self._rest_until - now)
                    continue
                if now >= self._look_at:
                    self._look_at = now + LOOK_S
                    return self._look
                step = self._step(now)
                marks = books.marks.next()
                if step is not None and (marks is None or self._marked or not books.log.segments.writable):
                    self._marked = False
                    return partial(self._do, step)
                if marks is not None:
                    self._marked = True
                    return partial(self._mark, *marks)
                due = self._look_at if books.log.segments.may_grow else min(self._look_at, self._grow_at)
                books.janitor.wait(due - now)
            return None

    def _step(self, now: float) -> Step | None:
        books = self._books
        if now >= self._grow_at:
            books.log.segments.may_grow = True
        kept_free = books.log.keeps_free
        step = books.log.next_step()
        if kept_free and not books.log.keeps_free:
            books.writers.notify_all()
        stuck = step is None and not books.log.segments.writable and not books.log.segments.leaving
        if stuck and not books.stuck:
            books.writers.notify_all()
        books.stuck = stuck
        return step

    def _has_no_room(self, error: OSError) -> None:
        """Of a file system that makes room as it is written to."""
        self._rest_until = time.monotonic() + FULL_S
        self._books.has_no_room(error)
        self._books.writers.notify_all()

    def _do(self, step: Step) -> None:
        match step.kind:
            case StepKind.ALLOCATE:
                self._allocate(step.segment)
            case StepKind.BEGIN:
                self._begin(step.segment)
            case StepKind.EVICT:
                self._evict(step.segment)
            case StepKind.RETIRE:
                self._retire(step.segment)
            case StepKind.DISCARD:
                self._discard(step.segment)
            case StepKind.FILL:
                self._fill(step.segment)

    def _allocate(self, number: int) -> None:
        books = self._books
        try:
            self._files.allocate(number, books.log.segments.segment_bytes)
        except OSError as error:  # full, or whatever it is: there are the segments that were made before
            with books.lock:
                self._grow_at = time.monotonic() + FULL_S
                books.cannot_grow(error)
            return
        with books.lock:
            books.log.segments.allocated(number)

    def _begin(self, number: int) -> None:
        books = self._books
        with books.lock:
            head = books.log.segments.next_head(secrets.randbits(64))
        self._write_first(number, pack_segment(head))
        with books.lock:
            books.log.begin(number, head)
            books.stuck = False
            books.writers.notify_all()

    def _retire(self, number: int) -> None:
        books = self._books
        with books.lock:
            generation = books.log.segments.retire(number)
        if generation is None:
            return
        self._write_first(number, bytes(BLOCK_BYTES))
        with books.lock:
            books.log.segments.retired(number)
            books.marks.erased(number, generation)
            books.writers.notify_all()

    def _discard(self, number: int) -> None:
        """There is room for another of the size that is made now."""
        with contextlib.suppress(FileNotFoundError):
            self._files.discard(number)
        self._files.detach(number)
        with self._books.lock:
            self._books.log.segments.discarded(number)

    def _write_first(self, number: int, block: bytes) -> None:
        """Raises OSError; before that, a segment where that happens again and again is given up."""
        books = self._books
        try:
            self._records.write_block(number, block)
        except OSError as error:
            if not is_full(error):
                with books.lock:
                    hopeless = books.log.segments.first_block_failed(number)
                if hopeless:
                    self._give_up(number, error)
            raise

    def _give_up(self, number: int, error: OSError) -> None:
        """Its file goes, so that nothing of it is found again."""
        log.warning("segment %d cannot be used, it is given up: %s", number, error.strerror)
        try:
            self._files.detach(number)
            self._files.discard(number)
        except OSError as failure:
            log.warning("segment %d could not be removed: %s", number, failure.strerror)
        with self._books.lock:
            for gone in self._books.log.segments.given_up(number):
                self._books.marks.erased(*gone)
            self._books.writers.notify_all()

    def _fill(self, number: int) -> None:
        """Where a write failed a mark takes its place, so that what follows it is found after a restart."""
        books = self._books
        with books.lock:
            gap = books.log.segments.gap(number)
        if gap is None:
            return
        try:
            self._records.write_void(gap)
        except (OSError, CorruptError) as error:
            with books.lock:
                books.log.segments.not_filled(gap, again=isinstance(error, OSError) and is_full(error))
            raise
        with books.lock:
            books.log.segments.filled(gap)

    def _evict(self, number: int) -> None:
        """Carry over what is used, then let the rest go."""
        books = self._books
        with books.lock:
            hot = books.log.worth_carrying(number)
        for ref in hot:
            if not self._carry(ref):
                break
        with books.lock:
            if not books.breaker.is_open and not books.closed:
                books.counts.evicted_parts += books.log.vacate(number)
                books.writers.notify_all()

    def _carry(self, ref: PartRef) -> bool:
        """Whether another may be tried."""
        books = self._books
        with books.lock:
            if books.closed or books.breaker.is_open:
                return False
            place = books.log.pin(ref)
        if place is None:
            return True
        try:
            data, checksums = self._records.read_whole(place, ref)
        except CorruptError:
            with books.lock:
                books.unpin(place)
                return True  # it goes with its segment
        except OSError as error:
            with books.lock:
                books.unpin(place)
                books.log.not_worth_carrying(ref)  # or its segment would never leave
                books.went_wrong(error, FAILURE)
                return not books.breaker.is_open
        with books.lock:
            books.unpin(place)
            if not books.log.lies_at(ref, place):
                return True  # it was removed meanwhile
            reservation = books.log.reserve(ref, carried=True)
        if not isinstance(reservation, Reservation):
            return False
        try:
            self._records.write(reservation, data, checksums)
        except Exception as failure:
            with books.lock:
                books.abandoned(reservation, _as_os_error(failure))
            raise
        with books.lock:
            books.committed(reservation)
            books.counts.written_bytes += record_bytes(ref.nbytes)
            books.counts.carried_bytes += record_bytes(ref.nbytes)
        return True

    def _mark(self, removal: Removal, places: list[Place]) -> None:
        failed = True
        try:
            failed = [self._mark_removed(place) for place in places].count(False) > 0
        finally:
            with self._books.lock:
                self._books.marks.written(removal, places, failed=failed)

    def _mark_removed(self, place: Place) -> bool:
        """Whether it cannot be found any more."""
        books = self._books
        with books.lock:
            if books.breaker.is_open:
                return False
        try:
            self._records.mark(place, Mark.REMOVED)
        except CorruptError:  # it was not there any more
            pass
        except OSError as error:
            with books.lock:
                books.went_wrong(error, FAILURE)
            return False
        return True

    def _look(self) -> None:
        """Whether its files are those of the directory still."""
        with self._books.watch(BLOCK_BYTES):
            self._files.look()

    def _try_out(self) -> None:
        books = self._books
        try:
            with books.watch(BLOCK_BYTES):
                self._files.try_out()
        except OSError as error:
            with books.lock:
                books.last_error = str(error)
                books.breaker.probe_failed(time.monotonic())
            return
        with books.lock:
            if books.moving.hangs():
                books.breaker.probe_failed(time.monotonic())
            else:
                books.is_back()


def call(report: Report) -> None:
    """Tell a caller. What its callback raises is its own defect, and ends no thread of the tier."""
    try:
        report()
    except Exception:
        log.exception("a callback failed")


def _as_os_error(failure: Exception) -> OSError:
    """What went wrong, as the books count it. Anything but an OSError is a defect, and logged."""
    if isinstance(failure, OSError):
        return failure
    log.error("a read or write failed in an unexpected way", exc_info=failure)
    return OSError(errno.EIO, f"{type(failure).__name__}: {failure}")
