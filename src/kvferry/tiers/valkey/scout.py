"""The thread that finds things out over the network, so that nothing else waits for the answers.

It probes shards whose breaker is open, one that failed a request, and those that were idle for a while: a
server that died should cost the next request nothing. It looks at their settings now and then.
It asks for a Cluster's map when a redirect, a lost
connection or a failed probe says that the old one is wrong.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvferry.errors import KvferryError
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import Reply, ServerError, info_facts
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.shard import Shard
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.tls import Tls
from kvferry.tiers.valkey.topology import SlotRange, ask_topology

PROBE_S = 0.25
IDLE_PROBE_S = 0.5
IDLE_PROBES = 2
"""Longer and again: a busy host may be slow to answer, and a server taken for dead is not asked."""
_UNWELL = ("LOADING", "BUSY", "MASTERDOWN")
REFRESH_S = 0.5
MIN_REFRESH_INTERVAL_S = 0.1
DEFECT_PAUSE_S = 0.05
_log = logging.getLogger(__name__)


class Territory(Protocol):
    """What the scout looks after."""

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards in use now."""
        ...

    def begin_refresh(self) -> None:
        """The map is being asked for."""

    def end_refresh(self, topology: Sequence[SlotRange]) -> None:
        """The answer; empty if there was none."""


class Scout(threading.Thread):
    """``want_map``, ``attention`` and ``stop`` may be called from any thread."""

    def __init__(
        self,
        settings: ValkeySettings,
        *,
        tls: Tls | None,
        clustered: bool,
        surveys: bool,
        territory: Territory,
    ) -> None:
        super().__init__(name="kvferry-valkey-scout", daemon=True)
        self._settings = settings
        self._tls = tls
        self._clustered = clustered
        self._surveys = surveys
        self._territory = territory
        self._wake = threading.Event()
        self._map_wanted = False
        self._refreshed_at = 0.0
        self._stopped = False

    def want_map(self) -> None:
        """Ask for the Cluster's map soon."""
        self._map_wanted = self._clustered
        self._wake.set()

    def attention(self) -> None:
        """A request failed, or a breaker opened."""
        self._wake.set()

    def stop(self) -> None:
        """End soon: after the question that is under way."""
        self._stopped = True
        self._wake.set()

    def run(self) -> None:
        """Until stopped."""
        while not self._stopped:
            try:
                self._wake.wait(self._pause_s())
                self._wake.clear()
                self._turn()
            except Exception:  # noqa: BLE001 - the top of a driver thread
                _log.exception("defect in %s", self.name)
                time.sleep(DEFECT_PAUSE_S)  # a defect that repeats must not spin

    def _pause_s(self) -> float | None:
        now = time.monotonic()
        times = [shard.probe_at() for shard in self._territory.shards]
        if self._surveys:
            times += [shard.survey_at() for shard in self._territory.shards]
        if self._map_wanted:
            times.append(self._refreshed_at + MIN_REFRESH_INTERVAL_S)
        return max(min(times) - now, 0.0) if times else None

    def _turn(self) -> None:
        if self._map_wanted and time.monotonic() >= self._refreshed_at + MIN_REFRESH_INTERVAL_S:
            self._refresh()
        for shard in self._territory.shards:
            if not self._stopped and shard.needs_probe(time.monotonic()):
                self._probe(shard)
            if self._surveys and not self._stopped and time.monotonic() >= shard.survey_at():
                self._survey(shard)

    def _survey(self, shard: Shard) -> None:
        """Ask how the server evicts. Whether it answers at all is for requests and probes to find out."""
        shard.begin_survey()
        if shard.is_open:
            return
        try:
            info = self._request(shard, b"INFO", deadline=time.monotonic() + IDLE_PROBE_S)
        except KvferryError as error:
            _log.debug("no INFO from %s: %s", shard.address, error)
            return
        if isinstance(info, bytes):
            shard.surveyed(info_facts(info))

    def _refresh(self) -> None:
        self._map_wanted = False
        self._territory.begin_refresh()
        topology: tuple[SlotRange, ...] = ()
        try:
            topology = self._ask()
        finally:
            self._refreshed_at = time.monotonic()
            self._territory.end_refresh(topology)

    def _ask(self) -> tuple[SlotRange, ...]:
        """Ask the servers for the map, those that answer first; empty if none does."""
        addresses = [shard.address for shard in sorted(self._territory.shards, key=lambda s: s.is_open)]
        addresses += [seed for seed in self._settings.url.seeds if seed not in addresses]
        deadline = time.monotonic() + REFRESH_S
        for address in addresses:
            if time.monotonic() >= deadline or self._stopped:
                break
            try:
                topology = ask_topology(address, self._settings, tls=self._tls, deadline=deadline)
            except KvferryError as error:
                _log.debug("no Cluster map from %s: %s", address, error)
                continue
            if topology:
                return topology
        return ()

    def _probe(self, shard: Shard) -> None:
        began = time.monotonic()
        doubted = shard.is_open or shard.suspected
        patience_s, tries = (PROBE_S, 1) if doubted else (IDLE_PROBE_S, IDLE_PROBES)
        failure = ""
        for _ in range(tries):
            failure = self._ask_alive(shard, deadline=time.monotonic() + patience_s)
            if not failure:
                shard.succeeded()
                return
            if self._stopped:
                return
        shard.probe_failed(failure, since=began)
        self._map_wanted = self._clustered

    def _ask_alive(self, shard: Shard, *, deadline: float) -> str:
        """What is wrong with the server; empty if it is well. An error reply, too, is an answer."""
        try:
            answer = self._request(shard, b"PING", deadline=deadline)
        except KvferryError as error:
            return str(error) or type(error).__name__
        return str(answer) if isinstance(answer, ServerError) and answer.code in _UNWELL else ""

    def _request(self, shard: Shard, word: bytes, *, deadline: float) -> Reply:
        """On a connection of its own. Raises KvferryError if there is no answer."""
        connection = Connection.open(shard.address, self._settings, tls=self._tls, deadline=deadline)
        try:
            return connection.request(word, patience=Until(deadline))
        finally:
            connection.close()
