"""A tier in a dictionary, for tests of what stands on tiers. It keeps the contract, threads included.

``hold`` makes every operation wait, as a stopped server would; ``fail`` makes a part end in a chosen way.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, TierStatistics

_POLL_S = 0.005


class _Task:
    """One item of work; ``cancel`` makes it end as LATE."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class MemoryTier:
    """Implements ``tiers.contract.Tier`` with one thread."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.parts: dict[PartKey, bytes] = {}
        self._failures: dict[PartKey, Outcome] = {}
        self._queue: deque[tuple[_Task, Callable[[Outcome | None], None]]] = deque()
        self._condition = threading.Condition()
        self._held = False
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """From now on nothing is answered; deadlines still end items as LATE."""
        self._held = True

    def release(self) -> None:
        """Answer again."""
        with self._condition:
            self._held = False
            self._condition.notify_all()

    def fail(self, key: PartKey, outcome: Outcome) -> None:
        """Make every fetch, store or probe of ``key`` end with ``outcome``."""
        self._failures[key] = outcome

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""

        def work(ending: Outcome | None) -> None:
            done([ending or self._presence(ref) for ref in refs])

        self._submit(_Task(deadline), work)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> _Task:
        """See the contract."""
        task = _Task(deadline)
        for index, item in enumerate(items):
            _check_size(item.into, item.ref)
            self._submit(task, partial(self._finish_fetch, index, item, done))
        return task

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> _Task:
        """See the contract."""
        task = _Task(deadline)
        for index, item in enumerate(items):
            _check_size(item.data, item.ref)
            self._submit(task, partial(self._finish_store, index, item, done))
        return task

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract; the dictionary's order is the recency."""
        for ref in reversed(refs):
            data = self.parts.pop(ref.key, None)
            if data is not None:
                self.parts[ref.key] = data

    def remove(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""

        def work(ending: Outcome | None) -> None:
            for ref in refs if ending is None else ():
                self.parts.pop(ref.key, None)

        self._submit(_Task(time.monotonic() + 5.0), work)

    def statistics(self) -> TierStatistics:
        """See the contract."""
        counts = self._counts
        return TierStatistics(
            name=self.name,
            state="down" if self._held or self._closed else "up",
            fetched_parts=counts["fetched_parts"],
            fetched_bytes=counts["fetched_bytes"],
            stored_parts=counts["stored_parts"],
            stored_bytes=counts["stored_bytes"],
            missed_parts=counts["missed_parts"],
            failed=dict(self._failed),
            inflight_bytes=0,
            detail={},
        )

    def close(self) -> None:
        """See the contract."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _submit(self, task: _Task, work: Callable[[Outcome | None], None]) -> None:
        with self._condition:
            if not self._closed:
                self._queue.append((task, work))
                self._condition.notify_all()
                return
        work(Outcome.LATE)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if not self._queue:
                    return
                task, work = self._queue.popleft()
                while self._held and not self._ended(task):
                    self._condition.wait(_POLL_S)
            work(Outcome.LATE if self._ended(task) else None)

    def _ended(self, task: _Task) -> bool:
        return self._closed or task.cancelled or time.monotonic() >= task.deadline

    def _presence(self, ref: PartRef) -> Outcome:
        present = Outcome.OK if ref.key in self.parts else Outcome.MISS
        return self._failures.get(ref.key, present)

    def _finish_fetch(
        self,
        index: int,
        item: FetchItem,
        done: Callable[[int, FetchResult], None],
        ending: Outcome | None,
    ) -> None:
        done(index, self._fetch_one(item, ending))

    def _finish_store(
        self, index: int, item: StoreItem, done: Callable[[int, Outcome], None], ending: Outcome | None
    ) -> None:
        done(index, self._store_one(item, ending))

    def _fetch_one(self, item: FetchItem, ending: Outcome | None) -> FetchResult:
        outcome = ending or self._presence(item.ref)
        data = self.parts.get(item.ref.key, b"")
        if outcome is Outcome.OK and len(data) != item.ref.nbytes:
            outcome = Outcome.CORRUPT
        if outcome is Outcome.OK:
            item.into.cast("B")[:] = data
            self._counts["fetched_parts"] += 1
            self._counts["fetched_bytes"] += len(data)
            return FetchResult(outcome, part_checksums(memoryview(data)))
        if outcome is Outcome.CORRUPT:
            self.parts.pop(item.ref.key, None)
        self._count_bad(outcome)
        return FetchResult(outcome, ())

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        outcome = ending or self._failures.get(item.ref.key, Outcome.OK)
        if outcome is Outcome.OK:
            self.parts.setdefault(item.ref.key, bytes(item.data))
            self._counts["stored_parts"] += 1
            self._counts["stored_bytes"] += item.ref.nbytes
        else:
            self._count_bad(outcome)
        return outcome

    def _count_bad(self, outcome: Outcome) -> None:
        if outcome is Outcome.MISS:
            self._counts["missed_parts"] += 1
        else:
            self._failed[outcome.value] += 1


def _check_size(memory: memoryview, ref: PartRef) -> None:
    if memory.nbytes != ref.nbytes:
        raise BrokenError(f"memory of {memory.nbytes} bytes for a part of {ref.nbytes}")
