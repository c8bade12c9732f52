"""Pilots on real sockets: the other pool costs the clients of the usual one nothing."""

import asyncio
import json

import pytest
from msgspec import to_builtins
from tests.router.http.rig import CHAT, ask, at_workers, client, mocks, prompt, routing, run, scripted, until

from kvferry.cli import router_status
from kvferry.observe.router_pilot_metrics import ROUTER_PILOT_METRICS
from kvferry.router.contract import Ended
from kvferry.router.orders import status
from kvferry.router.pilot_report import text
from kvferry.router.pilots import Share
from kvferry.secret import Secret
from kvferry.testing.worker import MockWorker

ALL = Share(1.0, "b")


def _asked(worker: MockWorker) -> int:
    return sum(seen.path == CHAT for seen in worker.seen)


def test_a_split_sends_conversations_there_and_all_their_turns() -> None:
    async def test() -> None:
        async with (
            mocks(2) as (usual, other),
            routing(usual.url, f"b={other.url}", split=Share(0.5, "b")) as router,
        ):
            for number in range(24):
                before = (_asked(usual), _asked(other))
                for turn in range(3):
                    messages = [{"role": "user", "content": f"conversation {number}"}]
                    messages += [{"role": "user", "content": f"turn {t}"} for t in range(turn)]
                    assert (await ask(router, CHAT, prompt(messages=messages))).status == 200
                assert 0 in (_asked(usual) - before[0], _asked(other) - before[1])
            assert _asked(usual) and _asked(other)
            counted = [router.pilots.of("split", pool).ended[Ended.DONE.value] for pool in ("", "b")]
            assert counted == [_asked(usual), _asked(other)]
            assert len(router.pilots.of("split", "b").conversations) * 3 == counted[1]

    run(test)


def test_a_pilots_pool_that_fails_costs_its_clients_nothing() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", split=ALL) as router:
            assert (await ask(router, CHAT, prompt("one"))).status == 200 and _asked(other) == 1
            other.stop()
            assert (await ask(router, CHAT, prompt("two"))).status == 200
            assert _asked(usual) == 1
            assert router.pilots.of("split", "b").ended[Ended.FAILED.value] == 1
            assert router.pilots.of("split", "").ended[Ended.DONE.value] == 1

    run(test)


def test_a_copy_is_the_same_request_and_its_answer_goes_nowhere() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", mirror=ALL) as router:
            body = prompt("hello", stream=True, max_tokens=5, stream_options={"include_usage": True})
            answer = await ask(router, CHAT, body, "Authorization: Bearer k")
            assert answer.status == 200 and answer.body.count(b"data: [DONE]") == 1
            told = router.pilots.of("mirror", "b")
            await until(lambda: told.ended[Ended.DONE.value])
            (first,) = [seen for seen in usual.seen if seen.path == CHAT]
            (copy,) = [seen for seen in other.seen if seen.path == CHAT]
            assert copy.body == first.body and b"cache_salt" in copy.body
            given, copied = first.headers.pop("x-request-id"), copy.headers.pop("x-request-id")
            assert copied == given + "-copy"
            assert {**copy.headers, "host": ""} == {**first.headers, "host": ""}
            assert len(told.ttft_s) == len(router.pilots.of("original", "").ttft_s) == 1
            assert told.prompt_tokens > 0 and at_workers(router) == 0
            assert text(router.pilots)[0] == "mirror 100% to b"
            rows = {
                (row.name, *labels): value
                for row in ROUTER_PILOT_METRICS
                for labels, value in row.read(router.snapshot())
            }
            assert rows["kvferry_router_pilot_requests", "mirror", "b", "done"] == 1
            assert rows["kvferry_router_pilot_ttft_seconds", "original", "default", "0.5"] > 0
            assert rows["kvferry_router_workers", "up"] == 2

    run(test)


@pytest.mark.parametrize("trouble", [{"hang": True}, {"status": 500}, {"deaf": True}, {"die_after": 2}])
def test_whatever_becomes_of_a_copy_the_client_has_its_answer(trouble: dict[str, object]) -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", mirror=ALL) as router:
            other.behave(**trouble)
            for number in range(5):
                answer = await ask(router, CHAT, prompt(f"{number}", stream=True, max_tokens=5))
                assert answer.status == 200
            assert _asked(usual) == 5 and _asked(other) <= 5  # none was sent twice
            told = router.pilots.of("mirror", "b")
            if "hang" not in trouble and "deaf" not in trouble:
                await until(lambda: told.ended[Ended.FAILED.value] >= 3)
            else:
                assert len(router.copies) == 5

    run(test)


