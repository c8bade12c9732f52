"""Reads what a listing shows and this process does not know yet.

What is listed is the truth: a pack that is listed and not known is read from a manifest that names it, or
else from its own end; one that is known and not listed any more is forgotten.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvferry.errors import CorruptError
from kvferry.tiers.objects.books import Books, log
from kvferry.tiers.objects.bucket import Bucket, BucketError, Trouble
from kvferry.tiers.objects.format import (
    FOOTER_BYTES,
    PackIndex,
    Removal,
    read_manifest,
    read_removed,
    read_tail,
    tail_length,
)
from kvferry.tiers.objects.manifests import Manifests
from kvferry.tiers.objects.names import Kind, Name
from kvferry.tiers.objects.removals import Removals

_T = TypeVar("_T")
_R = TypeVar("_R")
READ_S = 60.0
AT_ONCE = 8
TAIL_GUESS_BYTES = 64 << 10
"""Of a pack whose end is read: enough for the index of 1,200 parts."""


class Follower:
    """On the engine's thread, but for ``wrote``. Methods raise BucketError."""

    def __init__(self, books: Books, bucket: Bucket, removals: Removals, manifests: Manifests) -> None:
        self._books = books
        self._bucket = bucket
        self._removals = removals
        self._manifests = manifests
        self._known_at: dict[bytes, float] = {}

    def wrote(self, ident: bytes) -> None:
        """A pack of this process is in the bucket. Under the tier's lock."""
        self._known_at[ident] = time.monotonic()

    async def follow(self, names: Mapping[Name, int], began: float) -> None:
        """names: all objects of a listing that began then, and their sizes."""
        packs = {name.ident: name for name in names if name.kind is Kind.PACK}
        self._removals.lists = {n: about for n, about in self._removals.lists.items() if n in names}
        self._manifests.keep(names)
        await self._follow_removed([name for name in names if name.kind is Kind.REMOVED])
        self._forget_deleted(packs, began)
        await self._read_manifests([name for name in names if name.kind is Kind.MANIFEST], packs)
        unknown = self._unknown(packs)
        ends = await all_of(lambda name: self._read_end(name, names[name]), unknown)
        for name, index in zip(unknown, ends, strict=True):
            if index is not None:
                self._add(name.namespace, index)
        with self._books.lock:
            self._books.catalogue.settle(packs)

    async def _follow_removed(self, names: Sequence[Name]) -> None:
        """Others' lists of what does not count."""
        new = [name for name in names if name not in self._removals.lists]
        for name, data in zip(new, await all_of(self._read, new), strict=True):
            removals: list[Removal] = []
            if data is not None:
                try:
                    removals = read_removed(data)
                except CorruptError as error:
                    log.warning("objects: %s: %s", name.path, str(error))
            with self._books.lock:
                self._books.catalogue.apply(removals)
            self._removals.lists[name] = frozenset(removal.pack for removal in removals)

    def _forget_deleted(self, packs: Mapping[bytes, Name], began: float) -> None:
        """Those known before the listing began, and not in it."""
        with self._books.lock:
            catalogue = self._books.catalogue
            for ident in [ident for ident in catalogue.packs if ident not in packs]:
                if self._known_at.get(ident, 0.0) < began:
                    catalogue.forget(ident)
            self._known_at = {i: at for i, at in self._known_at.items() if i in catalogue.packs}

    def _unknown(self, packs: Mapping[bytes, Name]) -> list[Name]:
        with self._books.lock:
            known, dead = self._books.catalogue.packs, self._books.catalogue.is_dead
            return [name for ident, name in packs.items() if ident not in known and not dead(ident)]

    async def _read_manifests(self, names: Sequence[Name], packs: Mapping[bytes, Name]) -> None:
        new = [name for name in names if name not in self._manifests.known]
        for name, data in zip(new, await all_of(self._read, new), strict=True):
            if data is None:
                continue
            try:
                indexes = read_manifest(data)
            except CorruptError as error:
                log.warning("objects: %s: %s", name.path, str(error))
                indexes = []
            self._manifests.saw(name, len(data), indexes)
            for index in indexes:
                if packs.get(index.ident) == Name(Kind.PACK, name.namespace, index.ident):
                    self._add(name.namespace, index)

    def _add(self, namespace: bytes, index: PackIndex) -> None:
        with self._books.lock:
            if self._books.catalogue.add(namespace, index) is not None:
                self.wrote(index.ident)

    async def _read(self, name: Name) -> memoryview | None:
        """None: it was deleted meanwhile."""
        limit_s = self._books.settings.stall_s + READ_S
        try:
            return await self._again(lambda within_s: self._bucket.read(name.path, limit_s=within_s), limit_s)
        except BucketError as error:
            if error.trouble is not Trouble.ABSENT:
                raise
            return None

    async def _read_end(self, name: Name, nbytes: int) -> PackIndex | None:
        """None: it was deleted meanwhile. Without parts: it is no pack; it goes when it is old, as any."""
        try:
            tail = await self._tail(name, nbytes, min(nbytes, TAIL_GUESS_BYTES))
            length = tail_length(tail[-FOOTER_BYTES:])
            if length > len(tail):
                tail = await self._tail(name, nbytes, length)
            return read_tail(tail[-length:], ident=name.ident, namespace=name.namespace, nbytes=nbytes)
        except BucketError as error:
            if error.trouble is Trouble.ABSENT:
                return None
            if error.trouble is not Trouble.SHORT:
                raise
            log.warning("objects: %s: %s", name.path, str(error))
        except CorruptError as error:
            log.warning("objects: %s: %s", name.path, str(error))
        return PackIndex(name.ident, nbytes, [], array("Q"))

    async def _tail(self, name: Name, nbytes: int, length: int) -> bytes:
        if not FOOTER_BYTES <= length <= nbytes:
            raise CorruptError("pack: too short for its index")
        found = await self._again(
            lambda within_s: self._bucket.get(name.path, nbytes - length, length, limit_s=within_s),
            self._books.settings.stall_s,
        )
        return bytes(found)

    async def _again(self, work: Callable[[float], Awaitable[memoryview]], limit_s: float) -> memoryview:
        books = self._books
        found = await books.retries.run(
            work,
            limit_s=limit_s,
            give_up_at=time.monotonic() + 2 * limit_s,
            wanted=books.usable,
            failed=books.went_wrong,
        )
        books.went_well()
        return found


async def all_of(work: Callable[[_T], Awaitable[_R]], arguments: Iterable[_T]) -> list[_R]:
    """What each gives, in order, AT_ONCE at a time. The first error ends the rest."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(argument: _T) -> _R:
        async with gate:
            return await work(argument)

    tasks = [asyncio.ensure_future(one(argument)) for argument in arguments]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
