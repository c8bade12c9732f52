"""What only a real S3 server shows: listings of many pages, and one whose certificate nobody else knows."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.tiers.authority import Authority
from tests.tiers.objects import QUICK
from tests.tiers.s3_front import Front

from kvferry.errors import MisconfiguredError
from kvferry.testing.expectations import eventually
from kvferry.testing.s3 import S3Server
from kvferry.testing.tier_calls import fetch_all, probe_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.objects.bucket import Bucket, open_bucket
from kvferry.tiers.objects.tier import ObjectTier

MANY = 1_100  # a page of a listing has 1,000
AT_ONCE = 32
LIMIT_S = 120.0
REFS = [some_ref(10_000, seed) for seed in range(3)]
PARTS = [(ref, some_bytes(ref.nbytes, seed)) for seed, ref in enumerate(REFS)]

T = TypeVar("T")


def asked(work: Callable[[], Awaitable[T]]) -> T:
    async def all_of_it() -> T:
        return await work()

    return asyncio.run(all_of_it())


async def fill(bucket: Bucket, paths: list[str]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def put(path: str) -> None:
        async with gate:
            await bucket.put(path, b"x", limit_s=LIMIT_S)

    await asyncio.gather(*map(put, paths))


def test_what_follows_the_first_thousand_of_a_listing_is_found_and_dropped(s3: S3Server) -> None:
    settings = s3.settings("pages/many", **QUICK)
    bucket = open_bucket(settings)
    paths = [f"v1/0/{number:04}" for number in range(MANY)]  # before the names of packs
    try:
        asked(lambda: fill(bucket, paths))
        first = ObjectTier.open(settings)
        try:
            assert store_all(first, PARTS) == [Outcome.OK] * len(REFS)
        finally:
            first.close()
        listed = asked(lambda: bucket.list("v1/", limit_s=LIMIT_S))
        assert {entry.path for entry in listed} > set(paths)
        second = ObjectTier.open(settings)
        try:
            assert probe_all(second, REFS) == [Outcome.OK] * len(REFS)
            said: list[Dropped] = []
            second.drop(done=said.append)
            eventually(lambda: bool(said), "dropped")
            assert (said[0].parts, said[0].outcome) == (len(REFS), Outcome.OK)
        finally:
            second.close()
        third = ObjectTier.open(settings)
        try:
            assert probe_all(third, REFS) == [Outcome.MISS] * len(REFS)
        finally:
            third.close()
        asked(lambda: bucket.delete(paths, limit_s=LIMIT_S))
        left = asked(lambda: bucket.list("v1/0/", limit_s=LIMIT_S))
        assert left == [], "more than a thousand are deleted at a time"
    finally:
        bucket.close()


def test_a_private_authority_is_trusted_when_it_is_named(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("s3")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.cert, issued.key)
    with Front(s3.port, context) as front:
        settings = s3.settings("private/ca", endpoint=f"https://127.0.0.1:{front.port}", **QUICK)
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(
            MisconfiguredError, match="unknown authority: name a file that holds it in SSL_CERT"
        ):
            ObjectTier.open(settings).close()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        tier = ObjectTier.open(settings)
        try:
            assert store_all(tier, PARTS) == [Outcome.OK] * len(REFS)
            assert [bytes(data) for _, data in fetch_all(tier, REFS)] == [bytes(data) for _, data in PARTS]
        finally:
            tier.close()
