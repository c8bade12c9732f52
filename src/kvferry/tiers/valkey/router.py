"""Which shard serves which slot, and the one thread that looks after shards in trouble.

That thread asks for the Cluster's map again when a redirect or a lost connection says it is old, probes
shards whose breaker is open, and ends queued jobs whose time is over. Nothing else waits for it but jobs
that lost their connection in a Cluster.
"""

import logging
import ssl
import threading
import time
from collections.abc import Iterable

from kvferry.errors import KvferryError
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.jobs import Cause, Job, Verdict
from kvferry.tiers.valkey.resp import ErrorKind, ServerError
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.shard import Shard
from kvferry.tiers.valkey.slots import SLOTS
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.topology import SlotRange, ask_topology, parse_redirect
from kvferry.tiers.valkey.url import Address

MAX_SHARDS = 1024
SWEEP_S = 0.05
PROBE_S = 0.25
REFRESH_S = 0.5
MIN_REFRESH_INTERVAL_S = 0.1
_log = logging.getLogger(__name__)


class Router(threading.Thread):
    """Owns the shards. ``dispatch``, ``retry``, ``redirect`` may be called from any thread."""

    def __init__(
        self, settings: ValkeySettings, *, tls: ssl.SSLContext | None, topology: tuple[SlotRange, ...]
    ) -> None:
        """topology: empty for a single server (the first seed)."""
        super().__init__(name="kvferry-valkey-router", daemon=True)
        self._settings = settings
        self._tls = tls
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._shards: dict[Address, Shard] = {}
        self._parked: list[Job] = []
        self._refresh_wanted = False
        self._refreshed_at = 0.0
        self._watching = False  # whether queues may hold jobs, so that they are swept now and then
        self._swept_at = 0.0
        self._closed = False
        self._clustered = bool(topology)
        self._by_slot: list[Shard] = []
        self._apply(topology or (SlotRange(0, SLOTS - 1, settings.url.seeds[0]),))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards in use now."""
        with self._lock:
            return tuple(self._shards.values())

    @property
    def clustered(self) -> bool:
        """Whether the servers form a Cluster."""
        return self._clustered

    def dispatch(self, job: Job) -> None:
        """Queue the job at the shard that serves its slot."""
        self._by_slot[job.slot].submit(job)
        if not self._watching:
            self._watching = True
            self._wake.set()

    def retry(self, job: Job) -> None:
        """Queue the job again; in a Cluster after asking for the map again."""
        if not self._clustered:
            self.dispatch(job)
            return
        with self._lock:
            if not self._closed:
                self._parked.append(job)
                self._refresh_wanted = self._watching = True
                self._wake.set()
                return
        job.end(Verdict.LATE, Cause.CLOSED)

    def redirect(self, job: Job, error: ServerError) -> None:
        """Follow a MOVED (remembered) or ASK (once) reply."""
        target = parse_redirect(error, asked=self._by_slot[job.slot].address)
        shard = self._shard(target) if target is not None else None
        if shard is None:
            job.end(Verdict.FAILED, Cause.REDIRECTS)
            return
        if error.kind is ErrorKind.ASK:
            job.asking = True
        else:
            self._by_slot[job.slot] = shard
            self._refresh_wanted = True
            self._wake.set()
        shard.submit(job)

    def attention(self) -> None:
        """Wake the thread."""
        self._wake.set()

    def _shard(self, address: Address) -> Shard | None:
        with self._lock:
            shard = self._shards.get(address)
            if shard is None and not self._closed and len(self._shards) < MAX_SHARDS:
                shard = Shard(address, self._settings, tls=self._tls, routes=self)
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
            idle = [shard for shard in self._shards.values() if id(shard) not in serving and shard.is_open]
            for shard in idle:
                del self._shards[shard.address]
        for shard in idle:
            shard.close()
            shard.join()

    def run(self) -> None:
        """Look after the shards until closed."""
        while not self._closed:
            try:
                self._wake.wait(self._pause_s())
                self._wake.clear()
                self._turn()
            except Exception:  # noqa: BLE001 - the top of a driver thread
                _log.exception("defect in %s", self.name)
                time.sleep(SWEEP_S)  # a defect that repeats must not spin

    def _pause_s(self) -> float | None:
        now = time.monotonic()
        pauses = [max(at - now, 0.0) for shard in self.shards if (at := shard.probe_at()) is not None]
        if self._parked or self._refresh_wanted:
            pauses.append(max(self._refreshed_at + MIN_REFRESH_INTERVAL_S - now, 0.0))
        if self._watching:
            pauses.append(max(self._swept_at + SWEEP_S - now, 0.0))
        return min(pauses, default=None)

    def _turn(self) -> None:
        now = time.monotonic()
        if self._watching and now >= self._swept_at + SWEEP_S:
            self._sweep(now)
        if self._refresh_wanted and now >= self._refreshed_at + MIN_REFRESH_INTERVAL_S:
            self._refresh()
        for shard in self.shards:
            at = shard.probe_at()
            if at is not None and now >= at and not self._closed:
                self._probe(shard)

    def _sweep(self, now: float) -> None:
        """End waiting jobs whose time is over. Watching ends first: a job queued meanwhile renews it."""
        self._watching = False
        self._swept_at = now
        shards = self.shards
        for shard in shards:
            shard.sweep(now)
        self._sweep_parked(now)
        if self._parked or any(shard.has_queued for shard in shards):
            self._watching = True

    def _sweep_parked(self, now: float) -> None:
        with self._lock:
            parked, self._parked = self._parked, []
        kept: list[Job] = []
        for job in parked:
            ending = job.unwanted(now)
            if ending is None:
                kept.append(job)
            else:
                job.end(*ending)
        with self._lock:
            self._parked[:0] = kept

    def _refresh(self) -> None:
        with self._lock:
            self._refresh_wanted = False
            parked, self._parked = self._parked, []
        try:
            if self._clustered:
                self._ask()
        finally:
            self._refreshed_at = time.monotonic()
            for job in parked:
                self.dispatch(job)

    def _ask(self) -> None:
        """Ask the servers for the map, those that answer first; keep the old one if none does."""
        addresses = [shard.address for shard in sorted(self.shards, key=lambda shard: shard.is_open)]
        addresses += [seed for seed in self._settings.url.seeds if seed not in addresses]
        deadline = time.monotonic() + REFRESH_S
        for address in addresses:
            if time.monotonic() >= deadline or self._closed:
                return
            try:
                topology = ask_topology(address, self._settings, tls=self._tls, deadline=deadline)
            except KvferryError as error:
                _log.debug("no Cluster map from %s: %s", address, error)
                continue
            if topology:
                self._apply(topology)
                return

    def _probe(self, shard: Shard) -> None:
        deadline = time.monotonic() + PROBE_S
        try:
            connection = Connection.open(shard.address, self._settings, tls=self._tls, deadline=deadline)
            try:
                answer = connection.request(b"PING", patience=Until(deadline))
            finally:
                connection.close()
        except KvferryError as error:
            shard.probe_failed(str(error))
            self._refresh_wanted = self._clustered
            return
        if isinstance(answer, ServerError):
            shard.probe_failed(str(answer))
        else:
            shard.succeeded()

    def close(self) -> None:
        """End everything and join every thread."""
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
            shards = list(self._shards.values())
        for job in parked:
            job.end(Verdict.LATE, Cause.CLOSED)
        for shard in shards:
            shard.close()
        self._wake.set()
        for shard in shards:
            shard.join()
        if self.is_alive():
            self.join()
