"""A mock vLLM worker: an OpenAI-compatible server that computes nothing and can misbehave in many ways.

In a running loop:            async with MockWorker(WorkerSettings(), tier=tier) as worker: worker.url
In a process of their own:    worker_fleet.running_workers(WorkerSettings(), ..., directory=tmp_path)

``/v1/chat/completions`` and ``/v1/completions`` (streamed or not), ``/v1/models``, ``/health``, ``/metrics``,
``/reset_prefix_cache``, ``/tokenize``; ``/echo`` answers with what it got. ``/mock`` sets the behaviour.
"""

import asyncio
from collections import deque
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from kvferry.testing.worker_engine import MockEngine, SharedTier, Watcher, WorkerSettings
from kvferry.testing.worker_feed import MockFeed
from kvferry.testing.worker_http import Behaviour, Connection, Seen

__all__ = ["Behaviour", "MockWorker", "Seen", "SharedTier", "WorkerSettings"]

MAX_SEEN = 4096


class MockWorker:
    """One worker, on loopback. url: once it listens. seen: the newest requests."""

    def __init__(
        self,
        settings: WorkerSettings | None = None,
        *,
        tier: SharedTier | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """watcher: told what happens; without one, and with a ``feed_port``, it is the feed there."""
        self.settings = settings or WorkerSettings()
        self.feed: MockFeed | None = None
        if watcher is None and self.settings.feed_port:
            watcher = self.feed = MockFeed(self.settings, tier, epoch=1)
        self.engine = MockEngine(self.settings, tier, watcher)
        self.behaviour = Behaviour()
        self.port = self.settings.port
        self.seen: deque[Seen] = deque(maxlen=MAX_SEEN)
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._fed = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self.feed is not None:
            self.feed.close()

    async def listen(self) -> None:
        """Accept connections, at the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=4096, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self.feed is not None and not self._fed:
            await self.feed.listen()
            self._fed = True
        if self.engine.watcher is not None:
            self.engine.watcher.up()

    def stop(self) -> None:
        """As a crash: connections are reset, new ones refused, and the cache is empty."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.reset()
        self.engine.stop()
        if self.engine.watcher is not None:
            self.engine.watcher.down()

    async def restart(self) -> None:
        """``stop`` and ``listen``."""
        self.stop()
        await self.listen()

    def behave(self, **changes: Any) -> None:
        """Change fields of its behaviour."""
        self.behaviour = replace(self.behaviour, **changes)
        if self.engine.slow != self.behaviour.slow:
            self.engine.slow = self.behaviour.slow
            if self.engine.watcher is not None:
                self.engine.watcher.slowed(self.engine.slow)

    def forget_tier(self) -> None:
        """The shared tier is empty."""
        if self.engine.tier is not None:
            self.engine.tier.held.clear()
        if self.feed is not None:
            self.feed.forgotten()

    def statistics(self) -> dict[str, Any]:
        """Counts since it was made, and what is going on."""
        engine = self.engine
        return {
            **asdict(engine.totals),
            "waiting": len(engine.waiting) + len(engine.loading),
            "running": len(engine.running),
            "connections": len(self.connections),
            "cache_blocks": len(engine.cache),
            "tier_blocks": len(engine.tier.held) if engine.tier is not None else 0,
        }

    def metrics(self) -> str:
        """In vLLM's names."""
        engine, label = self.engine, f'{{engine="0",model_name="{self.settings.model}"}}'
        used = len(engine.cache) / max(1, self.settings.cache_blocks)
        totals = engine.totals
        values: dict[str, float] = {
            "num_requests_running": len(engine.running),
            "num_requests_waiting": len(engine.waiting) + len(engine.loading),
            "kv_cache_usage_perc": used,
            "prefix_cache_queries_total": totals.prompt_tokens,
            "prefix_cache_hits_total": totals.engine_tokens,
            "prompt_tokens_total": totals.prompt_tokens,
            "generation_tokens_total": totals.output_tokens,
        }
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value}"]
        blocks = f'block_size="16",num_gpu_blocks="{self.settings.cache_blocks}"'
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{blocks}}} 1.0"]
        return "\n".join(lines) + "\n"
