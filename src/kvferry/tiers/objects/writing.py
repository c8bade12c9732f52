"""Uploads packs, a bounded number at a time."""

import time
from collections import deque

from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects.books import Books, call, outcome_of
from kvferry.tiers.objects.bucket import Bucket, BucketError, Trouble
from kvferry.tiers.objects.catalogue import Record
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.format import WHOLE_PACK, Removal
from kvferry.tiers.objects.names import Kind, Name, new_id
from kvferry.tiers.objects.packing import Packer
from kvferry.tiers.objects.packs import OpenPack
from kvferry.tiers.objects.reading import limit_s
from kvferry.tiers.objects.upkeep import Upkeep


class Writer:
    """All methods run on the engine's thread. packer: what it uploads comes from there."""

    def __init__(self, books: Books, bucket: Bucket, engine: Engine, upkeep: Upkeep) -> None:
        self._books = books
        self._bucket = bucket
        self._engine = engine
        self._upkeep = upkeep
        self._waiting: deque[OpenPack] = deque()
        self._running = 0
        self.packer = Packer(books, lambda pack: engine.call(self.begin, pack))

    def begin(self, pack: OpenPack) -> None:
        """After those that wait."""
        self._waiting.append(pack)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._books.settings.uploads:
            self._running += 1
            self._engine.spawn(self._upload(self._waiting.popleft()))

    async def _upload(self, pack: OpenPack) -> None:
        try:
            await self._put(pack)
        finally:
            self._running -= 1
            self._start()

    async def _put(self, pack: OpenPack) -> None:
        books = self._books
        ident = new_id(self._upkeep.clock.now())
        data = pack.finish()
        await self._upkeep.writing(len(data))
        path = Name(Kind.PACK, pack.namespace, ident).path
        trouble: BucketError | None = None
        try:
            await books.retries.run(
                lambda within_s: self._bucket.put(path, data, limit_s=within_s),
                limit_s=limit_s(books.settings.stall_s, len(data)),
                give_up_at=time.monotonic() + books.settings.upload_s,
                wanted=books.usable,
                failed=lambda error: books.went_wrong(error, write=True),
            )
        except BucketError as error:
            trouble = error
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            books.defect("an upload", error)
            trouble = BucketError(Trouble.BROKEN, "a defect")
        else:
            books.went_well()
        self._settle(pack, ident, data, trouble)

    def _settle(self, pack: OpenPack, ident: bytes, data: memoryview, trouble: BucketError | None) -> None:
        books = self._books
        nbytes = len(data)
        with books.lock:
            waiting = self.packer.settled(pack, data)
            if trouble is not None:
                self._deny(pack, ident)
                reports = books.end_all(waiting, outcome_of(trouble), trouble.trouble.value)
            else:
                books.counts.written_packs += 1
                books.counts.written_bytes += nbytes
                self._add(pack, ident)
                reports = books.end_all(waiting, Outcome.OK, "")
            most = books.settings.max_bytes
            too_much = most is not None and books.catalogue.nbytes > most
        for report in reports:
            call(report)
        if too_much:
            self._engine.spawn(self._upkeep.retire())

    def _deny(self, pack: OpenPack, ident: bytes) -> None:
        """It may have landed although there was no answer: what was removed must not come back with it."""
        removed = [Removal(ident, pending.record) for pending in pack.parts if pending.removed]
        if removed and len(removed) == len(pack.parts):
            removed = [Removal(ident, WHOLE_PACK)]
        if removed:
            self._books.catalogue.apply(removed)
            self._upkeep.write_down(pack.namespace, removed)

    def _add(self, pack: OpenPack, ident: bytes) -> None:
        """Under the lock."""
        catalogue = self._books.catalogue
        added = catalogue.add(pack.namespace, pack.index(ident))
        if added is None:
            return
        self._upkeep.wrote(added)
        removed = [Record(added, pending.record) for pending in pack.parts if pending.removed]
        for record in removed:
            catalogue.strike(record)
        if removed:
            self._upkeep.write_down(pack.namespace, [record.removal for record in removed])
