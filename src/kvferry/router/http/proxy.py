"""The proxy as a whole: who is connected, what is in flight, to which workers, and what is late."""

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry.errors import KvferryError, RefusedError
from kvferry.router.contract import Ended
from kvferry.router.http.client import ClientConnection, State
from kvferry.router.http.desk import Desk, Order, Request
from kvferry.router.http.exchange import Exchange, Phase
from kvferry.router.http.head import RequestHead
from kvferry.router.http.limits import Limits
from kvferry.router.http.link import Link
from kvferry.router.http.waiting import Waiting

SWEEP_S = 0.5
MAX_DEFECTS_LOGGED = 10
MAX_REQUEST_ID = 128
_ID = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_REQUEST_ID)

log = logging.getLogger("kvferry.router")


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Since the start, but for what is there now: clients, in_flight, waiting, held_bytes.

    ended: requests by how. answers: of the router itself, by status. events: by word. workers: by URL,
    (requests in flight, connections, connections made).
    """

    clients: int
    in_flight: int
    waiting: int
    held_bytes: int
    requests: int
    ended: Mapping[str, int]
    answers: Mapping[int, int]
    events: Mapping[str, int]
    workers: Mapping[str, tuple[int, int, int]]


class Proxy:
    """Lives on one event loop. ``desk`` chooses; ``add_worker`` and ``remove_worker`` say among whom."""

    def __init__(
        self,
        desk: Desk,
        *,
        limits: Limits | None = None,
        worker_tls: Callable[[], ssl.SSLContext] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """worker_tls: for workers at https URLs."""
        self.desk = desk
        self.limits = limits or Limits()
        self.now = clock
        self.draining = False
        self.waiting = Waiting(self.limits.waiting, clock=clock)
        self.retry_after_s = 1
        self._worker_tls = worker_tls
        self._links: dict[str, Link] = {}
        self._leaving: list[Link] = []
        self._clients: set[ClientConnection] = set()
        self._exchanges: dict[Exchange, bool] = {}  # whether it counts: a question after health is no request
        self._held_bytes = 0
        self._requests = 0
        self._ended: Counter[str] = Counter()
        self._answers: Counter[int] = Counter()
        self._events: Counter[str] = Counter()
        self._id = secrets.token_hex(6)
        self._ids = itertools.count(1)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="kvferry-read")
        self._sweeper: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # Workers.

    def add_worker(self, url: str) -> None:
        """It may be sent requests from now on. Twice is once."""
        if url not in self._links:
            self._links[url] = Link(
                url, connect_s=self.limits.connect_s, tls=self._worker_tls, clock=self.now
            )
        self.waiting.wake()

    def remove_worker(self, url: str) -> None:
        """No more requests; those in flight there go on."""
        link = self._links.pop(url, None)
        if link is not None:
            link.close()
            self._leaving.append(link)

    def link(self, url: str) -> Link:
        """Raises KvferryError for a worker that is not there."""
        try:
            return self._links[url]
        except KeyError:
            raise KvferryError(f"{url} is no worker of this router") from None

    def has_room(self, url: str) -> bool:
        """Whether it may be sent one more."""
        link = self._links.get(url)
        return link is not None and link.in_flight < self.limits.per_worker

    def heard_at(self, url: str) -> float:
        """When bytes of an answer came from there last; before all time, if none did."""
        link = self._links.get(url)
        return link.heard_at if link is not None else 0.0

    def in_flight(self, url: str) -> int:
        """Requests that hold a place there, also while it leaves."""
        link = self._links.get(url) or next((link for link in self._leaving if link.url == url), None)
        return 0 if link is None else link.in_flight

    def worker_down(self, url: str) -> None:
        """It answers nothing any more: what waits for a first byte from it is sent elsewhere."""
        for exchange in list(self._exchanges):
            if exchange.worker == url and exchange.phase in (Phase.SENT, Phase.CONNECTING):
                exchange.cut(f"{url} does not answer")
        link = self._links.get(url)
        for errand in list(link.errands) if link is not None else ():
            errand.worker_down()

    # Requests.

    def protocol(self) -> ClientConnection:
        """For a connection that was accepted."""
        return ClientConnection(self)

    def came(self, client: ClientConnection) -> bool:
        """Whether there is room for it."""
        self._clients.add(client)
        if len(self._clients) <= self.limits.clients and not self.draining:
            return True
        self.count("clients_refused")
        return False

    def went(self, client: ClientConnection) -> None:
        """It is gone."""
        self._clients.discard(client)
        self._changed.set()

    def new_id(self, given: bytes) -> str:
        """Nobody else has it, also where the client gave one, which begins it then."""
        ours = f"{self._id}{next(self._ids):06x}"
        return f"{given.decode()}-{ours}" if _ID.fullmatch(given) else ours

    def exchange(self, client: ClientConnection, head: RequestHead, request: Request) -> Exchange:
        """A request has come."""
        exchange = Exchange(self, client, head, request)
        counts = self._exchanges[exchange] = not request.asks_health
        self._requests += counts
        return exchange

    def over(self, exchange: Exchange, how: Ended) -> None:
        """It has ended, and what it took is free."""
        counts = self._exchanges.pop(exchange, True)
        self.waiting.leave(exchange)
        if counts:
            self._ended[how.value] += 1
        self._changed.set()
        self.waiting.wake()

    def read(self, request: Request, exchange: Exchange) -> None:
        """Here, or beside the loop."""
        if len(request.body) < self.limits.apart_bytes:
            self._read_by(lambda: self.desk.read(request), exchange)
            return
        loop = asyncio.get_running_loop()
        future = self._readers.submit(self.desk.read, request)

        def done() -> None:
            self._read_by(future.result, exchange)

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done)

        future.add_done_callback(tell)

    def _read_by(self, read: Callable[[], Order], exchange: Exchange) -> None:
        self.survive(exchange, lambda: exchange.ordered(read()))

    def survive(self, exchange: Exchange, step: Callable[[], None]) -> None:
        """A step of this request, whose errors are its own."""
        try:
            step()
        except RefusedError as error:
            exchange.unreadable(error)
        except Exception:  # one request must not stop the others
            self.count("defects")
            if self._events["defects"] <= MAX_DEFECTS_LOGGED:
                log.exception("a request could not be read or placed, which is a defect of the router")
            exchange.defect()

    def hold(self, nbytes: int) -> bool:
        """Whether there is memory for so much more of bodies; it is taken then."""
        if self._held_bytes + nbytes > self.limits.held_bytes:
            self.count("bodies_refused")
            return False
        self._held_bytes += nbytes
        return True

    def let_go(self, nbytes: int) -> None:
        """So much is free again."""
        self._held_bytes -= nbytes

    def count(self, event: str) -> None:
        """One more of these."""
        self._events[event] += 1

    def answered_here(self, status: int) -> None:
        """The router said it, no worker."""
        self._answers[status] += 1

    def statistics(self) -> ProxyStatistics:
        """A snapshot; on the loop."""
        return ProxyStatistics(
            clients=len(self._clients),
            in_flight=len(self._exchanges),
            waiting=len(self.waiting),
            held_bytes=self._held_bytes,
            requests=self._requests,
            ended=dict(self._ended),
            answers=dict(self._answers),
            events=dict(self._events),
            workers={
                url: (link.in_flight, link.connections, link.connects) for url, link in self._links.items()
            },
        )

    # Time.

    def start(self) -> None:
        """Look after what is late, from now on."""
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    async def drain(self) -> None:
        """Idle connections go, requests in flight have a while, then they are cut."""
        self.draining = True
        for client in list(self._clients):
            client.drain()
        until = self.now() + self.limits.drain_s
        await self._until(lambda: not self._exchanges, until)
        for exchange in list(self._exchanges):
            self.count("cut_at_stop")
            exchange.cut("the router stops")
        await asyncio.sleep(0)

    async def close(self) -> None:
        """After ``drain``. Whatever is left is cut."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        until = self.now() + 1.0
        await self._until(lambda: all(client.state is State.IDLE for client in self._clients), until)
        for client in list(self._clients):
            client.hang_up()
        for link in [*self._links.values(), *self._leaving]:
            await link.ended()
        await self._until(lambda: not self._clients, self.now() + 1.0)
        self._readers.shutdown(wait=True)

    async def _until(self, reached: Callable[[], bool], end: float) -> None:
        """Looked at whenever a client or an exchange goes."""
        while not reached() and (left_s := end - self.now()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        now, limits = self.now(), self.limits
        for client in list(self._clients):
            if client.deadline < now:
                if client.state in (State.BUSY, State.TUNNEL):
                    self.count("client_stalled")
                client.late()
        for link in self._links.values():
            link.sweep(idle_since=now - limits.spare_s)
        for waiter in self.waiting.older_than(limits.queue_s):
            if isinstance(waiter, Exchange):
                self.survive(waiter, waiter.waited_too_long)
        self.waiting.wake()  # what a worker has, or how it is, may have changed without a place getting free
        for exchange in list(self._exchanges):
            exchange.look(now)
        self._leaving = [link for link in self._leaving if link.connections]
