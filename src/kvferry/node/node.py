"""A node: one per host. Usable inside a process (tests, tools) and as ``kvferry node``."""

import contextlib
import ipaddress
import logging
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FrameType

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.config import NodeSettings, format_size
from kvferry.errors import ClosedError, RetryError
from kvferry.feed.wire import Level
from kvferry.loop import Loop
from kvferry.node.app import App, snapshot
from kvferry.node.counters import NodeStatistics
from kvferry.node.feed import Feed
from kvferry.node.feedserver import FeedServer
from kvferry.node.feedtier import WatchedDisk, WatchedTier
from kvferry.node.keepers import Keepers
from kvferry.node.peers import Peer, peer_of
from kvferry.node.quota import QuotaTier
from kvferry.node.server import Server
from kvferry.node.state import Limits, NodeState
from kvferry.pool.arena import Arena
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.prepare import PrepareThread
from kvferry.pool.slots import SlotAllocator
from kvferry.tiers.contract import LowerTier, Tier
from kvferry.tiers.valkey.url import ValkeyUrl

JOIN_S = 10.0
DISK = "disk"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATISTICS_WAIT_S = 2.0

log = logging.getLogger("kvferry.node")


class Node:
    """Owns the arena, the tier, the loop's thread and the socket. ``close`` ends all of it."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        tier: Tier | None = None,
        keepers: Keepers | None = None,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
        peer_of: Callable[[socket.socket], Peer] = peer_of,
    ) -> None:
        """tier, keepers, token: instead of what the settings name. Raises MisconfiguredError, one line."""
        self.settings = settings
        token = token or (settings.token.reveal() if settings.token is not None else "")
        self._started = clock()
        self._closed = False
        self._running = False
        with contextlib.ExitStack() as undo:
            self._loop = Loop(after_turn=self._after_turn, clock=clock)
            undo.callback(self._loop.close)
            self._arena = Arena.create(settings.pool_bytes)
            undo.callback(self._arena.close)
            catalogue, epoch = Catalogue(SlotAllocator(self._arena.nbytes)), secrets.randbits(62) | 1
            behind = tier if tier is not None else _tier(settings)
            if behind is not None:
                undo.callback(behind.close)
            self._feed = _feed(settings, behind, catalogue, epoch=epoch)
            if self._feed is not None:
                undo.callback(self._feed.close)
                behind = _watched(behind, self._feed)
            self._quota = _within_quota(behind, settings)
            self._tier = self._quota or behind
            self._keepers = keepers if keepers is not None else _keepers(settings)
            if self._keepers is not None:
                undo.callback(self._keepers.close)
            state = NodeState(
                loop=self._loop,
                arena=self._arena,
                catalogue=catalogue,
                tier=self._tier,
                quota=self._quota,
                keepers=self._keepers,
                located=None if self._feed is None else self._feed.located,
                epoch=epoch,
                deadline_cap_s=settings.deadline_cap_ms / 1000,
                limits=Limits(tier_quota=settings.valkey_quota, write_rate=settings.valkey_write_rate),
            )
            self._app = App(state, statistics=self._snapshot, domain=settings.domain, feed=self._feed)
            self._server = Server(
                settings.socket_path,
                loop=self._loop,
                handler=self._app,
                token=token,
                group=settings.group,
                peer_of=peer_of,
            )
            undo.pop_all()
        self._prepare = PrepareThread(self._arena)
        self._thread = threading.Thread(target=self._loop.run, name="kvferry-node", daemon=True)

    @property
    def epoch(self) -> int:
        """Names this node process; handles of another epoch are refused."""
        return self._app.state.epoch

    @property
    def feed_address(self) -> Address | None:
        """Where routers find its feed; the port is known even where the settings left the choice."""
        return None if self._feed is None else self._feed.address

    def start(self) -> None:
        """Serve, on a thread of its own."""
        self._begin()
        self._thread.start()

    def serve(self) -> None:
        """Serve on the calling thread until ``stop``."""
        self._begin()
        try:
            self._loop.run()
        finally:
            self._running = False

    def _begin(self) -> None:
        self._running = True
        self._prepare.start()
        if self._feed is not None:
            self._feed.start()

    def stop(self) -> None:
        """Ask the loop to end; from any thread or signal handler."""
        self._loop.stop()

    def statistics(self) -> NodeStatistics:
        """A snapshot, from any thread. Raises ClosedError, or RetryError when the node is too busy."""
        if self._closed:
            raise ClosedError("the node is closed")
        if not self._running:
            return self._snapshot()
        box: list[NodeStatistics] = []
        done = threading.Event()

        def take() -> None:
            box.append(self._snapshot())
            done.set()

        self._loop.post(take)
        if not done.wait(STATISTICS_WAIT_S):
            raise RetryError(f"the node's loop gave no statistics within {STATISTICS_WAIT_S:.0f} s")
        return box[0]

    def check(self) -> None:
        """Raise BrokenError when the pool's invariants do not hold (tests; the node must be idle)."""
        self._app.state.catalogue.check()
        self._app.state.pins.check()

    def close(self) -> None:
        """Stop, end all connections and transfers, free the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._server.close()
        if self._feed is not None:
            self._feed.close()
        self._prepare.close()
        if self._keepers is not None:
            self._keepers.close()
        if self._tier is not None:
            self._tier.close()  # every transfer has ended after this: nothing touches the arena
        self._loop.close()
        self._arena.close()

    def _after_turn(self) -> None:
        self._app.after_turn()
        self._server.flush()

    def _snapshot(self) -> NodeStatistics:
        prepared = self._prepare.statistics()
        return snapshot(
            self._app,
            started=self._started,
            socket_path=str(self.settings.socket_path),
            huge_bytes=prepared.huge_bytes,
            prepared_bytes=prepared.populated_bytes,
            quota=None if self._quota is None else self._quota.quota(),
            feed=None if self._feed is None else self._feed.statistics(),
        )


def _tier(settings: NodeSettings) -> Tier | None:
    if settings.disk is not None and settings.disk_bytes is not None:
        from kvferry.tiers.disk.settings import DiskSettings
        from kvferry.tiers.disk.tier import DiskTier

        return DiskTier.open(DiskSettings(settings.disk, settings.disk_bytes))
    return None if settings.valkey is None else _valkey(settings, settings.valkey)


def _valkey(settings: NodeSettings, url: ValkeyUrl) -> Tier:
    from kvferry.tiers.valkey.protection import Checksums, Sealed
    from kvferry.tiers.valkey.settings import ValkeySettings
    from kvferry.tiers.valkey.tier import ValkeyTier

    keys = settings.encryption_keys
    protection = Checksums() if keys is None else Sealed(keys)
    return ValkeyTier.connect(ValkeySettings(url=url, protection=protection))


def _awaited(settings: NodeSettings) -> Tier | None:
    """Valkey, or what stands for it until it answers. None: what is behind the node is its own to open."""
    if settings.valkey is None:
        return None
    from kvferry.tiers.awaited import opened_or_awaited

    return opened_or_awaited("valkey", partial(_valkey, settings, settings.valkey))


def _keepers(settings: NodeSettings) -> Keepers | None:
    if not settings.keepers:
        return None
    from kvferry.keeper.client import Keepers as KeepersOfNetwork

    keys = settings.encryption_keys
    return KeepersOfNetwork(
        settings.keepers,
        access=settings.keeper_access,
        node=socket.gethostname(),
        key_ids=[] if keys is None else [key.key_id for key in keys.keys],
    )


def _feed(settings: NodeSettings, behind: Tier | None, catalogue: Catalogue, *, epoch: int) -> Feed | None:
    """What routers follow; None where the settings have none."""
    if settings.feed is None:
        return None
    on_disk = behind is not None and behind.name == DISK
    if on_disk and settings.disk is not None:
        shared = f"disk {_disk_name(settings.disk)}"
    else:
        shared = "" if behind is None else str(settings.valkey or behind.name)
    server = FeedServer(settings.feed, node=socket.gethostname(), epoch=epoch, behind=shared)
    return Feed(server, catalogue, level=Level.DISK if on_disk else Level.VALKEY)


def _disk_name(directory: Path) -> str:
    """Of no other host's, whatever hosts are called; the same after a restart of the node."""
    found = directory.stat()
    host = BOOT_ID.read_bytes() if BOOT_ID.exists() else socket.gethostname().encode()
    return sha256(b"%b %d %d" % (host, found.st_dev, found.st_ino)).hexdigest()[:16]


