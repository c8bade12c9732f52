"""Workers that fail: before the first byte another one answers, after it the client is told."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.router.http.rig import (
    CHAT,
    Handler,
    ask,
    at_workers,
    client,
    mocks,
    prompt,
    read_request,
    routing,
    run,
    scripted,
    until,
)  # fmt: skip
from tests.servers import free_ports

from kvferry.router.http.limits import Limits

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def saying(*answers: bytes, then: str = "close", seen: list[bytes] | None = None) -> Handler:
    """A worker that says this to one request after the other, and then closes, resets or hangs."""

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            writer.write(answer)
            await writer.drain()
        if then == "hang":
            await reader.read()
        elif then == "reset":
            writer.transport.abort()

    return worker


def events(router: Any) -> dict[str, int]:
    return dict(router.proxy.statistics().events)


def test_a_worker_that_is_not_there_costs_nothing_but_a_look() -> None:
    async def test() -> None:
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        async with mocks(1) as (worker,), routing(dead, worker.url, policy="round_robin") as router:
            for _ in range(4):
                assert (await ask(router, CHAT, prompt())).status == 200
            assert events(router)["worker_refused"] == 1  # it is down from the first time on

    run(test)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", SSE, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"])
@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_worker_lost_before_the_first_byte_of_a_body_is_replaced(said: bytes, then: str) -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with (
            scripted(saying(said, then=then, seen=seen)) as bad,
            scripted(saying(WHOLE)) as good,
            routing(bad, good, policy="round_robin") as router,
        ):
            for _ in range(2):
                answer = await ask(router, CHAT, prompt())
                assert (answer.status, answer.body) == (200, b"ok")
            assert events(router).get("retries") == len(seen) == 1

    run(test)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_answer_that_says_not_now_is_asked_for_elsewhere_once(status: int) -> None:
    async def test() -> None:
        async with mocks(2) as (a, b), routing(a.url, b.url, policy="round_robin") as router:
            a.behave(status=status)
            assert [(await ask(router, CHAT, prompt())).status for _ in range(4)] == [200] * 4
            b.behave(status=status)
            assert (await ask(router, CHAT, prompt())).status == status

    run(test)


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_other_answers_are_passed_on_as_they_are(status: int) -> None:
    async def test() -> None:
        async with mocks(2) as (a, b), routing(a.url, b.url) as router:
            a.behave(status=status)
            b.behave(status=status)
            answer = await ask(router, CHAT, prompt())
            assert (answer.status, answer.json()["error"]["message"]) == (status, "as told")
            assert len(a.seen) + len(b.seen) == 1
            ended = router.proxy.statistics().ended
            assert ended == {"refused" if status < 500 else "failed": 1}

    run(test)


def test_a_request_that_kills_its_worker_kills_two_at_most() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        killed = saying(b"", then="reset", seen=seen)
        async with (
            scripted(killed) as a,
            scripted(killed) as b,
            scripted(killed) as c,
            routing(a, b, c) as router,
        ):
            answer = await ask(router, CHAT, prompt())
            assert (answer.status, len(seen)) == (502, 2)
            assert answer.json()["error"]["type"] == "bad_gateway"

    run(test)


def test_what_may_have_had_an_effect_is_not_sent_twice() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        killed = saying(b"", then="reset", seen=seen)
        async with (
            scripted(killed) as a,
            scripted(killed) as b,
            routing(a, b, engine_control=True) as router,
        ):
            answer = await ask(router, "/v1/batches", b'{"model": "x"}')
            assert (answer.status, len(seen)) == (502, 1)

    run(test)


def test_a_kept_connection_that_the_worker_closed_is_no_failure() -> None:
    async def test() -> None:
        seen: list[bytes] = []
        async with scripted(saying(WHOLE, seen=seen)) as url, routing(url) as router, client(router) as one:
            for _ in range(6):
                one.post(CHAT, prompt())
                assert (await one.answer()).body == b"ok"
            assert len(seen) == 6
            assert not router.proxy.statistics().ended.get("failed")

    run(test)


def test_a_kept_connection_that_closes_at_the_next_request_is_replaced_at_the_same_worker() -> None:
    async def test() -> None:
        seen: list[bytes] = []

        async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Answers one, and is gone when the next has come."""
            await saying(WHOLE, then="")(reader, writer)
            seen.append(await reader.readuntil(b"\r\n\r\n"))

        async with scripted(closing) as url, routing(url) as router, client(router) as one:
            for _ in range(4):
                one.post(CHAT, prompt())
                assert (await one.answer()).body == b"ok"
            assert len(seen) == 3
            assert router.proxy.statistics().ended == {"done": 4}
            assert "worker_lost" not in events(router)

    run(test)


def test_a_stream_whose_worker_dies_ends_with_an_error_and_never_properly() -> None:
    async def test() -> None:
        async with mocks(1, step_s=0.002) as (worker,), routing(worker.url) as router, client(router) as one:
            worker.behave(die_after=3)
            one.post(CHAT, prompt(stream=True, max_tokens=50))
            status, _, _ = await one.head()
            rest = await one.rest()
            assert status == 200
            assert rest.count(b'"content"') == 3
            assert b'\n\nevent: error\ndata: {"type":"error","error":{' in rest
            assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n")
            assert events(router)["broken_streams"] == 1
            assert router.proxy.statistics().ended == {"failed": 1}

    run(test)


