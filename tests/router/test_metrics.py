"""The metrics page of a router, scraped while it serves."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from tests.router.http.rig import CHAT, ask, mocks, prompt, routing, run
from tests.servers import free_ports

from kvferry.observe.exposition import MetricsPage
from kvferry.observe.router_metrics import ROUTER_METRICS
from kvferry.router.pilots import Share


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_what_happened_is_told_by_worker_pool_and_cause() -> None:
    async def test() -> None:
        async with mocks(2) as (a, b), routing(a.url, split=Share(1.0, "pilot")) as router:
            router.add_worker(b.url, pool="pilot")
            for _ in range(3):
                await ask(router, CHAT, prompt("hello " * 50, stream=True))
            await ask(router, CHAT, b"{")
            (port,) = free_ports(1)
            page = MetricsPage(router.statistics, metrics=ROUTER_METRICS, port=port, host="127.0.0.1")
            try:
                text = await asyncio.to_thread(_scrape, page.url)
            finally:
                await asyncio.to_thread(page.close)
            found = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            name = "kvferry_router_"
            assert found[name + "requests_total",] == 4
            assert found[name + "ended_requests_total", "done"] == 3
            assert found[name + "own_answers_total", "400"] == 1
            assert found[name + "worker_chosen_requests_total", b.url] == 3
            assert found[name + "worker_inflight_requests", b.url] == 0

    run(test)
