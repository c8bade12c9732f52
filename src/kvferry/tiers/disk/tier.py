"""The disk tier: parts in preallocated segments of one directory, found again after a restart."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvferry.errors import MisconfiguredError
from kvferry.identity.names import PartRef
from kvferry.tiers.calls import exactly, fetched, possible, removal, storable, stored
from kvferry.tiers.contract import (
    Dropped,
    FetchItem,
    FetchResult,
    Outcome,
    StoreItem,
    TierStatistics,
    Transfer,
)
from kvferry.tiers.disk.books import Books, Cause
from kvferry.tiers.disk.files import SegmentFiles
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.opening import open_log
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.threads import Janitor, call, keep_time, read_parts, write_parts
from kvferry.tiers.disk.wall import unix_s
from kvferry.tiers.disk.work import Item, Operation, Removal, Report

log = logging.getLogger("kvferry.tiers.disk")

REMOVE_S = 5.0
"""After so long a removal that could not be written down is LATE."""


class DiskTier:
    """Implements ``tiers.contract.Tier``. Make one with ``open``.

    What the disk is moving when its deadline passes is reported when the disk lets go of it: only then is
    nothing written to its memory any more. Everything else ends by its deadline.
    """

    name = "disk"

    def __init__(
        self,
        settings: DiskSettings,
        files: SegmentFiles,
        segments: SegmentLog,
        *,
        wall: Callable[[], float] = unix_s,
    ) -> None:
        self._settings = settings
        self._files = files
        self._wall = wall
        self._books = books = Books(settings, segments)
        janitor = Janitor(books, files)
        work: list[tuple[str, Callable[[], None]]] = [("janitor", janitor.run)]
        work += [(f"read-{n}", partial(read_parts, books, files)) for n in range(settings.readers)]
        work += [(f"write-{n}", partial(write_parts, books, files)) for n in range(settings.writers)]
        self._threads = [_thread(name, target) for name, target in work]
        self._clock = _thread("clock", partial(keep_time, books))
        self._start()

    def _start(self) -> None:
        self._clock.start()
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                self._threads = self._threads[:number]
                self.close()
                raise MisconfiguredError(
                    f"disk tier in {self._settings.directory}: {error}; allow this process more threads"
                ) from error

    @classmethod
    def open(
        cls,
        settings: DiskSettings,
        *,
        open_files: Callable[..., SegmentFiles] = SegmentFiles.open,
        wall: Callable[[], float] = unix_s,
    ) -> "DiskTier":
        """Lock the directory, find what it holds (blocking), and start. wall: unix seconds.

        Raises MisconfiguredError, one line, if directory or size is wrong, or another process uses it.
        """
        files = open_files(settings.directory)
        try:
            return cls(settings, files, open_log(files, settings, wall=wall), wall=wall)
        except BaseException:
            files.close()
            raise

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract. It needs no disk, yet says nothing while the disk fails."""
        books = self._books
        with books.lock:
            refusal = books.refusal(deadline)
            if refusal is not None:
                found = [refusal[0]] * len(refs)
            else:
                used = [books.log.use(ref) for ref in reversed(refs)]
                found = [Outcome.OK if there else Outcome.MISS for there in reversed(used)]
            for outcome in found:
                books.count(outcome, refusal[1] if refusal is not None else None)
            report = self._told(partial(done, found))
        _call(report)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract."""
        memories = [exactly(item.into, item.ref) for item in items]
        operation = Operation(deadline, self._books.wake_clock)
        work = [
            Item(operation, item.ref, memory, partial(fetched, done, index))
            for index, (item, memory) in enumerate(zip(items, memories, strict=True))
        ]
        self._begin(work, deadline)
        return operation

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract. BrokenError for a name or checksums that no part has."""
        memories = [storable(item) for item in items]
        operation = Operation(deadline, self._books.wake_clock)
        work = [
            Item(operation, item.ref, memory, partial(stored, done, index), item.checksums, write=True)
            for index, (item, memory) in enumerate(zip(items, memories, strict=True))
        ]
        self._begin(work, deadline)
        return operation

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""
        with self._books.lock:
            for ref in reversed(refs):
                self._books.log.use(ref)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract. They are not found any more at once; that they are gone is then written down."""
        books = self._books
        report: Report | None = None
        with books.lock:
            if books.closed:
                report = partial(_ended_late, done, len(refs))
            else:
                removed = [books.log.remove(ref) for ref in refs]
                outcomes = [Outcome.OK if there else Outcome.MISS for there, _ in removed]
                places = [place for _, places in removed for place in places]
                ended = partial(removal, done, outcomes) if done is not None else None
                books.mark(Removal(places, time.monotonic() + REMOVE_S, ended))
        _call(report)

    def parts_within(self, seconds: float) -> Iterator[Sequence[PartRef]]:
        """What was stored or last used within so long, a segment at a time. No use of it."""
        books, since = self._books, self._wall() - seconds
        with books.lock:
            segments = books.log.segments.in_use
        for segment in segments:
            with books.lock:
                found = [(ref, books.log.find(ref)) for ref in segment.refs]
            yield [ref for ref, record in found if record is not None and record.used_at >= since]

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """See ``contract.Droppable``. Nobody waits for it, however many they are: the clock thread takes them
        out, some at a time. What is dropped of a whole segment goes with its first block."""
        books = self._books
        latest = self._wall() - older_than_s if older_than_s is not None else None
        with books.lock:
            closed = books.closed
            if not closed:
                books.drop(namespace, latest, done)
        if closed:
            call(partial(done, Dropped(0, 0, Outcome.LATE)))

    def statistics(self) -> TierStatistics:
        """See the contract. ``detail`` says how full it is and what the disk was last blamed for."""
        books = self._books
        with books.lock:
            counts, segments = books.counts, books.log.segments
            down = books.breaker.is_open or books.closed
            full = books.stuck or time.monotonic() < books.full_until
            detail = {
                "directory": str(self._settings.directory),
                "size": f"{segments.nbytes} of {self._settings.size_bytes} bytes",
                "parts": str(len(books.log.records)),
                "evicted_parts": str(counts.evicted_parts),
                "direct": "yes" if self._files.direct else "no",
            }
            if counts.written_bytes > counts.carried_bytes:
                new_bytes = counts.written_bytes - counts.carried_bytes
                detail["write_amplification"] = f"{counts.written_bytes / new_bytes:.2f}"
            if down or full:
                detail["warning"] = books.last_error or "closed"
            return TierStatistics(
                name=self.name,
                state="down" if down else "degraded" if full else "up",
                fetched_parts=counts.fetched[0],
                fetched_bytes=counts.fetched[1],
                stored_parts=counts.stored[0],
                stored_bytes=counts.stored[1],
                missed_parts=counts.missed,
                failed=dict(counts.failed),
                inflight_bytes=books.inflight_bytes,
                detail=detail,
            )

    def close(self) -> None:
        """See the contract. A disk that does not answer is waited for ``close_s`` at most."""
        books = self._books
        for report in books.close():
            call(report)
        give_up = time.monotonic() + self._settings.close_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        with books.lock:
            books.told.extend(books.marks.close())
            books.ended = True
            books.clock.notify()
        self._clock.join()
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:  # what they move stays theirs, and so do the files
            log.warning("the disk of %s does not answer: left behind %s", self._settings.directory, stuck)
        else:
            self._files.close()

    def _begin(self, items: Sequence[Item], deadline: float) -> None:
        books = self._books
        reports: list[Report] = []
        with books.lock:
            refusal = books.refusal(deadline)
            full = any((books.writes if item.write else books.reads).full for item in items[:1])
            for item in items:
                books.inflight_bytes += item.ref.nbytes
                ending = refusal or self._unqueued(item, full=full)
                if ending is None:
                    books.queue(item)
                    continue
                outcome, cause = ending
                report = self._told(books.ending(item, outcome, cause))
                if report is not None:
                    reports.append(report)
        for report in reports:
            call(report)

    def _unqueued(self, item: Item, *, full: bool) -> tuple[Outcome, Cause | None] | None:
        """How it ends without any work. Under the lock."""
        if not item.write and self._books.log.find(item.ref) is None:
            return Outcome.MISS, None
        if item.write and not possible(item.ref):
            return Outcome.REFUSED, Cause.NO_PART
        return (Outcome.REFUSED, Cause.QUEUE_FULL) if full else None

    def _told(self, report: Report) -> Report | None:
        """By the clock thread; by the caller itself when there is none any more. Under the lock."""
        if self._books.closed:
            return report
        self._books.tell(report)
        return None


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=f"kvferry-disk-{name}", daemon=True)


def _call(report: Report | None) -> None:
    if report is not None:
        call(report)


def _ended_late(done: Callable[[Sequence[Outcome]], None] | None, count: int) -> None:
    if done is not None:
        done([Outcome.LATE] * count)
