"""Prompts into which no salt can be put: a trust file keeps them from engines, unless it says otherwise."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.router.http.rig import ask, client, mocks, prompt, read_request, routing, run, scripted, until

from kvferry.router.health import Failure, Probed
from kvferry.router.http.limits import Limits
from kvferry.router.models import models_of
from kvferry.router.pilots import Share
from kvferry.router.trust import Trust
from kvferry.router.trustfile import rules_of

KEY = "Authorization: Bearer k"
FORM = "Content-Type: multipart/form-data; boundary=x"
OTHERS = [
    pytest.param("/v1/audio/transcriptions", b"--x\r\n\r\n{}\r\n--x--", FORM, "POST", id="form"),
    pytest.param("/v1/anything", b"\0\1", "Content-Type: application/octet-stream", "POST", id="bytes"),
    pytest.param("/cohere/v2/chat", prompt(), "X: y", "POST", id="Cohere"),
    pytest.param("/prefix//Cohere/v2/cha%74", prompt(), "X: y", "POST", id="Cohere in another spelling"),
    pytest.param("/v2/embed", prompt(), "X: y", "POST", id="Cohere's embeddings"),
    pytest.param("/v1/anything", b'["prompt"]', "X: y", "POST", id="no object"),
    pytest.param("/v2/embed", prompt(), "X: y", "PUT", id="another method"),
    pytest.param("/v1/anything", b"p", "X: y", "GET", id="a body of a GET"),
]


VLLM = b'{"data": [{"id": "mock", "owned_by": "vllm"}]}'
SGLANG = b'{"data": [{"id": "mock", "owned_by": "sglang"}]}'
OTHER = b'{"data": [{"id": "mock"}]}'


MESSAGES = [{"role": "user", "content": "p"}]


def trusting(**rules: object) -> Trust:
    """As a trust file says it."""
    return Trust(rules_of(rules))


@pytest.mark.parametrize(("path", "body", "field", "method"), OTHERS)
def test_what_takes_no_salt_is_kept_from_engines_where_its_caller_has_one(
    path: str, body: bytes, field: str, method: str
) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:

            async def status(*fields: str) -> tuple[int, bytes]:
                async with client(router) as one:
                    lines = (f"{method} {path} HTTP/1.1", "Host: r", f"Content-Length: {len(body)}")
                    one.send("\r\n".join((*lines, field, *fields, "", "")).encode() + body)
                    answer = await one.answer()
                return answer.status, answer.body

            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(worker.url, models_of(VLLM))
            refused, told = await status(KEY)
            assert (refused, len(worker.seen)) == (403, 0)
            assert b"trust file" in told
            assert (await status())[0] != 403  # who has no key shares with all who have none
            assert len(worker.seen) == 1
            router.reception.trust = trusting(unlisted="own", unsalted="pass")
            assert (await status(KEY))[0] != 403
            router.reception.trust = Trust()  # no file
            assert (await status(KEY))[0] != 403
            assert len(worker.seen) == 3

    run(test)


def test_so_is_what_would_be_said_on_a_websocket() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.reception.trust = trusting(keyless="own")
            asked = "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: k"
            async with client(router) as one:
                one.get("/v1/realtime", *asked)
                assert (await one.answer()).status == 403
            assert not worker.seen

    run(test)


def test_what_has_its_salt_or_no_prompt_passes() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(worker.url, models_of(VLLM))
            for path, body in (
                ("/v1/chat/completions", prompt()),
                ("/inference/v1/generate", prompt()),
                ("/v1/messages", prompt()),
                ("/what/comes/later", b"{}"),
                ("/v1/responses/resp_1/cancel", b""),
            ):
                await ask(router, path, body, KEY)
                assert worker.seen[-1].path == path, path
                assert not body or json.loads(worker.seen[-1].body)["cache_salt"]
            async with client(router) as one:
                one.get("/v1/responses/resp_1", KEY)
                await one.answer()
            assert len(worker.seen) == 6

    run(test)


READ = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


@pytest.mark.parametrize(
    ("models", "read", "unread"),
    [
        (VLLM, [*READ, "/v1/messages", "/v1/embeddings"], ["/cohere/v2/chat"]),
        (SGLANG, [*READ, "/generate"], ["/v1/messages", "/v1/embeddings", "/encode", "/api/chat"]),
        (OTHER, READ, ["/v1/messages", "/generate"]),
    ],
    ids=["vLLM", "SGLang", "another"],
)
def test_which_paths_read_a_salt_is_known_of_each_engine(
    models: bytes, read: list[str], unread: list[str]
) -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(worker.url, models_of(models))
            body = json.dumps({"model": "mock", "prompt": "p", "input": "p", "messages": MESSAGES}).encode()
            for path in (*read, *unread):
                assert ((await ask(router, path, body, KEY)).status == 403) == (path in unread), path

    run(test)


@pytest.mark.parametrize("other", [SGLANG, OTHER, None], ids=["SGLang", "another", "not known yet"])
def test_of_several_engines_only_those_that_read_it_are_asked(other: bytes | None) -> None:
    async def test() -> None:
        async with mocks(2) as (one, two), routing(one.url, two.url) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(one.url, models_of(VLLM))
            if other is not None:
                router.roster.learned(two.url, models_of(other))
            for number in range(12):
                assert (await ask(router, "/v1/messages", prompt(str(number)), KEY)).status != 403
            assert len(one.seen) == 12 and not two.seen
            assert (await ask(router, "/v1/messages", prompt())).status != 403
            router.drain_worker(one.url, grace_s=0)
            status = 503 if other is None else 403  # it may turn out to be one that does
            assert (await ask(router, "/v1/messages", prompt(), KEY)).status == status

    run(test)


def test_who_waits_or_is_tried_again_goes_to_no_other_engine_either() -> None:
    heard: list[bytes] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        heard.append(await read_request(reader))
        await reader.read()

    async def test() -> None:
        limits = replace(Limits(), per_worker=1)
        async with scripted(silent) as one, mocks(2) as (two, new), routing(one, limits=limits) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(one, models_of(VLLM))
            asked = [
                asyncio.create_task(ask(router, "/v1/messages", prompt(str(number)), KEY))
                for number in range(3)
            ]
            await until(lambda: heard and len(router.proxy.waiting) == 2)
            router.add_worker(new.url)
            router.roster.learned(new.url, models_of(SGLANG))
            await ask(router, "/v1/chat/completions", prompt())  # others wait for nobody
            assert len(new.seen) == 1
            router.add_worker(two.url)
            router.roster.learned(two.url, models_of(VLLM))
            router.reception.failed(one, Failure.REFUSED, router.proxy.now())  # what is there goes elsewhere
            await asyncio.gather(*asked)
            assert (len(new.seen), len(two.seen)) == (1, 3)

    run(test)


def test_an_engine_that_was_down_is_of_no_known_kind_until_it_says_so() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(worker.url, models_of(VLLM))
            assert (await ask(router, "/v1/messages", prompt(), KEY)).status != 403
            router.reception.failed(worker.url, Failure.REFUSED, router.proxy.now())
            router.reception.note(
                worker.url, lambda health: health.probed(Probed.WELL, router.proxy.now(), jitter=0.0)
            )
            assert (await ask(router, "/v1/messages", prompt(), KEY)).status in (403, 503)
            assert len(worker.seen) == 1
            router.roster.learned(worker.url, models_of(VLLM))
            await ask(router, "/v1/messages", prompt(), KEY)
            assert len(worker.seen) == 2

    run(test)


def test_while_the_engine_that_reads_it_is_down_it_is_asked_for_later() -> None:
    async def test() -> None:
        async with mocks(2) as (one, two), routing(one.url, two.url) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(one.url, models_of(VLLM))
            router.roster.learned(two.url, models_of(SGLANG))
            router.reception.failed(one.url, Failure.REFUSED, router.proxy.now())
            answer = await ask(router, "/v1/messages", prompt(), KEY)
            assert answer.status == 503 and "retry-after" in answer.headers
            assert not two.seen

    run(test)


@pytest.mark.parametrize("pool", ["prefill", "other"])
def test_no_prefill_and_no_copy_is_made_by_an_engine_that_does_not_read_it(pool: str) -> None:
    async def test() -> None:
        pilot = {"mirror": Share(1.0, pool)} if pool == "other" else {}
        async with mocks(2) as (one, two), routing(one.url, f"{pool}={two.url}", **pilot) as router:
            router.reception.trust = trusting(unlisted="own")
            router.roster.learned(one.url, models_of(VLLM))
            router.roster.learned(two.url, models_of(SGLANG))
            long = prompt("p" * 5000)
            await ask(router, "/v1/messages", long, KEY)
            assert one.seen and not two.seen
            await ask(router, "/v1/messages", long)
            await until(lambda: two.seen)

    run(test)


def test_a_salt_that_a_client_sends_without_a_key_wants_to_be_read_too() -> None:
    async def test() -> None:
        async with mocks(1) as (worker,), routing(worker.url) as router:
            router.roster.learned(worker.url, models_of(VLLM))
            for client_salt in ("namespace", "trust"):
                router.reception.trust = trusting(client_salt=client_salt)
                assert (await ask(router, "/cohere/v2/chat", prompt(cache_salt="s"))).status == 403
                assert (await ask(router, "/cohere/v2/chat", prompt())).status != 403

    run(test)


def test_without_any_worker_nobody_is_told_that_it_is_forbidden() -> None:
    async def test() -> None:
        async with routing() as router:
            router.reception.trust = trusting(unlisted="own")
            assert (await ask(router, "/v1/messages", prompt(), KEY)).status == 503

    run(test)
