"""What the node of a mock worker would tell routers: the feed of ``feed.wire``, without a node."""

import asyncio
from collections.abc import Sequence
from typing import cast

from kvferry import __version__
from kvferry.feed.framing import decode_from_router, encode
from kvferry.feed.wire import (
    MAX_EVENTS,
    PROTOCOL,
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Events,
    Held,
    Hello,
    Known,
    KnownEnd,
    Level,
    Ping,
    Pong,
    Prefetch,
    Prompt,
    Rate,
    Result,
    Space,
    Speed,
    Welcome,
)
from kvferry.frames import FrameBuffer
from kvferry.testing.worker_engine import SharedTier, Work, WorkerSettings

NAMESPACE = b"mockmockmockmock"
TOKEN_BYTES = 1000
SPACE = 1
ENGINE = 1


class MockFeed:
    """A watcher of one engine. numbered: events published so far. prefetches: what routers asked for.

    As a node it tells nothing of what its engine evicts, and of Valkey only what it put there itself.
    """

    def __init__(self, settings: WorkerSettings, tier: SharedTier | None, *, epoch: int) -> None:
        self.settings = settings
        self.port = settings.feed_port
        self.epoch = epoch
        self.numbered = 0
        self.prefetches: list[Prefetch] = []
        self.followers: set[Follower] = set()
        self._tier = tier
        self._slow = 1.0
        self._running = False
        self._put: dict[bytes, None] = {}
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Let routers follow, at the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Follower(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """As a node that is gone; another one of the same host has another epoch."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for follower in list(self.followers):
            follower.close()
        self.epoch += 1
        self.numbered = 0

    # -- Watcher -----------------------------------------------------------------------------------

    def up(self) -> None:
        self._running = True
        self.publish(*self._engine())

    def down(self) -> None:
        self._running = False
        self.publish(EngineDown(ENGINE))

    def asked(self, work: Work) -> None:
        self.publish(
            Prompt(
                ENGINE,
                SPACE,
                work.request_id,
                b"".join(work.blocks),
                work.prompt_tokens,
                work.engine_tokens,
            )
        )

    def prefilled(self, work: Work) -> None:
        tokens = (work.prompt_tokens, work.engine_tokens, work.loaded_tokens)
        self.publish(Result(ENGINE, work.request_id, *tokens, 0, ""))
        if self._tier is not None and (new := [block for block in work.blocks if block not in self._put]):
            self._put.update(dict.fromkeys(new))
            self.publish(Held(Level.VALKEY, 0, SPACE, b"".join(new)))

    def slowed(self, factor: float) -> None:
        self._slow = factor
        self.publish(self._speed())

    def forgotten(self) -> None:
        """The shared tier is empty."""
        self._put.clear()
        self.publish(Cleared(Level.VALKEY, 0))

    # -- followers ---------------------------------------------------------------------------------

    def publish(self, *events: AnyEvent) -> None:
        """To all who follow."""
        frame = encode(Events(self.numbered + 1, events))
        self.numbered += len(events)
        for follower in list(self.followers):
            follower.write(frame)

    def snapshot(self) -> Sequence[AnyEvent]:
        """All that it knows."""
        settings = self.settings
        chunk_tokens = settings.block_characters // settings.characters_per_token
        events: list[AnyEvent] = [
            Space(SPACE, NAMESPACE, settings.model, chunk_tokens, chunk_tokens * TOKEN_BYTES)
        ]
        if self._running:
            events += self._engine()
        if self._tier is not None:
            events.append(Rate(Level.VALKEY, self._tier.latency_s, TOKEN_BYTES / self._tier.token_s))
            if self._put:
                events.append(Held(Level.VALKEY, 0, SPACE, b"".join(self._put)))
        return events

    def welcome(self) -> Welcome:
        """Always with a snapshot."""
        behind = "mock" if self._tier is not None else ""
        name = f"node-{self.settings.name}"
        return Welcome(
            PROTOCOL,
            __version__,
            node=name,
            epoch=self.epoch,
            next=self.numbered + 1,
            snapshot=True,
            behind=behind,
        )

    def _engine(self) -> list[AnyEvent]:
        settings = self.settings
        cache_tokens = settings.cache_blocks * (settings.block_characters // settings.characters_per_token)
        return [EngineUp(ENGINE, settings.name, SPACE, cache_tokens), self._speed()]

    def _speed(self) -> Speed:
        return Speed(ENGINE, 0.0, self.settings.prefill_token_s * self._slow, 0.0)


class Follower(asyncio.Protocol):
    """A router that follows."""

    def __init__(self, feed: MockFeed) -> None:
        self._feed = feed
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._feed.followers.discard(self)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            match decode_from_router(payload):
                case Hello():
                    self._greet()
                case Ping():
                    self.write(encode(Pong()))
                case Prefetch() as prefetch:
                    self._feed.prefetches.append(prefetch)
                case Pong():
                    pass

    def write(self, frame: bytes) -> None:
        """To the router."""
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()

    def _greet(self) -> None:
        self.write(encode(self._feed.welcome()))
        events = self._feed.snapshot()
        for at in range(0, len(events), MAX_EVENTS):
            self.write(encode(Known(tuple(events[at : at + MAX_EVENTS]))))
        self.write(encode(KnownEnd()))
        self._feed.followers.add(self)
