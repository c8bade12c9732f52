"""The way to Valkey: there from the start, or as soon as a server that was down answers."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from kvferry.engines.lmcache.settings import AdapterSettings
from kvferry.errors import MisconfiguredError
from kvferry.tiers.contract import Tier
from kvferry.tiers.valkey.greeting import UnreachableServersError
from kvferry.tiers.valkey.protection import Checksums, Sealed
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.tier import ValkeyTier

RETRY_S = 2.0
JOIN_S = 10.0
_log = logging.getLogger("kvferry.lmcache")


def connect(settings: AdapterSettings) -> Tier:
    """Bounded by a few seconds. Raises MisconfiguredError, UnreachableServersError where nobody answers."""
    keys = settings.encryption_keys
    protection = Checksums() if keys is None else Sealed(keys)
    chosen = ValkeySettings(
        settings.valkey,
        protection=protection,
        client_name="kvferry-lmcache",
        store_connections=settings.store_connections,
    )
    if settings.fetch_connections is not None:
        chosen = replace(chosen, fetch_connections=settings.fetch_connections)
    return ValkeyTier.connect(chosen)


class Link:
    """Holds the tier once there is one. ``close`` ends it and every thread."""

    def __init__(self, connect: Callable[[], Tier], *, retry_s: float = RETRY_S) -> None:
        """Raises MisconfiguredError; a server that does not answer is asked again in the background."""
        self._connect = connect
        self._retry_s = retry_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.tier: Tier | None = None
        self.complaint = ""
        try:
            self.tier = connect()
        except UnreachableServersError as error:
            self.complaint = str(error)
            _log.warning("%s: everything is a miss until it answers", error)
            self._thread = threading.Thread(
                target=self._keep_trying, name="kvferry-lmcache-link", daemon=True
            )
            self._thread.start()

    def _keep_trying(self) -> None:
        told = self.complaint
        while not self._closed.wait(self._retry_s):
            try:
                tier = self._connect()
            except MisconfiguredError as error:
                self.complaint = str(error)
                if not isinstance(error, UnreachableServersError) and self.complaint != told:
                    told = self.complaint
                    _log.error("%s", error)
                continue
            except Exception:  # noqa: BLE001 - the top of a driver thread
                _log.exception("defect while connecting; no more is tried")
                return
            self.tier, self.complaint = tier, ""
            _log.info("Valkey answers: storing and loading")
            return

    def close(self) -> None:
        """Idempotent. Afterwards no thread of the tier touches memory any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        if self.tier is not None:
            self.tier.close()
