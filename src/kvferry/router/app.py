"""A router as a process: proxy, choice, health, feeds, metrics, admin. ``kvferry router`` runs it."""

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import os
import random
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace

import uvloop

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.certificates import Contexts, Labels, client_context, server_context
from kvferry.errors import ClosedError, MisconfiguredError, RefusedError
from kvferry.router.admin import Admin
from kvferry.router.attending import Attendant
from kvferry.router.cache_aware import CacheAware
from kvferry.router.choice import CostGuide
from kvferry.router.contract import Guide
from kvferry.router.copies import Copies
from kvferry.router.descriptors import FEW_CLIENTS, clients_within_descriptors
from kvferry.router.discovery import Discovery
from kvferry.router.feed.engines import EngineEvents
from kvferry.router.feed.follower import FollowerStatistics
from kvferry.router.feed.followers import Followers
from kvferry.router.feed.kvevents import KvEventsStatistics
from kvferry.router.health import Change, Failure, State
from kvferry.router.health import Limits as HealthLimits
from kvferry.router.http.desk import Order
from kvferry.router.http.limits import Limits
from kvferry.router.http.proxy import Proxy, ProxyStatistics
from kvferry.router.knowledge import Knowledge
from kvferry.router.orders import loads_of, orders
from kvferry.router.pilots import MeasuredSnapshot, Pilots
from kvferry.router.policies import Counting, LeastLoad, RoundRobin, SessionAffinity
from kvferry.router.prefill import Prefill
from kvferry.router.reception import Reception
from kvferry.router.reload import Plan, plan
from kvferry.router.roster import DEFAULT_POOL, Roster, WorkerStatistics
from kvferry.router.settings import RouterSettings, admin_sockets
from kvferry.router.strangers import complaints, trust_of
from kvferry.router.telling import Telling

TLS_LABELS = Labels("tls_ca ", "tls_cert ", "tls_key ")
WORKER_TLS_LABELS = Labels("worker_tls_ca ", "worker_tls_cert ", "worker_tls_key ")
BACKLOG = 1024
STATISTICS_S = 5.0
SWITCH_S = 0.001  # a large body that is read beside the loop does not hold it up for longer
RENEW_S = 2.0  # between looks at the certificates
DRAIN_S = 600.0  # for requests at a worker that leaves
_OTHERS: tuple[type[Counting], ...] = (RoundRobin, LeastLoad, SessionAffinity, CacheAware)

