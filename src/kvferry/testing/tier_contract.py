"""The contract suite for tiers: a new tier's test is a subclass and a fixture.

    class TestMyTier(TierContract):
        @pytest.fixture
        def store(self) -> TierStore: ...

``part_sizes`` may be narrowed by a tier with limits. docs/testing.md has a whole example.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from enum import Enum
from typing import ClassVar, Protocol

import pytest

from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.testing import expectations
from kvferry.testing.census import leaves_nothing
from kvferry.testing.expectations import eventually, expect
from kvferry.testing.tier_calls import (
    DEADLINE_S,
    UNTOUCHED,
    Results,
    empty_memory,
    fetch_all,
    left_to_the_tier,
    probe_all,
    some_bytes,
    some_ref,
    store_all,
)
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier

__all__ = [
    "DEADLINE_S",
    "FAILURES",
    "UNTOUCHED",
    "Damage",
    "Results",
    "TierContract",
    "TierStore",
    "empty_memory",
    "expect",
    "fetch_all",
    "probe_all",
    "some_bytes",
    "some_ref",
    "store_all",
]

OUTAGE_DEADLINE_S = 0.5
# How an operation may end that the store had no part in.
FAILURES = {Outcome.FAILED, Outcome.LATE, Outcome.REFUSED}


class Damage(Enum):
    """What is done to a stored part."""

    BIT_FLIP = "bit flip"
    TRUNCATION = "truncation"
    EXTENSION = "extension"


class TierStore(Protocol):
    """What a tier stands on, empty for each test, and ways to break it."""

    def open(self) -> Tier:
        """A new tier over this store. The suite closes it."""
        ...

    def outage(self) -> AbstractContextManager[None]:
        """While it lasts no operation can succeed; after it the tier recovers by itself."""
        ...

    def damage(self, ref: PartRef, how: Damage) -> None:
        """Change what is stored of the part, behind the tier's back."""

    def misplace(self, source: PartRef, under: PartRef) -> None:
        """Put what is stored of ``source`` under the name of ``under`` too. Both have the same size."""


