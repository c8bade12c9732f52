"""A tier that does not answer when it is wanted: whoever wants it starts without, and has it when it does.

         opened at last
    AWAITED ──────────────► OPEN, for good: from then on the tier sees to its own troubles

While it is awaited nothing is found in it and nothing is stored. What is to be deleted there is remembered,
and deleted before anything is found.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from kvferry.errors import KvferryError, MisconfiguredError
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

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
JOIN_S = 10.0
MAX_DELETED_PARTS = 1 << 16
MAX_DROPS = 256
MAX_LOGGED = 16
UNREACHABLE = "unreachable"
"""The cause under which it counts what it could not do."""

log = logging.getLogger("kvferry.tiers")


class UnansweredError(MisconfiguredError):
    """There is no good answer, and there may be one later. Who can wait opens it again then."""


class Refusing:
    """Implements ``contract.Tier``: refuses everything, and counts it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._refused = 0

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""
        self._count(len(refs))
        done([Outcome.REFUSED] * len(refs))

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract."""
        self._count(len(items))
        for index in range(len(items)):
            done(index, FetchResult(Outcome.REFUSED, ()))
        return self

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract."""
        self._count(len(items))
        for index in range(len(items)):
            done(index, Outcome.REFUSED)
        return self

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""
        self._count(len(refs))
        if done is not None:
            done([Outcome.REFUSED] * len(refs))

    def statistics(self) -> TierStatistics:
        """See the contract."""
        with self._lock:
            failed = {UNREACHABLE: self._refused} if self._refused else {}
        return TierStatistics(self.name, "down", 0, 0, 0, 0, 0, failed, 0, {})

    def cancel(self) -> None:
        """Of a fetch or store, which ended as it began."""

    def close(self) -> None:
        """See the contract."""

    def _count(self, parts: int) -> None:
        with self._lock:
            self._refused += parts


T = TypeVar("T", bound=Tier)


class AwaitedTier(Generic[T]):
    """Implements ``contract.Tier``. ``opened`` is called again and again, on a thread of its own."""

    def __init__(self, name: str, opened: Callable[[], T], error: UnansweredError) -> None:
        """error: of the first attempt, which the caller made."""
        self.name = name
        self._opened = opened
        self._lock = threading.Lock()
        self._refusing = Refusing(name)
        self._tier: T | None = None
        self._now: Tier = self._refusing
        self._since = datetime.now(UTC)
        self._error = str(error)
        self._logged = {self._error}
        self._ending = threading.Event()
        log.warning("%s; it is asked again until it answers", error)
        self._thread = threading.Thread(target=self._run, name=f"kvferry-await-{name}", daemon=True)
        self._thread.start()

    @property
    def tier(self) -> T | None:
        """The real one, once it answers."""
        return self._tier

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract."""
        self._now.probe(refs, deadline=deadline, done=done)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract."""
        return self._now.fetch(items, deadline=deadline, done=done)

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract."""
        return self._now.store(items, deadline=deadline, done=done)

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""
        self._now.touch(refs)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""
        self._now.remove(refs, done=done)

    def statistics(self) -> TierStatistics:
        """See the contract. ``detail`` says since when it does not answer, and why."""
        refused = self._refusing.statistics()
        tier = self._tier
        if tier is None:
            return replace(refused, detail={"since": f"{self._since:%F %T} UTC", "warning": self._error})
        now = tier.statistics()
        return replace(now, failed={**refused.failed, **now.failed})

    def close(self) -> None:
        """See the contract. An attempt under way is waited for, but not long."""
        with self._lock:
            self._ending.set()
            tier = self._tier
        if tier is not None:
            tier.close()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._ending.wait(random.uniform(pause_s / 2, pause_s)):
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                tier = self._opened()
            except KvferryError as error:
                self._say(str(error))
            except Exception as error:
                self._say(f"a defect as it was opened: {error}")
                log.debug("opening %s failed", self.name, exc_info=error)
            else:
                self._have(tier)
                return

    def _say(self, error: str) -> None:
        """Each reason once."""
        self._error = error
        if error not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(error)
            log.warning("%s; it is asked again until it answers", error)

    def _have(self, tier: T) -> None:
        with self._lock:
            closed = self._ending.is_set()
            if not closed:
                self._prepare(tier)
                self._tier = self._now = tier
        if closed:
            tier.close()
        else:
            log.info("%s answers now, and is used", self.name)

    def _prepare(self, tier: T) -> None:
        """What was asked for in vain is done now. Under the lock, before anybody finds anything."""


class AwaitedLower(AwaitedTier[LowerTier]):
    """The same of a tier whose deletions must not be forgotten."""

    def __init__(self, name: str, opened: Callable[[], LowerTier], error: UnansweredError) -> None:
        self._deleted: dict[PartRef, None] = {}
        self._drops: dict[tuple[bytes | None, float | None], float] = {}  # and when it was asked for
        super().__init__(name, opened, error)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract. That nobody will find it after a restart cannot be said while it is awaited."""
        with self._lock:
            if self._tier is None and len(self._deleted) + len(refs) <= MAX_DELETED_PARTS:
                self._deleted.update(dict.fromkeys(refs))
        super().remove(refs, done=done)

    def drop(
        self,
        *,
        namespace: bytes | None = None,
        older_than_s: float | None = None,
        done: Callable[[Dropped], None],
    ) -> None:
        """See the contract, and ``remove``."""
        with self._lock:
            tier = self._tier
            if tier is None and len(self._drops) < MAX_DROPS:
                self._drops[namespace, older_than_s] = time.monotonic()
        if tier is not None:
            tier.drop(namespace=namespace, older_than_s=older_than_s, done=done)
        else:
            done(Dropped(0, 0, Outcome.REFUSED))

    def _prepare(self, tier: LowerTier) -> None:
        now = time.monotonic()
        if self._deleted:
            tier.remove(list(self._deleted))
        for (namespace, older_than_s), asked in self._drops.items():
            age_s = None if older_than_s is None else older_than_s + (now - asked)
            tier.drop(namespace=namespace, older_than_s=age_s, done=_nobody)
        self._deleted.clear()
        self._drops.clear()


def opened_or_awaited(name: str, opened: Callable[[], T]) -> T | AwaitedTier[T]:
    """The tier, or one that stands for it until it answers. Raises MisconfiguredError for what never will."""
    try:
        return opened()
    except UnansweredError as error:
        return AwaitedTier(name, opened, error)


def lower_opened_or_awaited(name: str, opened: Callable[[], LowerTier]) -> LowerTier:
    """The same of a tier that can forget."""
    try:
        return opened()
    except UnansweredError as error:
        return AwaitedLower(name, opened, error)


def _nobody(dropped: Dropped) -> None:
    """Whoever asked was told that it could not be done then."""
