"""The mock worker is what tests of the router stand on: it must do what it is told, and nothing else."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.feed.framing import decode_to_router, encode
from kvferry.feed.wire import PROTOCOL, Events, Held, Hello, Known, KnownEnd, Prompt, Result, Welcome
from kvferry.testing.servers import free_ports
from kvferry.testing.worker import MockWorker, SharedTier, WorkerSettings
from kvferry.testing.worker_fleet import TierSettings, running_workers

BLOCK = 64
LONG = "x" * (10 * BLOCK)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


async def until(done: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if done():
            return
        await asyncio.sleep(0)
    raise TimeoutError


async def post(worker: MockWorker, body: object, path: str = "/v1/chat/completions") -> bytes:
    """The raw answer, until the worker is done or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    payload = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(payload)) + payload)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head:
            return head + await reader.readuntil(b"0\r\n\r\n")
        size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head + await reader.readexactly(size)
    finally:
        writer.close()


def chat(text: str = "hello", **more: object) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": text}], **more}


def usage(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw.partition(b"\r\n\r\n")[2])["usage"]
    return found


def cached(raw: bytes) -> int:
    return int(usage(raw)["prompt_tokens_details"]["cached_tokens"])


def settings(**values: Any) -> WorkerSettings:
    return WorkerSettings(block_characters=BLOCK, **values)


def test_a_stream_has_as_many_tokens_as_were_asked_for_and_then_the_usage() -> None:
    async def test() -> None:
        async with MockWorker(settings()) as worker:
            raw = await post(worker, chat(stream=True, max_tokens=5, stream_options={"include_usage": True}))
            events = [json.loads(x) for x in raw.decode().split("data: ")[1:-1] for x in [x.split("\n\n")[0]]]
            assert [len(event["choices"]) for event in events] == [1] * 6 + [0]
            assert sum(bool(e["choices"][0]["delta"]["content"]) for e in events[:-1]) == 5
            assert events[-1]["usage"]["completion_tokens"] == 5
            assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    run(test)


def test_what_was_computed_is_cached_up_to_the_last_whole_block_and_no_further_than_capacity() -> None:
    async def test() -> None:
        async with MockWorker(settings(cache_blocks=12)) as worker:
            assert cached(await post(worker, chat(LONG))) == 0
            assert cached(await post(worker, chat(LONG + "y" * 99))) == 160  # 10 blocks of 16 tokens
            assert cached(await post(worker, chat("z" * 12 * BLOCK))) == 0
            assert cached(await post(worker, chat(LONG))) == 0
            await post(worker, chat(LONG, cache_salt="other"))
            worker.engine.drop()
            assert cached(await post(worker, chat(LONG))) == 0

    run(test)


def test_another_salt_shares_nothing() -> None:
    async def test() -> None:
        async with MockWorker(settings()) as worker:
            await post(worker, chat(LONG))
            assert cached(await post(worker, chat(LONG, cache_salt="other"))) == 0

    run(test)


def test_a_prefix_in_the_shared_tier_is_loaded_where_that_is_quicker() -> None:
    async def test() -> None:
        slow = settings(prefill_token_s=1e-4)
        quick, late = SharedTier(token_s=1e-7, latency_s=0.0), SharedTier(token_s=1.0)
        for tier, loaded in ((quick, True), (late, False)):
            async with MockWorker(slow, tier=tier) as one, MockWorker(slow, tier=tier) as other:
                await post(one, chat(LONG))
                assert (cached(await post(other, chat(LONG))) > 0) is loaded
                assert (other.engine.totals.loaded_tokens > 0) is loaded

    run(test)


def test_prefill_is_serial_and_takes_the_time_of_what_is_not_cached() -> None:
    async def test() -> None:
        async with MockWorker(settings(prefill_token_s=1e-3, chunk_tokens=64)) as worker:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            texts = [letter * 100 * 4 for letter in "ab"]
            await asyncio.gather(*(post(worker, chat(text, max_tokens=1)) for text in texts))
            assert loop.time() - begun >= 0.2
            worker.behave(slow=3)
            begun = loop.time()
            await post(worker, chat("c" * 400, max_tokens=1))
            assert loop.time() - begun >= 0.3

    run(test)