log = logging.getLogger("kvferry.router")


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Of the whole process, for status and metrics."""

    pid: int
    version: str
    uptime_s: float
    proxy: ProxyStatistics
    loads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    feeds: tuple[FollowerStatistics, ...] = ()
    kv_events: tuple[KvEventsStatistics, ...] = ()
    workers: tuple[WorkerStatistics, ...] = ()
    worker_failures: Mapping[Failure, int] = field(default_factory=dict)
    pilots: tuple[MeasuredSnapshot, ...] = ()


class Router:
    """Owns all of it, on the running event loop: ``start``, then ``stop``."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        make_guide: Callable[[], Guide] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """limits: in place of what follows from the settings. Raises MisconfiguredError, one line."""
        self.settings = settings
        self._tls = None
        if settings.tls is not None:
            files = settings.tls
            self._tls = Contexts(lambda: server_context(files, TLS_LABELS), files)
        to_workers = settings.worker_tls

        @functools.cache
        def contexts() -> Contexts:
            return Contexts(lambda: client_context(to_workers, WORKER_TLS_LABELS), to_workers)

        def worker_tls() -> ssl.SSLContext:
            return contexts()()

        if any(worker.url.startswith("https:") for worker in settings.workers):
            contexts()  # what cannot be used is said at once; workers at https may also come later
        limits = limits or settings.limits
        self.roster = Roster(
            in_flight=self._in_flight, limits=HealthLimits(interval_s=settings.probe_interval_s)
        )
        self.pilots = Pilots(settings.split, settings.mirror)
        self._telling = Telling()
        worker_key = settings.worker_api_key.reveal() if settings.worker_api_key is not None else ""
        self.knowledge = Knowledge()
        self.followers = Followers(self.knowledge, settings.feed_access)
        self.reception = Reception(
            roster=self.roster,
            trust=trust_of(settings),
            make_guide=make_guide or self._guide,
            seed=secrets.randbits(63),
            apart_bytes=limits.apart_bytes,
            changed=self._changed,
            prefetch=self.followers.prefetch,
            pilots=self.pilots,
            worker_key=worker_key,
            control=settings.engine_control,
        )
        shown = {"Authorization": f"Bearer {worker_key}"} if worker_key else None
        self.engine_events = EngineEvents(self.knowledge, settings.kv_events, tls=worker_tls, headers=shown)
        self._tasks: set[asyncio.Task[None]] = set()
        self._feeds: dict[str, str] = {}  # by worker
        self.proxy = Proxy(self.reception, limits=limits, worker_tls=worker_tls)
        self.attendant = Attendant(
            self.roster,
            note=self.reception.note,
            removed=self._removed,
            heard_at=self.proxy.heard_at,
            tls=worker_tls,
            headers=shown,
            clock=self.proxy.now,
        )
        self.copies = Copies(self.proxy, self.reception, self.pilots)
        self.reception.prefill = Prefill(self.proxy, self.reception).before
        self.reception.look_again = self.attendant.look_again
        if self.pilots.mirror is not None:
            self.reception.copy = self.copies.make
        self._discovery: Discovery | None = None
        self._started = self.proxy.now()
        self._server: asyncio.Server | None = None
        self._sock: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        self._address: Address | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        if self._address is None:
            raise ClosedError("the router does not listen")
        return self._address

    async def start(self) -> None:
        """Listen and serve. Raises MisconfiguredError where it cannot listen."""
        self._loop = asyncio.get_running_loop()
        for worker in self.settings.workers:
            self.add_worker(worker.url, pool=worker.pool)
        listen = self.settings.listen
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        try:
            self._sock = socket.create_server((listen.host, listen.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise MisconfiguredError(
                f"cannot listen at {listen}: {os.strerror(error.errno or 0)}; choose another --listen"
            ) from error
        self._address = Address(*self._sock.getsockname()[:2])
        await self._listen()
        if self._tls is not None:
            self._renewing = asyncio.create_task(self._renew())
        self.proxy.start()
        self._discovery = Discovery(self.settings.names, found=self._found, gone=self._gone)

    async def _listen(self) -> None:
        """With the certificates that are there now; again where they were replaced."""
        loop = asyncio.get_running_loop()
        context = self._tls() if self._tls is not None else None
        if self._sock is None or (self._server is not None and context is self._context):
            return
        before, self._context = self._server, context
        self._server = await loop.create_server(
            self.proxy.protocol,
            sock=self._sock.dup(),
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=self.proxy.limits.head_s if context is not None else None,
        )
        if before is not None:
            before.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._listen()

    def add_worker(self, url: str, *, pool: str = DEFAULT_POOL, found_by_name: bool = False) -> None:
        """It gets requests from now on. found_by_name: it goes when its name leads to it no more.

        Raises RefusedError: see ``Roster.add``.
        """
        if self._server is not None and self.roster.get(url) is None:
            log.info("worker %s added%s", url, f" to pool {pool}" if pool else "")
        worker = self.roster.add(url, pool=pool, found_by_name=found_by_name, now=self.proxy.now())
        if self.settings.probe_interval_s:
            self.attendant.attend(worker)
        self.reception.guide(pool).worker_added(url)
        self._follow(url)
        self.proxy.add_worker(url)

    def drain_worker(self, url: str, *, grace_s: float) -> bool:
        """It gets no more requests; those it has may go on so long. False: there is none."""
        return self.attendant.drain(url, grace_s=grace_s)

    def reload(self, settings: RouterSettings) -> Plan:
        """See ``reload.plan``. Raises MisconfiguredError, and changes nothing."""
        trust = trust_of(settings)
        running = {worker.url: worker.pool for worker in self.roster if not worker.leaving}
        led = self._discovery.led if self._discovery is not None else {}
        change = plan(self.settings, settings, running=running, led=led)
        if trust != self.reception.trust and "trust" not in change.changed:  # what its file holds
            change = replace(change, changed=(*change.changed, "trust"))
        self.settings = change.settings
        self.reception.trust = trust
        self.pilots.change(settings.split, settings.mirror)
        self.reception.copy = self.copies.make if settings.mirror is not None else None
        for url in change.drain:
            self.drain_worker(url, grace_s=DRAIN_S)
        for worker in change.add:
            self._found(worker.url, worker.pool)
        for there in self.roster:
            there.found_by_name = there.url not in dict(settings.workers)
        log.info(
            "settings read anew: %d workers added, %d leave; changed: %s",
            len(change.add),
            len(change.drain),
            ", ".join(change.changed) or "nothing else",
        )
        if change.later:
            log.warning("other values of %s count after a new start", ", ".join(change.later))
        return change

    async def stop(self) -> None:
        """Listening ends, requests in flight have a while."""
        if self._discovery is not None:
            await self._discovery.close()
        await self.attendant.close()
        self.copies.close()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._server is not None:
            self._server.close()
        if self._sock is not None:
            self._sock.close()
        await self.proxy.drain()
        await self.followers.close()
        await self.engine_events.close()
        await asyncio.gather(*self._tasks)
        await self.proxy.close()

    def statistics(self) -> RouterStatistics:
        """A snapshot, from any other thread. Raises ClosedError."""
        loop = self._loop
        if loop is None or loop.is_closed():
            raise ClosedError("the router does not run")

        async def snapshot() -> RouterStatistics:
            return self.snapshot()

        return asyncio.run_coroutine_threadsafe(snapshot(), loop).result(STATISTICS_S)

    def snapshot(self) -> RouterStatistics:
        """On the loop."""
        return RouterStatistics(
            os.getpid(),
            __version__,
            self.proxy.now() - self._started,
            self.proxy.statistics(),
            loads_of(self.reception.guides.values()),
            self.followers.statistics(),
            self.engine_events.statistics(),
            self.roster.statistics(),
            self.roster.failures(),
            self.pilots.statistics(),
        )

    def _found(self, url: str, pool: str) -> None:
        try:
            self.add_worker(url, pool=pool, found_by_name=True)
        except RefusedError as error:
            log.warning("%s", error)

    def _gone(self, url: str) -> None:
        worker = self.roster.get(url)
        if worker is not None and worker.found_by_name:
            self.drain_worker(url, grace_s=DRAIN_S)

    def _follow(self, url: str) -> None:
        """Its own KV events where it publishes them, else the feed of its host's node, where there is one."""
        if self.settings.policy != CostGuide.name:
            return
        events = self.engine_events.follow(url)
        if events is not None:
            self.knowledge.near(url, events)
            self.reception.given = self._given
            return
        address = self.settings.feeds.of(url)
        if address is not None and url not in self._feeds:
            self._feeds[url] = self.followers.follow(address)
            self.knowledge.near(url, self._feeds[url])

    def _given(self, url: str, order: Order) -> None:
        worker = self.roster.get(url)
        models = (worker.models if worker is not None else None) or ()
        if any(model.adapter and model.name == order.asked.model for model in models):
            return  # its blocks have other names than tokens alone give
        self.engine_events.sent(url, order.asked, order.request.path, order.body)

    def _guide(self) -> Guide:
        policy = self.settings.policy
        if policy == CostGuide.name:
            return CostGuide(self.knowledge, random=random.Random())
        return next(kind() for kind in _OTHERS if kind.name == policy)

    def _in_flight(self, url: str) -> int:
        return self.proxy.in_flight(url)

    def _removed(self, url: str) -> None:
        log.info("worker %s is removed", url)
        self.proxy.worker_down(url)
        self.proxy.remove_worker(url)
        self.reception.forget(url)
        feed = self._feeds.pop(url, None)
        if feed is not None:
            self._soon(self.followers.unfollow(feed))
        self._soon(self.engine_events.unfollow(url))

    def _soon(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self, url: str, change: Change) -> None:
        node = self._feeds.get(url) or self.engine_events.node(url)
        if change.lost and node is not None:
            self.knowledge.near(url, node)
        worker = self.roster.get(url)
        why = worker.trouble if worker is not None else ""
        self._telling.changed(url, change.before, change.after, why=why)
        if change.after is State.DOWN and not change.answers:
            # Soon: the request that showed it is still being placed elsewhere.
            asyncio.get_running_loop().call_soon(self.proxy.worker_down, url)
        elif change.after in (State.UP, State.TRIAL):
            self.proxy.waiting.wake()


