"""Every request ends, and ends alone: what others do, and what became of earlier ones, holds nobody up."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.router.http.rig import (
    CHAT,
    Client,
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

from kvferry.router.contract import Asked, Flight
from kvferry.router.health import State
from kvferry.router.http.framing import Body
from kvferry.router.http.head import AnswerHead
from kvferry.router.http.limits import Limits
from kvferry.router.http.worker import WorkerConnection
from kvferry.router.models import Model
from kvferry.router.pilots import parse_share


class FakeTransport:
    """Of a worker's connection."""

    def __init__(self) -> None:
        self.reading = True
        self.unsent = 0
        self.aborted = False

    def writelines(self, parts: Iterable[bytes]) -> None: ...

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class Stalling:
    """A receiver whose client takes no further bytes once it has some."""

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self.ended = False

    def answer_head(self, head: AnswerHead, body: Body) -> None: ...

    def answer_data(self, data: bytes) -> None:
        self._connection.stall(stalled=True)

    def answer_end(self) -> None:
        self.ended = True

    def answer_lost(self, why: str) -> None: ...

    def worker_stalls(self, *, stalled: bool) -> None: ...


@pytest.mark.parametrize("unsent", [0, 1])
def test_a_connection_is_kept_if_the_next_request_and_its_answer_will_pass(unsent: int) -> None:
    free: list[WorkerConnection] = []
    connection = WorkerConnection(on_free=free.append, on_lost=lambda _: None)
    transport = FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    receiver = Stalling(connection)
    connection.send(receiver, method=b"GET", head=b"GET / HTTP/1.1\r\n\r\n", body=b"")
    transport.unsent = unsent
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert receiver.ended
    assert (free, transport.aborted) == (([], True) if unsent else ([connection], False))
    assert transport.reading is not bool(unsent)


@pytest.mark.parametrize("url", ["https://127.0.0.1:{port}", "http://a..b:{port}"])
def test_a_worker_that_comes_later_and_cannot_be_reached_is_an_error_in_time(url: str) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.drain_worker(worker.url, grace_s=0)
            await until(lambda: router.roster.get(worker.url) is None)
            router.add_worker(url.format(port=worker.port))
            assert (await ask(router, CHAT, prompt())).status == 502

    run(test)


def test_who_waits_for_a_model_that_goes_is_told_and_nobody_else_notices() -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with mocks(2) as (a, b), routing(a.url, b.url, limits=limits) as router:
            a.behave(hang=True)
            router.roster.learned(a.url, (Model("mock", b"{}"),))
            router.roster.learned(b.url, (Model("other", b"{}"),))
            holds = await Client.to(router.address)
            holds.post(CHAT, prompt())
            await until(lambda: at_workers(router) == 1)
            async with client(router) as waits:
                waits.post(CHAT, prompt())
                await until(lambda: len(router.proxy.waiting) == 1)
                router.roster.learned(a.url, (Model("new", b"{}"),))
                assert (await ask(router, CHAT, prompt(model="other"))).status == 200
                assert (await waits.answer()).status == 404
            holds.close()
            await until(lambda: at_workers(router) == 0)

    run(test)


def test_who_waits_is_placed_at_a_worker_that_turns_out_to_do() -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with mocks(2) as (a, b), routing(a.url, b.url, limits=limits) as router:
            a.behave(hang=True)
            router.roster.learned(a.url, (Model("mock", b"{}"),))
            router.roster.learned(b.url, (Model("other", b"{}"),))
            async with client(router) as holds, client(router) as waits:
                holds.post(CHAT, prompt())
                await until(lambda: at_workers(router) == 1)
                waits.post(CHAT, prompt())
                await until(lambda: len(router.proxy.waiting) == 1)
                router.roster.learned(b.url, (Model("mock", b"{}"),))
                assert (await waits.answer()).status == 200

    run(test)


def test_many_that_wait_for_one_model_do_not_keep_others_from_theirs() -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with mocks(2) as (a, b), routing(a.url, b.url, limits=limits) as router:
            a.behave(hang=True)
            router.roster.learned(a.url, (Model("mock", b"{}"),))
            router.roster.learned(b.url, (Model("other", b"{}"),))
            crowd = [await Client.to(router.address) for _ in range(100)]
            for one in crowd:
                one.post(CHAT, prompt())
            await until(lambda: len(router.proxy.waiting) == 99)
            async with asyncio.TaskGroup() as group:
                others = [
                    group.create_task(ask(router, CHAT, prompt(model="other"))) for _ in range(5)
                ]  # of which most wait as well
            assert [other.result().status for other in others] == [200] * 5
            for one in crowd:
                one.close()

    run(test)


def test_an_answer_to_head_has_no_body_whoever_gives_it() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            await until(lambda: router.drain_worker(worker.url, grace_s=0))
            for _ in range(2):
                one.get("/v1/anything", method="HEAD")
                answer = await one.answer(bodiless=True)
                assert answer.status == 503
                assert int(answer.headers["content-length"]) > 0

    run(test)


def test_a_connection_on_which_a_request_is_still_being_sent_is_not_used_again() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            if b"hello" not in await reader.read(100):  # and it reads no more of a large one
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.Event().wait()
            del head

        async with scripted(worker) as url, routing(url) as router:
            large = prompt("x" * (32 << 20))
            assert (await ask(router, CHAT, large)).status == 200
            assert (await ask(router, CHAT, prompt())).status == 200
            assert router.proxy.link(url).connects == 2

    run(test)


