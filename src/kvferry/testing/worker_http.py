"""How a mock worker speaks HTTP/1.1, and what it answers."""

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvferry.testing.worker_engine import Work

if TYPE_CHECKING:
    from kvferry.testing.worker import MockWorker

MAX_HEAD_BYTES = 64 << 10
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large"}
_PROMPTS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How it behaves from now on.

    slow: factor on the engine's times. status: every prompt is answered with it; 0: as it should be.
    health: of ``/health``. hang: prompts are read and not answered; deaf: nothing is. die_after: its
    connection is reset after so many tokens of a stream; 0: never. trickle_s: pause after each byte.
    """

    slow: float = 1.0
    status: int = 0
    health: int = 200
    hang: bool = False
    deaf: bool = False
    die_after: int = 0
    trickle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came. headers: names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Body(msgspec.Struct):
    """What it reads of a prompt's body."""

    model: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str = ""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_BODY = msgspec.json.Decoder(Body)


def text_of(body: Body) -> str:
    """The prompt as the engine's cache sees it: salt, tools, then each message with its role before it."""
    if body.prompt:
        prompt = msgspec.json.decode(body.prompt)
        return body.cache_salt + (prompt if isinstance(prompt, str) else bytes(body.prompt).decode())
    parts = [body.cache_salt, bytes(body.tools).decode()]
    for message in msgspec.json.decode(body.messages or b"[]"):
        content = message.get("content")
        parts += ["<|", str(message.get("role")), "|>"]
        parts.append(content if isinstance(content, str) else json.dumps(content, sort_keys=True))
    return "".join(parts) + "<|assistant|>"