def test_copies_are_bounded_and_those_not_made_are_counted() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", mirror=ALL) as router:
            router.copies._limit = 3
            other.behave(hang=True)
            for number in range(7):
                assert (await ask(router, CHAT, prompt(f"{number}"))).status == 200
            assert len(router.copies) == 3
            assert router.pilots.of("mirror", "b").skipped == 4
            assert router.proxy.statistics().held_bytes > 0
            other.stop()
            await until(lambda: not router.copies)
            assert router.proxy.statistics().held_bytes == 0

    run(test)


def test_a_mirror_without_workers_that_answer_is_counted_as_skipped() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", mirror=ALL) as router:
            other.stop()
            for number in range(3):
                assert (await ask(router, CHAT, prompt(f"{number}"))).status == 200
                await until(lambda: not router.copies)
            told = router.pilots.of("mirror", "b")
            assert told.ended[Ended.FAILED.value] + told.skipped == 3

    run(test)


def test_what_has_no_prompt_is_not_copied() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other), routing(usual.url, f"b={other.url}", mirror=ALL) as router:
            await ask(router, "/v1/models")
            await ask(router, "/tokenize", b'{"prompt":"x"}')
            assert len(usual.seen) == 2 and not other.seen

    run(test)


@pytest.mark.parametrize("key", [None, Secret("k")])
def test_a_key_that_everybody_may_use_is_warned_of(
    key: Secret | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url, worker_api_key=key):
            assert ("let a trust file say who may" in caplog.text) is (key is not None)

    run(test)


def test_workers_get_the_routers_key_in_place_of_the_callers() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url, worker_api_key=Secret("inner")) as router:
            await ask(router, CHAT, prompt(), "Authorization: Bearer outer", "X-Api-Key: outer")
            assert worker.seen[-1].headers["authorization"] == "Bearer inner"
            assert "x-api-key" not in worker.seen[-1].headers

    run(test)


def test_models_of_all_workers_are_one_list_and_others_are_unknown() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\r\n\r\n")
        names = ["mock", "adapter"] if b"/v1/models" in line else []
        body = json.dumps({"data": [{"id": name} for name in names]}).encode()
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def test() -> None:
        async with (
            mocks(1) as (worker,),
            scripted(serve) as other,
            routing(worker.url, other, probe_interval_s=1.0) as router,
            client(router) as one,
        ):
            await until(lambda: all(worker.models for worker in router.roster))
            one.get("/v1/models")
            assert [entry["id"] for entry in (await one.answer()).json()["data"]] == ["mock", "adapter"]
            for _ in range(4):
                one.post(CHAT, prompt(model="adapter"))
                assert (await one.answer()).json()["data"] == []  # that of the one that has it
            one.post(CHAT, prompt(model="nobody's"))
            refused = await one.answer()
            assert refused.status == 404 and "adapter, mock" in refused.json()["error"]["message"]

    run(test)


def test_status_ends_with_the_comparison_where_there_is_one() -> None:
    async def test() -> None:
        async with mocks(2) as (usual, other):
            async with routing(usual.url, f"b={other.url}", split=ALL) as router:
                assert (await ask(router, CHAT, prompt("one"))).status == 200
                shown = router_status.render(json.loads(json.dumps(to_builtins(status(router)))))
                assert "split 100% to b" in shown
                assert "TTFT p50, ms" in shown
            async with routing(usual.url) as router:
                assert "TTFT" not in router_status.render(to_builtins(status(router)))

    run(test)


def test_a_mirror_copies_what_the_usual_pool_gets() -> None:
    """Beside a split, or its comparison would be of the other pool with itself."""

    async def test() -> None:
        half = Share(0.5, "b")
        async with (
            mocks(2) as (usual, other),
            routing(usual.url, f"b={other.url}", split=half, mirror=ALL) as router,
        ):
            for number in range(20):
                assert (await ask(router, CHAT, prompt(f"conversation {number}"))).status == 200
            await until(lambda: sum(router.pilots.of("mirror", "b").ended.values()) == _asked(usual) > 0)
            assert 0 < _asked(usual) < 20
            assert _asked(other) == 20
            assert sum(router.pilots.of("original", "").ended.values()) == _asked(usual)
            assert not router.pilots.of("original", "b").ended

    run(test)
