"""Clients that leave, stop reading or never finish; and the router that stops."""

import asyncio
import contextlib
import socket
import struct
from dataclasses import replace

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

from kvferry.router.http.limits import Limits

ABORTED = 10_000
AT_A_TIME = 100


def reset(one: Client) -> None:
    """Leave as a process that is killed with data unread."""
    sock = one.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.writer.transport.abort()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("when", ["before the first byte", "in a stream"])
def test_a_client_that_leaves_stops_the_engine_at_once(how: str, when: str) -> None:
    async def test() -> None:
        async with mocks(1, step_s=0.002) as (worker,), routing(worker.url) as router:
            worker.behave(hang=when != "in a stream")
            one = await Client.to(router.address)
            one.post(CHAT, prompt(stream=True, max_tokens=100_000))
            if when == "in a stream":
                await one.reader.readuntil(b'"content"')
            else:
                await until(lambda: worker.seen)
            assert at_workers(router) == 1
            if how == "close":
                one.close()
            elif how == "reset":
                reset(one)
            else:
                one.writer.write_eof()
            await until(lambda: worker.statistics()["connections"] == 0)
            await until(lambda: at_workers(router) == 0)
            assert router.proxy.statistics().ended == {"aborted": 1}
            assert worker.statistics()["running"] == 0
            one.close()

    run(test)


def test_a_client_that_leaves_the_queue_is_never_sent_on() -> None:
    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with mocks(1, step_s=0.002) as (worker,), routing(worker.url, limits=limits) as router:
            first, second = await Client.to(router.address), await Client.to(router.address)
            first.post(CHAT, prompt(stream=True, max_tokens=100_000))
            await first.reader.readuntil(b'"content"')
            second.post(CHAT, prompt("second"))
            await until(lambda: len(router.proxy.waiting) == 1)
            second.close()
            await until(lambda: len(router.proxy.waiting) == 0)
            first.close()
            await until(lambda: at_workers(router) == 0)
            assert len(worker.seen) == 1

    run(test)


def test_a_client_that_leaves_while_the_worker_is_being_reached_costs_a_connection_at_most() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            worker.behave(hang=True)
            for _ in range(20):
                one = await Client.to(router.address)
                one.post(CHAT, prompt())
                await until(lambda: router.proxy.statistics().in_flight)
                reset(one)
                await until(lambda: router.proxy.statistics().in_flight == 0)
            assert at_workers(router) == 0
            worker.behave(hang=False)
            assert (await ask(router, CHAT, prompt())).status == 200

    run(test)


def test_ten_thousand_aborted_requests_leave_no_load_behind() -> None:
    async def test() -> None:
        async with mocks(2, step_s=0.001) as (a, b), routing(a.url, b.url) as router:
            body = prompt(stream=True, max_tokens=100_000)

            async def abort(number: int) -> None:
                one = await Client.to(router.address)
                one.post(CHAT, body)
                if number % 3 == 0:  # otherwise wherever it is just then
                    with contextlib.suppress(asyncio.IncompleteReadError):
                        await one.reader.readuntil(b'"content"')
                elif number % 3 == 1:
                    await asyncio.sleep(0)
                reset(one)

            for start in range(0, ABORTED, AT_A_TIME):
                await asyncio.gather(*(abort(start + number) for number in range(AT_A_TIME)))
            await until(lambda: router.proxy.statistics().in_flight == 0)
            assert at_workers(router) == 0
            for guide in router.reception.guides.values():
                workers = guide.statistics()["workers"]
                assert isinstance(workers, dict)
                for load in workers.values():
                    assert (load["requests"], load["waiting_tokens"], load["decoding"]) == (0, 0, 0)
                    assert load["chosen"] == load["ended"]
            await until(lambda: a.statistics()["running"] + b.statistics()["running"] == 0)
            assert (await ask(router, CHAT, prompt())).status == 200

    run(test)


def test_a_client_that_reads_slowly_slows_its_worker_and_loses_nothing() -> None:
    total = 32 << 20

    async def test() -> None:
        sent = 0

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            while sent < total:
                writer.write(bytes(1 << 16))
                sent += 1 << 16
                await writer.drain()
            await reader.read()

        async with scripted(worker) as url, routing(url) as router, client(router) as one:
            one.get("/large")
            await one.head()
            before = -1
            while before != sent:  # it comes to a stand
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total
            async with asyncio.timeout(60):
                assert len(await one.reader.readexactly(total)) == total

    run(test)


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

        limits = replace(Limits(), stall_s=0.1, idle_s=0.05)
        async with scripted(worker) as url, routing(url, limits=limits) as router:
            one = await Client.to(router.address)
            one.writer.transport.pause_reading()
            one.get("/endless")
            await until(lambda: router.proxy.statistics().events.get("client_stalled"))
            await until(lambda: at_workers(router) == 0)
            assert router.proxy.statistics().ended == {"aborted": 1}
            one.writer.transport.abort()

    run(test)


