"""The load: streams that are asked for and timed with as little work per byte as Python allows.

It runs in the benchmark's own process, which does nothing else meanwhile. What it costs itself is in every
arm alike, in the direct one too.
"""

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from kvferry.errors import BrokenError

T = TypeVar("T")
PATIENCE_S = 120.0
TRAILERS = 3  # events without text: the finish reason, the usage and [DONE]
END = b"\r\n0\r\n\r\n"
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. at: when it was sent, or should have been, from the begin. error: empty: it was answered.

    ttft_s: from then to the first event of the stream; total_s: to its end. tokens: events with text.
    """

    at: float
    ttft_s: float
    total_s: float
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class Stream(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[str] | None = None
        self.first = 0.0
        self.events = 0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(f"connection lost: {exc!r}")

    def data_received(self, data: bytes) -> None:
        if not self.first:
            if data.startswith(b"HTTP/1.1 ") and data[9:12] != b"200":
                self._finish(data[:200].decode(errors="replace"))
                return
            if b"data: " in data:
                self.first = time.perf_counter()
        self.events += data.count(b"data: ")
        if data.endswith(END) or (self.tail + data).endswith(END):
            self.tail = self.tail + data
            self._finish("")
        else:
            self.tail = data[-1024:] if len(data) >= 1024 else (self.tail + data)[-1024:]

    @property
    def open(self) -> bool:
        """Whether the server has not closed it, as it may once it was idle for long."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, body: bytes) -> str:
        """Empty when it was answered whole; else what went wrong."""
        if self._transport is None:
            return "connection lost"
        self.first, self.events, self.tail = 0.0, 0, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request + body)
        try:
            return await asyncio.wait_for(self._done, PATIENCE_S)
        except TimeoutError:
            self.close()
            return f"no end within {PATIENCE_S:.0f} s"

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(error)


class Target:
    """A server that is asked. Connections are kept."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self._idle: list[Stream] = []
        self._count = 0

    async def ask(self, body: bytes, *, name: str, at: float, begun: float) -> Sample:
        """Send it now; times count from ``at``, seconds after ``begun`` (perf_counter)."""
        self._idle = [stream for stream in self._idle if stream.open]
        try:
            stream = self._idle.pop() if self._idle else await self._connect()
        except OSError as failure:
            return Sample(at, 0.0, 0.0, 0, error=repr(failure))
        self._count += 1
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"X-Request-Id: bench-{name}-{self._count}\r\n\r\n"
        )
        error = await stream.ask(head.encode(), body)
        ended = time.perf_counter()
        if error:
            stream.close()
        else:
            self._idle.append(stream)
        prompt, cached = _PROMPT.search(stream.tail), _CACHED.search(stream.tail)
        return Sample(
            at,
            stream.first - begun - at,
            ended - begun - at,
            max(0, stream.events - TRAILERS),
            int(prompt[1]) if prompt else 0,
            int(cached[1]) if cached else 0,
            error or ("" if stream.first else "no event"),
        )

    async def _connect(self) -> Stream:
        _, stream = await asyncio.get_running_loop().create_connection(Stream, self.host, self.port)
        return stream

    def close(self) -> None:
        """End idle connections."""
        for stream in self._idle:
            stream.close()
        self._idle.clear()


def run(work: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own: uvloop's, where installed; without pauses of the collector."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with _uncollected(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def closed_loop(
    urls: Sequence[str], make: Callable[[], bytes], *, streams: int, seconds: float, apart_s: float
) -> list[Sample]:
    """So many streams at any time, spread over ``urls``; each asks anew when its answer ends.

    apart_s: the first requests are spread over so long; from then on all streams run, for ``seconds``.
    """
    targets = [Target(url) for url in urls]
    begun = time.perf_counter()
    samples: list[Sample] = []

    async def stream(number: int) -> None:
        await asyncio.sleep(apart_s * number / streams)
        target = targets[number % len(targets)]
        while (now := time.perf_counter() - begun) < apart_s + seconds:
            samples.append(await target.ask(make(), name=f"c{number}", at=now, begun=begun))

    await asyncio.gather(*(stream(number) for number in range(streams)))
    for target in targets:
        target.close()
    return samples


async def count_loop(url: str, make: Callable[[], bytes], *, streams: int, count: int) -> list[Sample]:
    """So many requests, as fast as ``streams`` at a time are answered."""
    target = Target(url)
    begun = time.perf_counter()
    samples: list[Sample] = []
    left = count

    async def stream(number: int) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            now = time.perf_counter() - begun
            samples.append(await target.ask(make(), name=f"n{number}", at=now, begun=begun))

    await asyncio.gather(*(stream(number) for number in range(streams)))
    target.close()
    return samples


async def open_loop(url: str, plan: Sequence[tuple[float, bytes]]) -> list[Sample]:
    """Each request at its time, whatever became of those before it."""
    target = Target(url)
    begun = time.perf_counter() + 0.1
    tasks = []
    for number, (at, body) in enumerate(plan):
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        tasks.append(asyncio.create_task(target.ask(body, name=f"o{number}", at=at, begun=begun)))
    samples = await asyncio.gather(*tasks)
    target.close()
    return list(samples)


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank. BrokenError without values."""
    if not values:
        raise BrokenError("nothing was measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
