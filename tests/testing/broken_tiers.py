"""Memory tiers with one defect each, of kinds that caches were seen with."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.identity.names import PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.testing.memory_tier import MemoryTier
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, TierStatistics

Done = Callable[[int, Any], None]


class IgnoresPartNumber(MemoryTier):
    """Ranks of one engine get each other's bytes."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        for key in self.parts:
            if key[:2] == item.ref.key[:2]:
                return super()._fetch_one(item._replace(ref=PartRef(key, item.ref.nbytes)), ending)
        return super()._fetch_one(item, ending)


class ShortensNames(MemoryTier):
    """Looks at the first half of the digest alone: another prompt's bytes."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        for key in self.parts:
            if key.chunk[:16] == item.ref.key.chunk[:16] and key.namespace == item.ref.key.namespace:
                return super()._fetch_one(item._replace(ref=PartRef(key, item.ref.nbytes)), ending)
        return super()._fetch_one(item, ending)


class Truncates(MemoryTier):
    """Reports OK for a part of which only the first half arrived."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        half = item.ref.nbytes // 2
        tail = bytes(item.into[half:])
        result = super()._fetch_one(item, ending)
        item.into[half:] = tail
        return result


class TrustsWhatItReads(MemoryTier):
    """Checks no checksum."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        self._checksums.pop(item.ref.key, None)
        return super()._fetch_one(item, ending)


class KeepsDamage(MemoryTier):
    """Finds damage out and leaves it there, to be found again by every request."""

    def _drop(self, key: Any) -> None:
        pass


class CallsFailuresMisses(MemoryTier):
    """A dead store looks like an empty one."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        result = super()._fetch_one(item, ending)
        return FetchResult(Outcome.MISS, ()) if result.outcome is Outcome.LATE else result


class ProbesFailuresAsMisses(MemoryTier):
    """The same in the probe alone."""

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        def as_miss(found: Sequence[Outcome]) -> None:
            done([Outcome.MISS if outcome is Outcome.LATE else outcome for outcome in found])

        super().probe(refs, deadline=deadline, done=as_miss)


class CountsFailuresAsMisses(MemoryTier):
    """Right answers, wrong figures."""

    def _count_bad(self, outcome: Outcome) -> None:
        self._counts["missed_parts"] += 1


