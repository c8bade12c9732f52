"""A tier in a dictionary, for tests of what stands on tiers. It keeps the contract, threads included.

``hold`` makes every operation wait, as a stopped server would; ``fail`` makes a part end in a chosen way.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey, PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.testing.tier_contract import Damage
from kvferry.tiers.contract import Dropped, FetchItem, FetchResult, Outcome, StoreItem, TierStatistics

_POLL_S = 0.005


class _Task:
    """One item of work; ``cancel`` makes it end as LATE."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class MemoryTier:
    """Implements ``tiers.contract.Tier`` and ``Droppable`` with one thread.

    parts: what is stored. What was put there by other means than ``store`` is taken to be right.
    """

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.parts: dict[PartKey, bytes] = {}
        self._checksums: dict[PartKey, tuple[bytes, ...]] = {}
        self._used_at: dict[PartKey, float] = {}
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

    def mend(self) -> None:
        """Nothing fails any more."""
        self._failures.clear()

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
                self._used_at[ref.key] = time.monotonic()

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""

        def work(ending: Outcome | None) -> None:
            there = [ending is None and ref.key in self.parts for ref in refs]
            for ref in refs if ending is None else ():
                self._drop(ref.key)
            if done is not None:
                done([ending or (Outcome.OK if was else Outcome.MISS) for was in there])

        self._submit(_Task(time.monotonic() + 5.0), work)

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """See the contract. What was put there by other means is of unknown age, and old."""
        until = time.monotonic() - (older_than_s or 0.0)
        going = [
            (key, len(data))
            for key, data in list(self.parts.items())
            if namespace in (None, key.namespace) and self._used_at.get(key, 0.0) <= until
        ]
        for key, _ in going:
            self._drop(key)
        dropped = Dropped(len(going), sum(nbytes for _, nbytes in going))
        self._submit(_Task(time.monotonic() + 5.0), lambda ending: done(dropped))

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
        if present is Outcome.OK:
            self._used_at[ref.key] = time.monotonic()
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
        checksums: tuple[bytes, ...] = ()
        if outcome is Outcome.OK:
            checksums = part_checksums(memoryview(data)) if len(data) == item.ref.nbytes else ()
            if checksums != self._checksums.get(item.ref.key, checksums) or not checksums:
                outcome = Outcome.CORRUPT
        if outcome is Outcome.OK:
            item.into.cast("B")[:] = data
            self._counts["fetched_parts"] += 1
            self._counts["fetched_bytes"] += len(data)
            return FetchResult(outcome, checksums)
        if outcome is Outcome.CORRUPT:
            self._drop(item.ref.key)
        self._count_bad(outcome)
        return FetchResult(outcome, ())

    def _store_one(self, item: StoreItem, ending: Outcome | None) -> Outcome:
        outcome = ending or self._failures.get(item.ref.key, Outcome.OK)
        if outcome is Outcome.OK:
            if item.ref.key not in self.parts:
                self.parts[item.ref.key] = bytes(item.data)
                self._checksums[item.ref.key] = item.checksums or part_checksums(item.data)
            self._used_at[item.ref.key] = time.monotonic()
            self._counts["stored_parts"] += 1
            self._counts["stored_bytes"] += item.ref.nbytes
        else:
            self._count_bad(outcome)
        return outcome

    def _drop(self, key: PartKey) -> None:
        self.parts.pop(key, None)
        self._checksums.pop(key, None)
        self._used_at.pop(key, None)

    def _count_bad(self, outcome: Outcome) -> None:
        if outcome is Outcome.MISS:
            self._counts["missed_parts"] += 1
        else:
            self._failed[outcome.value] += 1


def _check_size(memory: memoryview, ref: PartRef) -> None:
    if memory.nbytes != ref.nbytes:
        raise BrokenError(f"memory of {memory.nbytes} bytes for a part of {ref.nbytes}")


class MemoryStore:
    """``TierStore`` of memory tiers. make: opens one, ``MemoryTier`` or a variant of it."""

    def __init__(self, make: Callable[[], MemoryTier] = MemoryTier) -> None:
        self._make = make
        self._opened: list[MemoryTier] = []

    def open(self) -> MemoryTier:
        """A new tier. It shares nothing with those before it."""
        self._opened.append(self._make())
        return self._opened[-1]

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Every tier holds."""
        for tier in self._opened:
            tier.hold()
        try:
            yield
        finally:
            for tier in self._opened:
                tier.release()

    def damage(self, ref: PartRef, how: Damage) -> None:
        """Of the tier opened last."""
        parts = self._opened[-1].parts
        data = parts[ref.key]
        middle = len(data) // 2
        match how:
            case Damage.BIT_FLIP:
                parts[ref.key] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            case Damage.TRUNCATION:
                parts[ref.key] = data[:-1]
            case Damage.EXTENSION:
                parts[ref.key] = data + b"x"

    def misplace(self, source: PartRef, under: PartRef) -> None:
        """Of the tier opened last."""
        parts = self._opened[-1].parts
        parts[under.key] = parts[source.key]
