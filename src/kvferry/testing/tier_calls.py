"""Calls to a tier that wait for their results, and parts to call it with."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.identity.names import DIGEST_BYTES, NAMESPACE_BYTES, PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.testing import expectations
from kvferry.testing.expectations import expect
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier

DEADLINE_S = 15.0
UNTOUCHED = 0xA5


class Results:
    """Collects ``done`` calls of operations on ``count`` items."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._condition = threading.Condition()
        self._found: dict[int, Any] = {}
        self._repeated: list[int] = []

    def done(self, index: int, result: Any) -> None:
        """The callback."""
        with self._condition:
            if index in self._found:
                self._repeated.append(index)
            self._found[index] = result
            self._condition.notify_all()

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """The results in order, once all are there. AssertionError otherwise, and for a repeated one."""
        timeout_s = expectations.WAIT_S if timeout_s is None else timeout_s
        with self._condition:
            whole = self._condition.wait_for(lambda: len(self._found) >= self._count, timeout_s)
            missing = sorted(set(range(self._count)) - set(self._found))
            expect(whole, f"items {missing} of {self._count} were not reported in {timeout_s} s")
            expect(not self._repeated, f"items {self._repeated} were reported more than once")
            return [self._found[index] for index in range(self._count)]


def some_ref(nbytes: int, seed: int) -> PartRef:
    """A part of that size with a name made from ``seed``."""
    source = random.Random(seed)
    return PartRef(
        PartKey(source.randbytes(NAMESPACE_BYTES), source.randbytes(DIGEST_BYTES), seed % 3), nbytes
    )


def some_bytes(nbytes: int, seed: int) -> memoryview:
    """Reproducible contents."""
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def empty_memory(nbytes: int) -> memoryview:
    """Memory with a known filling, to see whether it was touched."""
    return memoryview(bytearray([UNTOUCHED]) * nbytes)


def left_to_the_tier(data: memoryview) -> tuple[bytes, ...]:
    """The checksums of data that nobody has read yet."""
    del data
    return ()


def store_all(
    tier: Tier,
    parts: Sequence[tuple[PartRef, memoryview]],
    *,
    deadline_s: float = DEADLINE_S,
    checksums: Callable[[memoryview], tuple[bytes, ...]] = part_checksums,
) -> list[Outcome]:
    """Store and wait."""
    results = Results(len(parts))
    items = [StoreItem(ref, data, checksums(data), place) for place, (ref, data) in enumerate(parts)]
    tier.store(items, deadline=time.monotonic() + deadline_s, done=results.done)
    return results.wait()


def fetch_all(
    tier: Tier, refs: Sequence[PartRef], *, deadline_s: float = DEADLINE_S
) -> list[tuple[FetchResult, memoryview]]:
    """Fetch into fresh memory and wait."""
    results = Results(len(refs))
    items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in refs]
    tier.fetch(items, deadline=time.monotonic() + deadline_s, done=results.done)
    return [(result, item.into) for result, item in zip(results.wait(), items, strict=True)]


def probe_all(tier: Tier, refs: Sequence[PartRef], *, deadline_s: float = DEADLINE_S) -> list[Outcome]:
    """Probe and wait."""
    results = Results(1)
    tier.probe(refs, deadline=time.monotonic() + deadline_s, done=lambda found: results.done(0, list(found)))
    found: list[Outcome] = results.wait()[0]
    return found
