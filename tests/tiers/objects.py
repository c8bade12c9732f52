"""A bucket or a directory as the tier contract sees it: it can fail, and what is stored can be changed."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvferry.identity.names import PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import fetch_all, some_bytes, some_ref, store_all
from kvferry.testing.tier_contract import Damage
from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects.bucket import Bucket, BucketError, Listed, Trouble, open_bucket
from kvferry.tiers.objects.catalogue import Record
from kvferry.tiers.objects.format import record_bytes
from kvferry.tiers.objects.names import Kind, Name
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

QUICK = {"linger_s": 0.01, "pack_bytes": 16 << 20, "write_bytes": 128 << 20, "stall_s": 30.0}
"""Of a tier whose tests wait for it, on a machine that may be slow."""


class TroubledBucket:
    """A real bucket, after a look at what is wrong with it.

    failing: every request fails so. before: awaited before each request, with what it is ("put"...) and its
    path. requests: what was asked, in order.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.failing: Trouble | None = None
        self.before: Callable[[str, str], Awaitable[None]] | None = None
        self.requests: list[tuple[str, str]] = []

    async def get(self, path: str, start: int, nbytes: int, *, limit_s: float) -> memoryview:
        await self._meet("get", path)
        return await self.bucket.get(path, start, nbytes, limit_s=limit_s)

    async def read(self, path: str, *, limit_s: float) -> memoryview:
        await self._meet("read", path)
        return await self.bucket.read(path, limit_s=limit_s)

    async def put(self, path: str, data: bytes | memoryview, *, limit_s: float) -> None:
        await self._meet("put", path)
        await self.bucket.put(path, data, limit_s=limit_s)

    async def list(self, prefix: str, *, limit_s: float) -> list[Listed]:
        await self._meet("list", prefix)
        return await self.bucket.list(prefix, limit_s=limit_s)

    async def delete(self, paths: Sequence[str], *, limit_s: float) -> None:
        for path in paths:
            await self._meet("delete", path)
        await self.bucket.delete(paths, limit_s=limit_s)

    def close(self) -> None:
        self.bucket.close()

    def count(self, verb: str, kind: Kind | None = None) -> int:
        """How many requests there were."""
        return sum(
            asked == verb and (kind is None or f"/{kind.value}/" in path) for asked, path in self.requests
        )

    async def _meet(self, verb: str, path: str) -> None:
        self.requests.append((verb, path))
        if self.before is not None:
            await self.before(verb, path)
        if self.failing is not None:
            raise BucketError(self.failing, "as told")


class MemoryBucket:
    """A ``Bucket`` in a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def get(self, path: str, start: int, nbytes: int, *, limit_s: float) -> memoryview:
        return (await self.read(path, limit_s=limit_s))[start : start + nbytes]

    async def read(self, path: str, *, limit_s: float) -> memoryview:
        del limit_s
        if path not in self.objects:
            raise BucketError(Trouble.ABSENT, path)
        return memoryview(self.objects[path])

    async def put(self, path: str, data: bytes | memoryview, *, limit_s: float) -> None:
        del limit_s
        self.objects[path] = bytes(data)

    async def list(self, prefix: str, *, limit_s: float) -> list[Listed]:
        del limit_s
        return [
            Listed(path, len(data), 0.0) for path, data in self.objects.items() if path.startswith(prefix)
        ]

    async def delete(self, paths: Sequence[str], *, limit_s: float) -> None:
        del limit_s
        for path in paths:
            self.objects.pop(path, None)

    def close(self) -> None:
        pass


class ObjectStore:
    """``TierStore`` over one place. settings: of a new tier. trouble: begins and ends an outage."""

    def __init__(self, settings: ObjectSettings, trouble: Callable[[bool], None] | None = None) -> None:
        self.settings = settings
        self.buckets: list[TroubledBucket] = []
        self._trouble = trouble
        self._opened: list[ObjectTier] = []
        self._direct: Any = None

    def open(self, **changes: Any) -> ObjectTier:
        settings = replace(self.settings, **changes)
        self._opened.append(ObjectTier.open(settings, opened=self._open_bucket))
        return self._opened[-1]

    def close(self) -> None:
        for tier in self._opened:
            tier.close()

    @property
    def bucket(self) -> TroubledBucket:
        """Of the tier opened last."""
        return self.buckets[-1]

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Every request fails, and the tiers have noticed."""
        self._begin(on=True)
        try:
            for n, tier in enumerate(self._opened):
                eventually(lambda tier=tier, n=n: _noticed(tier, n), "the outage is noticed")  # type: ignore[misc]
            yield
        finally:
            self._begin(on=False)

    def damage(self, ref: PartRef, how: Damage) -> None:
        """Of the tier opened last: a bit of the part; its pack cut before its end; a byte more before it."""
        path, data, record = self.record(ref)
        start, end = record.offset, record.offset + record_bytes(ref.nbytes)
        match how:
            case Damage.BIT_FLIP:
                data[end - ref.nbytes // 2 - 1] ^= 1
            case Damage.TRUNCATION:
                del data[end - 1 :]
            case Damage.EXTENSION:
                data[start:start] = b"x"
        self.put(path, bytes(data))

    def misplace(self, source: PartRef, under: PartRef) -> None:
        _, data, record = self.record(source)
        taken = data[record.offset : record.offset + record_bytes(source.nbytes)]
        path, data, record = self.record(under)
        data[record.offset : record.offset + record_bytes(under.nbytes)] = taken
        self.put(path, bytes(data))

    def record(self, ref: PartRef) -> tuple[str, bytearray, Record]:
        """The path and the bytes of the pack that a part is in, and where in it."""
        record = self._opened[-1]._books.catalogue.find(ref)
        assert record is not None
        path = Name(Kind.PACK, record.pack.namespace, record.pack.ident).path
        return path, bytearray(self.direct.get(path).bytes()), record

    @property
    def direct(self) -> Any:
        """The store of obstore, without tier and trouble."""
        if self._direct is None:
            self._direct = open_bucket(self.settings)._store  # type: ignore[attr-defined]
        return self._direct

    def put(self, path: str, data: bytes) -> None:
        self.direct.put(path, data, use_multipart=False)

    def paths(self, kind: Kind | None = None) -> list[str]:
        """What is there."""
        found = [meta["path"] for meta in self.direct.list("v1/").collect()]
        return sorted(path for path in found if kind is None or f"/{kind.value}/" in path)

    def _begin(self, *, on: bool) -> None:
        if self._trouble is not None:
            self._trouble(on)
        else:
            for bucket in self.buckets:
                bucket.failing = Trouble.BROKEN if on else None

    def _open_bucket(self, settings: ObjectSettings) -> Bucket:
        self.buckets.append(TroubledBucket(open_bucket(settings)))
        return self.buckets[-1]


def _noticed(tier: ObjectTier, number: int) -> bool:
    store_all(tier, [(some_ref(1, 9000 + number), some_bytes(1, 9000 + number))], deadline_s=0.5)
    return tier.statistics().state == "down"


def found_right(tier: ObjectTier, ref: PartRef, seed: int) -> bool:
    """Whether it is there with the bytes of that seed. AssertionError for any other bytes."""
    result, memory = fetch_all(tier, [ref])[0]
    assert result.outcome is not Outcome.OK or memory == some_bytes(ref.nbytes, seed)
    return result.outcome is Outcome.OK
