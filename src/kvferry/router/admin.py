"""The router's own questions and orders, over HTTP on a Unix socket that its user alone can open.

GET /status   GET /workers   GET /explain?request=ID   GET /pilot
POST /workers {"url": ..., "pool": ...}   DELETE /workers?url=...&grace_s=...   POST /reload
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvferry import socketfile
from kvferry.errors import CorruptError, KvferryError, MisconfiguredError, RefusedError
from kvferry.router.http.framing import Body
from kvferry.router.http.head import MAX_HEAD_BYTES, RequestHead, read_request
from kvferry.router.http.refusals import TurnedAwayError, own_answer, refusal

MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 64
SILENT_S = 10.0

Handler = Callable[[Mapping[str, str], bytes], object]
"""Query and body in, a document out. Raises KvferryError."""


class Admin:
    """Serves these handlers, by ``METHOD /path``, on the running loop."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        """Raises MisconfiguredError where it cannot listen there."""
        self._handlers = dict(handlers)
        self._path = path
        self._connections: set[_Connection] = set()
        self._server: asyncio.AbstractServer | None = None
        try:
            self._lock = socketfile.lock(path, group=None)
            try:
                self._sock = socketfile.listen(path, group=None)
            except BaseException:
                os.close(self._lock)
                raise
        except MisconfiguredError as error:
            words = str(error).replace("--socket", "--admin-socket").replace("a node", "a router")
            raise MisconfiguredError(words) from error

    async def start(self) -> None:
        """From now on."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), sock=self._sock
        )

    async def close(self) -> None:
        """Hang up; the socket file goes."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.hang_up()
            await asyncio.sleep(0)
        else:
            self._sock.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._lock)

    def came(self, connection: "_Connection") -> bool:
        """Whether there is room for it."""
        self._connections.add(connection)
        return len(self._connections) <= MAX_CONNECTIONS

    def went(self, connection: "_Connection") -> None:
        """It is gone."""
        self._connections.discard(connection)

    def answer(self, head: RequestHead, body: bytes) -> bytes:
        """To one request."""
        parts = urlsplit(head.target.decode("latin-1"))
        name = f"{head.method.decode('latin-1')} {parts.path}"
        handler = self._handlers.get(name)
        if handler is None:
            return refusal(404, f"no {name} here; there are {', '.join(self._handlers)}", close=True)
        try:
            query = {key: values[-1] for key, values in parse_qs(parts.query, max_num_fields=16).items()}
            document = msgspec.json.encode(handler(query, body))
        except TurnedAwayError as error:
            return refusal(error.status, str(error), close=True)
        except (RefusedError, MisconfiguredError, ValueError) as error:
            return refusal(400, str(error), close=True)
        except KvferryError as error:
            return refusal(500, str(error), close=True)
        return own_answer(200, document + b"\n", close=True)


class _Connection(asyncio.Protocol):
    """One request, one answer."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._head: RequestHead | None = None
        self._body: Body | None = None
        self._parts: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(SILENT_S, self.hang_up)
        if not self._admin.came(self):
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._admin.went(self)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            answer = self._take(data)
        except TurnedAwayError as error:
            answer = refusal(error.status, str(error), close=True)
        except CorruptError as error:
            answer = refusal(400, str(error), close=True)
        if answer:
            self._transport.write(answer)
            self._transport.close()

    def _take(self, data: bytes) -> bytes:
        """The answer, once the request is whole."""
        if self._body is None:
            self._data += data
            end = self._data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(self._data) > MAX_HEAD_BYTES:
                    raise TurnedAwayError(431, "the head is too long")
                return b""
            self._head = read_request(self._data[:end])
            self._body = self._head.body()
            data = self._data[end:]
        whole = self._body.feed(data, self._parts) >= 0
        if sum(map(len, self._parts)) > MAX_BODY_BYTES:
            raise TurnedAwayError(413, f"at most {MAX_BODY_BYTES} bytes are taken")
        return self._admin.answer(self._head, b"".join(self._parts)) if whole and self._head else b""
