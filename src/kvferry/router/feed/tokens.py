"""A prompt's tokens, as its worker counts them: asked of it behind the request, and never in its way."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from kvferry.errors import KvferryError
from kvferry.router.feed.tasks import end

MAX_WAITING = 64
"""Prompts, and of all their bodies; of more, the oldest are left out."""
MAX_WAITING_BYTES = 4 << 20
MAX_REMEMBERED = 4096
MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 1 << 21
PATHS = ("/v1/chat/completions", "/v1/completions")

log = logging.getLogger("kvferry.router.kvevents")

Post = Callable[[bytes], Awaitable[bytes]]
"""Sends a body to the worker's ``/tokenize``. Raises KvferryError."""
Told = Callable[[str, list[int], str], Awaitable[None]]
"""Request id, tokens, salt."""


class _Body(msgspec.Struct, omit_defaults=True):
    """What of a request decides on its tokens. A prompt of token ids needs no question."""

    model: str = ""
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: str | list[int] | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    add_generation_prompt: bool | msgspec.UnsetType = msgspec.UNSET
    continue_final_message: bool | msgspec.UnsetType = msgspec.UNSET
    add_special_tokens: bool | msgspec.UnsetType = msgspec.UNSET
    chat_template: str | msgspec.UnsetType | None = msgspec.UNSET
    chat_template_kwargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Wanted(NamedTuple):
    request_id: str
    body: bytes
    salt: str


class TokenAsker:
    """One worker's, with one question at a time. told: on the same loop."""

    def __init__(self, post: Post, told: Told) -> None:
        self.asked = self.failed = self.left_out = 0
        self._post, self._told = post, told
        self._waiting: OrderedDict[bytes, _Wanted] = OrderedDict()
        self._waiting_bytes = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        await end(task)

    def sent(self, name: bytes, request_id: str, path: str, body: bytes, salt: str) -> None:
        """A request is on its way there. name: of its whole prompt; one that was asked for is not again."""
        if path not in PATHS or name in self._known or len(body) > MAX_BODY_BYTES:
            return
        self._known[name] = None
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        self._waiting[name] = _Wanted(request_id, body, salt)
        self._waiting_bytes += len(body)
        while len(self._waiting) > MAX_WAITING or self._waiting_bytes > MAX_WAITING_BYTES:
            self._known.pop(self._next()[0], None)
            self.left_out += 1
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                name, wanted = self._next()
                try:
                    tokens = await self._tokens(wanted.body)
                    await self._told(wanted.request_id, tokens, wanted.salt)
                except (KvferryError, msgspec.DecodeError, UnicodeDecodeError) as error:
                    self._known.pop(name, None)
                    self.failed += 1
                    log.debug("no tokens of a prompt: %s", error)
                except Exception:
                    self.failed += 1
                    log.exception("a defect in asking for tokens; it goes on")

    def _next(self) -> tuple[bytes, _Wanted]:
        name, wanted = self._waiting.popitem(last=False)
        self._waiting_bytes -= len(wanted.body)
        return name, wanted

    async def _tokens(self, body: bytes) -> list[int]:
        asked = msgspec.json.decode(body, type=_Body)
        if isinstance(asked.prompt, list):
            return asked.prompt
        self.asked += 1
        answer = await self._post(msgspec.json.encode(asked))
        return msgspec.json.decode(answer, type=_Tokens).tokens[:MAX_TOKENS]
