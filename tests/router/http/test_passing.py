"""What passes through the proxy is what the worker said, and what the client asked."""

import asyncio
import json
import re

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

OCTETS = b"Content-Type: application/octet-stream\r\nTrailer: T\r\n\r\n"


def test_every_path_and_query_reaches_a_worker_as_it_is() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            for method, path in (
                ("GET", "/v1/models"), ("GET", "/anything/at?all=1&b=%20"), ("DELETE", "/v1/x"),
                ("OPTIONS", "/v1/models"),
            ):  # fmt: skip
                one.get(path, method=method)
                await one.answer()
                assert (worker.seen[-1].method, worker.seen[-1].path) == (method, path)
            one.get("/health", method="HEAD")
            await one.head()  # the mock sends a body of no bytes

    run(test)


def test_a_body_arrives_byte_for_byte_however_it_was_framed() -> None:
    async def test() -> None:
        body = bytes(range(256)) * 700
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            one.post("/echo", body, "Content-Type: application/octet-stream")
            assert (await one.answer()).body == body
            one.send(b"POST /echo HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n" + OCTETS)
            for at in range(0, len(body), 50_000):
                piece = body[at : at + 50_000]
                one.send(b"%x;why=so\r\n" % len(piece) + piece + b"\r\n")
                await asyncio.sleep(0)
            one.send(b"0\r\nT: 1\r\n\r\n")
            assert (await one.answer()).body == body
            assert worker.seen[-1].headers["content-length"] == str(len(body))

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_that_of_the_worker_byte_for_byte(stream: bool) -> None:
    async def test() -> None:
        async with mocks(1, step_s=0.001) as (worker,), routing(worker.url) as router:
            body = prompt(stream=stream, max_tokens=20, stream_options={"include_usage": True})
            through = await ask(router, CHAT, body, "X-Request-Id: same")
            ours = through.headers.pop("x-request-id")
            assert ours.startswith("same-")
            worker.engine.drop()
            one = Client(*await asyncio.open_connection("127.0.0.1", worker.port))
            one.post(CHAT, body, f"X-Request-Id: {ours}")
            direct = await one.answer()
            one.close()
            assert through.headers == direct.headers
            assert through.raw.startswith(b"HTTP/1.1 200 OK\r\n")
            assert through.raw.partition(b"\r\n\r\n")[2] == direct.raw.partition(b"\r\n\r\n")[2]

    run(test)


def test_bytes_of_a_stream_are_passed_on_as_they_come_in_whatever_pieces() -> None:
    pieces = [b"5\r\nhe", b"llo\r", b"\n1;x=y\r\n!\r\n", b"0\r\nA: b\r\n", b"\r\n"]
    gate = asyncio.Event

    async def test() -> None:
        opened = [gate() for _ in pieces]

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 Fine\r\nTransfer-Encoding: chunked\r\nX-Y: z\r\n\r\n")
            for piece, may in zip(pieces, opened, strict=True):
                await may.wait()
                writer.write(piece)
            await reader.read()

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.get("/x")
            opened[0].set()
            _, headers, raw = await one.head()
            assert raw.startswith(b"HTTP/1.1 200 Fine\r\n") and headers["x-y"] == "z"
            for piece, may in zip(pieces, opened, strict=True):
                may.set()
                assert await one.reader.readexactly(len(piece)) == piece
            await until(lambda: at_workers(router) == 0)

    run(test)


def test_connections_are_kept_on_both_sides() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            for _ in range(5):
                one.post(CHAT, prompt())
                assert (await one.answer()).status == 200
            assert router.proxy.link(worker.url).connects == 1

    run(test)


def test_requests_that_come_before_their_turn_are_answered_in_order() -> None:
    async def test() -> None:
        async with mocks(2) as (a, b), routing(a.url, b.url) as router, client(router) as one:
            head = b"POST /echo HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n"
            one.send(b"".join(head + b"%02d" % number for number in range(40)))
            assert [(await one.answer()).body for _ in range(40)] == [b"%02d" % n for n in range(40)]

    run(test)


def test_large_requests_that_come_before_their_turn_wait_for_it() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            bodies = [bytes([number]) * 300_000 for number in range(6)]
            for body in bodies:
                one.post("/echo", body, "Content-Type: application/octet-stream")
            assert [(await one.answer()).body for _ in bodies] == bodies

    run(test)