def run(settings: RouterSettings, *, reload: Callable[[], RouterSettings]) -> int:
    """``kvferry router``: serve until SIGTERM or SIGINT. Raises MisconfiguredError at start-up."""
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, reload))


async def _serve(settings: RouterSettings, read: Callable[[], RouterSettings]) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.info("stopping on %s", number.name)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    chosen = settings.admin_socket
    if chosen is not None and not chosen.parent.is_dir():
        raise MisconfiguredError(
            f"admin_socket {chosen}: there is no directory {chosen.parent}; make it, for its user alone"
        )
    clients = clients_within_descriptors(settings.limits.clients)
    router = Router(settings, limits=replace(settings.limits, clients=clients))

    def reload() -> Plan:
        return router.reload(read())

    def again() -> None:
        try:
            reload()
        except MisconfiguredError as error:
            log.error("the settings stay as they are: %s", error)

    loop.add_signal_handler(signal.SIGHUP, again)
    async with contextlib.AsyncExitStack() as stack:
        await router.start()
        stopping = stack.push_async_callback(router.stop)
        socket_path = settings.admin_socket or admin_sockets() / f"router-{router.address.port}.sock"
        admin = Admin(socket_path, orders(router, reload))
        stack.push_async_callback(admin.close)
        await admin.start()
        _serve_metrics(router, stack)
        log.info("kvferry %s router at %s: %d workers", __version__, router.address, len(settings.workers))
        for complaint in complaints(settings, router.reception.trust):
            log.warning("%s", complaint)
        if clients < FEW_CLIENTS:
            log.warning("%d clients at a time: raise the hard limit of open files (ulimit -Hn)", clients)
        # Tables of names are never garbage: looking through them, full, stopped the loop for 100 ms.
        gc.collect()
        gc.freeze()
        await ended.wait()
        await stopping()  # before metrics and admin go
    return 0


def _serve_metrics(router: Router, stack: contextlib.AsyncExitStack) -> None:
    settings = router.settings
    if not settings.metrics_port:
        return
    from kvferry.observe.exposition import MetricsPage
    from kvferry.observe.router_metrics import ROUTER_METRICS

    page = MetricsPage(
        router.statistics, metrics=ROUTER_METRICS, port=settings.metrics_port, host=settings.metrics_host
    )
    stack.callback(page.close)
    if not ipaddress.ip_address(settings.metrics_host).is_loopback:
        log.warning("metrics are open to everyone who can connect to %s", page.url)