def test_an_answer_is_not_taken_in_for_who_takes_none_of_the_one_before() -> None:
    total = 64 << 20

    async def test() -> None:
        sent = 0

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            request = await read_request(reader)
            if request.startswith(b"GET /first"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(1_000_000))
                await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            while sent < total:
                writer.write(bytes(1 << 16))
                sent += 1 << 16
                await writer.drain()
            await reader.read()

        async with scripted(worker) as url, routing(url) as router:
            one = await Client.to(router.address)
            one.writer.transport.pause_reading()
            for _ in range(20):
                one.get("/first")
            one.get("/second")
            before = -1
            while before != sent or not router.proxy.statistics().requests:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total // 2
            one.writer.transport.abort()

    run(test)


def test_a_redirect_to_the_worker_itself_leads_to_the_router() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await read_request(reader)
            host = request.partition(b"Host: ")[2].partition(b"\r\n")[0]
            where = b"//elsewhere/" if request.startswith(b"GET /else") else b"//" + host + b"/v1/models"
            writer.write(b"HTTP/1.1 307 R\r\nContent-Length: 0\r\nLocation: http:" + where + b"\r\n\r\n")

        async with scripted(worker) as url, routing(url) as router:
            assert (await ask(router, "/v1/models/")).headers["location"] == "/v1/models"
            assert (await ask(router, "/else")).headers["location"] == "http://elsewhere/"

    run(test)


def test_a_long_answer_in_one_piece_is_not_asked_for_twice_and_blames_nobody() -> None:
    async def test() -> None:
        limits = replace(Limits(), first_byte_s=0.1)
        async with mocks(2) as workers, routing(*(one.url for one in workers), limits=limits) as router:
            for worker in workers:
                worker.behave(hang=True)
            for _ in range(4):
                assert (await ask(router, CHAT, prompt())).status == 504
            assert sum(len(worker.seen) for worker in workers) == 4
            assert {worker.state for worker in router.roster} == {State.UP}

    run(test)


def test_errors_of_others_do_not_end_what_waits_for_its_answer() -> None:
    async def test() -> None:
        may = asyncio.Event()

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await read_request(reader)
            if b"/bad" in request:
                writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
                return
            await may.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.post("/v1/waits", b"")
            await until(lambda: at_workers(router) == 1)
            while next(iter(router.roster)).state is not State.DOWN:
                assert (await ask(router, "/bad", b"")).status == 500
            await asyncio.sleep(0)
            may.set()
            assert (await one.answer()).status == 200

    run(test)


@pytest.mark.parametrize("large", [False, True])
def test_a_defect_in_the_choice_costs_the_request_that_met_it_and_no_other(large: bool) -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router:
            guide = router.reception.guide("")
            begin = guide.begin

            def broken(asked: Asked, **more: Any) -> Flight:
                if asked.session == "bad":
                    raise ZeroDivisionError
                return begin(asked, **more)

            guide.begin = broken  # type: ignore[method-assign]
            bad = prompt("x" * (1 << 20 if large else 1), session_id="bad")
            assert (await ask(router, CHAT, bad)).status == 500
            worker.behave(hang=True)
            async with client(router) as holds, client(router) as waits:
                holds.post(CHAT, prompt())
                await until(lambda: at_workers(router) == 1)
                waits.post(CHAT, bad)
                await until(lambda: len(router.proxy.waiting) == 1)
                worker.behave(hang=False)
                holds.writer.transport.abort()
                assert (await waits.answer()).status == 500
            assert (await ask(router, CHAT, prompt())).status == 200
            assert router.proxy.statistics().events["defects"] == 2

    run(test)


def test_a_copy_is_made_once_even_where_a_kept_connection_had_been_closed() -> None:
    async def test() -> None:
        async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.readuntil(b"\r\n\r\n")  # and then it closes without a word

        mirror = parse_share("100%=pilot")
        async with (
            scripted(closing) as url,
            mocks(1) as (pilot,),
            routing(url, f"pilot={pilot.url}", mirror=mirror) as router,
        ):
            for _ in range(2):
                assert (await ask(router, CHAT, prompt())).status == 200
            await until(lambda: not router.copies)
            assert len([seen for seen in pilot.seen if seen.path == CHAT]) == 2

    run(test)


def test_a_prefill_at_a_worker_that_goes_down_is_given_up() -> None:
    async def test() -> None:
        async with mocks(2) as (first, second), routing(f"prefill={first.url}", second.url) as router:
            first.behave(hang=True)
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(ask(router, CHAT, prompt("x" * 5000)))
                await until(lambda: at_workers(router) == 1)
                router.proxy.worker_down(first.url)
            assert asked.result().status == 200

    run(test)


def test_who_waited_for_workers_that_went_is_not_told_that_they_are_busy() -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1, queue_s=0.5)
        async with mocks(1) as (worker,), routing(worker.url, limits=limits) as router:
            worker.behave(hang=True)
            async with client(router) as holds, client(router) as waits:
                holds.post(CHAT, prompt())
                await until(lambda: at_workers(router) == 1)
                waits.post(CHAT, prompt())
                await until(lambda: len(router.proxy.waiting) == 1)
                router.drain_worker(worker.url, grace_s=600)
                answer = await waits.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    run(test)


def test_a_connection_is_not_handed_over_to_who_did_not_ask() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
            await reader.read()

        async with scripted(worker) as url, routing(url) as router:
            assert (await ask(router, CHAT, prompt())).status == 502

    run(test)