def test_fields_of_one_hop_end_here_and_the_others_do_not() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: keep-alive, x-mine\r\nKeep-Alive: timeout=5\r\nX-Mine: 1\r\n"
                b"X-Request-Id: theirs\r\nX-Kept: 2\r\nContent-Length: %d\r\n\r\n" % len(head) + head
            )
            await reader.read()

        async with scripted(worker) as url, routing(url) as router:
            answer = await ask(
                router, "/v1/models", None, "Connection: x-secret, te", "X-Secret: 1", "TE: trailers",
                "Keep-Alive: 5", "Proxy-Authorization: no", "Upgrade: h2c", "Authorization: Bearer k",
                "X-Request-Id: mine",
            )  # fmt: skip
            seen = answer.body.decode().lower()
            assert "authorization: bearer k" in seen and f"host: {url[7:]}" in seen
            assert not re.search(
                r"^(connection|x-secret|te|keep-alive|proxy-.*|upgrade):", seen, re.MULTILINE
            )
            assert "x-mine" not in answer.headers and "keep-alive" not in answer.headers
            assert answer.headers["x-kept"] == "2"
            ours = answer.headers["x-request-id"]
            assert ours.startswith("mine-") and f"x-request-id: {ours}" in seen

    run(test)


def test_an_id_that_would_not_do_is_replaced() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for bad in ("two words", "a" * 200, "x\ty", ""):
                answer = await ask(router, "/v1/models", None, f"X-Request-Id: {bad}")
                assert re.fullmatch(r"[0-9a-f]{18,}", answer.headers["x-request-id"])
            assert len({seen.headers["x-request-id"] for seen in worker.seen}) == len(worker.seen)

    run(test)


def test_a_body_that_ends_with_the_connection_ends_so_here_too() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")

        async with scripted(worker) as url, routing(url) as router:
            answer = await ask(router, "/x")
            assert (answer.body, answer.headers["connection"]) == (b"all of it", "close")

    run(test)


def test_an_old_client_gets_no_chunks() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert b" HTTP/1.0\r\n" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nplain")

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await one.rest()).endswith(b"\r\n\r\nplain")

    run(test)


def test_continue_is_said_to_who_waits_for_it_and_early_hints_are_kept_back() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
            await reader.read()

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.send(b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert (await one.head())[0] == 100
            one.send(b"ok")
            assert (await one.answer()).status == 204

    run(test)


def test_after_101_both_sides_pass_bytes_on() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b"connection: upgrade\r\nupgrade: websocket\r\n" in head
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
            )
            writer.write(b"hi")
            while data := await reader.read(100):
                writer.write(data.upper())

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.get("/v1/realtime", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: k")
            status, headers, _ = await one.head()
            assert (status, headers["upgrade"], headers["connection"]) == (101, "websocket", "upgrade")
            assert await one.reader.readexactly(2) == b"hi"
            one.send(b"there\0\xff")
            assert await one.reader.readexactly(7) == b"THERE\0\xff"
            assert at_workers(router) == 1
            one.close()
            await until(lambda: at_workers(router) == 0)

    run(test)


def test_a_salt_follows_from_the_key_and_the_rest_of_the_body_stays_as_it_was() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            body = b'{"model":"mock",  "messages":[{"role":"user","content":"\\u00e9"}], "max_tokens":1}'
            await ask(router, CHAT, body)
            assert worker.seen[-1].body == body
            for key in ("a", "b", "a"):
                await ask(router, CHAT, body, f"Authorization: Bearer {key}")
            first, second, third = (seen.body for seen in list(worker.seen)[-3:])
            assert first == third != second
            assert first.endswith(body[1:]) and "cache_salt" in json.loads(first)

    run(test)


def test_a_request_refused_here_is_counted_as_refused() -> None:
    """Nothing failed: 4xx is the client's."""

    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            assert (await ask(router, CHAT, b'{"messages": 3}')).status == 400
            assert (await ask(router, CHAT, b"no JSON")).status == 400
            assert dict(router.proxy.statistics().ended) == {"refused": 2}
            assert not worker.seen

    run(test)
