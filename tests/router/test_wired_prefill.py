"""Prefill and decode pools: one worker prefills, another answers, and whatever fails costs a recompute."""

import asyncio
import json
from typing import Any

import pytest
from tests.router.http.rig import (
    CHAT,
    Client,
    ask,
    at_workers,
    client,
    mocks,
    prompt,
    routing,
    run,
    scripted,
    until,
)

from kvferry.cli.explain_router import render
from kvferry.testing.worker import MockWorker

LONG = "x" * 5000
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "10.0.0.1", "remote_port": 5}


def _bodies(worker: MockWorker, path: str = CHAT) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in worker.seen if seen.path == path]


def test_a_long_prompt_is_prefilled_first_and_then_answered() -> None:
    async def test() -> None:
        async with mocks(2) as (first, second), routing(f"prefill={first.url}", second.url) as router:
            more = {"max_completion_tokens": 7, "stream_options": {"include_usage": True}, "n": 1}
            answer = await ask(router, CHAT, prompt(LONG, stream=True, **more), "Authorization: Bearer k")
            assert answer.status == 200 and answer.body.count(b"[DONE]") == 1
            (one,), (two,) = _bodies(first), _bodies(second)
            assert (one["max_tokens"], one["stream"]) == (1, False)
            assert one["kv_transfer_params"]["do_remote_decode"] is True
            assert not {"max_completion_tokens", "stream_options", "n"} & one.keys()
            assert (
                two["stream"] is True
                and two["max_completion_tokens"] == 7
                and "kv_transfer_params" not in two
            )
            assert one["cache_salt"] == two["cache_salt"] and one["messages"] == two["messages"]
            assert at_workers(router) == 0 and router.proxy.statistics().events["prefilled"] == 1
            told = router.reception.explain(answer.headers["x-request-id"])
            assert told is not None
            before = told["prefill"]
            assert isinstance(before, dict)
            assert (told["worker"], before["worker"]) == (second.url, first.url)
            assert told["request_id"] == answer.headers["x-request-id"] != before["request_id"]
            assert f"prefilled at {first.url}" in render(told)

    run(test)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_what_the_first_worker_answers_with_goes_to_the_second_and_a_clients_own_does_not(path: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode()
        half = len(body) // 2
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (body[:half], body[half:]):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def test() -> None:
        async with (
            scripted(serve) as first,
            mocks(1) as (second,),
            routing(f"prefill={first}", second.url) as router,
        ):
            await ask(router, path, prompt(LONG, kv_transfer_params={"remote_host": "evil"}))
            assert [body["kv_transfer_params"] for body in _bodies(second, path)] == [PARAMS]

    run(test)


def test_short_prompts_and_other_paths_go_straight_to_their_worker() -> None:
    async def test() -> None:
        async with mocks(2) as (first, second), routing(f"prefill={first.url}", second.url) as router:
            assert (await ask(router, CHAT, prompt("short"))).status == 200
            assert (await ask(router, "/tokenize", json.dumps({"prompt": LONG}).encode())).status == 200
            assert not first.seen and len(second.seen) == 2

    run(test)


@pytest.mark.parametrize("trouble", ["gone", "status", "die"])
def test_a_prefill_that_fails_costs_the_client_nothing(trouble: str) -> None:
    async def test() -> None:
        async with mocks(2) as (first, second), routing(f"prefill={first.url}", second.url) as router:
            if trouble == "gone":
                first.stop()
            else:
                first.behave(**({"status": 500} if trouble == "status" else {"die_after": 1}))
            for number in range(4):
                assert (await ask(router, CHAT, prompt(LONG + str(number)))).status == 200
            assert len(_bodies(second)) == 4 and at_workers(router) == 0

    run(test)


def test_a_client_that_leaves_ends_its_prefill() -> None:
    async def test() -> None:
        async with mocks(2) as (first, second), routing(f"prefill={first.url}", second.url) as router:
            first.behave(hang=True)
            async with client(router) as one:
                one.post(CHAT, prompt(LONG))
                await until(lambda: _bodies(first))
                assert at_workers(router) == 1
            await until(lambda: at_workers(router) == 0)
            await until(lambda: not first.connections)
            assert not _bodies(second)
            assert isinstance(one, Client)

    run(test)


def test_a_request_that_is_still_being_prefilled_is_explained() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.read()

    async def test() -> None:
        async with (
            scripted(hang) as first,
            mocks(1) as (second,),
            routing(f"prefill={first}", second.url) as router,
            client(router) as one,
        ):
            one.post(CHAT, prompt(LONG), "X-Request-Id: mine")
            await until(lambda: router.reception.explain("mine") is not None)
            told = router.reception.explain("mine")
            assert told is not None and told["worker"] == first

    run(test)
