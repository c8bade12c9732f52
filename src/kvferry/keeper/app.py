"""A keeper as a process: its tiers, its core, its connections and metrics. ``kvferry keeper`` runs it."""

import contextlib
import ipaddress
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import msgspec

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.config import format_size
from kvferry.errors import ClosedError
from kvferry.keeper.forms import Form, Plain, Sealed
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.remembered import MAX_FILE_BYTES
from kvferry.keeper.scan import ScanSettings
from kvferry.keeper.server import Admission, Server, ServerStatistics
from kvferry.keeper.settings import KeeperSettings
from kvferry.keeper.statistics import KeeperStatistics
from kvferry.keeper.tls import keeper_contexts
from kvferry.keeper.troubles import Trouble, Troubles, Watch
from kvferry.tiers.awaited import AwaitedTier, lower_opened_or_awaited, opened_or_awaited
from kvferry.tiers.contract import LowerTier
from kvferry.tiers.disk.tier import DiskTier

USES_NAME = "uses"
MIN_DISK_FOR_USES_BYTES = 4 << 30
FIRST_OPEN_S = 60.0
OPEN_S = 600.0

log = logging.getLogger("kvferry.keeper")


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """Of the whole process, for status and metrics. keepers: who shares the work; empty: it is alone.

    troubles: of its tiers, now. trouble_episodes: how often since start, by tier and word.
    """

    pid: int
    version: str
    name: str
    address: str
    uptime_s: float
    keepers: tuple[str, ...]
    server: ServerStatistics
    keeper: KeeperStatistics
    troubles: tuple[Trouble, ...]
    trouble_episodes: dict[str, dict[str, int]]


class KeeperProcess:
    """Owns all of it. ``close`` ends it, the connections first."""

    def __init__(
        self,
        settings: KeeperSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits | None = None,
    ) -> None:
        """limits: in place of what follows from the settings. Raises MisconfiguredError, one line."""
        self._settings = settings
        self._clock = clock
        self._started = clock()
        self._closed = False
        admission = Admission(
            name=settings.name,
            token=settings.token.reveal() if settings.token is not None else "",
            tls=None if settings.tls is None else keeper_contexts(settings.tls),
            key_ids=settings.key_ids,
        )
        with contextlib.ExitStack() as undo:
            self._keeper = _keeper(settings, limits or Limits(buffer_bytes=settings.buffer_bytes))
            undo.callback(self._keeper.close)
            self._troubles = Troubles(clock)
            self._watch = Watch(lambda: self._troubles.look(self._keeper.statistics()))
            undo.callback(self._watch.close)
            self._server = Server(
                settings.listen, keeping=self._keeper, admission=admission, status=self._document
            )
            undo.pop_all()

    @property
    def address(self) -> Address:
        """Where it listens; the port is known even where the settings left the choice."""
        return self._server.address

    def start(self) -> None:
        """Serve, on threads of its own."""
        self._server.start()

    def statistics(self) -> ProcessStatistics:
        """A snapshot, from any thread. Raises ClosedError."""
        if self._closed:
            raise ClosedError("the keeper is closed")
        keeper = self._keeper.statistics()
        return ProcessStatistics(
            pid=os.getpid(),
            version=__version__,
            name=self._settings.name,
            address=str(self.address),
            uptime_s=self._clock() - self._started,
            keepers=self._settings.keepers,
            server=self._server.statistics(),
            keeper=keeper,
            troubles=self._troubles.look(keeper),
            trouble_episodes=self._troubles.episodes,
        )

    def close(self) -> None:
        """Hang up, give copies on their way a moment, close the tiers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self._server.close()
        self._keeper.close()

    def _document(self) -> bytes:
        return msgspec.json.encode(self.statistics())


def _keeper(settings: KeeperSettings, limits: Limits) -> Keeper:
    """Over its tiers, which are the keeper's own once it is made. What does not answer yet is awaited."""
    from kvferry.tiers.valkey.keyspace import Keyspace
    from kvferry.tiers.valkey.protection import AsStored, Checksums
    from kvferry.tiers.valkey.settings import ValkeySettings
    from kvferry.tiers.valkey.tier import ValkeyTier

    form: Form = Sealed(settings.key_ids) if settings.key_ids else Plain()
    protection = AsStored(settings.key_ids) if settings.key_ids else Checksums()
    with contextlib.ExitStack() as opened:
        disk = _disk(settings)
        if disk is not None:
            opened.callback(disk.close)
        objects = _objects(settings)
        if objects is not None:
            opened.callback(objects.close)
        to_valkey = ValkeySettings(
            url=settings.valkey, client_name="kvferry-keeper", no_touch=True, protection=protection
        )
        valkey = opened_or_awaited(ValkeyTier.name, lambda: ValkeyTier.connect(to_valkey))
        opened.callback(valkey.close)

        def servers() -> Sequence[Address]:
            """Of Valkey; none before it answered."""
            tier = valkey.tier if isinstance(valkey, AwaitedTier) else valkey
            return [] if tier is None else tier.servers

        keeper = Keeper(
            valkey=valkey,
            disk=disk,
            objects=objects,
            limits=limits,
            form=form,
            keyspace=Keyspace(to_valkey, servers),
            scan=ScanSettings(name=settings.name, keepers=settings.keepers),
            uses=settings.disk / USES_NAME if settings.disk is not None and _uses_bytes(settings) else None,
        )
        opened.pop_all()
    return keeper


