"""All connections to one worker: those at work, and idle ones that the next request takes."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from kvferry.errors import KvferryError
from kvferry.router.descriptors import lacks_descriptors
from kvferry.router.health import Failure
from kvferry.router.http.worker import WorkerConnection

MAX_IDLE = 256
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 15, 5, 3
UNSENT_MS = 30_000  # bytes on the way that nobody acknowledges


class Connecting(Protocol):
    """Who waits for a connection."""

    def connected(self, connection: WorkerConnection) -> None:
        """Here it is, and nobody else has it."""

    def unconnected(self, why: str, what: Failure) -> None:
        """There is none to be had. REFUSED: nobody listens there; SILENT: cannot be told; UNTRIED: here."""


class Errand(Protocol):
    """A request of the router's own that is at this worker."""

    def worker_down(self) -> None:
        """It answers nothing any more."""


class Attempt:
    """One wait for a connection. ``forget``: it is not wanted any more, and goes to the idle ones."""

    __slots__ = ("_who",)

    def __init__(self, who: Connecting) -> None:
        self._who: Connecting | None = who

    def forget(self) -> None:
        """Nobody waits any more."""
        self._who = None

    def take(self) -> Connecting | None:
        """Who waits, once."""
        who, self._who = self._who, None
        return who


class Link:
    """To one worker. in_flight: requests that hold a place there. errands: those of the router's own."""

    def __init__(
        self,
        url: str,
        *,
        connect_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """url: as the contract has it."""
        parts = urlsplit(url)
        self.url = url
        self.in_flight = 0
        self.heard_at = 0.0  # bytes of an answer
        self.connects = 0
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._connect_s = connect_s
        self._tls = tls
        self._clock = clock
        self.errands: set[Errand] = set()
        self._idle: list[WorkerConnection] = []
        self._all: set[WorkerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._none: asyncio.Event | None = None  # set when there is no connection any more
        self.host_field = parts.netloc.rpartition("@")[2].encode()

    @property
    def connections(self) -> int:
        """Open ones, idle or at work."""
        return len(self._all)

    def idle(self) -> WorkerConnection | None:
        """The one used last, which is the least likely to be closed from the other side."""
        while self._idle:
            connection = self._idle.pop()
            if connection.quiet:
                return connection
            connection.give_up()
        return None

    def sweep(self, *, idle_since: float) -> None:
        """Let go of those that have been idle since then: the worker closes them soon."""
        while self._idle and self._idle[0].idle_since < idle_since:
            self._idle.pop(0).give_up()

    def connect(self, who: Connecting) -> Attempt:
        """A new connection, in time."""
        attempt = Attempt(who)
        task = asyncio.get_running_loop().create_task(self._connect(attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return attempt

    def close(self) -> None:
        """Idle connections go now, those at work when they are done."""
        self._closed = True
        for connection in self._idle:
            connection.give_up()
        self._idle.clear()

    async def ended(self) -> None:
        """Cut everything and wait until it is gone."""
        self.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._none = asyncio.Event()
        for connection in list(self._all):
            connection.give_up()
        if self._all:
            await self._none.wait()

    async def _connect(self, attempt: Attempt) -> None:
        why, what = "", Failure.SILENT
        connection: WorkerConnection | None = None
        try:
            async with asyncio.timeout(self._connect_s):
                connection = await self._opened()
        except TimeoutError:
            why = f"no connection in {self._connect_s:g} s"
        except (OSError, ssl.SSLError, UnicodeError, KvferryError) as error:
            why = f"no connection: {getattr(error, 'strerror', None) or error}"
            if isinstance(error, ConnectionRefusedError):
                what = Failure.REFUSED
            elif isinstance(error, OSError) and lacks_descriptors(error):
                why, what = "no connection: the router has no descriptors left", Failure.UNTRIED
        except asyncio.CancelledError:
            why = "the router stops"
        who = attempt.take()
        if connection is None:
            if who is not None:
                who.unconnected(why, what)
        elif who is not None:
            who.connected(connection)
        else:
            self._free(connection)

    async def _opened(self) -> WorkerConnection:
        self.connects += 1
        context = (self._tls or ssl.create_default_context)() if self._secure else None
        transport, connection = await asyncio.get_running_loop().create_connection(
            lambda: WorkerConnection(on_free=self._free, on_lost=self._lost),
            self._host,
            self._port,
            ssl=context,
            server_hostname=self._host if self._secure else None,
        )
        self._all.add(connection)
        if connection.transport is None:
            self._all.discard(connection)
            raise OSError("the connection ended at once")
        sock = transport.get_extra_info("socket")
        notice_dead(sock)
        if not self._secure:  # TLS has words of its own
            connection.watch(sock.fileno())
        return connection

    def _free(self, connection: WorkerConnection) -> None:
        if self._closed or len(self._idle) >= MAX_IDLE or connection.transport is None:
            connection.give_up()
        else:
            connection.idle_since = self._clock()
            self._idle.append(connection)

    def _lost(self, connection: WorkerConnection) -> None:
        self._all.discard(connection)
        if self._none is not None and not self._all:
            self._none.set()
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


def notice_dead(sock: socket.socket | None) -> None:
    """A peer that is gone without a word is noticed, in about half a minute."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MS)