class WritesLate(MemoryTier):
    """What arrives after the deadline is still put where it was to go."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[FetchItem] = []

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        if ending is not None:
            self._late.append(item)
        else:
            for late in self._late:
                late.into[:] = self.parts.get(late.ref.key, bytes(late.ref.nbytes))
        return super()._fetch_one(item, ending)


class FinishesAfterReport(MemoryTier):
    """Reports a part first and writes its last bytes then."""

    def _finish_fetch(self, index: int, item: FetchItem, done: Done, ending: Outcome | None) -> None:
        before = bytes(item.into[-16:])
        result = self._fetch_one(item, ending)
        after = bytes(item.into[-16:])
        item.into[-16:] = before
        done(index, result)
        item.into[-16:] = after


class NeverCallsBack(MemoryTier):
    """Its probes are never answered."""

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        super().probe(refs, deadline=deadline, done=lambda found: None)


class DropsCompletions(MemoryTier):
    """One part in seven is not reported."""

    def _finish_fetch(self, index: int, item: FetchItem, done: Done, ending: Outcome | None) -> None:
        result = self._fetch_one(item, ending)
        if index % 7 != 3:
            done(index, result)


class ReportsTwice(MemoryTier):
    """A part is reported again a little later."""

    def _finish_store(self, index: int, item: StoreItem, done: Done, ending: Outcome | None) -> None:
        super()._finish_store(index, item, done, ending)
        if index == 9:
            done(index, Outcome.OK)


class ForgetsTheRestAtClose(MemoryTier):
    """What waits when it is closed is never reported."""

    def close(self) -> None:
        with self._condition:
            self._queue.clear()
        super().close()


class LosesErrors(MemoryTier):
    """A store that failed is called done."""

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        super()._store_one(item, ending)
        return Outcome.OK


class PublishesHalf(MemoryTier):
    """A part can be read before it is whole."""

    def store(self, items: Sequence[StoreItem], *, deadline: float, done: Done) -> Any:
        for item in items:
            half = bytes(item.data[: item.ref.nbytes // 2])
            self.parts[item.ref.key] = half + bytes(item.ref.nbytes - len(half))

        def finish() -> None:
            for item in items:
                del self.parts[item.ref.key]
            super(PublishesHalf, self).store(items, deadline=deadline, done=done)

        threading.Timer(0.1, finish).start()


class KeepsHalfOfWhatFailed(MemoryTier):
    """A store that was cut off stays visible."""

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        if ending is not None:
            self.parts[item.ref.key] = bytes(item.ref.nbytes)
        return super()._store_one(item, ending)


class LeaksAThread(MemoryTier):
    """Every tier leaves one behind. ``ENDS`` lets the test clean up."""

    ENDS = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=self.ENDS.wait, name="kvferry-left-behind", daemon=True).start()


class IgnoresDeadlines(MemoryTier):
    """Answers however late it is."""

    def _submit(self, task: Any, work: Callable[[Outcome | None], None]) -> None:
        task.deadline = max(task.deadline, time.monotonic() + 0.5)
        super()._submit(task, work)


class IgnoresCancel(MemoryTier):
    """Holds on to memory until its deadline."""

    def fetch(self, items: Sequence[FetchItem], *, deadline: float, done: Done) -> Any:
        task = super().fetch(items, deadline=deadline, done=done)
        task.cancel = lambda: None  # type: ignore[method-assign]
        return task


class ClosesWhenAnswered(MemoryTier):
    """A dead store keeps it from closing."""

    def close(self) -> None:
        while self._held:
            time.sleep(0.005)
        super().close()


class AcceptsAnySize(MemoryTier):
    """Memory of a wrong size is found out when it is too late."""

    def fetch(self, items: Sequence[FetchItem], *, deadline: float, done: Done) -> Any:
        fitting = [FetchItem(item.ref, memoryview(bytearray(item.ref.nbytes))) for item in items]
        return super().fetch(fitting, deadline=deadline, done=done)


class MixesUpAProbe(MemoryTier):
    """Its answers come in another order than the questions."""

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        super().probe(refs[::-1], deadline=deadline, done=done)


class RemovesNothing(MemoryTier):
    """Deleting succeeds and does not delete."""

    def remove(self, refs: Sequence[PartRef]) -> None:
        pass


class RemovesWhatIsNotThere(MemoryTier):
    """By its account, every time it is asked."""

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        super().remove(refs, done=done and (lambda found: done([Outcome.OK for _ in found])))


class WritesOnAMiss(MemoryTier):
    """Clears memory before it knows whether there is anything to put into it."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        item.into[:] = bytes(item.ref.nbytes)
        return super()._fetch_one(item, ending)


class MakesUpChecksums(MemoryTier):
    """Right bytes with checksums of something else."""

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        result = super()._fetch_one(item, ending)
        return result._replace(checksums=part_checksums(memoryview(bytes(item.ref.nbytes))))


class CountsInFlightForEver(MemoryTier):
    """What it reports as in flight never comes down."""

    def statistics(self) -> TierStatistics:
        found = super().statistics()
        return replace(found, inflight_bytes=found.fetched_bytes)


class OverwritesWhatIsThere(MemoryTier):
    """Answers a second store of a part by storing what the caller's memory holds by then."""

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        if item.ref.key in self.parts and ending is None:
            self.parts[item.ref.key] = bytes(item.ref.nbytes)
            self._checksums[item.ref.key] = part_checksums(memoryview(bytes(item.ref.nbytes)))
        return super()._store_one(item, ending)


class LeavesChecksumsToTheCaller(MemoryTier):
    """Stores the checksums it is given, even where it is given none."""

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        outcome = super()._store_one(item, ending)
        if outcome is Outcome.OK:
            self._checksums[item.ref.key] = item.checksums
        return outcome
