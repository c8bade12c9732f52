"""Workers that die, restart, hang and leave, as clients of the router see it."""

import asyncio
import logging

import pytest
from tests.router.http.rig import CHAT, ask, at_workers, client, mocks, prompt, routing, run, until

from kvferry.router.health import State
from kvferry.router.orders import loads_of, status


def test_a_request_whose_worker_is_found_dead_is_sent_to_one_other_once() -> None:
    async def test() -> None:
        async with mocks(2) as (one, other), routing(one.url, other.url) as router:
            for number in range(6):  # connections to both are there, and idle
                await ask(router, CHAT, prompt(f"{number}"))
            one.stop()
            other.seen.clear()
            for number in range(6):
                assert (await ask(router, CHAT, prompt(f"again {number}"))).status == 200
            assert len({seen.headers["x-request-id"] for seen in other.seen}) == len(other.seen) == 6
            assert router.proxy.statistics().ended == {"done": 12}

    run(test)


def test_requests_that_wait_at_a_worker_that_stops_answering_are_moved() -> None:
    async def test() -> None:
        async with mocks(2) as (one, other), routing(one.url, other.url, probe_interval_s=1.0) as router:
            one.behave(hang=True)
            other.behave(hang=True)
            asked = [asyncio.create_task(ask(router, CHAT, prompt(f"{number}"))) for number in range(8)]
            await until(lambda: at_workers(router) == 8)
            other.behave(hang=False)
            one.stop()
            await until(lambda: sum(task.done() for task in asked) >= 1)
            assert all(task.result().status == 200 for task in asked if task.done())
            other.stop()
            answers = await asyncio.gather(*asked)
            assert {answer.status for answer in answers} <= {200, 502, 503}

    run(test)


def test_a_worker_that_is_back_gets_requests_again_and_is_believed_empty() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url, probe_interval_s=1.0) as router:
            for _ in range(2):
                assert (await ask(router, CHAT, prompt("x" * 4000))).status == 200
            worker.stop()
            refused = await ask(router, CHAT, prompt("y"))
            assert refused.status in (502, 503) and b"error" in refused.body
            await until(lambda: router.roster.candidates("", "mock") == ())
            assert loads_of(router.reception.guides.values())[worker.url]["chosen"] >= 3  # counts go on
            assert (await ask(router, CHAT, prompt("y"))).status == 503
            await worker.listen()
            await until(lambda: router.roster.candidates("", "mock"))
            assert (await ask(router, CHAT, prompt("x" * 4000))).status == 200

    run(test)


def test_what_clients_do_wrong_takes_no_worker_down() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            for status in (400, 404, 422, 429, 501):
                worker.behave(status=status)
                for _ in range(5):
                    assert (await ask(router, CHAT, prompt())).status == status
            assert [one.state for one in router.roster] == [State.UP]

    run(test)


def test_a_worker_leaves_when_its_last_request_has_ended() -> None:
    async def test() -> None:
        async with mocks(2, step_s=0.01) as (one, other), routing(one.url, other.url) as router:
            streams = [
                asyncio.create_task(ask(router, CHAT, prompt(f"{n}", stream=True, max_tokens=30)))
                for n in range(4)
            ]
            await until(lambda: len(one.seen) + len(other.seen) == 4)
            assert router.drain_worker(one.url, grace_s=60.0)
            assert not router.drain_worker("http://nobody:1", grace_s=60.0)
            before = sum(seen.path == CHAT for seen in one.seen)
            for number in range(4):
                assert (await ask(router, CHAT, prompt(f"more {number}"))).status == 200
            assert sum(seen.path == CHAT for seen in one.seen) == before
            answers = await asyncio.gather(*streams)
            assert all(answer.body.count(b"[DONE]") == 1 for answer in answers)
            await until(lambda: len(router.roster) == 1)
            router.add_worker(one.url)
            assert set(router.roster.candidates("", "")) == {one.url, other.url}

    run(test)


def test_why_a_probe_failed_is_in_the_log_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router")

    async def test() -> None:
        async with mocks(1) as (worker,), routing(probe_interval_s=0.1) as router:
            url = worker.url.replace("http:", "https:")
            router.add_worker(url)
            await until(lambda: [one.state for one in router.roster] == [State.DOWN])
            assert f"{url}/health" in next(one.trouble for one in router.roster)
            assert any("is down" in line and f"{url}/health" in line for line in caplog.messages)
            assert f"worker {url} added" in caplog.messages

    run(test)


def test_a_question_after_the_router_s_own_health_is_no_request() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            assert (await ask(router, "/health")).status == 200
            router.drain_worker(worker.url, grace_s=0)
            await until(lambda: not len(router.roster))
            assert (await ask(router, "/health")).status == 503
            now = router.proxy.statistics()
            assert (now.requests, dict(now.ended)) == (0, {})

    run(test)


def test_a_router_that_drains_still_says_how_it_is() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router, client(router) as one:
            worker.behave(hang=True)
            one.post(CHAT, prompt())
            await until(lambda: at_workers(router) == 1)
            address = router.address
            stopping = asyncio.create_task(router.stop())
            await until(lambda: router.proxy.draining)
            await asyncio.sleep(0)
            assert status(router)["address"] == str(address)
            worker.behave(hang=False)
            one.close()
            await stopping

    run(test)
