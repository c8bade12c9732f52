"""Requests that are none, too much, too slow, or meant to be read in two ways."""

import asyncio
import contextlib
import gzip
import json
from dataclasses import replace

import pytest
from tests.router.http.rig import CHAT, ask, client, mocks, prompt, routing, run, until

from kvferry.router.http.limits import Limits

HOST = b"Host: r\r\n"
POST = b"POST / HTTP/1.1\r\nHost: r\r\n"
BAD = [
    (400, b"nonsense\r\n\r\n"),
    ((400, 505), b"GET /\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n" + HOST + b"Bad Name: x\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n" + HOST + b"Name : x\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n" + HOST + b"A: x\r\n folded\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n" + HOST + b"A: x\nContent-Length: 3\r\n\r\nabc"),
    (400, b"GET / HTTP/1.1\r\n" + HOST + b"A: x\0y\r\n\r\n"),
    (400, b"GET / HTTP/1.1\n" + HOST + b"\r\n"),
    (400, b"GET http://other/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    (400, b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n"),
    (400, b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n"),
    (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    (405, b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n"),
    (405, b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n"),
    (417, POST + b"Expect: a miracle\r\nContent-Length: 1\r\n\r\n"),
    # Two ways to say where the body ends.
    (
        400,
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        400,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    ),
    (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
    (400, POST + b"Content-Length: +3\r\n\r\nabc"),
    (400, POST + b"Content-Length: -1\r\n\r\n"),
    (400, POST + b"Content-Length: 0x3\r\n\r\nabc"),
    (400, POST + b"Content-Length: \r\n\r\nabc"),
    (400, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ((400, 501), POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    ((400, 501), POST + b"Transfer-Encoding: identity\r\n\r\n"),
    ((400, 501), POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n 5\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n"),
    (431, b"GET / HTTP/1.1\r\n" + HOST + b"A: " + b"x" * (70 << 10) + b"\r\n\r\n"),
    (431, b"GET /" + b"x" * (70 << 10)),
    (431, b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 300 + b"\r\n"),
]


@pytest.mark.parametrize(("status", "sent"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_no_request_ends_here_with_its_connection(status: int | tuple[int, ...], sent: bytes) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            one.send(sent)
            answer = await one.answer()
            assert answer.status in (status if isinstance(status, tuple) else (status,))
            assert answer.headers["connection"] == "close"
            assert answer.json()["error"]["message"]
            one.get("/v1/models")
            assert await one.rest() == b""
            assert not worker.seen

    run(test)


NO_PROMPTS = [b"{", b"[]", b'"x"', b"{} {}", b"\xff{}", b'{"messages": 3}', b"[" * 100_000]


@pytest.mark.parametrize("body", NO_PROMPTS, ids=lambda value: str(value)[:20])
def test_a_body_that_is_no_prompt_is_the_client_s_fault_and_the_connection_stays(body: bytes) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            one.post(CHAT, body, "Content-Type: application/json")
            answer = await one.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            one.post(CHAT, prompt())
            assert (await one.answer()).status == 200
            assert len(worker.seen) == 1

    run(test)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_over_the_limit_is_refused_before_it_was_read(chunked: bool) -> None:
    async def test() -> None:
        limits = replace(Limits(), body_bytes=1000)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router, client(router) as one:
            if chunked:
                one.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(3):
                    one.send(b"190\r\n" + b"x" * 400 + b"\r\n")
            else:
                one.send(POST + b"Content-Length: 1001\r\n\r\n")
            assert (await one.answer()).status == 413
            one.get("/v1/models")
            assert await one.rest() == b""
            assert not worker.seen

    run(test)


def test_all_bodies_together_have_a_limit() -> None:
    async def test() -> None:
        limits = replace(Limits(), held_bytes=10_000)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router:
            worker.behave(hang=True)
            async with client(router) as one, client(router) as two:
                one.post(CHAT, prompt("x" * 8000))
                await until(lambda: worker.seen)
                two.post(CHAT, prompt("x" * 8000))
                assert (await two.answer()).status == 503
                assert router.proxy.statistics().events["bodies_refused"] == 1

    run(test)


@pytest.mark.parametrize("begun", [b"GET / HT", POST + b"Content-Length: 9\r\n\r\nx"])
def test_a_request_that_does_not_come_in_time_is_given_up(begun: bytes) -> None:
    async def test() -> None:
        limits = replace(Limits(), head_s=0.3)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router, client(router) as one:

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    for byte in begun:
                        one.send(bytes([byte]))
                        await asyncio.sleep(0.001)

            await drip()
            assert (await one.answer()).status == 408
            assert await one.rest() == b""

    run(test)


def test_a_connection_on_which_nothing_comes_is_closed_without_a_word() -> None:
    async def test() -> None:
        limits = replace(Limits(), keep_s=0.1)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router, client(router) as one:
            one.post(CHAT, prompt())
            await one.answer()
            assert await one.rest() == b""

    run(test)


def test_too_many_connections_are_turned_away_and_the_others_go_on() -> None:
    async def test() -> None:
        limits = replace(Limits(), clients=2)
        async with (
            mocks(1) as (worker,),
            routing(worker.url, limits=limits) as router,
            client(router) as one,
            client(router) as two,
        ):
            for each in (one, two):
                each.post(CHAT, prompt())
                assert (await each.answer()).status == 200
            async with client(router) as three:
                assert await three.rest() == b""
            one.post(CHAT, prompt())
            assert (await one.answer()).status == 200

    run(test)


def test_megabytes_beside_streams_arrive_whole_and_so_do_the_streams() -> None:
    async def test() -> None:
        large = prompt("The quick brown fox. " * 300_000, max_tokens=1)
        assert len(large) > 6 << 20
        async with mocks(2, step_s=0.001, cache_blocks=0) as (a, b), routing(a.url, b.url) as router:
            stream = prompt(stream=True, max_tokens=300)
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(ask(router, CHAT, stream)) for _ in range(8)]
                bodies = [group.create_task(ask(router, CHAT, large)) for _ in range(4)]
            assert [task.result().status for task in bodies] == [200] * 4
            for task in streams:
                assert task.result().body.count(b"data: ") == 302
            received = [seen.body for worker in (a, b) for seen in worker.seen if len(seen.body) > 1 << 20]
            assert received == [large] * 4

    run(test)


def test_a_client_s_salt_counts_for_nobody_else() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            sent = prompt(cache_salt="mine")
            for key in ("a", "b"):
                await ask(router, CHAT, sent, f"Authorization: Bearer {key}")
            salts = [json.loads(seen.body)["cache_salt"] for seen in worker.seen]
            assert len({*salts, "mine"}) == 3

    run(test)


SALTED = '{"cache_salt": "theirs", "prompt": "p"}'
UNREAD = [
    (SALTED.encode(), "Content-Type: multipart/form-data; boundary=x"),
    (b"\n " + SALTED.encode(), "Content-Type: application/octet-stream"),
    ((" " + SALTED).encode("utf-16-le"), "Content-Type: application/json"),
    ((" " + SALTED).encode("utf-32-le"), "Content-Type: application/json"),
    (SALTED.replace("_", "+AF8-").encode(), "Content-Type: application/json; charset=utf-7"),
    (gzip.compress(SALTED.encode()), "Content-Encoding: gzip"),
    (SALTED.encode(), "Content-Type: audio/wav\r\nContent-Type: application/json"),
    (b'{"sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "me"}}}}', "X: y"),
    (b'{"sampling_params": {"extra_args": {"kv\\u005ftransfer_params": {}}}}', "X: y"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/chat/completion%73", "/inference/v1/generate"])
@pytest.mark.parametrize(("body", "field"), UNREAD, ids=lambda value: str(value)[:40])
def test_no_body_is_passed_on_that_a_worker_may_read_otherwise(body: bytes, field: str, path: str) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            answer = await ask(router, path, body, field, "Authorization: Bearer k")
            for seen in worker.seen:
                assert json.loads(seen.body)["cache_salt"] not in ("theirs", "")
            assert worker.seen or answer.status in (400, 415)

    run(test)


DOORS = [
    "/invocations",
    "/inference/v1/generate",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/chat/completions/batch",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/v2/rerank",
    "/what/comes/later",
]


@pytest.mark.parametrize("path", DOORS)
def test_a_prompt_has_its_caller_s_salt_whatever_door_it_comes_by(path: str) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for key in ("a", "b"):
                for body in (
                    '{"cache_salt": "theirs", "input": "p", "messages": []}',
                    '{"input": "p", "messages": [], "body": {"cache_salt": "theirs"}}',
                ):
                    await ask(router, path, body.encode(), f"Authorization: Bearer {key}")
            salts = [json.loads(seen.body)["cache_salt"] for seen in worker.seen]
            assert len({*salts, "theirs"}) == 5

    run(test)


def test_media_is_passed_on_as_it_is() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for kind, body in (
                ("multipart/form-data; boundary=x", b"--x\r\n\r\n{}\r\n--x--"),
                ("audio/mp4", bytes(9)),
            ):
                await ask(
                    router,
                    "/v1/audio/transcriptions",
                    body,
                    f"Content-Type: {kind}",
                    "Authorization: Bearer k",
                )
                assert worker.seen[-1].body == body

    run(test)


def test_no_connection_is_handed_over_but_to_websocket() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for to in ("h2c", "websocket, h2c", "websocket\r\nUpgrade: h2c"):
                await ask(router, "/echo", None, "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {to}")
                assert "upgrade" not in worker.seen[-1].headers

    run(test)


def test_clients_do_not_control_engines_unless_they_may() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,):
            async with routing(worker.url) as router:
                answer = await ask(router, "/reset_prefix_cache", b"")
                assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")
                assert not worker.seen
            async with routing(worker.url, engine_control=True) as router:
                assert (await ask(router, "/reset_prefix_cache", b"")).status == 200

    run(test)


def test_a_client_that_never_waits_for_its_turn_is_read_no_faster_than_it_is_answered() -> None:
    async def test() -> None:
        count, ahead = 600, [0]
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            (connection,) = router.proxy._clients

            async def watch() -> None:
                while True:
                    ahead.append(len(connection._ahead))
                    await asyncio.sleep(0)

            watching = asyncio.ensure_future(watch())
            for _ in range(count):  # 10 MB
                one.post(CHAT, prompt("x" * 16_000))
            for _ in range(count):
                assert (await one.answer()).status == 200
            watching.cancel()
            assert len(worker.seen) == count
            assert max(ahead) < 1 << 20

    run(test)


@pytest.mark.parametrize("kind", [["a"], {}, 1, None, True])
def test_a_part_of_no_kind_is_the_worker_s_to_judge(kind: object) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            body = prompt(messages=[{"role": "user", "content": [{"type": kind, "text": "hello"}]}])
            assert (await ask(router, CHAT, body)).status != 500
            assert worker.seen

    run(test)