class TierContract:
    """Subclass with a ``store`` fixture. Each test's name states the property."""

    part_sizes: ClassVar[tuple[int, ...]] = (1, 4096, 1 << 20, (5 << 19) + 17, 10 << 20)

    @pytest.fixture
    def tier(self, store: TierStore) -> Iterator[Tier]:
        """A tier without parts."""
        made = store.open()
        yield made
        made.close()

    # -- what is stored ----------------------------------------------------------------------------

    def test_what_is_stored_comes_back_byte_for_byte(self, tier: Tier) -> None:
        """Also its checksums, at every size, whoever computes them."""
        parts = [(some_ref(size, i), some_bytes(size, i)) for i, size in enumerate(self.part_sizes)]
        stored = store_all(tier, parts[::2]) + store_all(tier, parts[1::2], checksums=left_to_the_tier)
        expect(stored == [Outcome.OK] * len(parts), "a store failed")
        for (ref, data), (result, memory) in zip(parts, fetch_all(tier, [r for r, _ in parts]), strict=True):
            expect(result.outcome is Outcome.OK, f"{ref.nbytes} bytes: {result.outcome}")
            expect(memory == data, f"{ref.nbytes} bytes came back different")
            expect(result.checksums == part_checksums(data), f"{ref.nbytes} bytes: other checksums")

    def test_parts_are_told_apart_by_every_field_of_their_names(self, tier: Tier) -> None:
        """Names that differ in one bit or in the part number alone; all of one size."""
        name = some_ref(5000, 150).key
        keys = [
            name,
            name._replace(part=name.part + 1),
            name._replace(namespace=_other_end(name.namespace)),
            name._replace(chunk=_other_end(name.chunk)),
            name._replace(chunk=_other_end(name.chunk[::-1])[::-1]),
        ]
        parts = [(PartRef(key, 5000), some_bytes(5000, 150 + n)) for n, key in enumerate(keys)]
        for stored in range(len(parts)):
            expect(store_all(tier, [parts[stored]]) == [Outcome.OK], "a store failed")
            found = fetch_all(tier, [ref for ref, _ in parts])
            for n, ((_, data), (result, memory)) in enumerate(zip(parts, found, strict=True)):
                wanted = Outcome.OK if n <= stored else Outcome.MISS
                expect(result.outcome is wanted, f"name {n} is {result.outcome} when {stored} are stored")
                expect(n > stored or memory == data, f"name {n} gives another part's bytes")

    def test_what_was_never_stored_is_a_miss_and_leaves_memory_alone(self, tier: Tier) -> None:
        """Fetch and probe agree."""
        refs = [some_ref(4096, 100), some_ref(6 << 20, 101)]
        for result, memory in fetch_all(tier, refs):
            expect(result == FetchResult(Outcome.MISS, ()), f"found {result}")
            expect(memory == empty_memory(memory.nbytes), "memory of a miss was written")
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
        """Removal happens in the background; its neighbours stay."""
        parts = [(some_ref(3 << 20, n), some_bytes(3 << 20, n)) for n in (400, 401)]
        store_all(tier, parts)
        gone, kept = (ref for ref, _ in parts)
        tier.touch([gone])
        tier.remove([gone])
        eventually(lambda: probe_all(tier, [gone]) == [Outcome.MISS], "its removal")
        expect(fetch_all(tier, [gone])[0][0] == FetchResult(Outcome.MISS, ()), "fetched after its removal")
        expect(fetch_all(tier, [kept])[0][1] == parts[1][1], "another part was removed")

    def test_a_removal_tells_what_was_there(self, tier: Tier) -> None:
        """So that nobody counts twice what went once."""
        parts = [(some_ref(3 << 20, n), some_bytes(3 << 20, n)) for n in (402, 403)]
        store_all(tier, parts)
        refs = [parts[0][0], some_ref(1000, 404), parts[1][0]]
        for expected in ([Outcome.OK, Outcome.MISS, Outcome.OK], [Outcome.MISS] * 3):
            results = Results(1)
            tier.remove(refs, done=lambda found, told=results: told.done(0, list(found)))  # type: ignore[misc]
            found = results.wait()[0]
            expect(found == expected, f"removing told {found}, not {expected}")

    def test_while_a_part_is_being_stored_nobody_sees_half_of_it(self, tier: Tier) -> None:
        """A reader meanwhile gets a miss or the exact bytes."""
        size = max(self.part_sizes)
        for seed in range(450, 454):
            ref, data = some_ref(size, seed), some_bytes(size, seed)
            results = Results(1)
            item = StoreItem(ref, data, part_checksums(data))
            tier.store([item], deadline=time.monotonic() + DEADLINE_S, done=results.done)
            give_up = time.monotonic() + expectations.WAIT_S
            while True:
                result, memory = fetch_all(tier, [ref])[0]
                expect(result.outcome in (Outcome.MISS, Outcome.OK), f"half of it is {result.outcome}")
                expect(result.outcome is Outcome.MISS or memory == data, "half of it was read as whole")
                if result.outcome is Outcome.OK:
                    break
                expect(time.monotonic() < give_up, "it never appeared")
            expect(results.wait() == [Outcome.OK], "the store failed")

    # -- what is reported --------------------------------------------------------------------------

    def test_every_item_is_reported_exactly_once(self, tier: Tier) -> None:
        """From several threads at a time. Once the tier is closed, no further report can come."""
        with ThreadPoolExecutor(4) as callers:
            batches = list(callers.map(lambda caller: self._batch(tier, caller), range(4)))
        for results in batches:
            results.wait()
        tier.close()
        for results in batches:
            results.wait()

    def _batch(self, tier: Tier, caller: int) -> Results:
        """Store, probe and fetch some parts of the caller's own."""
        parts = [(some_ref(70_000, n), some_bytes(70_000, n)) for n in range(10 * caller, 10 * caller + 10)]
        results = Results(21)
        deadline = time.monotonic() + DEADLINE_S
        items = [StoreItem(ref, data, part_checksums(data)) for ref, data in parts]
        tier.store(items, deadline=deadline, done=results.done)
        tier.probe([ref for ref, _ in parts], deadline=deadline, done=lambda found: results.done(20, found))
        memory = [FetchItem(ref, empty_memory(ref.nbytes)) for ref, _ in parts]
        tier.fetch(memory, deadline=deadline, done=lambda n, result: results.done(10 + n, result))
        return results

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
        """Whatever was reported stays as it was at that moment, of a cancelled fetch too."""
        refs = [some_ref(2 << 20, i) for i in range(600, 612)]
        store_all(tier, [(ref, some_bytes(ref.nbytes, 600)) for ref in refs])
        items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in refs * 2]
        results = Results(len(items))
        at_done: dict[int, bytes] = {}

        def done(index: int, result: FetchResult) -> None:
            at_done[index] = bytes(items[index].into)
            results.done(index, result)

        half, deadline = len(refs), time.monotonic() + DEADLINE_S
        tier.fetch(items[:half], deadline=deadline, done=done)
        tier.fetch(items[half:], deadline=deadline, done=lambda n, result: done(half + n, result)).cancel()
        outcomes = [result.outcome for result in results.wait()]
        expect(set(outcomes[:half]) == {Outcome.OK}, f"fetched items ended as {outcomes[:half]}")
        expect(set(outcomes[half:]) <= {Outcome.OK, Outcome.LATE}, f"cancelled: {outcomes[half:]}")
        expect(fetch_all(tier, refs[-1:])[0][0].outcome is Outcome.OK, "after a cancelled fetch")
        time.sleep(0.05)
        for index, item in enumerate(items):
            expect(bytes(item.into) == at_done[index], f"item {index} was touched after done")

    def test_memory_of_another_size_is_refused_at_once(self, tier: Tier) -> None:
        """A defect of the caller, not an outcome."""
        results = Results(1)
        with pytest.raises(BrokenError):
            tier.fetch([FetchItem(some_ref(100, 700), empty_memory(99))], deadline=0.0, done=results.done)
        item = StoreItem(some_ref(100, 700), empty_memory(101), ())
        with pytest.raises(BrokenError):
            tier.store([item], deadline=0.0, done=results.done)

    def test_statistics_tell_stored_fetched_and_missed_apart(self, tier: Tier) -> None:
        """In parts and bytes; nothing is in flight once all is reported."""
        parts = [(some_ref(5000, n), some_bytes(5000, n)) for n in (750, 751)]
        store_all(tier, parts)
        fetch_all(tier, [parts[0][0], some_ref(5000, 752)])
        found = tier.statistics()
        expect((found.stored_parts, found.stored_bytes) == (2, 10_000), f"stored: {found}")
        expect((found.fetched_parts, found.fetched_bytes) == (1, 5000), f"fetched: {found}")
        expect((found.missed_parts, sum(found.failed.values())) == (1, 0), f"missed: {found}")
        expect((found.name, found.state) == (tier.name, "up"), f"now: {found}")
        eventually(lambda: tier.statistics().inflight_bytes == 0, "nothing in flight")

    # -- failures ----------------------------------------------------------------------------------

    def test_a_failure_is_never_a_miss(self, store: TierStore, tier: Tier) -> None:
        """Neither in the answer nor in the counts: an absent part cannot be told during an outage."""
        part, absent = (some_ref(1 << 20, 900), some_bytes(1 << 20, 900)), some_ref(1 << 20, 901)
        store_all(tier, [part])
        before = tier.statistics()
        with store.outage():
            for ref in (part[0], absent):
                found, _ = fetch_all(tier, [ref], deadline_s=OUTAGE_DEADLINE_S)[0]
                expect(found.outcome in FAILURES, f"a fetch that failed is {found.outcome}")
                (probed,) = probe_all(tier, [ref], deadline_s=OUTAGE_DEADLINE_S)
                expect(probed in FAILURES, f"a probe that failed is {probed}")
        after = tier.statistics()
        expect(after.missed_parts == before.missed_parts, "a failure was counted as a miss")
        failed = sum(after.failed.values()) - sum(before.failed.values())
        expect(failed >= 2, f"of 2 fetches that failed {failed} were counted")

    def test_a_store_that_failed_says_so_and_leaves_nothing_wrong(self, store: TierStore, tier: Tier) -> None:
        """Afterwards the part is a miss or whole."""
        parts = [(some_ref(3 << 20, n), some_bytes(3 << 20, n)) for n in (910, 911)]
        with store.outage():
            outcomes = store_all(tier, parts, deadline_s=OUTAGE_DEADLINE_S)
        expect(set(outcomes) <= FAILURES, f"stores that failed are {outcomes}")
        found = self._recovered(tier, [ref for ref, _ in parts])
        for (_, data), (result, memory) in zip(parts, found, strict=True):
            whole = result.outcome is Outcome.OK and memory == data
            expect(whole or result.outcome is Outcome.MISS, f"afterwards it is {result.outcome}")

    def test_late_bytes_go_nowhere(self, store: TierStore, tier: Tier) -> None:
        """The store answers in the end, but the memory has had another owner since."""
        part = (some_ref(1 << 20, 920), some_bytes(1 << 20, 920))
        store_all(tier, [part])
        with store.outage():
            result, memory = fetch_all(tier, [part[0]], deadline_s=OUTAGE_DEADLINE_S)[0]
            expect(result.outcome in FAILURES, f"the fetch is {result.outcome}")
            memory[:] = empty_memory(memory.nbytes)
        expect(self._recovered(tier, [part[0]])[0][1] == part[1], "the part is lost")
        time.sleep(0.05)
        expect(memory == empty_memory(memory.nbytes), "memory was written after its item was reported")

    def test_a_cancelled_operation_does_not_wait_for_its_deadline(self, store: TierStore, tier: Tier) -> None:
        """Its deadline is further away than this suite waits."""
        with store.outage():
            results = Results(1)
            item = FetchItem(some_ref(1 << 20, 930), empty_memory(1 << 20))
            transfer = tier.fetch([item], deadline=time.monotonic() + 1000.0, done=results.done)
            transfer.cancel()
            (result,) = results.wait()
            expect(result.outcome in FAILURES, f"the cancelled item is {result.outcome}")

    def test_a_damaged_part_is_corrupt_and_then_a_miss(self, store: TierStore, tier: Tier) -> None:
        """Whatever was done to it, other parts stay as they are."""
        other = (some_ref(200_000, 940), some_bytes(200_000, 940))
        store_all(tier, [other])
        for n, how in enumerate(Damage):
            ref, data = some_ref(200_000, 941 + n), some_bytes(200_000, 941 + n)
            expect(store_all(tier, [(ref, data)]) == [Outcome.OK], "a store failed")
            missed = tier.statistics().missed_parts
            store.damage(ref, how)
            outcome = fetch_all(tier, [ref])[0][0].outcome
            expect(outcome is Outcome.CORRUPT, f"after a {how.value} it is {outcome}")
            expect(tier.statistics().missed_parts == missed, "corruption was counted as a miss")
            eventually(lambda ref=ref: probe_all(tier, [ref]) == [Outcome.MISS], "its removal")  # type: ignore[misc]
            expect(store_all(tier, [(ref, data)]) == [Outcome.OK], "it cannot be stored again")
            expect(fetch_all(tier, [ref])[0][1] == data, "stored again, it is different")
        expect(fetch_all(tier, [other[0]])[0][1] == other[1], "another part suffered")

    def test_a_part_under_another_name_is_corrupt(self, store: TierStore, tier: Tier) -> None:
        """Never another request's bytes."""
        parts = [(some_ref(200_000, n), some_bytes(200_000, n)) for n in (950, 951)]
        store_all(tier, parts)
        source, under = (ref for ref, _ in parts)
        store.misplace(source, under)
        outcome = fetch_all(tier, [under])[0][0].outcome
        expect(outcome is Outcome.CORRUPT, f"under another name it is {outcome}")
        expect(fetch_all(tier, [source])[0][1] == parts[0][1], "the source suffered")

    # -- ends --------------------------------------------------------------------------------------

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
        expect(probe_all(tier, refs[:1]) == [Outcome.LATE], "a closed tier answered a probe")
        part = (refs[0], some_bytes(1 << 20, 800))
        expect(store_all(tier, [part]) == [Outcome.LATE], "a closed tier stored")

    def test_close_during_an_outage_reports_everything_and_returns(
        self, store: TierStore, tier: Tier
    ) -> None:
        """It waits for no answer."""
        with store.outage():
            results = Results(4)
            refs = [some_ref(1 << 20, i) for i in range(810, 814)]
            items = [FetchItem(ref, empty_memory(ref.nbytes)) for ref in refs]
            tier.fetch(items, deadline=time.monotonic() + 1000.0, done=results.done)
            closing = threading.Thread(target=tier.close, daemon=True)
            closing.start()
            closing.join(expectations.WAIT_S)
            expect(not closing.is_alive(), f"close did not return in {expectations.WAIT_S} s")
            outcomes = {result.outcome for result in results.wait()}
            expect(outcomes <= FAILURES, f"found {outcomes}")

    def test_a_closed_tier_leaves_no_thread_and_no_descriptor(self, store: TierStore) -> None:
        """After work, and after work that was cut off."""
        with leaves_nothing():
            tier = store.open()
            part = (some_ref(3 << 20, 820), some_bytes(3 << 20, 820))
            store_all(tier, [part])
            results = Results(1)
            item = FetchItem(part[0], empty_memory(part[0].nbytes))
            tier.fetch([item], deadline=time.monotonic() + DEADLINE_S, done=results.done)
            tier.close()
            results.wait()

    def _recovered(self, tier: Tier, refs: list[PartRef]) -> list[tuple[FetchResult, memoryview]]:
        """What is fetched after an outage, once that works again. It must without help."""
        found: list[tuple[FetchResult, memoryview]] = []

        def works() -> bool:
            found[:] = fetch_all(tier, refs)
            return not any(result.outcome in FAILURES for result, _ in found)

        eventually(works, "recovery from an outage")
        return found


def _other_end(name: bytes) -> bytes:
    """The same name but for its last bit."""
    return name[:-1] + bytes([name[-1] ^ 1])
