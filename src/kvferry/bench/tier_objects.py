"""The objects tier in ``kvferry bench tiers``, beside bare obstore against the same server in the same run.

The bare arm puts and gets whole objects as large as the tier's packs, as many at a time as the tier does, and
drops what it gets. Both take turns. The server is a real one on this host, so it shares the CPUs with both.
"""

import asyncio
import contextlib
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvferry.bench.tier_arms import WAIT_S, Parts, TierArm, parts_in_memory
from kvferry.bench.tier_beside import BesideRow, Turn, beside, take_turn
from kvferry.errors import BrokenError
from kvferry.testing.s3 import running_s3
from kvferry.tiers.objects.bucket import Bucket, open_bucket
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

LARGEST_PART_MIB = 16
LINGER_S = 0.02
"""The last pack of a turn should not wait for parts that do not come."""


class BareObjects:
    """obstore without a tier. ``get`` reads what the last ``set`` wrote; nothing is verified or kept."""

    name = "bare"

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._bucket: Bucket = open_bucket(settings)
        self._memory = mmap.mmap(-1, settings.pack_bytes)
        self._memory.write(os.urandom(settings.pack_bytes))
        self._loop = asyncio.new_event_loop()
        self._sizes: dict[str, int] = {}

    def prepare(self, parts: Parts) -> None:
        """See Arm."""
        self.set(parts)

    def set(self, parts: Parts) -> None:
        """See Arm."""
        whole, rest = divmod(parts.nbytes, self._settings.pack_bytes)
        sizes = [self._settings.pack_bytes] * whole + [rest] * (rest > 0)
        self._sizes = {f"bare/{number}": nbytes for number, nbytes in enumerate(sizes)}
        view = memoryview(self._memory)
        self._all(
            self._settings.uploads,
            lambda path, nbytes: self._bucket.put(path, view[:nbytes], limit_s=WAIT_S),
        )

    def get(self, parts: Parts) -> None:
        """See Arm."""
        self._all(
            self._settings.requests, lambda path, nbytes: self._bucket.get(path, 0, nbytes, limit_s=WAIT_S)
        )

    def forget(self, parts: Parts) -> None:
        """Delete what was put."""
        self._loop.run_until_complete(self._bucket.delete(list(self._sizes), limit_s=WAIT_S))

    def close(self) -> None:
        """See Arm."""
        self._loop.close()
        self._bucket.close()

    def _all(self, at_once: int, work: Callable[[str, int], Awaitable[object]]) -> None:
        gate = asyncio.Semaphore(at_once)

        async def one(path: str, nbytes: int) -> None:
            async with gate:
                await work(path, nbytes)

        async def everything() -> None:
            await asyncio.gather(*(one(*each) for each in self._sizes.items()))

        self._loop.run_until_complete(everything())


class ObjectsArm(TierArm):
    """The tier as a keeper uses it."""

    def __init__(self, tier: ObjectTier) -> None:
        super().__init__(tier)
        self._objects = tier

    def forget(self, parts: Parts) -> None:
        """Remove them, and wait until they are."""
        done = threading.Event()
        self._objects.remove(parts.refs, done=lambda outcomes: done.set())
        if not done.wait(WAIT_S):
            raise BrokenError(f"a removal did not end in {WAIT_S:.0f} s")


def measure_objects(part_mib: Sequence[float], rounds: int, sample_bytes: int) -> list[BesideRow]:
    """Writes and reads at each size up to LARGEST_PART_MIB. Raises MisconfiguredError where it cannot."""
    rows: list[BesideRow] = []
    with running_s3() as server:
        settings = server.settings("kvferry-bench/tiers", linger_s=LINGER_S)
        for mib in part_mib:
            if mib <= LARGEST_PART_MIB:
                with _arms(settings) as arms, parts_in_memory(int(mib * (1 << 20)), sample_bytes) as parts:
                    try:
                        rows += _compare(arms, parts, mib, rounds)
                    finally:
                        arms[1].close()  # joins the threads that may still read or fill the parts' memory
    return rows


@contextlib.contextmanager
def _arms(settings: ObjectSettings) -> Iterator[tuple[BareObjects, ObjectsArm]]:
    """The tier's ``close`` may be repeated."""
    with contextlib.ExitStack() as stack:
        bare = BareObjects(settings)
        stack.callback(bare.close)
        tier = ObjectsArm(ObjectTier.open(settings))
        stack.callback(tier.close)
        yield bare, tier


def _compare(
    arms: tuple[BareObjects, ObjectsArm], parts: Parts, part_mib: float, rounds: int
) -> list[BesideRow]:
    """The first round warms up and is not counted."""
    writes: list[list[Turn]] = [[], []]
    reads: list[list[Turn]] = [[], []]
    for number in range(rounds + 1):
        named = parts.renamed()
        order = (0, 1) if number % 2 else (1, 0)
        for index in order:
            writes[index].append(take_turn(arms[index].set, named))
        for index in order:
            reads[index].append(take_turn(arms[index].get, named))
        named.verify()
        for view in named.target:
            view[:8] = bytes(8)
        for arm in arms:
            arm.forget(named)
    return [
        beside("read", part_mib, *(turns[1:] for turns in reads)),
        beside("write", part_mib, *(turns[1:] for turns in writes)),
    ]