def test_a_client_that_leaves_ends_its_work() -> None:
    async def test() -> None:
        async with MockWorker(settings(step_s=60.0, prefill_token_s=1e-9)) as worker:
            asking = asyncio.create_task(post(worker, chat(stream=True)))
            await until(lambda: bool(worker.engine.running))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await until(lambda: not worker.engine.running)
            assert worker.statistics()["aborted"] == 1

    run(test)


def test_it_misbehaves_as_told() -> None:
    async def test() -> None:
        async with MockWorker(settings()) as worker:
            worker.behave(status=503)
            assert b" 503 " in await post(worker, chat())
            worker.behave(status=0, die_after=3)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await post(worker, chat(stream=True))
            assert worker.statistics()["running"] == 0
            worker.behave(die_after=0, hang=True)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(post(worker, chat()), 0.05)
            assert b" 200 " in await post(worker, {}, "/health")
            worker.behave(hang=False, trickle_s=1e-6)
            assert usage(await post(worker, chat(max_tokens=2)))["completion_tokens"] == 2
            worker.behave(trickle_s=0.0)
            await post(worker, chat(LONG))
            await worker.restart()
            assert cached(await post(worker, chat(LONG))) == 0
            worker.stop()
            with pytest.raises(ConnectionError):
                await post(worker, chat())

    run(test)


def test_it_answers_what_no_engine_is_needed_for() -> None:
    async def test() -> None:
        async with MockWorker(settings(model="m")) as worker:
            assert (await post(worker, ["as", "sent"], "/echo")).endswith(b'["as", "sent"]')
            assert worker.seen[-1].path == "/echo"
            assert b'"id": "m"' in await post(worker, {}, "/v1/models")
            assert b"vllm:num_requests_waiting{" in await post(worker, {}, "/metrics")
            assert b" 404 " in await post(worker, {}, "/no/such/thing")
            assert b" 400 " in await post(worker, ["no object"])

    run(test)


def test_workers_in_a_process_of_their_own_are_told_over_http(tmp_path: Path) -> None:
    with running_workers(settings(), settings(name="b"), directory=tmp_path, tier=TierSettings()) as workers:
        assert len({worker.url for worker in workers}) == 2
        workers[1].behave(slow=2.0)
        assert workers[1].tell(None)["behaviour"]["slow"] == 2.0
        assert workers[0].tell(None)["behaviour"]["slow"] == 1.0
        workers[0].restart()
        workers[1].drop(tier=True)
        assert workers[1].statistics()["tier_blocks"] == 0


async def followed(worker: MockWorker, count: int) -> tuple[asyncio.StreamWriter, list[object]]:
    """Follow its feed until so many messages have come."""
    assert worker.feed is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.feed.port)
    writer.write(encode(Hello(PROTOCOL, "test")))
    messages: list[object] = []
    while len(messages) < count:
        size = int.from_bytes(await reader.readexactly(4), "little")
        messages.append(decode_to_router(await reader.readexactly(size)))
    return writer, messages


def test_its_feed_tells_what_a_node_would() -> None:
    async def test() -> None:
        (port,) = free_ports(1)
        tier = SharedTier(token_s=1e-6)
        async with MockWorker(settings(feed_port=port), tier=tier) as worker:
            following = asyncio.create_task(followed(worker, 5))
            assert worker.feed is not None
            await until(lambda: bool(worker.feed and worker.feed.followers))
            await post(worker, chat(LONG))
            writer, messages = await following
            welcome, known, end, asked, result = messages
            assert isinstance(welcome, Welcome) and welcome.snapshot and welcome.behind
            assert isinstance(known, Known) and isinstance(end, KnownEnd)
            assert [type(event).__name__ for event in known.events] == ["Space", "EngineUp", "Speed", "Rate"]
            assert isinstance(asked, Events) and isinstance(asked.events[0], Prompt)
            assert asked.first == welcome.next
            assert len(asked.events[0].digests) == 10 * 32
            assert isinstance(result, Events) and isinstance(result.events[0], Result)
            assert result.first == asked.first + 1
            writer.close()
            again, messages = await followed(worker, 3)
            assert isinstance(messages[1], Known) and isinstance(messages[1].events[-1], Held)
            again.close()

    run(test)
