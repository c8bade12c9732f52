"""A plain vLLM's KV events, followed where it publishes them (ZMQ: PUB, and ROUTER for replay).

    SILENT ──a batch──► FOLLOWED ──the number after──► FOLLOWED
                            │ ▲
                   a gap    │ │ replayed
                            └─┴── not replayed, or numbers begin anew: what was known is forgotten

vLLM numbers batches from 0 when it starts, keeps the latest for replay, and says nothing while nothing
changes. Requests are found in its blocks by their tokens, which the worker itself tells (``tokens``).
"""

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.feed.wire import MAX_CHUNKS, AnyEvent, Held, Prompt
from kvferry.identity.names import DIGEST_BYTES
from kvferry.router.feed.blocks import ENGINE, SPACE, Blocks, chain, decode_batch
from kvferry.router.feed.follower import Knowledge
from kvferry.router.feed.tasks import end

MAX_MESSAGE_BYTES = 16 << 20
QUEUED_MESSAGES = 1000
REPLAY_S = 2.0
MAX_REPLAYED = 100_000
HEARTBEAT_MS = 5000
RETRY_S = 5.0
OVERLAP_S = 5.0
"""So long after a replay what it has told may come again."""
END = (1 << 64) - 1
PIECE = 1024
NAMED_AT_ONCE = 128
"""Blocks of a prompt, at a few microseconds each."""
SILENT_S = 60.0
SURE_TOKENS = 1024
"""A prompt of so many fills a block of any engine, which tells of it."""
SILENCE = (
    "prompts were sent there and nothing has been heard; is it started with --kv-events-config and "
    "enable_kv_cache_events, and are these its ports?"
)

log = logging.getLogger("kvferry.router.kvevents")


@dataclass(frozen=True, slots=True)
class KvEventsStatistics:
    """Of one worker. orphans: blocks whose beginning is not known. gaps: of numbers; lost: not replayed."""

    address: str
    followed: bool
    batches: int
    blocks: int
    orphans: int
    gaps: int
    lost: int
    error: str


