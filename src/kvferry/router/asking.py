"""Small questions to workers, each on a connection of its own: bounded in time and bytes."""

import asyncio
import contextlib
import errno
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from kvferry.errors import ClosedError, CorruptError, RetryError
from kvferry.router.descriptors import lacks_descriptors

MAX_ANSWER_BYTES = 8 << 20
_READ_BYTES = 64 << 10
_CLOSING_S = 1.0

Tls = Callable[[], ssl.SSLContext]


class NobodyThereError(ClosedError):
    """Nobody listens at that address."""


class UntriedError(RetryError):
    """Nothing was asked: there are no descriptors left here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said."""

    status: int
    body: bytes


class _Parts:
    """What the parser tells of one answer."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.whole = False
        self.sized = False  # it says where it ends: not with the connection
        self._limit = limit

    def on_header(self, name: bytes, _: bytes) -> None:
        self.sized = self.sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._limit:
            raise CorruptError(f"the answer has over {self._limit} bytes")
        self.body += data

    def on_message_complete(self) -> None:
        self.whole = True


async def get(
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    tls: Tls | None = None,
    limit: int = MAX_ANSWER_BYTES,
    body: bytes = b"",
) -> Answer:
    """Ask a worker. url: of the worker, without a path. body: JSON, which is posted.

    Raises NobodyThereError where nobody listens, UntriedError without a descriptor, RetryError for no answer
    in time or half of one, and CorruptError for what is no answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(url, path, headers or {}, tls, limit, body)
    except TimeoutError as error:
        raise RetryError(f"{url}{path} was not answered within {timeout_s:g} s") from error
    except (ssl.SSLError, UnicodeError) as error:
        raise RetryError(f"{url}{path}: {error}") from error
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            raise NobodyThereError(f"nobody listens at {url}") from error
        if lacks_descriptors(error):
            raise UntriedError(f"{url}{path}: {error.strerror}") from error
        raise RetryError(f"{url}{path}: {error.strerror or error}") from error


async def _get(
    url: str, path: str, headers: Mapping[str, str], tls: Tls | None, limit: int, body: bytes
) -> Answer:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host = parts.hostname or ""
    reader, writer = await asyncio.open_connection(
        host,
        parts.port or (443 if secure else 80),
        ssl=(tls() if tls is not None else ssl.create_default_context()) if secure else None,
    )
    try:
        verb = "POST" if body else "GET"
        lines = [f"{verb} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
        found = _Parts(limit)
        parser = httptools.HttpResponseParser(found)
        while not found.whole:
            data = await reader.read(_READ_BYTES)
            if not data:
                break
            _feed(parser, data)
        status = parser.get_status_code()
        if status < 100 or (found.sized and not found.whole):
            raise RetryError(f"{url}{path}: the connection ended without a whole answer")
        return Answer(status, bytes(found.body))
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await writer.wait_closed()


def _feed(parser: httptools.HttpResponseParser, data: bytes) -> None:
    try:
        parser.feed_data(data)
    except httptools.HttpParserCallbackError as error:
        if isinstance(error.__context__, CorruptError):
            raise error.__context__ from error
        raise CorruptError(f"no HTTP answer: {error}") from error
    except httptools.HttpParserError as error:
        raise CorruptError(f"no HTTP answer: {error}") from error
