"""The Valkey tier: parts striped over one server or the shards of a Cluster."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.addresses import Address
from kvferry.errors import BrokenError
from kvferry.identity.names import PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.tiers.contract import (
    FetchItem,
    FetchResult,
    Outcome,
    StoreItem,
    TierStatistics,
    Transfer,
)
from kvferry.tiers.valkey.greeting import ServerReport, inspect_servers
from kvferry.tiers.valkey.jobs import (
    Job,
    Operation,
    Part,
    Verb,
    fetch_jobs,
    small_jobs,
    store_jobs,
    undo_jobs,
)
from kvferry.tiers.valkey.keyspace import Keyspace
from kvferry.tiers.valkey.router import Router
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.shard import Shard
from kvferry.tiers.valkey.tls import Tls

_log = logging.getLogger(__name__)

REMOVE_S = 5.0
"""How long a touch or removal in the background may take."""


class ValkeyTier:
    """Implements ``tiers.contract.Tier``. Make one with ``connect``."""

    name = "valkey"

    def __init__(self, settings: ValkeySettings, *, tls: Tls | None, report: ServerReport) -> None:
        self._settings = settings
        self._suffixes = settings.protection.suffixes
        self._version = settings.protection.version
        self._report = report
        self._router = Router(
            settings,
            tls=tls,
            topology=report.topology,
            lifetimes=report.lifetimes,
            surveys=report.informed,
        )
        self._lock = threading.Lock()
        self._fetched = [0, 0]
        self._stored = [0, 0]
        self._missed = 0
        self._failed: Counter[str] = Counter()
        self._closed = False

    @classmethod
    def connect(cls, settings: ValkeySettings, *, timeout_s: float = 3.0) -> "ValkeyTier":
        """Check the servers (blocking, bounded by ``timeout_s``) and start.

        Raises MisconfiguredError, one line, if the URL, the password or the server is wrong.
        """
        tls = Tls(settings.url.tls) if settings.url.tls is not None else None
        report = inspect_servers(settings, tls=tls, deadline=time.monotonic() + timeout_s)
        if advice := report.detail.get("warning"):
            _log.warning("Valkey at %s: %s", settings.url, advice)
        tier = cls(settings, tls=tls, report=report)
        tier._router.start()
        return tier

    def probe(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """See the contract. Refreshes recency from the last reference to the first."""

        def ended(parts: Sequence[Part]) -> None:
            for part in parts:
                self._count(part, None)
            done([part.outcome for part in parts])

        self._ask_all(refs, Verb.TOUCH, deadline=deadline, ended=ended)

    def fetch(
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> Transfer:
        """See the contract."""

        def report(part: Part) -> None:
            self._count(part, self._fetched)
            outcome = part.outcome
            done(part.index, FetchResult(outcome, tuple(part.checksums) if outcome is Outcome.OK else ()))

        operation = Operation(deadline)
        jobs: list[Job] = []
        for index, item in enumerate(items):
            part = self._part(operation, index, item.ref, report)
            jobs += fetch_jobs(part, _exactly(item.into, item.ref.nbytes))
        self._router.dispatch_all(jobs)
        return operation

    def store(
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """See the contract. Of a part that could not be stored whole, what was written is removed again."""

        def report(part: Part) -> None:
            self._count(part, self._stored)
            if part.lost and part.written:
                self._undo(part)
            done(part.index, part.outcome)

        operation = Operation(deadline)
        jobs: list[Job] = []
        for index, item in enumerate(items):
            part = self._part(operation, index, item.ref, report, rank=item.position)
            jobs += store_jobs(
                part, _exactly(item.data, item.ref.nbytes), item.checksums, version=self._version
            )
        self._router.dispatch_all(jobs)
        return operation

    def touch(self, refs: Sequence[PartRef]) -> None:
        """See the contract."""
        self._ask_all(refs, Verb.TOUCH, deadline=time.monotonic() + REMOVE_S, ended=_ignore_all)

    def remove(
        self, refs: Sequence[PartRef], *, done: Callable[[Sequence[Outcome]], None] | None = None
    ) -> None:
        """See the contract."""

        def ended(parts: Sequence[Part]) -> None:
            if done is not None:
                done([_removal(part) for part in parts])

        self._ask_all(refs, Verb.UNLINK, deadline=time.monotonic() + REMOVE_S, ended=ended)

    @property
    def servers(self) -> Sequence[Address]:
        """Those in use."""
        return [shard.address for shard in self._router.shards]

    def keyspace(self) -> Keyspace:
        """All keys of the servers in use, for one who has time to look at them."""
        return Keyspace(self._settings, lambda: self.servers)

    def statistics(self) -> TierStatistics:
        """See the contract. ``detail`` holds server versions, shards in trouble and warnings."""
        shards = self._router.shards
        broken = [shard for shard in shards if shard.is_open]
        state = "up" if not broken else "down" if len(broken) == len(shards) else "degraded"
        detail = dict(self._report.detail)
        detail["url"] = str(self._settings.url)
        if self._settings.protection.description:
            detail["encryption"] = self._settings.protection.description
        detail["shards"] = " ".join(str(shard.address) for shard in shards)
        if broken:
            detail["breaker_open"] = "; ".join(_complaint(shard) for shard in broken)
        surveyed = [shard for shard in shards if shard.warning is not None]
        if surveyed:
            detail.pop("warning", None)
        warnings = [_addressed(shard, shard.warning) for shard in surveyed if shard.warning]
        if warnings:
            detail["warning"] = "; ".join(warnings)
        kept = [shard.lifetimes.kept_ms for shard in shards if shard.lifetimes is not None]
        if any(kept):
            detail["longest_unused"] = f"{max(kept) / 1000:,.0f} s"
        denials = [_addressed(shard, shard.denial) for shard in shards if shard.denial]
        if denials:
            detail["denied"] = "; ".join(denials)
        with self._lock:
            return TierStatistics(
                name=self.name,
                state=state,
                fetched_parts=self._fetched[0],
                fetched_bytes=self._fetched[1],
                stored_parts=self._stored[0],
                stored_bytes=self._stored[1],
                missed_parts=self._missed,
                failed=dict(self._failed),
                inflight_bytes=sum(shard.inflight_bytes for shard in shards),
                detail=detail,
            )

    def close(self) -> None:
        """See the contract."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._router.close()

    def _ask_all(
        self,
        refs: Sequence[PartRef],
        verb: Verb,
        *,
        deadline: float,
        ended: Callable[[Sequence[Part]], None],
    ) -> None:
        """A small command for every stripe, last part first; ``ended`` is called once, after all answers."""
        remaining = len(refs)
        lock = threading.Lock()

        def report(part: Part) -> None:
            nonlocal remaining
            del part
            with lock:
                remaining -= 1
                last = remaining == 0
            if last:
                ended(parts)

        operation = Operation(deadline)
        ranks = _ranks(refs)
        parts = [
            self._part(operation, index, ref, report, rank=ranks[index]) for index, ref in enumerate(refs)
        ]
        if not parts:
            ended(parts)
            return
        self._router.dispatch_all([job for part in reversed(parts) for job in small_jobs(part, verb)])

    def _undo(self, part: Part) -> None:
        """Remove what a failed store wrote, and only that: another node may be storing the same part."""
        operation = Operation(time.monotonic() + REMOVE_S)
        undone = Part(
            operation,
            part.index,
            part.ref,
            jobs=len(part.written),
            report=_ignore,
            suffixes=self._suffixes,
        )
        self._router.dispatch_all(undo_jobs(undone, part.written))

    def _part(
        self,
        operation: Operation,
        index: int,
        ref: PartRef,
        report: Callable[[Part], None],
        *,
        rank: int = 0,
    ) -> Part:
        jobs = len(stripe_plan(ref.nbytes))
        return Part(operation, index, ref, jobs=jobs, report=report, suffixes=self._suffixes, rank=rank)

    def _count(self, part: Part, counter: list[int] | None) -> None:
        outcome = part.outcome
        with self._lock:
            if outcome is Outcome.OK:
                if counter is not None:
                    counter[0] += 1
                    counter[1] += part.ref.nbytes
            elif outcome is Outcome.MISS:
                self._missed += 1
            else:
                self._failed[part.cause.value] += 1


def _removal(part: Part) -> Outcome:
    """MISS where no value of it was there."""
    return Outcome.MISS if part.outcome is Outcome.OK and not part.found else part.outcome


def _ranks(refs: Sequence[PartRef]) -> list[int]:
    """For each part how many chunks come before its own. The parts of a chunk come one after another."""
    ranks: list[int] = []
    for at, ref in enumerate(refs):
        same = at > 0 and ref.key.chunk == refs[at - 1].key.chunk
        ranks.append((ranks[-1] + (not same)) if at else 0)
    return ranks


def _complaint(shard: Shard) -> str:
    return _addressed(shard, shard.last_error)


def _addressed(shard: Shard, error: str) -> str:
    """Most errors of connections name the address."""
    address = str(shard.address)
    return error if error.startswith(address) else f"{address}: {error}"


def _ignore_all(parts: Sequence[Part]) -> None:
    """As below."""


def _ignore(part: Part) -> None:
    """Nobody waits for the result of background work."""


def _exactly(memory: memoryview, nbytes: int) -> memoryview:
    if memory.nbytes != nbytes or not memory.contiguous:
        raise BrokenError(f"memory of {memory.nbytes} bytes for a part of {nbytes}")
    return memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")