def test_connections_that_nobody_needs_any_more_are_let_go() -> None:
    async def test() -> None:
        now = 1000.0
        heard, gate = 0, asyncio.Event()

        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal heard
            while True:
                await read_request(reader)
                heard += 1
                await gate.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        async with scripted(worker) as url, routing(url) as router:
            link = router.proxy.link(url)
            link._clock = router.proxy.now = lambda: now
            asked = [asyncio.create_task(ask(router, CHAT, prompt(max_tokens=1))) for _ in range(30)]
            await until(lambda: heard == 30)
            gate.set()
            await asyncio.gather(*asked)
            assert link.connections == 30
            now += Limits().spare_s / 2
            assert (await ask(router, CHAT, prompt(max_tokens=1))).status == 200
            assert (link.connections, link.connects) == (30, 30)
            now += Limits().spare_s * 0.6
            await until(lambda: link.connections == 1)  # the one that was used
            assert (await ask(router, CHAT, prompt(max_tokens=1))).status == 200
            assert link.connects == 30
            now += Limits().spare_s * 1.1
            await until(lambda: not link.connections)
            assert (await ask(router, CHAT, prompt(max_tokens=1))).status == 200

    run(test)


def test_stopping_lets_streams_end_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with (
            mocks(1, step_s=0.002) as (worker,),
            routing(worker.url) as router,
            client(router) as one,
            client(router) as idle,
        ):
            one.post(CHAT, prompt(stream=True, max_tokens=100))
            await one.reader.readuntil(b'"content"')
            address = router.address
            stopping = asyncio.create_task(router.stop())
            assert await idle.rest() == b""
            with pytest.raises(ConnectionError):
                await Client.to(address)
            assert (await one.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            await stopping

    run(test)


def test_what_does_not_end_in_time_is_cut_when_the_router_stops() -> None:
    async def test() -> None:
        async with mocks(1, step_s=0.002) as (worker,), routing(worker.url) as router:
            router.proxy.limits = replace(router.proxy.limits, drain_s=0.05)
            async with client(router) as one:
                one.post(CHAT, prompt(stream=True, max_tokens=100_000))
                await one.reader.readuntil(b'"content"')
                await router.stop()
                assert b"the router stops" in await one.rest()
            await until(lambda: worker.statistics()["running"] == 0)
            assert router.proxy.statistics().events["cut_at_stop"] == 1

    run(test)


def test_a_worker_that_is_taken_away_ends_what_it_has_and_gets_nothing_more() -> None:
    async def test() -> None:
        async with (
            mocks(2, step_s=0.002) as (a, b),
            routing(a.url, b.url, policy="round_robin") as router,
            client(router) as one,
            client(router) as two,
        ):
            for each in (one, two):
                each.post(CHAT, prompt(stream=True, max_tokens=200))
                await each.reader.readuntil(b'"content"')
            assert {len(a.seen), len(b.seen)} == {1}
            assert router.drain_worker(a.url, grace_s=60)
            for _ in range(5):
                assert (await ask(router, CHAT, prompt(max_tokens=1))).status == 200
            assert len(a.seen) == 1
            for each in (one, two):
                await each.reader.readuntil(b"[DONE]")
            await until(lambda: len(router.roster) == 1)
            router.add_worker(a.url)
            for _ in range(4):
                await ask(router, CHAT, prompt(max_tokens=1))
            assert len(a.seen) > 1

    run(test)


def test_ends_that_vanish_without_a_word_are_asked_after_by_the_kernel_on_both_sides() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            worker.behave(hang=True)
            one.post(CHAT, prompt())
            await until(lambda: worker.seen)
            link = router.proxy.link(worker.url)
            sides = [*router.proxy._clients, *link._all]
            transports = [getattr(side, "_transport", None) or side.transport for side in sides]
            assert len(transports) == 2
            for transport in transports:
                sock = transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
                assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000

    run(test)


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (b"data: [DONE]\n\n", "done"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "done"),
        (b"data: {}\n\n", "aborted"),
    ],
)
def test_a_client_that_leaves_after_the_last_event_has_had_all_of_it(last: bytes, how: str) -> None:
    async def test() -> None:
        async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + b"%x\r\n" % len(last) + last + b"\r\n")
            await reader.read()  # HTTP's own end does not come

        async with scripted(worker) as url, routing(url) as router:
            one = await Client.to(router.address)
            one.post(CHAT, prompt(stream=True))
            await one.reader.readuntil(last)
            one.close()
            await until(lambda: router.proxy.statistics().ended)
            assert router.proxy.statistics().ended == {how: 1}

    run(test)