def _watched(behind: Tier | None, feed: Feed) -> Tier | None:
    """With its answers told of."""
    if behind is None:
        return None
    if isinstance(behind, LowerTier):
        return WatchedDisk(behind, feed.seen)
    return WatchedTier(behind, feed.seen)


def _within_quota(tier: Tier | None, settings: NodeSettings) -> QuotaTier | None:
    if tier is None or settings.valkey_quota is None:
        return None
    return QuotaTier(tier, quota_bytes=settings.valkey_quota)


def run(settings: NodeSettings) -> int:
    """``kvferry node``: serve until SIGTERM or SIGINT. Raises MisconfiguredError at start-up."""
    from kvferry.observe.exposition import MetricsPage
    from kvferry.observe.metrics import METRICS

    with contextlib.ExitStack() as stack:
        node = Node(settings, tier=_awaited(settings))
        stack.callback(node.close)
        if settings.metrics_port:
            page = MetricsPage(
                node.statistics, metrics=METRICS, port=settings.metrics_port, host=settings.metrics_host
            )
            stack.callback(page.close)
            if not ipaddress.ip_address(settings.metrics_host).is_loopback:
                log.warning("metrics are open to everyone who can connect to %s", page.url)

        def stop(number: int, frame: FrameType | None) -> None:
            del frame
            log.info("stopping on %s", signal.Signals(number).name)
            node.stop()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, stop)
        log.info(
            "kvferry %s at %s: pool %s, %s",
            __version__,
            settings.socket_path,
            format_size(settings.pool_bytes),
            f"behind it {settings.valkey or settings.disk}"
            if settings.valkey or settings.disk
            else "memory only",
        )
        node.serve()
    return 0
