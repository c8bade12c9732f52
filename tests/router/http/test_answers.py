"""Answers of workers that are none, too much, too slow, or meant to be read in two ways."""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.router.http.rig import (
    CHAT,
    ask,
    at_workers,
    client,
    prompt,
    read_request,
    routing,
    run,
    scripted,
    until,
)  # fmt: skip

from kvferry.router.http.limits import Limits

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n"
UPGRADE = ("Connection: upgrade", "Upgrade: websocket")


class Saying:
    """A worker that says this to each request, and then waits. heard: what came, whole. gone: connections."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.heard: list[bytes] = []
        self.gone = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                self.heard.append(await read_request(reader))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        finally:
            self.gone += 1


@pytest.mark.parametrize(
    ("answered", "asked"),
    [
        (b"Upgrade: websocket\r\n", ()),
        (b"Upgrade: h2c\r\n", UPGRADE),
        (b"Upgrade: websocket\r\nUpgrade: h2c\r\n", UPGRADE),
        (b"", UPGRADE),
        (b"", ()),
        (b"Upgrade: h2c\r\n", ("Connection: upgrade", "Upgrade: h2c")),
    ],
)
def test_nothing_goes_by_unread_after_a_101_that_nobody_asked_for(
    answered: bytes, asked: Sequence[str]
) -> None:
    async def test() -> None:
        worker = Saying(SWITCHING + answered + b"\r\n")
        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.get("/v1/realtime", *asked)
            assert (await one.answer()).status == 502
            await until(lambda: worker.gone == len(worker.heard))
            one.get("/sleep")
            assert (await one.answer()).status == 403
            assert not any(b"/sleep" in heard for heard in worker.heard)

    run(test)


def test_a_copy_and_a_prefill_are_handed_over_to_nobody_either() -> None:
    async def test() -> None:
        worker = Saying(SWITCHING + b"Upgrade: websocket\r\n\r\n")
        async with (
            scripted(worker) as url,
            scripted(Saying(OK)) as other,
            routing(f"prefill={url}", other) as router,
        ):
            assert (await ask(router, CHAT, prompt("x" * 5000))).status == 200
            await until(lambda: worker.heard and worker.gone == len(worker.heard))

    run(test)


NONE = [
    b"HTTP/1.1 099 A\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 600 A\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 999 A\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 20 A\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 2000 A\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.2 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"\r\n" + OK,
    # Heads that never end, and are none from the first byte on.
    b"hello",
    b"S",
    b"\x16\x03\x01",
    b"HTTP/2",
    b"HTTP/1.1 999 ",
    b"HTTP/1.1 abc ",
    b"\x00" * 60_000,
    b"HTTP/1.1 100 Continue\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\nhello" + OK,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 65 + OK,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 200_000,
    (b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 30_000 + b"\r\n\r\n") * 3 + OK,
]


@pytest.mark.parametrize("said", NONE, ids=lambda said: str(said[:40]))
def test_what_is_no_answer_is_a_failure_at_once(said: bytes) -> None:
    async def test() -> None:
        worker = Saying(said)
        async with scripted(worker) as url, routing(url) as router:
            assert (await ask(router, CHAT, prompt())).status == 502
            await until(lambda: worker.gone == len(worker.heard) > 0)

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 64 + OK,
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_what_is_an_answer_is_passed_on_however_it_is_cut(said: bytes) -> None:
    async def test() -> None:
        for worker in (Saying(said), Saying(*(said[at : at + 1] for at in range(len(said))))):
            async with scripted(worker) as url, routing(url) as router:
                answer = await ask(router, CHAT, prompt())
                assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"ok", "2")

    run(test)


def test_a_head_that_does_not_end_is_given_up_in_time() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nX: ")
            while True:
                writer.write(b"y")
                await writer.drain()
                await asyncio.sleep(0.01)

        limits = replace(Limits(), head_s=0.1)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            assert (await ask(router, CHAT, prompt())).status == 504

    run(test)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize(
    "fields", [b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Content-Length: 0"]
)
def test_an_answer_without_a_body_does_not_speak_of_one(status: bytes, fields: bytes) -> None:
    async def test() -> None:
        worker = Saying(b"HTTP/1.1 " + status + b"\r\n" + fields + b"\r\nX-A: b\r\n\r\n")
        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            for _ in range(2):
                one.get("/x")
                got, headers, _ = await one.head()
                assert (got, headers["x-a"]) == (int(status[:3]), "b")
                assert not {"content-length", "transfer-encoding"} & set(headers)
            # Whose worker may be about to send one is not asked again on that connection.
            assert router.proxy.link(url).connects == (1 if fields.endswith(b" 0") else 2)

    run(test)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"5\nhello\n0\n\n",),
        (b"5", b"\nhello\n0\n\n"),
        (b"5;a=b\nc", b"\r\nhello\r\n0\r\n\r\n"),
        (b"+5\r\nhello\r\n0\r\n\r\n",),
        (b"5 ", b"x\r\nhello\r\n0\r\n\r\n"),
        (b"\r\nhello",),
        (b"f" * 16, b"\r\nhello\r\n"),
        (b"5;" + b"a" * 200, b"a" * 200),
    ],
)
def test_nothing_of_a_body_reaches_a_client_before_its_framing_is_known_to_be_some(
    pieces: Sequence[bytes],
) -> None:
    async def test() -> None:
        async with scripted(Saying(CHUNKED, *pieces)) as url, routing(url) as router:
            assert (await ask(router, CHAT, prompt())).status == 502

    run(test)


@pytest.mark.parametrize("late", [OK, b"H", b""])
def test_a_connection_on_which_something_came_unasked_gets_no_further_request(late: bytes) -> None:
    async def test() -> None:
        writers: list[asyncio.StreamWriter] = []

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await Saying(OK)(reader, writer)

        async with scripted(worker) as url, routing(url) as router:
            link = router.proxy.link(url)
            for _ in range(2):
                assert (await ask(router, CHAT, prompt())).status == 200
            assert link.connects == 1
            sock = writers[0].get_extra_info("socket")
            if late:  # the router's loop has not read it when the next request comes
                os.write(sock.fileno(), late)
            else:
                with socket.socket(fileno=os.dup(sock.fileno())) as same:
                    same.shutdown(socket.SHUT_WR)
            assert link.idle() is None
            answer = await ask(router, CHAT, prompt())
            assert (answer.status, link.connects) == (200, 2)

    run(test)


def test_of_a_body_that_goes_wrong_only_what_was_right_is_passed_on() -> None:
    async def test() -> None:
        worker = Saying(CHUNKED, b"2\r\nab\r\n3", b"\nabc\r\n0\r\n\r\n")
        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.post(CHAT, prompt())
            _, _, head = await one.head()
            assert (await one.rest()) == b"2\r\nab\r\n"
            assert head
            await until(lambda: at_workers(router) == 0)

    run(test)
