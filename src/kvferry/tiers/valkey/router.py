"""Which shard serves which slot, and the thread that ends jobs whose time is over while they wait.

A job waits in a shard's queue, or parked: it lost its connection in a Cluster, and goes on when the map
has been asked for again (``scout.py``).
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from kvferry.addresses import Address
from kvferry.tiers.valkey.jobs import Cause, Job, Verdict
from kvferry.tiers.valkey.lifetimes import Lifetimes
from kvferry.tiers.valkey.resp import ErrorKind, ServerError
from kvferry.tiers.valkey.scout import Scout
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.shard import Shard
from kvferry.tiers.valkey.slots import SLOTS
from kvferry.tiers.valkey.tls import Tls
from kvferry.tiers.valkey.topology import SlotRange, parse_redirect

MAX_SHARDS = 1024
MAX_PARKED = 65536
SWEEP_S = 0.05
_log = logging.getLogger(__name__)


class Router(threading.Thread):
    """Owns the shards. ``dispatch``, ``retry``, ``redirect`` may be called from any thread."""

    def __init__(
        self,
        settings: ValkeySettings,
        *,
        tls: Tls | None,
        topology: tuple[SlotRange, ...],
        lifetimes: Lifetimes | None = None,
        surveys: bool = True,
    ) -> None:
        """topology: empty for a single server (the first seed). lifetimes: to begin with, at every shard.

        surveys: whether to ask servers for their settings now and then.
        """
        super().__init__(name="kvferry-valkey-router", daemon=True)
        self._settings = settings
        self._tls = tls
        self._lifetimes = lifetimes
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._shards: dict[Address, Shard] = {}
        self._parked: list[Job] = []  # until the next question for the map
        self._asking: list[Job] = []  # until the question under way has its answer
        self._watching = False  # whether jobs may be waiting, so that they are swept now and then
        self._closed = False
        self._clustered = bool(topology)
        self._scout = Scout(settings, tls=tls, clustered=self._clustered, surveys=surveys, territory=self)
        self._by_slot: list[Shard] = []
        self._apply(topology or (SlotRange(0, SLOTS - 1, settings.url.seeds[0]),))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in use now."""
        with self._lock:
            return tuple(self._shards.values())

    def start(self) -> None:
        """Start both threads."""
        super().start()
        self._scout.start()

    def dispatch(self, job: Job) -> None:
        """Queue the job at the shard that serves its slot."""
        self._by_slot[job.slot].submit((job,))
        self._watch()

    def dispatch_all(self, jobs: Iterable[Job]) -> None:
        """The same for jobs of one lane, in order. A mover is woken once, not once per job."""
        by_slot = self._by_slot
        shares: dict[int, list[Job]] = {}
        for job in jobs:
            shares.setdefault(id(by_slot[job.slot]), []).append(job)
        for share in shares.values():
            by_slot[share[0].slot].submit(share)
        self._watch()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._wake.set()

    def retry(self, job: Job) -> None:
        """Queue the job again; in a Cluster after asking for the map again."""
        if not self._clustered and not self._closed:
            self.dispatch(job)
            return
        with self._lock:
            closed, full = self._closed, len(self._parked) >= MAX_PARKED
            if not closed and not full:
                self._parked.append(job)
        if closed:
            job.end(Verdict.LATE, Cause.CLOSED)
        elif full:
            job.end(Verdict.REFUSED, Cause.QUEUE_FULL)
        else:
            self._scout.want_map()
            self._watch()

    def redirect(self, job: Job, error: ServerError) -> None:
        """Follow a MOVED (remembered) or ASK (once) reply.

        A single server has no business to send us elsewhere, and nothing would ever lead back from there.
        """
        target = parse_redirect(error, asked=self._by_slot[job.slot].address) if self._clustered else None
        shard = self._shard(target) if target is not None else None
        if shard is None:
            job.end(Verdict.FAILED, Cause.REDIRECTS)
            return
        if error.kind is ErrorKind.ASK:
            job.asking = True
        else:
            self._by_slot[job.slot] = shard
            self._scout.want_map()
        shard.submit((job,))
        self._watch()

    def attention(self) -> None:
        """A breaker opened."""
        self._scout.attention()

    def _shard(self, address: Address) -> Shard | None:
        with self._lock:
            shard = self._shards.get(address)
            if shard is None and not self._closed and len(self._shards) < MAX_SHARDS:
                shard = Shard(address, self._settings, tls=self._tls, routes=self, lifetimes=self._lifetimes)
                self._shards[address] = shard
            return shard

    def _apply(self, topology: Iterable[SlotRange]) -> None:
        """Take over a new map; shards that serve nothing any more are closed."""
        by_slot: list[Shard | None] = list(self._by_slot) or [None] * SLOTS
        for slots in topology:
            shard = self._shard(slots.address)
            by_slot[slots.first : slots.last + 1] = [shard] * (slots.last + 1 - slots.first)
        known = [shard for shard in by_slot if shard is not None]
        if not known:
            return
        self._by_slot = [shard if shard is not None else known[0] for shard in by_slot]
        serving = {id(shard) for shard in known}
        with self._lock:
            # One that still works may be the target of an ASK; a job that comes too late is sent again.
            retired = [s for s in self._shards.values() if id(s) not in serving and (s.is_open or s.is_idle)]
            for shard in retired:
                del self._shards[shard.address]
        for shard in retired:
            shard.close()
            shard.join()

    def begin_refresh(self) -> None:
        """The map is being asked for: jobs parked from now on wait for the next answer."""
        with self._lock:
            self._asking += self._parked
            self._parked = []

    def end_refresh(self, topology: Sequence[SlotRange]) -> None:
        """Take over the map, if there is one, and send the parked jobs on their way."""
        try:
            if topology:
                self._apply(topology)
        finally:
            with self._lock:
                jobs, self._asking = self._asking, []
            for job in jobs:
                self.dispatch(job)

    def run(self) -> None:
        """End waiting jobs whose time is over, until closed."""
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ending.wait(SWEEP_S):
                return
            try:
                self._sweep(time.monotonic())
            except Exception:  # noqa: BLE001 - the top of a driver thread
                _log.exception("defect in %s", self.name)
                self._watching = True
            if self._watching:
                self._wake.set()

    def _sweep(self, now: float) -> None:
        """Watching ends first: a job queued meanwhile renews it."""
        self._watching = False
        shards = self.shards
        for shard in shards:
            shard.sweep(now)
        self._sweep_parked(now)
        if self._parked or self._asking or any(shard.has_queued for shard in shards):
            self._watching = True

    def _sweep_parked(self, now: float) -> None:
        ended: list[tuple[Job, tuple[Verdict, Cause]]] = []
        with self._lock:
            for jobs in (self._parked, self._asking):
                kept: list[Job] = []
                for job in jobs:
                    ending = job.unwanted(now)
                    if ending is None:
                        kept.append(job)
                    else:
                        ended.append((job, ending))
                jobs[:] = kept
        for job, ending in ended:
            job.end(*ending)

    def close(self) -> None:
        """End everything and join every thread."""
        with self._lock:
            self._closed = True
            parked = self._parked + self._asking
            self._parked, self._asking = [], []
            shards = list(self._shards.values())
        for job in parked:
            job.end(Verdict.LATE, Cause.CLOSED)
        for shard in shards:
            shard.close()
        self._scout.stop()
        self._ending.set()
        self._wake.set()
        for shard in shards:
            shard.join()
        for thread in (self, self._scout):
            if thread.is_alive():
                thread.join()