class KvEventsFollower:
    """All on one event loop."""

    def __init__(self, name: str, endpoint: str, replay: str, knowledge: Knowledge) -> None:
        """name: what the knowledge calls it. replay: empty: nothing is replayed.

        Raises MisconfiguredError without pyzmq.
        """
        try:
            import zmq.asyncio
        except ImportError as error:
            raise MisconfiguredError(
                "to follow vLLM's KV events install pyzmq: pip install 'kvferry[router]'"
            ) from error
        self.name = name
        self.blocks = Blocks(name)
        self._zmq: Any = zmq
        self._endpoint, self._replay = endpoint, replay
        self._knowledge = knowledge
        self._next = 0
        self._last = -1
        self._overlap_until = 0.0
        self._known = False
        self._task: asyncio.Task[None] | None = None
        self._batches = self._gaps = self._lost = 0
        self._asked_at: float | None = None  # when it should first have said something; once told, never
        self._error = ""

    def start(self) -> None:
        """Follow, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"kv-events-{self.name}")

    async def close(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        await end(task)
        if self._known:
            self._known = False
            self._knowledge.lost(self.name)

    async def prompt(self, request_id: str, tokens: list[int], *, salt: str) -> None:
        """A request that was sent there has these tokens. Others have the loop meanwhile."""
        size = self.blocks.block_tokens
        if not size:
            self._listened_in_vain(len(tokens))
            return
        names: list[bytes] = []
        for name in islice(chain(tokens, size, salt=salt), MAX_CHUNKS):
            names.append(name)
            if len(names) % NAMED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if size == self.blocks.block_tokens:
            event = Prompt(ENGINE, SPACE, request_id, b"".join(names), len(tokens), 0)
            self._knowledge.apply(self.name, event)

    def statistics(self) -> KvEventsStatistics:
        """A snapshot."""
        return KvEventsStatistics(
            address=self._endpoint,
            followed=self._known,
            batches=self._batches,
            blocks=len(self.blocks),
            orphans=self.blocks.orphans,
            gaps=self._gaps,
            lost=self._lost,
            error=self._error,
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except KvferryError as error:
                self._complain(str(error))
            except Exception as error:
                log.exception("a defect in what follows %s; it goes on", self.name)
                self._complain(str(error))
            self._begin_anew()
            await asyncio.sleep(random.uniform(RETRY_S / 2, RETRY_S))

    async def _follow(self) -> None:
        context = self._zmq.asyncio.Context()
        try:
            sub = context.socket(self._zmq.SUB)
            sub.setsockopt(self._zmq.LINGER, 0)
            sub.setsockopt(self._zmq.RCVHWM, QUEUED_MESSAGES)
            sub.setsockopt(self._zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            sub.setsockopt(self._zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            sub.setsockopt(self._zmq.SUBSCRIBE, b"")
            sub.connect(self._endpoint)
            if self._replay:
                await self._catch_up(context, END)
            while True:
                await self._heard(context, *_numbered(await sub.recv_multipart()))
        finally:
            context.destroy(linger=0)

    async def _heard(self, context: Any, number: int, payload: bytes) -> None:
        before, self._last = self._last, number
        if number < self._next:
            if number > before and time.monotonic() < self._overlap_until:
                return  # replayed before
            self._begin_anew()  # the engine has restarted
        elif number > self._next and self._batches:
            self._gaps += 1
            if not (self._replay and await self._catch_up(context, number)):
                self._lost += 1
                self._begin_anew()
        if number >= self._next:
            await self._take(number, payload)

    async def _catch_up(self, context: Any, until: int) -> bool:
        """Ask for what is missing before that number. Whether all of it came."""
        socket = context.socket(self._zmq.DEALER)
        try:
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.setsockopt(self._zmq.RCVHWM, MAX_REPLAYED)
            socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.connect(self._replay)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            for _ in range(MAX_REPLAYED):
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                number, payload = _numbered(frames[-3:])
                if number == END:
                    break
                if number >= self._next:
                    if number > self._next and self._next:
                        return False
                    await self._take(number, payload)
        except TimeoutError:
            return False
        finally:
            socket.close(linger=0)
            self._overlap_until = time.monotonic() + OVERLAP_S
        return self._next >= until

    async def _take(self, number: int, payload: bytes) -> None:
        events = self.blocks.take(decode_batch(payload))
        self._next = number + 1
        self._batches += 1
        self._error = ""
        for event in events:
            if not self._known:
                self._known = True
                self._knowledge.reset(self.name)
                self._knowledge.met(self.name, behind="")
            for piece in _pieces(event):
                self._knowledge.apply(self.name, piece)
                await asyncio.sleep(0)

    def _begin_anew(self) -> None:
        self._next = 0
        self._last = -1
        self.blocks.forget()
        if self._known:
            self._knowledge.reset(self.name)
            self._knowledge.met(self.name, behind="")

    def _listened_in_vain(self, tokens: int) -> None:
        """A prompt was sent there, and nothing was ever heard: as from a publisher that is not there."""
        if self._batches or tokens < SURE_TOKENS:
            return
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > SILENT_S:
            self._asked_at = math.inf
            self._complain(f"{self._endpoint}: {SILENCE}")

    def _complain(self, error: str) -> None:
        if error != self._error:
            self._error = error
            log.warning("KV events of %s: %s", self.name, error)


def _numbered(frames: list[bytes]) -> tuple[int, bytes]:
    """Raises RefusedError."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise RefusedError("a message that is none of vLLM's KV events")
    return int.from_bytes(frames[1], "big"), frames[2]


def _pieces(event: AnyEvent) -> list[AnyEvent]:
    if not isinstance(event, Held):
        return [event]
    step = PIECE * DIGEST_BYTES
    return [
        Held(event.level, event.engine, event.space, event.digests[at : at + step])
        for at in range(0, len(event.digests), step)
    ]
