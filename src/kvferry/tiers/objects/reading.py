"""Reads spans of packs, a bounded number and size at a time, and hands the parts over, verified.

A request is not ended by the deadline of who waits for it, but by its own limit: so that a store that goes
silent is noticed even where nobody waits that long. Its bytes then go nowhere.
"""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry.errors import CorruptError
from kvferry.identity.stripes import checksum, stripe_plan
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.address import address_of
from kvferry.tiers.objects.books import CORRUPT, DEFECT, Books, call, outcome_of
from kvferry.tiers.objects.bucket import Bucket, BucketError, Trouble
from kvferry.tiers.objects.catalogue import Record
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.format import head_bytes, verify_head
from kvferry.tiers.objects.names import Kind, Name
from kvferry.tiers.objects.spans import Span
from kvferry.tiers.objects.upkeep import Upkeep
from kvferry.tiers.objects.work import Item, State

SLOW_BYTES_PER_S = 1 << 20
"""A store that gives or takes less, from ``stall_s`` on, counts as silent."""


def limit_s(stall_s: float, nbytes: int) -> float:
    """How long a request for so many bytes may take."""
    return stall_s + nbytes / SLOW_BYTES_PER_S


@dataclass(slots=True, eq=False)
class Job:
    """A span, and for each record wanted of it who wants it."""

    span: Span
    records: Sequence[Record]
    items: Sequence[Item]

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return any(item.state is State.WAITING for item in self.items)


class Reader:
    """All methods but ``deliver`` run on the engine's thread."""

    def __init__(
        self, books: Books, bucket: Bucket, engine: Engine, upkeep: Upkeep, pool: ThreadPoolExecutor
    ) -> None:
        self._books = books
        self._bucket = bucket
        self._engine = engine
        self._upkeep = upkeep
        self._pool = pool
        self._waiting: deque[Job] = deque()
        self._running = 0
        self._bytes = 0

    def begin(self, jobs: Sequence[Job]) -> None:
        """After those that wait."""
        self._waiting.extend(jobs)
        self._start()

    def _start(self) -> None:
        settings = self._books.settings
        while self._waiting and self._running < settings.requests:
            nbytes = self._waiting[0].span.nbytes
            if self._running and self._bytes + nbytes > settings.read_bytes:
                return
            job = self._waiting.popleft()
            if job.wanted:
                self._running += 1
                self._bytes += nbytes
                self._engine.spawn(self._read(job))

    async def _read(self, job: Job) -> None:
        try:
            data = await self._get(job)
            if data is not None:
                await self._engine.loop.run_in_executor(self._pool, self.deliver, job, data)
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            self._books.defect("reading a pack", error)
            with self._books.lock:
                reports = self._books.end_all(job.items, Outcome.FAILED, DEFECT)
            for report in reports:
                call(report)
        finally:
            self._running -= 1
            self._bytes -= job.span.nbytes
            self._start()

    async def _get(self, job: Job) -> memoryview | None:
        books, span = self._books, job.span
        path = Name(Kind.PACK, job.records[0].pack.namespace, span.pack).path
        limit = limit_s(books.settings.stall_s, span.nbytes)
        latest = max(item.operation.deadline for item in job.items)
        try:
            data = await books.retries.run(
                lambda within_s: self._bucket.get(path, span.offset, span.nbytes, limit_s=within_s),
                limit_s=limit,
                give_up_at=max(latest, time.monotonic() + limit),
                wanted=lambda: job.wanted and books.usable(),
                failed=books.went_wrong,
            )
        except BucketError as error:
            self._failed(job, error)
            return None
        books.went_well()
        return data

    def _failed(self, job: Job, error: BucketError) -> None:
        books = self._books
        with books.lock:
            if error.trouble is Trouble.ABSENT:  # somebody deleted the pack
                books.catalogue.forget(job.span.pack)
                reports = books.end_all(job.items, Outcome.MISS, "")
            elif error.trouble is Trouble.SHORT:
                reports = []
                for item, record in zip(job.items, job.records, strict=True):
                    reports += books.end_all([item], *self._corrupt(record))
            else:
                reports = books.end_all(job.items, outcome_of(error), error.trouble.value)
        for report in reports:
            call(report)

    def deliver(self, job: Job, data: memoryview) -> None:
        """Copy each part to who waits for it. On a thread of the pool."""
        books = self._books
        for wanted, record, item in zip(job.span.wanted, job.records, job.items, strict=True):
            with books.lock:
                if not books.claim(item):
                    continue
            start = wanted.offset - job.span.offset
            try:
                checksums = hand_over(data[start : start + wanted.nbytes], item)
            except CorruptError:
                with books.lock:
                    outcome, cause = self._corrupt(record)
                    report = books.end(item, outcome, cause, moved=True)
            except Exception as error:  # noqa: BLE001 - counted and told by the books
                books.defect("handing over a part", error)
                with books.lock:
                    report = books.end(item, Outcome.FAILED, DEFECT, moved=True)
            else:
                with books.lock:
                    report = books.end(item, Outcome.OK, checksums=checksums, moved=True)
            call(report)

    def _corrupt(self, record: Record) -> tuple[Outcome, str]:
        """It does not count any more. Under the lock."""
        pack, catalogue = record.pack, self._books.catalogue
        if catalogue.packs.get(pack.ident) is not pack or record.record in pack.gone:
            return Outcome.MISS, ""  # it was removed meanwhile
        catalogue.strike(record)
        self._upkeep.write_down(pack.namespace, [record.removal])
        return Outcome.CORRUPT, CORRUPT


def hand_over(data: memoryview, item: Item) -> tuple[bytes, ...]:
    """Copy a record's part to its memory, and verify it there; its checksums. Raises CorruptError."""
    checksums = verify_head(data, item.ref)
    source, target = address_of(data) + head_bytes(item.ref.nbytes), address_of(item.memory)
    for stripe, expected in zip(stripe_plan(item.ref.nbytes), checksums, strict=True):
        ctypes.memmove(target + stripe.offset, source + stripe.offset, stripe.nbytes)
        if checksum(item.memory[stripe.offset : stripe.offset + stripe.nbytes]) != expected:
            raise CorruptError(f"stored record: the checksum of stripe {stripe.index} does not match")
    return checksums
