"""A prompt's tokens are asked of its worker: once, within bounds, and behind the request."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from tests.router.feed.test_kvevents import Loop

from kvferry.errors import RetryError
from kvferry.router.feed.tokens import MAX_WAITING, MAX_WAITING_BYTES, TokenAsker
from kvferry.testing.expectations import WAIT_S, eventually


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def loop(stack: ExitStack) -> Loop:
    made = Loop()
    stack.callback(made.close)
    return made


def asker(
    loop: Loop, stack: ExitStack, post: Callable[[bytes], Awaitable[bytes]]
) -> tuple[TokenAsker, list[Any]]:
    told: list[Any] = []

    async def begin() -> TokenAsker:
        async def tell(*what: Any) -> None:
            told.append(what)

        made = TokenAsker(post, tell)
        made.start()
        return made

    made = loop.call(begin)
    stack.callback(lambda: loop.call(made.close))
    return made, told


def test_tokens_are_asked_for_once_and_with_all_that_decides_on_them(loop: Loop, stack: ExitStack) -> None:
    bodies: list[Any] = []

    async def post(body: bytes) -> bytes:
        bodies.append(msgspec.json.decode(body))
        return b'{"count": 2, "max_model_len": 10, "tokens": [5, 6]}'

    made, told = asker(loop, stack, post)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": true}'
    for _ in range(2):
        loop.loop.call_soon_threadsafe(made.sent, b"n", "r", "/v1/chat/completions", body, "salt")
    eventually(lambda: told, "told")
    loop.loop.call_soon_threadsafe(made.sent, b"o", "q", "/v1/completions", b'{"prompt": [1, 2]}', "")
    loop.loop.call_soon_threadsafe(made.sent, b"p", "q", "/v1/embeddings", body, "")
    eventually(lambda: len(told) == 2, "told")
    assert told == [("r", [5, 6], "salt"), ("q", [1, 2], "")]
    assert bodies == [{"model": "m", "messages": [{"role": "user", "content": "x"}]}]


def test_questions_that_wait_are_bounded_and_failures_are_counted(loop: Loop, stack: ExitStack) -> None:
    let_go = asyncio.Event()

    async def post(body: bytes) -> bytes:
        await let_go.wait()
        raise RetryError("no answer")

    made, told = asker(loop, stack, post)
    for number in range(MAX_WAITING + 50):
        loop.loop.call_soon_threadsafe(
            made.sent, b"%d" % number, "r", "/v1/completions", b'{"prompt": "x"}', ""
        )
    eventually(lambda: made.left_out >= 49, "left out")
    loop.loop.call_soon_threadsafe(let_go.set)
    eventually(lambda: made.failed >= MAX_WAITING, "counted")
    assert told == []


def test_bodies_that_wait_are_bounded_too_and_asked_for_when_they_come_again(
    loop: Loop, stack: ExitStack
) -> None:
    let_go = asyncio.Event()

    async def post(body: bytes) -> bytes:
        await let_go.wait()
        return b'{"tokens": [1]}'

    made, told = asker(loop, stack, post)
    body = msgspec.json.encode({"prompt": "x" * 900_000})
    for number in range(10):
        loop.loop.call_soon_threadsafe(made.sent, b"%d" % number, str(number), "/v1/completions", body, "")
    sent = threading.Event()
    loop.loop.call_soon_threadsafe(sent.set)
    assert sent.wait(WAIT_S)
    assert made.left_out >= 5
    assert sum(len(wanted.body) for wanted in made._waiting.values()) <= MAX_WAITING_BYTES
    again = [number for number in range(1, 10) if b"%d" % number not in made._known][-1]
    loop.loop.call_soon_threadsafe(let_go.set)
    eventually(lambda: not made._waiting, "asked")
    loop.loop.call_soon_threadsafe(made.sent, b"%d" % again, "again", "/v1/completions", body, "")
    eventually(lambda: ("again", [1], "") in told, "asked again")
