"""A router that restarts knows again what the nodes tell, and what it believes wrongly costs speed alone."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from tests.router.http.rig import CHAT, ask, prompt, routing, run, until

from kvferry.addresses import Address
from kvferry.router.settings import Feeds
from kvferry.testing.servers import free_ports
from kvferry.testing.worker import MockWorker, SharedTier, WorkerSettings


async def _fleet(stack: AsyncExitStack, tier: SharedTier) -> tuple[list[MockWorker], dict[str, Any]]:
    """Two workers whose nodes publish, and a router's settings for them."""
    ports = free_ports(2)
    workers = [
        await stack.enter_async_context(
            MockWorker(WorkerSettings(name=f"w{port}", feed_port=port), tier=tier)
        )
        for port in ports
    ]
    feeds = {worker.url: Address("127.0.0.1", port) for worker, port in zip(workers, ports, strict=True)}
    return workers, {"feeds": Feeds(0, feeds)}


def test_after_a_restart_the_index_is_what_it_was_and_a_stale_hint_costs_no_answer() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            tier = SharedTier(token_s=1e-9, latency_s=1e-6)
            workers, settings = await _fleet(stack, tier)
            urls = [worker.url for worker in workers]
            texts = [f"{number} " * 2000 for number in range(6)]
            async with routing(*urls, **settings) as router:
                await until(lambda: router.knowledge.statistics()["nodes"] == 2)
                for text in texts:
                    assert (await ask(router, CHAT, prompt(text))).status == 200
                await until(lambda: router.knowledge.statistics()["chunks"] == len(tier.held) > 0)
            async with routing(*urls, **settings) as again:
                await until(lambda: again.knowledge.statistics()["chunks"] == len(tier.held))
                tier.held.clear()  # and nobody is told
                for worker in workers:
                    worker.engine.drop()
                answers = await asyncio.gather(*(ask(again, CHAT, prompt(text)) for text in texts))
                assert [answer.status for answer in answers] == [200] * 6
                cached = [
                    json.loads(one.body)["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers
                ]
                assert cached == [0] * 6

    run(test)


def test_a_feed_that_is_lost_costs_no_answer() -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            tier = SharedTier(token_s=1e-9, latency_s=1e-6)
            workers, settings = await _fleet(stack, tier)
            async with routing(*(worker.url for worker in workers), **settings) as router:
                await until(lambda: router.knowledge.statistics()["nodes"] == 2)
                assert (await ask(router, CHAT, prompt("x" * 4000))).status == 200
                for worker in workers:
                    assert worker.feed is not None
                    worker.feed.close()
                for number in range(6):
                    assert (await ask(router, CHAT, prompt(f"{number % 2}" * 4000))).status == 200

    run(test)
