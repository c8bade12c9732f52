"""The contract suite for tiers: a new tier's test is a subclass and a fixture.

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self): ...

``part_sizes`` may be narrowed by a tier with limits.
"""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from kvferry.errors import BrokenError
from kvferry.identity.names import DIGEST_BYTES, NAMESPACE_BYTES, PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier

WAIT_S = 20.0
DEADLINE_S = 15.0
UNTOUCHED = 0xA5


class Results:
    """Collects ``done`` calls; a second call for one item is remembered as a breach."""

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

    def wait(self, timeout_s: float = WAIT_S) -> list[Any]:
        """The results in order, once all are there."""
        with self._condition:
            whole = self._condition.wait_for(lambda: len(self._found) == self._count, timeout_s)
            expect(whole, f"only {len(self._found)} of {self._count} items were reported in {timeout_s} s")
            expect(not self._repeated, f"items {self._repeated} were reported more than once")
            return [self._found[index] for index in range(self._count)]


def expect(condition: object, message: str) -> None:
    """AssertionError with ``message`` unless ``condition``."""
    if not condition:
        raise AssertionError(message)


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


def store_all(
    tier: Tier, parts: Sequence[tuple[PartRef, memoryview]], *, deadline_s: float = DEADLINE_S
) -> list[Outcome]:
    """Store and wait."""
    results = Results(len(parts))
    items = [StoreItem(ref, data, part_checksums(data)) for ref, data in parts]
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


class TierContract:
    """Subclass with a ``tier`` fixture; each test gets a tier without the parts it uses."""

    part_sizes: ClassVar[tuple[int, ...]] = (1, 4096, 1 << 20, (5 << 19) + 17, 10 << 20)

    def test_what_is_stored_comes_back_byte_for_byte(self, tier: Tier) -> None:
        """Also its checksums, at every size."""
        parts = [(some_ref(size, i), some_bytes(size, i)) for i, size in enumerate(self.part_sizes)]
        expect(store_all(tier, parts) == [Outcome.OK] * len(parts), "a store failed")
        for (ref, data), (result, memory) in zip(parts, fetch_all(tier, [r for r, _ in parts]), strict=True):
            expect(result.outcome is Outcome.OK, f"{ref.nbytes} bytes: {result.outcome}")
            expect(memory == data, f"{ref.nbytes} bytes came back different")
            expect(result.checksums == part_checksums(data), f"{ref.nbytes} bytes: other checksums")

    def test_what_was_never_stored_is_a_miss_and_leaves_memory_alone(self, tier: Tier) -> None:
        """Fetch and probe agree."""
        refs = [some_ref(4096, 100), some_ref(6 << 20, 101)]
        for result, memory in fetch_all(tier, refs):
            expect(result == FetchResult(Outcome.MISS, ()), f"found {result}")
            expect(bytes(memory[:64]) == bytes([UNTOUCHED]) * 64, "memory of a miss was written")
        expect(probe_all(tier, refs) == [Outcome.MISS] * 2, "probe found what was never stored")

    def test_a_probe_tells_present_from_absent_in_order(self, tier: Tier) -> None:
        """One answer per reference; an empty probe answers too."""
        parts = [(some_ref(5000, i), some_bytes(5000, i)) for i in range(200, 206)]
        store_all(tier, parts[::2])
        expect(probe_all(tier, [ref for ref, _ in parts]) == [Outcome.OK, Outcome.MISS] * 3, "wrong answers")
        expect(probe_all(tier, []) == [], "an empty probe")

    def test_storing_what_is_there_is_ok(self, tier: Tier) -> None:
        """And changes nothing."""
        part = (some_ref(3 << 20, 300), some_bytes(3 << 20, 300))
        expect(store_all(tier, [part]) == [Outcome.OK], "first store")
        expect(store_all(tier, [part]) == [Outcome.OK], "second store")
        expect(fetch_all(tier, [part[0]])[0][1] == part[1], "bytes changed")

    def test_a_removed_part_is_a_miss(self, tier: Tier) -> None:
        """Removal happens in the background."""
        part = (some_ref(3 << 20, 400), some_bytes(3 << 20, 400))
        store_all(tier, [part])
        tier.touch([part[0]])
        tier.remove([part[0]])
        give_up = time.monotonic() + WAIT_S
        while probe_all(tier, [part[0]]) != [Outcome.MISS]:
            expect(time.monotonic() < give_up, "still there")
            time.sleep(0.01)

    def test_a_deadline_already_past_ends_everything_as_late(self, tier: Tier) -> None:
        """Nothing is written either."""
        part = (some_ref(1 << 20, 500), some_bytes(1 << 20, 500))
        store_all(tier, [part])
        result, memory = fetch_all(tier, [part[0]], deadline_s=-1.0)[0]
        expect(result == FetchResult(Outcome.LATE, ()), f"fetch: {result}")
        expect(memory == empty_memory(1 << 20), "memory of a late item was written")
        expect(probe_all(tier, [part[0]], deadline_s=-1.0) == [Outcome.LATE], "probe")
        late = (some_ref(1 << 20, 501), some_bytes(1 << 20, 501))
        expect(store_all(tier, [late], deadline_s=-1.0) == [Outcome.LATE], "store")

    def test_after_done_no_memory_is_touched(self, tier: Tier) -> None:
        """Cancelled items report once, and whatever was reported stays as it was at that moment."""
        refs = [some_ref(2 << 20, i) for i in range(600, 612)]
        store_all(tier, [(ref, some_bytes(ref.nbytes, 600)) for ref in refs])
        items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in refs]
        results = Results(len(items))
        at_done: dict[int, bytes] = {}

        def done(index: int, result: FetchResult) -> None:
            at_done[index] = bytes(items[index].into)
            results.done(index, result)

        transfer = tier.fetch(items, deadline=time.monotonic() + DEADLINE_S, done=done)
        transfer.cancel()
        outcomes = {result.outcome for result in results.wait()}
        expect(outcomes <= {Outcome.OK, Outcome.LATE}, f"cancelled items ended as {outcomes}")
        time.sleep(0.05)
        for index, item in enumerate(items):
            expect(bytes(item.into) == at_done[index], f"item {index} was touched after done")

    def test_memory_of_another_size_is_refused_at_once(self, tier: Tier) -> None:
        """A defect of the caller, not an outcome."""
        try:
            tier.fetch([FetchItem(some_ref(100, 700), empty_memory(99))], deadline=0.0, done=_never)
        except BrokenError:
            return
        raise AssertionError("memory of a wrong size was accepted")

    def test_close_ends_what_is_left_and_may_be_repeated(self, tier: Tier) -> None:
        """Later calls end as LATE."""
        refs = [some_ref(1 << 20, i) for i in range(800, 804)]
        results = Results(len(refs))
        items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in refs]
        tier.fetch(items, deadline=time.monotonic() + DEADLINE_S, done=results.done)
        tier.close()
        tier.close()
        outcomes = {result.outcome for result in results.wait()}
        expect(outcomes <= {Outcome.MISS, Outcome.LATE}, f"found {outcomes}")
        expect(fetch_all(tier, refs[:1])[0][0].outcome is Outcome.LATE, "a closed tier answered")


def _never(index: int, result: FetchResult) -> None:
    raise AssertionError(f"item {index} was reported: {result}")