def _disk(settings: KeeperSettings) -> DiskTier | None:
    if settings.disk is None or settings.disk_bytes is None:
        return None
    from kvferry.tiers.disk.settings import DiskSettings

    return DiskTier.open(DiskSettings(settings.disk, settings.disk_bytes - _uses_bytes(settings)))


def _uses_bytes(settings: KeeperSettings) -> int:
    """Room beside the parts for what was used lately, twice while it is replaced. A small disk has none."""
    return 2 * MAX_FILE_BYTES if (settings.disk_bytes or 0) >= MIN_DISK_FOR_USES_BYTES else 0


def _objects(settings: KeeperSettings) -> LowerTier | None:
    """A large bucket is given more time to be listed once nobody waits for the keeper to start."""
    url = settings.objects
    if url is None:
        return None
    from kvferry.tiers.objects.settings import ObjectSettings
    from kvferry.tiers.objects.tier import ObjectTier

    patience_s = itertools.chain((FIRST_OPEN_S,), itertools.repeat(OPEN_S))

    def opened() -> ObjectTier:
        return ObjectTier.open(
            ObjectSettings(
                url,
                max_age_s=settings.objects_age_s,
                max_bytes=settings.objects_bytes,
                open_s=next(patience_s),
            )
        )

    return lower_opened_or_awaited(ObjectTier.name, opened)


def run(settings: KeeperSettings) -> int:
    """``kvferry keeper``: serve until SIGTERM or SIGINT. Raises MisconfiguredError at start-up."""
    from kvferry.observe.exposition import MetricsPage
    from kvferry.observe.keeper_metrics import KEEPER_METRICS

    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        log.info("stopping on %s", signal.Signals(number).name)
        ended.set()

    with contextlib.ExitStack() as stack:
        process = KeeperProcess(settings)
        stack.callback(process.close)
        if settings.metrics_port:
            page = MetricsPage(
                process.statistics,
                metrics=KEEPER_METRICS,
                port=settings.metrics_port,
                host=settings.metrics_host,
            )
            stack.callback(page.close)
            if not ipaddress.ip_address(settings.metrics_host).is_loopback:
                log.warning("metrics are open to everyone who can connect to %s", page.url)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, stop)
        process.start()
        log.info(
            "kvferry %s keeper %s at %s: %s", __version__, settings.name, process.address, _places(settings)
        )
        ended.wait()
    return 0


def _places(settings: KeeperSettings) -> str:
    places = [f"Valkey at {settings.valkey}"]
    if settings.disk is not None and settings.disk_bytes is not None:
        places.append(f"{format_size(settings.disk_bytes)} in {settings.disk}")
    if settings.objects is not None:
        places.append(f"objects in {settings.objects}")
    return ", ".join(places)