def test_in_the_middle_of_a_chunk_nothing_is_put_in() -> None:
    async def test() -> None:
        async with (
            scripted(saying(SSE + b"40\r\ndata: half", then="reset")) as url,
            routing(url) as router,
            client(router) as one,
        ):
            one.post(CHAT, prompt(stream=True))
            await one.head()
            assert await one.rest() == b"40\r\ndata: half"

    run(test)


def test_another_answer_that_breaks_off_breaks_off_here() -> None:
    async def test() -> None:
        half = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
        async with scripted(saying(half, then="reset")) as url, routing(url) as router, client(router) as one:
            one.post(CHAT, prompt())
            await one.head()
            assert await one.rest() == b"half"

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (70 << 10),
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_its_worker(said: bytes) -> None:
    async def test() -> None:
        async with scripted(saying(said, then="hang")) as url, routing(url) as router:
            assert (await ask(router, CHAT, prompt())).status == 502

    run(test)


def test_what_follows_an_answer_is_not_passed_on() -> None:
    async def test() -> None:
        async with (
            scripted(saying(WHOLE + WHOLE, then="hang")) as url,
            routing(url) as router,
            client(router) as one,
        ):
            one.post(CHAT, prompt())
            assert (await one.answer()).body == b"ok"
            one.post(CHAT, prompt())
            assert (await one.answer()).body == b"ok"
            assert router.proxy.link(url).connects == 2

    run(test)


def quick(**more: float) -> Limits:
    return replace(Limits(), **{"first_byte_s": 0.1, "idle_s": 0.1, "connect_s": 1.0, **more})


def test_a_hung_worker_holds_up_nobody_else_and_is_left_in_time() -> None:
    async def test() -> None:
        async with (
            mocks(2) as (a, b),
            routing(a.url, b.url, limits=quick(first_byte_s=0.6), policy="round_robin") as router,
        ):
            a.behave(hang=True)
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(router, CHAT, prompt(stream=True))) for _ in range(8)]
                await until(lambda: sum(task.done() for task in asked) == 4)
                assert at_workers(router) == 4  # those of b are done, those of a wait
            assert {task.result().status for task in asked} == {200}
            assert a.statistics()["connections"] == 0

    run(test)


def test_a_worker_that_goes_down_gives_up_what_waits_for_its_first_byte() -> None:
    async def test() -> None:
        async with (
            mocks(2) as (a, b),
            routing(a.url, b.url, policy="round_robin", probe_interval_s=1.0) as router,
        ):
            a.behave(hang=True, health=503)
            statuses = await asyncio.gather(*(ask(router, CHAT, prompt()) for _ in range(4)))
            assert [answer.status for answer in statuses] == [200] * 4

    run(test)


def test_a_stream_that_stops_is_given_up() -> None:
    async def test() -> None:
        said = SSE + b"5\r\nhello\r\n"
        async with (
            scripted(saying(said, then="hang")) as url,
            routing(url, limits=quick()) as router,
            client(router) as one,
        ):
            one.post(CHAT, prompt(stream=True))
            await one.head()
            assert b"no further byte" in await one.rest()

    run(test)


def test_nobody_there_is_said_with_when_to_come_again() -> None:
    async def test() -> None:
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        async with routing(dead) as router:
            assert (await ask(router, CHAT, prompt())).status == 502  # it was asked
            answer = await ask(router, CHAT, prompt())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    run(test)


def gated() -> tuple[asyncio.Event, Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]]:
    """A worker that answers all its requests once it may."""
    may = asyncio.Event()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await may.wait()
            writer.write(WHOLE)

    return may, worker


def test_a_full_worker_lets_requests_wait_and_a_full_queue_refuses_them() -> None:
    async def test() -> None:
        may, worker = gated()
        limits = replace(Limits(), per_worker=2, waiting=3)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            async with asyncio.TaskGroup() as group:
                first = [group.create_task(ask(router, CHAT, prompt())) for _ in range(5)]
                await until(lambda: len(router.proxy.waiting) == 3)
                assert at_workers(router) == 2
                refused = await ask(router, CHAT, prompt())
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert refused.json()["error"]["type"] == "rate_limit_error"
                may.set()
            assert [task.result().status for task in first] == [200] * 5
            assert events(router)["queue_full"] == 1

    run(test)


def test_who_waits_too_long_for_a_place_is_told_so() -> None:
    async def test() -> None:
        may, worker = gated()
        limits = replace(Limits(), per_worker=1, queue_s=0.1)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            async with asyncio.TaskGroup() as group:
                first = group.create_task(ask(router, CHAT, prompt()))
                await until(lambda: at_workers(router) == 1)
                assert (await ask(router, CHAT, prompt())).status == 429
                may.set()
            assert first.result().status == 200

    run(test)


def test_models_of_unlike_workers_are_told_together_and_find_theirs() -> None:
    async def test() -> None:
        async with (
            mocks(1, model="small") as (a,),
            mocks(1, model="large") as (b,),
            routing(a.url, b.url, probe_interval_s=1.0) as router,
        ):
            await until(lambda: all(worker.models for worker in router.roster))
            listed = (await ask(router, "/v1/models")).json()["data"]
            assert {model["id"] for model in listed} == {"small", "large"}
            for _ in range(3):
                answer = await ask(router, CHAT, prompt().replace(b"mock", b"large"))
                assert answer.json()["model"] == "large"
            assert not [seen for seen in a.seen if seen.path == CHAT]
            answer = await ask(router, CHAT, prompt().replace(b"mock", b"none"))
            assert answer.status == 404 and "large, small" in answer.json()["error"]["message"]

    run(test)
