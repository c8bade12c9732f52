"""Keeps the catalogue as the bucket is, and the bucket as its limits say."""

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.objects.books import BREAKER_OPEN, Books, call, log
from kvferry.tiers.objects.bucket import Bucket, BucketError, Listed
from kvferry.tiers.objects.catalogue import Cut, Pack
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.following import READ_S, Follower
from kvferry.tiers.objects.format import WHOLE_PACK, Removal
from kvferry.tiers.objects.health import StoreClock, recover, try_out
from kvferry.tiers.objects.manifests import Manifests
from kvferry.tiers.objects.names import Kind, Name, new_id, prefix_of, read_name, time_of
from kvferry.tiers.objects.removals import Notice, Removals

LIST_S = 60.0
MAX_DROPS = 64
"""Under way at a time: each is asked about every part that is looked for. No more are begun."""
RECORDS_AT_ONCE = 256
"""So many a drop looks at before anybody else has the lock: less than a millisecond."""
STRIKE_REST_S = 0.001
"""Between two looks, so that others have it."""
UNSEEN_DIVISOR = 64
TRIAL_S = 3600.0
"""What a start that was cut off left behind is deleted after so long."""


class Upkeep:
    """``wrote``, ``write_down`` and ``drop`` under the tier's lock; all else on the engine's thread."""

    def __init__(self, books: Books, bucket: Bucket, engine: Engine) -> None:
        self._books = books
        self._bucket = bucket
        self._engine = engine
        self.clock = StoreClock()
        self._removals = Removals(books, bucket, engine, self.clock)
        self._manifests = Manifests(books)
        self._follower = Follower(books, bucket, self._removals, self._manifests)
        self._suspects: set[Name] = set()
        self._refreshing = asyncio.Lock()
        self._unseen_bytes = 0  # written since the last look at what others wrote
        self._recovering = False
        books.opened = lambda: engine.call(self._recover)

    # -- under the lock ------------------------------------------------------------------------------

    def wrote(self, pack: Pack) -> None:
        """A pack of this process is in the bucket."""
        self._follower.wrote(pack.ident)

    def write_down(self, namespace: bytes, removals: Iterable[Removal]) -> None:
        """See Removals."""
        self._removals.write_down(namespace, removals)

    def notify(self, notice: Notice) -> None:
        """See Removals."""
        self._removals.notify(notice)

    def drop(
        self, namespace: bytes | None, older_than_s: float | None, done: Callable[[Dropped], None]
    ) -> None:
        """See the contract. What is in the bucket and not known here yet goes too. Its records are struck on
        the engine's thread, some at a time: nobody waits for it, however many they are."""
        older_s = -math.inf if older_than_s is None else older_than_s
        stored_s, used = self.clock.now() - older_s, time.monotonic() - older_s
        catalogue = self._books.catalogue
        if catalogue.drops >= MAX_DROPS:
            self._engine.call(call, partial(done, Dropped(0, 0, Outcome.REFUSED)))
            return
        cut = catalogue.cut(namespace, stored_s, used)
        notice = Notice(lambda outcome: done(Dropped(cut.parts, cut.nbytes, outcome)))
        self._removals.watch(notice)
        self._engine.call(lambda: self._engine.spawn(self._drop(cut, notice)))

    def close(self) -> None:
        """Once the engine is."""
        self._removals.close()

    # -- start and rhythm ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Try the store, and read what it holds. Raises BucketError."""
        await try_out(self._bucket, self.clock, limit_s=self._books.settings.stall_s)
        await self.refresh()
        self._engine.spawn(self._run())

    async def _run(self) -> None:
        settings = self._books.settings
        while True:
            await asyncio.sleep(settings.refresh_s * random.uniform(0.8, 1.2))  # not all keepers at once
            if not self._books.usable():
                continue
            self._removals.wake()  # for what could not be written down before
            try:
                await self.refresh()
            except BucketError as error:
                log.info("objects at %s were not followed: %s", settings.url, str(error))
            except Exception as error:  # noqa: BLE001 - counted and told by the books
                self._books.defect("following the bucket", error)

    async def writing(self, nbytes: int) -> None:
        """Before so much is put there. So several processes pass the limit of bytes by a share of it each:

        who wrote as much since it looked last at what others wrote looks again first.
        """
        most = self._books.settings.max_bytes
        if most is None:
            return
        if self._unseen_bytes + nbytes > most // UNSEEN_DIVISOR:
            try:
                await self.refresh()
            except BucketError as error:
                log.info("objects at %s were not followed: %s", self._books.settings.url, str(error))
            except Exception as error:  # noqa: BLE001 - counted and told by the books
                self._books.defect("following the bucket", error)
        self._unseen_bytes += nbytes

    async def refresh(self) -> None:
        """List everything, follow it, and delete what goes. Raises BucketError. One at a time."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        began, unseen = time.monotonic(), self._unseen_bytes
        listed = await self._list(None)
        await self._follower.follow({name: entry.nbytes for name, entry in listed.items()}, began)
        await self._tidy(listed)
        await self.retire()
        self._unseen_bytes -= unseen
        await self._write_manifests()

    async def _list(self, namespace: bytes | None) -> dict[Name, Listed]:
        try:
            listed = await self._bucket.list(prefix_of(namespace), limit_s=LIST_S)
        except BucketError as error:
            self._books.went_wrong(error)
            raise
        named = ((read_name(entry.path), entry) for entry in listed)
        return {name: entry for name, entry in named if name is not None}

    def _recover(self) -> None:
        """The breaker opened: nobody waits any longer, and it is asked until the store is back."""
        books = self._books
        with books.lock:
            reports = books.end_all([*books.reading, *books.writing], Outcome.REFUSED, BREAKER_OPEN)
        for report in reports:
            call(report)
        if not self._recovering:
            self._recovering = True
            self._engine.spawn(self._recovery())

    async def _recovery(self) -> None:
        books = self._books
        try:
            while not await self._recovered():
                with books.lock:
                    books.breaker.probe_failed(time.monotonic())
        finally:
            self._recovering = False
        self._removals.wake()

    async def _recovered(self) -> bool:
        """Whether it did, or fell over a defect before it could."""
        try:
            await recover(self._books, self._bucket)
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            self._books.defect("asking whether it is back", error)
            return False
        return True

    # -- what goes -----------------------------------------------------------------------------------

    async def _tidy(self, listed: Mapping[Name, Listed]) -> None:
        """Delete packs of which nothing counts, lists and manifests of packs that are gone, old trials.

        A listing takes a while: what speaks of no pack in it must do so twice.
        """
        packs = {name.ident: name for name in listed if name.kind is Kind.PACK}
        with self._books.lock:
            dead = [name for name in packs.values() if self._books.catalogue.is_dead(name.ident)]
        about = {**self._removals.lists, **self._manifests.known}
        useless = {name for name, idents in about.items() if name in listed and idents.isdisjoint(packs)}
        twice = useless & self._suspects
        self._suspects = useless - twice
        horizon = self.clock.now() - TRIAL_S
        old = [n for n, entry in listed.items() if n.kind is Kind.TRIAL and entry.modified_s < horizon]
        await self._removals.delete([name.path for name in [*dead, *twice, *old]])

    async def retire(self) -> None:
        """Beyond age and size the oldest packs go. They are not found any more before they are deleted."""
        books, settings = self._books, self._books.settings
        going: list[Pack] = []
        horizon = self.clock.now() - settings.max_age_s if settings.max_age_s is not None else 0.0
        while True:
            with books.lock:  # for each: they may be many after a change of the limits
                pack = books.catalogue.first()
                too_much = settings.max_bytes is not None and books.catalogue.nbytes > settings.max_bytes
                if pack is None or (not too_much and time_of(pack.ident) >= horizon):
                    break
                books.catalogue.apply([Removal(pack.ident, WHOLE_PACK)])
                books.counts.deleted_packs += 1
            going.append(pack)
        await self._removals.delete([Name(Kind.PACK, pack.namespace, pack.ident).path for pack in going])

    async def _drop(self, cut: Cut, notice: Notice) -> None:
        removals = await self._strike(cut)
        listed: Mapping[Name, Listed] = {}
        try:
            listed = await self._list(cut.namespace)
        except BucketError:
            notice.end(Outcome.FAILED)
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            self._books.defect("listing for a drop", error)
            notice.end(Outcome.FAILED)
        with self._books.lock:
            catalogue = self._books.catalogue
            for name in listed:
                unknown = name.ident not in catalogue.packs and not catalogue.is_dead(name.ident)
                if name.kind is Kind.PACK and unknown and time_of(name.ident) < cut.stored_s:
                    removals[name.namespace].append(Removal(name.ident, WHOLE_PACK))
                    catalogue.apply(removals[name.namespace][-1:])
            for of_namespace, found in removals.items():
                self._removals.write_down(of_namespace, found)
            self._removals.notify(notice)

    async def _strike(self, cut: Cut) -> dict[bytes, list[Removal]]:
        """All that it is about; what is to be written down, by namespace."""
        catalogue = self._books.catalogue
        removals: dict[bytes, list[Removal]] = defaultdict(list)
        with self._books.lock:
            packs = catalogue.packs_of(cut)
        for pack in packs:
            records, struck = range(len(pack.index.keys)), list[Removal]()
            for start in records[::RECORDS_AT_ONCE]:
                with self._books.lock:
                    found = catalogue.strike_some(cut, pack, records[start : start + RECORDS_AT_ONCE])
                whole = found[-1:] == [Removal(pack.ident, WHOLE_PACK)]
                struck = found if whole else [*struck, *found]
                await asyncio.sleep(STRIKE_REST_S)
            removals[pack.namespace] += struck
        with self._books.lock:
            catalogue.uncut(cut)
        return removals

    # -- manifests -----------------------------------------------------------------------------------

    async def _write_manifests(self) -> None:
        for manifest in self._manifests.due():
            name = Name(Kind.MANIFEST, manifest.namespace, new_id(self.clock.now()))
            data = manifest.data()
            await self._bucket.put(name.path, data, limit_s=READ_S)
            self._manifests.saw(name, len(data), manifest.packs)
            await self._removals.delete([old.path for old in manifest.replaces])
