"""A router on real sockets, before mock workers and before servers that do as a test says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import uvloop

from kvferry.addresses import Address
from kvferry.router.app import Router
from kvferry.router.http.limits import Limits
from kvferry.router.http.proxy import ProxyStatistics
from kvferry.router.settings import Feeds, RouterSettings, parse_workers
from kvferry.testing.worker import MockWorker, WorkerSettings

PATIENCE_S = 30.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHAT = "/v1/chat/completions"

uvloop.new_event_loop().close()  # the first one opens a pipe for the whole process


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop that the router uses."""

    async def bounded() -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


async def until(reached: Callable[[], object]) -> None:
    """Wait for it, and fail after a while."""
    async with asyncio.timeout(PATIENCE_S):
        while not reached():  # noqa: ASYNC110  (whatever a test looks at tells nobody)
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def routing(*workers: str, limits: Limits | None = None, **settings: Any) -> AsyncIterator[Router]:
    """A router that listens on loopback. limits: instead of those that follow from the settings."""
    told = RouterSettings(
        workers=parse_workers(",".join(workers)) if workers else (),
        listen=Address("127.0.0.1", 0),
        metrics_port=0,
        **{"feeds": Feeds(0), "probe_interval_s": 0.0, **settings},
    )
    router = Router(told, limits=replace(limits or told.limits, drain_s=PATIENCE_S))
    await router.start()
    try:
        yield router
    finally:
        await router.stop()
        idle = router.proxy.statistics()
        assert (idle.clients, idle.in_flight, idle.waiting, idle.held_bytes) == (0, 0, 0, 0)
        assert at_workers(router) == 0


def at_workers(router: Router) -> int:
    """Requests that hold a place, by the proxy's count and by the guide's."""
    proxy: ProxyStatistics = router.proxy.statistics()
    total = sum(in_flight for in_flight, _, _ in proxy.workers.values())
    counted = 0
    for guide in router.reception.guides.values():
        loads = guide.statistics()["workers"]
        assert isinstance(loads, dict)
        counted += sum(load["requests"] for load in loads.values())
    assert counted == total
    return total


@contextlib.asynccontextmanager
async def mocks(count: int = 2, **settings: Any) -> AsyncIterator[list[MockWorker]]:
    """Mock workers of one kind."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(MockWorker(WorkerSettings(name=f"w{number}", **settings)))
            for number in range(count)
        ]


@contextlib.asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[str]:
    """A server that does as it is told; its URL."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await handler(reader, writer)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body, as a scripted worker gets them."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    return head + await reader.readexactly(length)


class Answer:
    """status, headers in lower case, body without framing, raw: all bytes."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.raw = raw

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Client:
    """One connection, and bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, address: Address) -> "Client":
        """Connected."""
        return cls(*await asyncio.open_connection(address.host, address.port))

    def send(self, data: bytes) -> None:
        """As it is."""
        self.writer.write(data)

    def post(self, path: str, body: bytes, *fields: str) -> None:
        """A request."""
        lines = [f"POST {path} HTTP/1.1", "Host: router", f"Content-Length: {len(body)}", *fields]
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode() + body)

    def get(self, path: str, *fields: str, method: str = "GET") -> None:
        """A request without a body."""
        self.send(("\r\n".join([f"{method} {path} HTTP/1.1", "Host: router", *fields]) + "\r\n\r\n").encode())

    async def head(self) -> tuple[int, dict[str, str], bytes]:
        """Of the next answer that is no 1xx."""
        async with asyncio.timeout(PATIENCE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), headers, raw

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next one, whole. Raises IncompleteReadError where it breaks off."""
        status, headers, raw = await self.head()
        if bodiless or status in (204, 304):
            return Answer(status, headers, b"", raw)
        async with asyncio.timeout(PATIENCE_S):
            if headers.get("transfer-encoding") == "chunked":
                body = b""
                while True:
                    line = await self.reader.readuntil(b"\r\n")
                    chunk = await self.reader.readexactly(int(line, 16) + 2)
                    raw += line + chunk
                    if line == b"0\r\n":
                        return Answer(status, headers, body, raw)
                    body += chunk[:-2]
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        return Answer(status, headers, body, raw + body)

    async def rest(self) -> bytes:
        """All until the connection ends."""
        async with asyncio.timeout(PATIENCE_S):
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    found += piece
            return found

    def close(self) -> None:
        """Leave."""
        self.writer.close()


@contextlib.asynccontextmanager
async def client(router: Router) -> AsyncIterator[Client]:
    """Connected to it."""
    made = await Client.to(router.address)
    try:
        yield made
    finally:
        made.close()
        with contextlib.suppress(ConnectionError):
            await made.writer.wait_closed()


def prompt(text: str = "hello", *, stream: bool = False, **more: Any) -> bytes:
    """A chat body."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "mock", "messages": messages, "stream": stream, **more}).encode()


async def ask(router: Router, path: str = CHAT, body: bytes | None = None, *fields: str) -> Answer:
    """On a connection of its own."""
    async with client(router) as one:
        if body is None:
            one.get(path, *fields)
        else:
            one.post(path, body, *fields)
        return await one.answer()
