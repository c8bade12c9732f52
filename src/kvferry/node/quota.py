"""A tier within a quota: what this node stores beyond it replaces what it stored before.

Wraps a tier. Stores wait until what has to make room is gone; what others put into the tier is left alone.
``node.ledger`` decides; this performs. Callbacks of the tier come on its threads, hence the lock.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.identity.names import PartRef
from kvferry.node.ledger import ChunkName, Ledger, LedgerStatistics
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier, TierStatistics, Transfer

_ABSENT = (Outcome.MISS, Outcome.CORRUPT)  # a tier removes the value that is corrupt


class _Store:
    """A store that may have to wait. Its ``Transfer``, too: cancelled early, it ends as LATE."""

    def __init__(
        self, items: Sequence[tuple[int, StoreItem]], deadline: float, done: Callable[[int, Outcome], None]
    ) -> None:
        self.items = items
        self.deadline = deadline
        self.done = done
        self.left = len(items)
        self.running: Transfer | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """See ``tiers.contract.Transfer``."""
        self.cancelled = True
        if self.running is not None:
            self.running.cancel()


class QuotaTier:
    """Implements ``tiers.contract.Tier``. quota_bytes: of this node's values, headers included."""

    def __init__(self, tier: Tier, *, quota_bytes: int) -> None:
        self.name = tier.name
        self._tier = tier
        self._lock = threading.Lock()
        self._ledger = Ledger(quota_bytes)
        self._waiting: deque[_Store] = deque()

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""
        with self._lock:
            mark = self._ledger.mark

        def seen(outcomes: Sequence[Outcome]) -> None:
            with self._lock:
                self._ledger.touch(_names(refs))
            self._missing([ref for ref, o in zip(refs, outcomes, strict=True) if o in _ABSENT], since=mark)
            done(outcomes)

        self._tier.probe(refs, deadline=deadline, done=seen)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract."""
        with self._lock:
            mark = self._ledger.mark

        def fetched(index: int, result: FetchResult) -> None:
            if result.outcome in _ABSENT:
                self._missing([items[index].ref], since=mark)
            done(index, result)

        return self._tier.fetch(items, deadline=deadline, done=fetched)

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract. OVER_QUOTA: room for it cannot be made."""
        with self._lock:
            self._ledger.order(_names([item.ref for item in items]))
            admitted = [(at, item) for at, item in enumerate(items) if self._ledger.claim(item.ref)]
            store = _Store(admitted, deadline, done)
            victims = self._ledger.make_room()
            if admitted:
                self._waiting.append(store)
        for at in set(range(len(items))) - {at for at, _ in admitted}:
            done(at, Outcome.OVER_QUOTA)
        if victims:
            self._tier.remove(victims, done=partial(self._removed, victims))
        self._start()
        return store

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""
        with self._lock:
            self._ledger.touch(_names(refs))
        self._tier.touch(refs)

    def used(self, names: Sequence[ChunkName]) -> None:
        """A prefix was served from somewhere before the tier: what it holds there stays as long as others."""
        with self._lock:
            self._ledger.touch(names)

    def extends(self, names: Sequence[ChunkName]) -> None:
        """An engine is about to store some of this prefix: its head is to stay when not all of it fits."""
        with self._lock:
            self._ledger.extends(names)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""
        with self._lock:
            self._ledger.forget(refs)

        def removed(outcomes: Sequence[Outcome]) -> None:
            self._removed(refs, outcomes)
            if done is not None:
                done(outcomes)

        self._tier.remove(refs, done=removed)

    def statistics(self) -> TierStatistics:
        """See the contract."""
        return self._tier.statistics()

    def quota(self) -> LedgerStatistics:
        """A snapshot of what counts against the quota."""
        with self._lock:
            return self._ledger.statistics()

    def close(self) -> None:
        """See the contract."""
        self._tier.close()
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for store in waiting:
            self._end(store, Outcome.LATE)

    def _missing(self, refs: Sequence[PartRef], *, since: int) -> None:
        """A server evicts values, not parts: what it left of one would stay there uncounted."""
        with self._lock:
            remains = self._ledger.missing(refs, since=since)
        if remains:
            self._tier.remove(remains, done=partial(self._removed, remains))

    def _start(self) -> None:
        """Begin the stores that there is room for, in order."""
        while True:
            with self._lock:
                if not self._waiting or self._ledger.over_quota:
                    return
                if any(self._ledger.is_leaving(item.ref.key) for _, item in self._waiting[0].items):
                    return
                store = self._waiting.popleft()
            if store.cancelled:
                self._end(store, Outcome.LATE)
                continue
            store.running = self._tier.store(
                [item for _, item in store.items], deadline=store.deadline, done=partial(self._stored, store)
            )

    def _stored(self, store: _Store, index: int, outcome: Outcome) -> None:
        at, item = store.items[index]
        with self._lock:
            if outcome is Outcome.OK:
                self._ledger.stored(item.ref.key)
            else:  # a reply that was not waited for may still have been a success
                self._ledger.not_stored(item.ref.key, traces=outcome in (Outcome.LATE, Outcome.FAILED))
            store.left -= 1
            if not store.left:
                self._ledger.order(_names([item.ref for _, item in store.items]))
        store.done(at, outcome)

    def _removed(self, refs: Sequence[PartRef], outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome not in (Outcome.OK, *_ABSENT)]
        with self._lock:
            for ref, outcome in zip(refs, outcomes, strict=True):
                self._ledger.left(ref.key, gone=outcome in (Outcome.OK, *_ABSENT))
            stuck: deque[_Store] = deque()
            if failed:
                stuck, self._waiting = self._waiting, stuck
        for store in stuck:
            self._end(store, failed[0])
        self._start()

    def _end(self, store: _Store, outcome: Outcome) -> None:
        """Without having begun."""
        with self._lock:
            for _, item in store.items:
                self._ledger.not_stored(item.ref.key, traces=False)
        for at, _ in store.items:
            store.done(at, outcome)


def _names(refs: Sequence[PartRef]) -> list[ChunkName]:
    return [ChunkName(ref.key.namespace, ref.key.chunk) for ref in refs]
