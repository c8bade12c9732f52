"""Writes down what does not count any more, and then deletes what nobody needs.

First it is not found here, then a list of removals says so to everybody and after a restart, then the bytes
go.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects.books import Books, call, log
from kvferry.tiers.objects.bucket import Bucket, BucketError
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.format import WHOLE_PACK, Removal, pack_removed
from kvferry.tiers.objects.health import StoreClock
from kvferry.tiers.objects.names import Kind, Name, new_id

GATHER_S = 0.05
"""What is removed within so long is written down together."""
MAX_LIST = 65536
DELETED_AT_ONCE = 1000


@dataclass(slots=True, eq=False)
class Notice:
    """Hears once whether what it waits for was written down."""

    told: Callable[[Outcome], None]
    ended: bool = False

    def end(self, outcome: Outcome) -> None:
        """Tell, unless that was done before."""
        if not self.ended:
            self.ended = True
            call(lambda: self.told(outcome))


class Removals:
    """``write_down`` under the tier's lock; all else on the engine's thread.

    lists: of removals in the bucket, by the name of each: the packs it names.
    """

    def __init__(self, books: Books, bucket: Bucket, engine: Engine, clock: StoreClock) -> None:
        self._books = books
        self._bucket = bucket
        self._engine = engine
        self._clock = clock
        self._queue: dict[bytes, list[Removal]] = defaultdict(list)
        self._notices: list[Notice] = []
        self._watched: set[Notice] = set()
        self._writing = False
        self.lists: dict[Name, frozenset[bytes]] = {}

    def write_down(self, namespace: bytes, removals: Iterable[Removal]) -> None:
        """Soon."""
        self._queue[namespace] += removals
        self._engine.call(self.wake)

    def watch(self, notice: Notice) -> None:
        """It is told by ``close`` at the latest."""
        self._watched.add(notice)

    def notify(self, notice: Notice) -> None:
        """Once all that was given until now is written, or could not be."""
        self._watched.add(notice)
        self._notices.append(notice)
        self._engine.call(self.wake)

    def close(self) -> None:
        """Once the engine is."""
        for notice in self._watched:
            notice.end(Outcome.LATE)

    def wake(self) -> None:
        """Write what waits."""
        if not self._writing:
            self._writing = True
            self._engine.spawn(self._write())

    async def _write(self) -> None:
        try:
            await asyncio.sleep(GATHER_S)
            with self._books.lock:
                queue, self._queue = self._queue, defaultdict(list)
                notices, self._notices = self._notices, []
            failed = False
            emptied: list[str] = []
            for namespace, removals in queue.items():
                for start in range(0, len(removals), MAX_LIST):
                    piece = removals[start : start + MAX_LIST]
                    if await self._put(namespace, piece):
                        emptied += self._emptied(namespace, piece)
                    else:
                        failed = True
            for notice in notices:
                notice.end(Outcome.FAILED if failed else Outcome.OK)
            with self._books.lock:
                self._watched = {notice for notice in self._watched if not notice.ended}
        finally:
            self._writing = False
        await self.delete(emptied)
        with self._books.lock:
            again = bool(self._notices)
        if again:
            self.wake()

    async def _put(self, namespace: bytes, removals: Sequence[Removal]) -> bool:
        books = self._books
        name = Name(Kind.REMOVED, namespace, new_id(self._clock.now()))
        data = pack_removed(removals)
        try:
            await books.retries.run(
                lambda within_s: self._bucket.put(name.path, data, limit_s=within_s),
                limit_s=books.settings.stall_s,
                give_up_at=time.monotonic() + books.settings.upload_s,
                wanted=books.usable,
                failed=lambda error: books.went_wrong(error, write=True),
            )
        except BucketError as error:
            log.warning("objects: what was removed may be found again after a restart: %s", str(error))
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            books.defect("writing down what was removed", error)
        else:
            self.lists[name] = frozenset(removal.pack for removal in removals)
            return True
        with books.lock:
            self._queue[namespace] += removals  # with the next list
        return False

    def _emptied(self, namespace: bytes, removals: Sequence[Removal]) -> list[str]:
        """Packs of which nothing counts any more."""
        catalogue = self._books.catalogue
        with self._books.lock:
            gone = {removal.pack for removal in removals if removal.record == WHOLE_PACK}
            for ident in {removal.pack for removal in removals} - gone:
                pack = catalogue.packs.get(ident)
                if pack is not None and not pack.live:
                    gone.add(ident)
            catalogue.apply(Removal(ident, WHOLE_PACK) for ident in gone)
            self._books.counts.deleted_packs += len(gone)
        return [Name(Kind.PACK, namespace, ident).path for ident in gone]

    async def delete(self, paths: Sequence[str]) -> None:
        """What cannot be deleted now is tried again when it is listed the next time."""
        books = self._books
        for start in range(0, len(paths), DELETED_AT_ONCE):
            piece = paths[start : start + DELETED_AT_ONCE]
            try:
                await self._bucket.delete(piece, limit_s=books.settings.stall_s + len(piece) / 50)
            except BucketError as error:
                books.went_wrong(error)
                log.debug("objects: %d were not deleted: %s", len(piece), str(error))
                return