class Connection(asyncio.Protocol):
    """A client's: one request after the other."""

    def __init__(self, worker: "MockWorker") -> None:
        self._worker = worker
        self._buffer = bytearray()
        self._need = 0  # bytes in the buffer before it is worth another look
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._trickle: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        self._transport = None
        if self._answer is not None:
            self._answer.abort()
            self._answer = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def reset(self) -> None:
        """End it without a word."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """To the client, a byte at a time where it is to trickle."""
        if self._transport is None:
            return
        if not self._worker.behaviour.trickle_s and not self._trickle:
            self._transport.write(data)
            return
        idle = not self._trickle
        self._trickle.extend(data[at : at + 1] for at in range(len(data)))
        if idle:
            self._drip()

    def respond(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A whole answer."""
        reason = REASONS.get(status, "Mock")
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)

    def done(self) -> None:
        """The answer was written: the next request."""
        self._answer = None
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _drip(self) -> None:
        if self._transport is None or not self._trickle:
            return
        self._transport.write(self._trickle.popleft())
        if self._trickle:
            asyncio.get_running_loop().call_later(self._worker.behaviour.trickle_s, self._drip)

    def _next(self) -> None:
        """Take a request from the buffer, when it is whole and the last one is answered."""
        if self._answer is not None or self._transport is None or len(self._buffer) < self._need:
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self.reset()
            return
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        if headers.get("expect", "").lower() == "100-continue" and len(self._buffer) == end + 4:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, stop = self._body(end + 4, headers)
        if stop < 0:
            return
        del self._buffer[:stop]
        self._need = 0
        seen = Seen(method, path, headers, body)
        self._worker.seen.append(seen)
        self._answer = Answer(self, self._worker, seen)
        self._answer.begin()

    def _body(self, start: int, headers: dict[str, str]) -> tuple[bytes, int]:
        """The body and where it ends; -1 while it is not whole."""
        if "chunked" not in headers.get("transfer-encoding", ""):
            self._need = stop = start + int(headers.get("content-length", 0))
            return (bytes(self._buffer[start:stop]), stop) if len(self._buffer) >= stop else (b"", -1)
        pieces: list[bytes] = []
        at = start
        while (line := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(bytes(self._buffer[at:line]).split(b";")[0], 16)
            at = line + 2 + size + 2
            if len(self._buffer) < at:
                break
            if not size:
                return b"".join(pieces), at
            pieces.append(bytes(self._buffer[line + 2 : line + 2 + size]))
        return b"", -1


class Answer:
    """What becomes of one request."""

    def __init__(self, connection: Connection, worker: "MockWorker", seen: Seen) -> None:
        self._connection = connection
        self._worker = worker
        self._seen = seen
        self._body = Body()
        self._work: Work | None = None
        self._frame = ("", "")
        self._text: list[str] = []
        self._sent = 0

    def begin(self) -> None:
        """Answer at once, or hand it to the engine."""
        behaviour, path = self._worker.behaviour, self._seen.path.partition("?")[0]
        if behaviour.deaf or (behaviour.hang and path in _PROMPTS):
            return
        if path not in _PROMPTS:
            self._plain(path)
        elif behaviour.status:
            error = {"message": "as told", "type": "mock", "code": behaviour.status}
            self._finish(behaviour.status, json.dumps({"error": error}).encode())
        else:
            self._prompt(path)

    def abort(self) -> None:
        """The client left."""
        if self._work is not None:
            self._worker.engine.abort(self._work)

    def _prompt(self, path: str) -> None:
        settings, engine = self._worker.settings, self._worker.engine
        try:
            self._body = body = _BODY.decode(self._seen.body)
            hashed = settings.cache_blocks or engine.tier is not None
            text = text_of(body) if hashed else " " * (len(body.messages) + len(body.prompt))
        except (msgspec.MsgspecError, AttributeError, TypeError) as error:
            self._finish(400, json.dumps({"error": {"message": str(error), "code": 400}}).encode())
            return
        chat = path == _PROMPTS[0]
        name = self._seen.headers.get("x-request-id", f"{engine.totals.requests}")
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{name}"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": identity, "object": kind, "created": 1, "model": body.model or settings.model}
        opened = json.dumps(head, separators=(",", ":"))[:-1]
        opened += ',"choices":[{"index":0,' + ('"delta":{"content":"' if chat else '"text":"')
        self._frame = (opened, '"}' if chat else '"')
        wanted = body.max_completion_tokens or body.max_tokens or 0
        self._work = engine.work(identity, text, output_tokens=wanted, on_token=self._token)
        engine.submit(self._work)

    def _token(self, work: Work, text: str | None) -> None:
        if text is None:
            self._end(work)
        elif self._body.stream:
            if not self._sent:
                self._connection.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                    b"transfer-encoding: chunked\r\n\r\n"
                )
            self._sent += 1
            self._event(f'{self._frame[0]}{text}{self._frame[1]},"finish_reason":null}}]}}')
            if self._sent == self._worker.behaviour.die_after:
                self._connection.reset()
                self.abort()
        else:
            self._text.append(text)

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self._connection.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _usage(self, work: Work) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": work.prompt_tokens,
            "total_tokens": work.prompt_tokens + work.produced,
            "completion_tokens": work.produced,
        }
        if self._worker.settings.details:
            usage["prompt_tokens_details"] = {"cached_tokens": work.cached_tokens}
        return usage

    def _end(self, work: Work) -> None:
        if not self._body.stream:
            chat = work.request_id.startswith("chat")
            text = "".join(self._text)
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            whole = {
                "id": work.request_id,
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": self._body.model or self._worker.settings.model,
                "choices": [choice],
                "usage": self._usage(work),
            }
            self._finish(200, json.dumps(whole).encode())
            return
        self._event(f'{self._frame[0]}{self._frame[1]},"finish_reason":"length"}}]}}')
        if (self._body.stream_options or {}).get("include_usage"):
            head = self._frame[0].partition(',"choices"')[0]
            self._event(f'{head},"choices":[],"usage":{json.dumps(self._usage(work))}}}')
        self._event("[DONE]")
        self._connection.write(b"0\r\n\r\n")
        self._connection.done()

    def _plain(self, path: str) -> None:
        worker, kind = self._worker, "application/json"
        status, body = 200, b"{}"
        if path == "/health":
            status = worker.behaviour.health
        elif path == "/v1/models":
            listed = [{"id": worker.settings.model, "object": "model", "created": 1, "owned_by": "mock"}]
            body = json.dumps({"object": "list", "data": listed}).encode()
        elif path == "/metrics":
            body, kind = worker.metrics().encode(), "text/plain; version=0.0.4"
        elif path == "/echo":
            body, kind = self._seen.body, self._seen.headers.get("content-type", "application/octet-stream")
        elif path == "/tokenize":
            count = len(self._seen.body) // worker.settings.characters_per_token
            body = json.dumps({"count": count, "max_model_len": 1 << 20, "tokens": [0] * count}).encode()
        elif path == "/reset_prefix_cache":
            worker.engine.drop()
            body = b'{"success":true}'
        elif path == "/mock":
            self._told()
            body = json.dumps({**worker.statistics(), "behaviour": asdict(worker.behaviour)}).encode()
        else:
            status, body = 404, b'{"detail":"Not Found"}'
        self._finish(status, body, kind)

    def _told(self) -> None:
        """``behaviour``: changes to it; ``restart``: once this was answered."""
        if self._seen.method == "POST" and self._seen.body:
            told = json.loads(self._seen.body)
            self._worker.behave(**told.get("behaviour", {}))
            if told.get("drop_tier"):
                self._worker.forget_tier()
            if told.get("restart"):
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: loop.create_task(self._worker.restart()))

    def _finish(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self._connection.respond(status, body, kind)
        self._connection.done()
