"""A tier whose answers are told to those who follow the node: what it has, and has no more.

A wrapper round the tier itself, under a quota, so that what makes room there is seen too. It adds one call
per batch of parts; the work is done on the feed's thread.
"""

from collections.abc import Callable, Sequence

from kvferry.identity.names import PartRef
from kvferry.tiers.contract import (
    Dropped,
    FetchItem,
    FetchResult,
    LowerTier,
    Outcome,
    StoreItem,
    Tier,
    TierStatistics,
    Transfer,
)

Seen = Callable[[Sequence[PartRef], Sequence[Outcome]], None]
"""Of these parts: OK, it is there; MISS or CORRUPT, it is not; any other says nothing."""


class WatchedTier:
    """Implements ``tiers.contract.Tier``. seen: called on the tier's threads, before who asked is told."""

    def __init__(self, tier: Tier, seen: Seen) -> None:
        self.name = tier.name
        self._tier = tier
        self._seen = seen

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""

        def probed(outcomes: Sequence[Outcome]) -> None:
            self._seen(refs, outcomes)
            done(outcomes)

        self._tier.probe(refs, deadline=deadline, done=probed)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract. That a part was fetched is no news: it was found before."""

        def fetched(index: int, result: FetchResult) -> None:
            if result.outcome in (Outcome.MISS, Outcome.CORRUPT):
                self._seen((items[index].ref,), (result.outcome,))
            done(index, result)

        return self._tier.fetch(items, deadline=deadline, done=fetched)

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract."""

        def stored(index: int, outcome: Outcome) -> None:
            if outcome is Outcome.OK:
                self._seen((items[index].ref,), (outcome,))
            done(index, outcome)

        return self._tier.store(items, deadline=deadline, done=stored)

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""
        self._tier.touch(refs)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract. What is to go counts as gone, whatever becomes of that."""
        gone = [Outcome.MISS] * len(refs)
        self._seen(refs, gone)

        def removed(outcomes: Sequence[Outcome]) -> None:
            self._seen(refs, gone)  # it may have been stored meanwhile, before it went
            if done is not None:
                done(outcomes)

        self._tier.remove(refs, done=removed)

    def statistics(self) -> TierStatistics:
        """See the contract."""
        return self._tier.statistics()

    def close(self) -> None:
        """See the contract."""
        self._tier.close()


class WatchedDisk(WatchedTier):
    """One that can forget what it is not told the names of. What goes so is found missing later."""

    def __init__(self, tier: LowerTier, seen: Seen) -> None:
        super().__init__(tier, seen)
        self._droppable = tier

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """See ``contract.Droppable``."""
        self._droppable.drop(namespace=namespace, older_than_s=older_than_s, done=done)
