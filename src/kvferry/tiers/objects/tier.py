"""The objects tier: parts in packs of a bucket or a directory, which several processes share."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
from kvferry.tiers.objects.books import LATE, NO_PART, QUEUE_FULL, Backlog, Books, call
from kvferry.tiers.objects.bucket import Bucket, BucketError, Trouble, open_bucket
from kvferry.tiers.objects.catalogue import Record
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.format import record_bytes
from kvferry.tiers.objects.health import misconfigured
from kvferry.tiers.objects.reading import Job, Reader
from kvferry.tiers.objects.removals import Notice
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.spans import Wanted, spans
from kvferry.tiers.objects.upkeep import Upkeep
from kvferry.tiers.objects.work import Item, Operation, Report
from kvferry.tiers.objects.writing import Writer

REMOVE_S = 5.0
"""After so long a removal that could not be written down is LATE."""
COPIERS = 3
SPARE_DIVISOR = 8
"""Of ``max_bytes``, so much is left to what is stored: only beyond it parts count as lacking."""


class ObjectTier:
    """Implements ``tiers.contract.Tier`` and ``Droppable``. Make one with ``open``.

    A part is stored when its pack is in the bucket. What was stored by others is found after a while
    (``refresh_s``), and what they deleted is a miss.
    """

    name = "objects"

    def __init__(self, settings: ObjectSettings, bucket: Bucket) -> None:
        self._settings = settings
        self._bucket = bucket
        self._books = books = Books(settings)
        self._engine = engine = Engine()
        self._pool = ThreadPoolExecutor(COPIERS, "kvferry-objects-copy")
        self._upkeep = Upkeep(books, bucket, engine)
        self._reader = Reader(books, bucket, engine, self._upkeep, self._pool)
        self._packer = Writer(books, bucket, engine, self._upkeep).packer
        self._thread = threading.Thread(target=self._packer.run, name="kvferry-objects-pack", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, settings: ObjectSettings, *, opened: Callable[[ObjectSettings], Bucket] = open_bucket
    ) -> "ObjectTier":
        """Try the store, read what it holds (blocking, at most ``open_s``), and start.

        Raises MisconfiguredError, one line, if anything about it is wrong or it does not answer.
        """
        tier = cls(settings, opened(settings))
        try:
            beginning = tier._engine.submit(tier._upkeep.begin())
            try:
                beginning.result(settings.open_s)
            except TimeoutError as error:
                beginning.cancel()
                silent = BucketError(Trouble.SILENT, f"it could not be read in {settings.open_s:.0f} s")
                raise misconfigured(settings, silent) from error
            except BucketError as error:
                raise misconfigured(settings, error) from error
        except BaseException:
            tier.close()
            raise
        return tier

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract. It sends no request, yet says nothing while the store fails."""
        books = self._books
        with books.lock:
            refusal = books.refusal(deadline)
            if refusal is not None:
                found = [refusal[0]] * len(refs)
            else:
                now = time.monotonic()
                found = [Outcome.OK if books.catalogue.use(ref, now) else Outcome.MISS for ref in refs]
            for outcome in found:
                books.count(outcome, refusal[1] if refusal is not None else "")
        self._tell(partial(done, found))

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract. Neighbours of a pack are read with one request."""
        memories = [exactly(item.into, item.ref) for item in items]
        operation = Operation(deadline, self._over_now)
        work = [
            Item(operation, item.ref, memory, partial(fetched, done, index))
            for index, (item, memory) in enumerate(zip(items, memories, strict=True))
        ]
        self._begin(operation, work)
        return operation

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract. A pack goes on its way when it is full, or nothing was added for ``linger_s``.

        BrokenError for a name or checksums that no part has.
        """
        memories = [storable(item) for item in items]
        operation = Operation(deadline, self._over_now)
        work = [
            Item(operation, item.ref, memory, partial(stored, done, index), item.checksums, write=True)
            for index, (item, memory) in enumerate(zip(items, memories, strict=True))
        ]
        self._begin(operation, work)
        return operation

    def lacks(self, refs: Sequence[PartRef]) -> Sequence[PartRef]:
        """Those that are not there, as far as is known, and have room; none while the store fails. No use."""
        books, most = self._books, self._settings.max_bytes
        with books.lock:
            if books.refusal(math.inf) is not None:
                return []
            room = math.inf if most is None else most - most // SPARE_DIVISOR - books.catalogue.nbytes
            return [
                ref
                for ref in refs
                if books.catalogue.find(ref) is None and possible(ref) and (room := room - ref.nbytes) >= 0
            ]

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract. It counts for ``drop`` by age, and not for what goes when there is too much."""
        with self._books.lock:
            now = time.monotonic()
            for ref in refs:
                self._books.catalogue.use(ref, now)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract. They are not found any more at once; that they are gone is then written down."""
        told = done if done is not None else _nobody
        books = self._books
        with books.lock:
            if books.closed:
                late = partial(told, [Outcome.LATE] * len(refs))
            else:
                late = None
                outcomes = [self._remove(ref) for ref in refs]
                self._notify(partial(removal, told, outcomes))
        call(late)

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """See the contract. Age by the store's clock; what was used is known of this process's time only."""
        books = self._books
        with books.lock:
            closed = books.closed
            if not closed:
                if older_than_s is None:
                    self._packer.remove_all(namespace)
                self._upkeep.drop(namespace, older_than_s, done)
        if closed:
            call(partial(done, Dropped(0, 0, Outcome.LATE)))

    @property
    def backlog(self) -> Backlog:
        """What was given to ``store`` and is not in the bucket yet."""
        return self._books.backlog()

    def statistics(self) -> TierStatistics:
        """See the contract. ``detail`` says what is there, what waits and what the store is blamed for."""
        books = self._books
        with books.lock:
            counts, catalogue, backlog = books.counts, books.catalogue, books.backlog()
            down = books.breaker.is_open or books.closed
            refused = time.monotonic() < books.writes_refused_until
            detail = {
                "url": self._settings.url,
                "parts": str(catalogue.parts),
                "packs": str(len(catalogue.packs)),
                "size": f"{catalogue.nbytes} bytes",
                "backlog": f"{backlog.parts} parts, {backlog.nbytes} bytes, oldest {backlog.oldest_s:.1f} s",
                "written_packs": str(counts.written_packs),
                "deleted_packs": str(counts.deleted_packs),
                "retries": str(books.retries.budget.spent),
            }
            if self._settings.max_bytes is not None:
                detail["size"] = f"{catalogue.nbytes} of {self._settings.max_bytes} bytes"
            if counts.requests:
                troubles = sorted(counts.requests.items())
                detail["failed_requests"] = ", ".join(f"{count} {name}" for name, count in troubles)
            if down or refused:
                detail["warning"] = books.last_error or "closed"
            return TierStatistics(
                name=self.name,
                state="down" if down else "degraded" if refused else "up",
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
        """See the contract. Requests under way are dropped."""
        books = self._books
        with books.lock:
            if books.closed:
                return
            books.closed = True
            reports = books.end_all([*books.reading, *books.writing], Outcome.LATE, LATE)
            books.packer.notify_all()
        for report in reports:
            call(report)
        self._thread.join()
        self._engine.close()
        self._upkeep.close()
        self._pool.shutdown()
        self._packer.buffers.trim()
        self._bucket.close()

    # -- beginnings ----------------------------------------------------------------------------------

    def _begin(self, operation: Operation, items: Sequence[Item]) -> None:
        """Queue what can be done, and end the rest."""
        books = self._books
        reports: list[Report] = []
        reads: list[tuple[Item, Record]] = []
        writes: list[Item] = []
        with books.lock:
            for item in items:
                refusal = books.refusal(operation.deadline, write=item.write)
                if refusal is None and item.write and not possible(item.ref):
                    refusal = Outcome.REFUSED, NO_PART
                if refusal is None and not books.begin(item):
                    refusal = Outcome.REFUSED, QUEUE_FULL
                if refusal is not None:
                    reports.append(books.never_begun(item, *refusal))
                elif item.write:
                    writes.append(item)
                elif (record := books.catalogue.find(item.ref)) is not None:
                    record.pack.used[record.record] = time.monotonic()
                    reads.append((item, record))
                else:
                    reports += books.end_all([item], Outcome.MISS, "")
            if writes:
                self._packer.queue(writes)
        if reads:
            self._engine.call(self._reader.begin, _jobs(reads))
        if reads or writes:
            self._engine.call(self._watch, operation)
        for report in reports:
            self._tell(report)

    def _watch(self, operation: Operation) -> None:
        """End what is left of it at its deadline. On the engine's thread."""
        if operation.items:
            self._engine.loop.call_at(operation.deadline, self._end, operation)

    def _end(self, operation: Operation) -> None:
        for report in self._books.end_operation(operation):
            call(report)

    def _over_now(self, operation: Operation) -> None:
        """It was cancelled."""
        self._engine.call(self._end, operation)

    def _remove(self, ref: PartRef) -> Outcome:
        """Under the lock."""
        pending = self._packer.remove(ref)
        records = self._books.catalogue.remove(ref)
        for record in records:
            self._upkeep.write_down(record.pack.namespace, [record.removal])
        return Outcome.OK if records or pending else Outcome.MISS

    def _notify(self, told: Callable[[Outcome], None]) -> None:
        """Once removals are written down; LATE after a while. Under the lock."""
        notice = Notice(told)
        self._upkeep.notify(notice)
        self._engine.call(self._engine.loop.call_later, REMOVE_S, notice.end, Outcome.LATE)

    def _tell(self, report: Report) -> None:
        """On the engine's thread; by the caller itself when there is none any more."""
        if not self._engine.call(call, report):
            call(report)


def _jobs(reads: Sequence[tuple[Item, Record]]) -> list[Job]:
    wanted = [
        Wanted(record.pack.ident, record.offset, record_bytes(item.ref.nbytes), index)
        for index, (item, record) in enumerate(reads)
    ]
    return [
        Job(span, [reads[w.index][1] for w in span.wanted], [reads[w.index][0] for w in span.wanted])
        for span in spans(wanted)
    ]


def _nobody(outcomes: Sequence[Outcome]) -> None:
    """Nobody waits for a removal."""
