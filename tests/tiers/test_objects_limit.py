"""The limit of bytes of a bucket that several processes write to is passed by what it says, and no more."""

import random
from collections.abc import Iterator

import pytest
from tests.tiers.objects import QUICK, MemoryBucket

from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.objects import upkeep
from kvferry.tiers.objects.bucket import Listed
from kvferry.tiers.objects.names import Kind
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

pytestmark = pytest.mark.usefixtures("obstore")

PART = 20_000
PACK = 21_000  # of one part, at most
MOST = 20 * PACK
DIVISOR = 8
WRITERS = 3


class Shared(MemoryBucket):
    """Of several tiers at once. most: bytes of packs that it ever held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    @property
    def nbytes(self) -> int:
        return sum(len(data) for path, data in list(self.objects.items()) if f"/{Kind.PACK.value}/" in path)

    async def put(self, path: str, data: bytes | memoryview, *, limit_s: float) -> None:
        await super().put(path, data, limit_s=limit_s)
        self.most = max(self.most, self.nbytes)

    async def list(self, prefix: str, *, limit_s: float) -> list[Listed]:
        found = list(self.objects.items())
        return [Listed(path, len(data), 0.0) for path, data in found if path.startswith(prefix)]


@pytest.fixture
def bucket() -> Shared:
    return Shared()


@pytest.fixture
def tiers(bucket: Shared, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ObjectTier]]:
    """Each looks at what the others wrote when it must, and never of itself."""
    monkeypatch.setattr(upkeep, "UNSEEN_DIVISOR", DIVISOR)
    settings = ObjectSettings("s3://bucket", **{**QUICK, "refresh_s": 3600.0, "max_bytes": MOST})
    opened = [ObjectTier.open(settings, opened=lambda _: bucket) for _ in range(WRITERS)]
    yield opened
    for tier in opened:
        tier.close()


@pytest.mark.parametrize("seed", range(3))
def test_each_writer_passes_it_by_its_share_at_most(
    bucket: Shared, tiers: list[ObjectTier], seed: int
) -> None:
    """Whoever writes when: in turns, in bursts, one alone."""
    chance = random.Random(seed)
    number = written = 0
    while written < 3 * MOST:
        tier = chance.choice(tiers)
        for _ in range(chance.choice([1, 1, 5])):
            number += 1
            ref = some_ref(PART, seed=number)
            assert store_all(tier, [(ref, some_bytes(PART, number))]) == [Outcome.OK]
            written += PART
    assert MOST - PACK <= bucket.most <= MOST + WRITERS * (MOST // DIVISOR + PACK)
    for tier in tiers:
        tier._engine.submit(tier._upkeep.refresh()).result(60.0)
    eventually(lambda: bucket.nbytes <= MOST, "within the limit")
