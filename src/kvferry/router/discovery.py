"""Workers found by name: each address of a DNS name is one, asked for again and again.

What cannot be looked up changes nothing. An address that is new counts at once; one that is gone counts as
gone when several answers in a row lack it, since some name servers give part of a long list at a time.
"""

import asyncio
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from kvferry.router.settings import WorkerAddress

EVERY_S = 10.0
TIMEOUT_S = 5.0
ABSENCES = 3
MAX_ADDRESSES = 1024  # of one name

log = logging.getLogger("kvferry.router")


class Found(NamedTuple):
    """What an answer changed: URLs of workers."""

    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class Addresses:
    """Of one name, as far as its answers show. Pure."""

    def __init__(self) -> None:
        self._absent: dict[str, int] = {}  # answers in a row that lacked it, by URL

    def answer(self, urls: Iterable[str]) -> Found:
        """The name has these now. None at all is taken for a fault of the name server."""
        given = dict.fromkeys(sorted(urls)[:MAX_ADDRESSES])
        if not given:
            return Found()
        new = tuple(url for url in given if url not in self._absent)
        gone = []
        for url in list(self._absent):
            if url in given:
                self._absent[url] = 0
                continue
            self._absent[url] += 1
            if self._absent[url] >= ABSENCES:
                del self._absent[url]
                gone.append(url)
        self._absent.update(dict.fromkeys(new, 0))
        return Found(new, tuple(gone))


class Lookup(Protocol):
    """``loop.getaddrinfo``, in short."""

    def __call__(self, host: str, port: int) -> asyncio.Future[list[str]]:
        """Addresses. Raises OSError."""
        ...


class Discovery:
    """Asks for all names until it is closed."""

    def __init__(
        self,
        names: Iterable[WorkerAddress],
        *,
        found: Callable[[str, str], None],
        gone: Callable[[str], None],
        lookup: Lookup | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        """found: a worker's URL and its pool. gone: its URL."""
        self.failures = 0
        self._found = found
        self._gone = gone
        self._lookup = lookup or _look_up
        self._every_s = every_s
        self._led: Counter[str] = Counter()  # how many names lead to it, by URL
        self._pools: dict[str, str] = {}
        self._tasks = {name: asyncio.create_task(self._watch(name)) for name in names}

    @property
    def led(self) -> dict[str, str]:
        """Workers that names lead to now, and their pools."""
        return dict(self._pools)

    async def close(self) -> None:
        """No more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watch(self, name: WorkerAddress) -> None:
        known = Addresses()
        failing = False
        asking: asyncio.Future[list[str]] | None = None
        parts = urlsplit(name.url)
        try:
            while True:
                if asking is None:  # one that hangs is waited for, not joined by others
                    asking = asyncio.ensure_future(self._lookup(parts.hostname or "", parts.port or 80))
                await asyncio.wait({asking}, timeout=TIMEOUT_S)
                error: BaseException | None = TimeoutError(f"no answer in {TIMEOUT_S:g} s")
                if asking.done():
                    error = asking.exception()
                    if error is None:
                        urls = [_url(parts.scheme, at, parts.port) for at in asking.result()]
                        self._act(name, known.answer(urls))
                    asking = None
                if error is not None:
                    self.failures += 1
                    if not failing:
                        log.warning("%s cannot be looked up (%s): its workers stay as they are", name, error)
                failing = error is not None
                await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))
        finally:
            if asking is not None:
                asking.cancel()

    def _act(self, name: WorkerAddress, change: Found) -> None:
        for url in change.new:
            log.info("%s leads to the worker %s", name, url)
            self._led[url] += 1
            self._pools.setdefault(url, name.pool)
            self._found(url, name.pool)
        for url in change.gone:
            log.info("%s leads to the worker %s no more", name, url)
            self._led[url] -= 1
            if not self._led[url]:  # else another name still leads there
                del self._led[url], self._pools[url]
                self._gone(url)


def _url(scheme: str, address: str, port: int | None) -> str:
    host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    return f"{scheme}://{host}" + (f":{port}" if port is not None else "")


async def _addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def _look_up(host: str, port: int) -> asyncio.Future[list[str]]:
    return asyncio.ensure_future(_addresses(host, port))
