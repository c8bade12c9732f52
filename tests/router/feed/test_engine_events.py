"""A plain engine's KV events and a request that was sent to it, together: what the router then knows."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.router.feed import test_kvevents as events

from kvferry.errors import MisconfiguredError
from kvferry.feed.wire import Level
from kvferry.router.contract import Asked, Key
from kvferry.router.feed.endpoints import KvEvents, Ports, parse_kv_events
from kvferry.router.feed.engines import EngineEvents
from kvferry.router.knowledge import Knowledge
from kvferry.testing.expectations import eventually

TOKENS = [n + 1 for n in range(40)]


class Worker(http.server.BaseHTTPRequestHandler):
    """Counts tokens, as vLLM does."""

    asked: list[Any]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"count": len(TOKENS), "tokens": TOKENS}).encode()
        self.send_response(200 if self.path == "/tokenize" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (of the base class)
        """Quiet."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def worker(stack: ExitStack) -> str:
    Worker.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}"


def test_a_prompt_is_found_in_the_blocks_that_its_engine_holds(worker: str, stack: ExitStack) -> None:
    loop = events.Loop()
    stack.callback(loop.close)
    publisher = events.Publisher()
    stack.callback(publisher.close)
    knowledge = Knowledge()
    ports = Ports(*(int(at.rpartition(":")[2]) for at in (publisher.endpoint, publisher.replay)))
    asked = Asked("r-1", "m", (Key(b"k" * 16, 100), Key(b"l" * 16, 200)))

    async def begin() -> EngineEvents:
        made = EngineEvents(knowledge, KvEvents(ports))
        name = made.follow(worker)
        assert name is not None
        knowledge.near(worker, name)
        return made

    engines = loop.call(begin)
    stack.callback(lambda: loop.call(engines.close))
    publisher.say(events.stored(TOKENS))

    async def followed() -> bool:
        return engines.statistics()[0].blocks == 10

    eventually(lambda: loop.call(followed), "its blocks")

    async def send() -> None:
        knowledge.sent(asked, knowledge.worker(worker), new_tokens=40.0)
        engines.sent(worker, asked, "/v1/completions", b'{"model": "m", "prompt": "x"}')

    loop.call(send)

    async def links() -> int:
        return len(knowledge.links)

    eventually(lambda: loop.call(links) == 2, "its names are those blocks")
    assert knowledge.statistics()["paired_workers"] == 1

    async def held() -> int:
        place = next(p for p in knowledge.told.holders._places.values() if p.level is Level.ENGINE)
        return sum(
            bool(mask & knowledge.told.holders.known(place))
            for mask in knowledge.told.holders._masks.values()
        )

    assert loop.call(held) == 10
    assert Worker.asked == [{"model": "m", "prompt": "x"}]


def test_where_events_are_published_is_written_as_ports_of_workers_hosts() -> None:
    assert parse_kv_events("none").of("http://gpu1:8000") is None
    everywhere = parse_kv_events("5557:5558,http://[::1]:8001=6000")
    assert everywhere.of("http://gpu1:8000") == ("tcp://gpu1:5557", "tcp://gpu1:5558")
    assert everywhere.of("http://[::1]:8001") == ("tcp://[::1]:6000", "")
    some = parse_kv_events("http://gpu1:8000/=5557")
    assert some.of("http://gpu1:8000") == ("tcp://gpu1:5557", "")
    assert some.of("http://gpu2:8000") is None
    for text in ("0", "gpu1=5557", "70000", "5557:x", "tcp://gpu1:5557"):
        with pytest.raises(MisconfiguredError):
            parse_kv_events(text)
