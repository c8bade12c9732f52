"""A plain vLLM's KV events: what they say of its cache, and that requests are found in it."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
import pytest
from tests.feed.view import View

from kvferry.errors import RefusedError
from kvferry.feed.wire import Cleared, EngineUp, Gone, Held, Level, Space
from kvferry.router.feed.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    Blocks,
    BlockStored,
    EventBatch,
    chain,
    decode_batch,
)
from kvferry.router.feed.kvevents import KvEventsFollower
from kvferry.testing.expectations import WAIT_S, eventually

zmq = pytest.importorskip("zmq", reason="tested where pyzmq is, as with an engine")

T = TypeVar("T")


def stored(
    tokens: list[int], *, parent: int | bytes | None = None, first: int = 100, **more: Any
) -> BlockStored:
    """Blocks of 4 tokens, called by numbers from ``first`` on."""
    count = len(tokens) // 4
    return BlockStored(list(range(first, first + count)), parent, tokens, 4, **more)


def batch(*events: Any) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode(EventBatch(1.0, list(events))))


def held(view: View) -> set[bytes]:
    return view.at(Level.ENGINE)


# ---- what events mean


def test_a_prompts_blocks_are_those_that_the_engine_stored_for_it() -> None:
    blocks, tokens = Blocks("w"), list(range(12))
    told = blocks.take(batch(stored(tokens)))
    space, up, cleared, now = told
    assert isinstance(space, Space)
    assert isinstance(up, EngineUp)
    assert cleared == Cleared(Level.ENGINE, 1)
    assert isinstance(now, Held)
    assert (space.chunk_tokens, now.digests) == (4, b"".join(chain(tokens, 4)))
    later = blocks.take(batch(stored([50, 51, 52, 53], parent=102, first=103)))
    assert later == [Held(Level.ENGINE, 1, 1, [*chain([*tokens, 50, 51, 52, 53], 4)][3])]
    assert list(chain([*tokens, 50, 51], 4)) == list(chain(tokens, 4))  # whole blocks only


def test_two_workers_that_call_a_block_differently_hold_the_same() -> None:
    one = Blocks("a").take(batch(stored([1, 2, 3, 4], first=1)))[-1]
    other = Blocks("b").take(batch(BlockStored([b"x" * 32], None, [1, 2, 3, 4], 4)))[-1]
    assert one == other


def test_a_salt_or_an_adapter_makes_other_blocks() -> None:
    tokens = list(range(8))
    salted = Blocks("w").take(batch(stored(tokens, extra_keys=[["pepper"], None])))[-1]
    adapted = Blocks("w").take(batch(stored(tokens, extra_keys=[["lora"], ["lora"]])))[-1]
    assert isinstance(salted, Held)
    assert isinstance(adapted, Held)
    assert salted.digests == b"".join(chain(tokens, 4, salt="pepper"))
    assert len({salted.digests, adapted.digests, b"".join(chain(tokens, 4))}) == 3


def test_what_is_evicted_is_gone_and_what_was_never_known_is_not_told() -> None:
    blocks = Blocks("w")
    blocks.take(batch(stored(list(range(8)))))
    first, second = chain(list(range(8)), 4)
    assert blocks.take(batch(BlockRemoved([101, 999]))) == [Gone(Level.ENGINE, 1, 1, second)]
    assert blocks.take(batch(BlockRemoved([101]))) == []
    assert blocks.take(batch(AllBlocksCleared())) == [Cleared(Level.ENGINE, 1)]
    assert blocks.take(batch(BlockRemoved([100]))) == []
    assert first


def test_a_block_whose_beginning_is_not_known_is_counted_and_left_out() -> None:
    blocks = Blocks("w")
    told = blocks.take(batch(stored([1, 2, 3, 4], parent=7)))
    assert not any(isinstance(event, Held) for event in told)
    assert blocks.orphans == 1


def test_blocks_that_vllm_leaves_out_or_has_in_part_change_nothing() -> None:
    """Of windows it stores some blocks of a run, of states those that are not full: with all tokens."""
    blocks, tokens = Blocks("w"), list(range(8))
    view = View()
    for event in blocks.take(batch(stored(tokens))):
        view.apply("w", event)
    before = held(view)
    assert blocks.take(batch(BlockStored([], 101, list(range(12)), 4))) == []
    assert blocks.take(batch(BlockStored([200], 101, list(range(12)), 4))) == []
    assert blocks.take(batch(BlockStored([201], 101, [8, 9], 2))) == []
    for event in blocks.take(batch(stored([8, 9, 10, 11], parent=101, first=102))):
        view.apply("w", event)
    assert held(view) == {*before, [*chain(list(range(12)), 4)][2]}


def test_other_media_and_other_groups_are_not_the_engines_own_cache() -> None:
    blocks = Blocks("w")
    assert blocks.take(batch(stored([1, 2, 3, 4], medium="CPU"), stored([1, 2, 3, 4], group_idx=1))) == []
    assert blocks.take(batch(stored([1, 2, 3, 4], medium="GPU", group_idx=0)))


def test_what_is_remembered_is_bounded_and_what_is_forgotten_is_told() -> None:
    blocks, view = Blocks("w", max_blocks=10), View()
    for number in range(20):
        for event in blocks.take(batch(stored(list(range(number * 8, number * 8 + 8)), first=number * 2))):
            view.apply("w", event)
        assert len(held(view)) == len(blocks) <= 10


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [{"type": "Pickle"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "x"}]]),
        msgspec.msgpack.encode([1.0]),
    ],
)
def test_what_are_no_events_is_refused(payload: bytes) -> None:
    with pytest.raises(RefusedError, match="no KV events"):
        decode_batch(payload)


def test_events_that_make_no_sense_are_refused() -> None:
    for event in (
        BlockStored([1, 2], None, [1, 2, 3], 4),
        BlockStored([1], None, [], 0),
        BlockStored([1], None, [-1, 2, 3, 4], 4),
        BlockStored([1], None, [1 << 40, 2, 3, 4], 4),
    ):
        with pytest.raises(RefusedError):
            Blocks("w").take(batch(event))


def test_what_a_later_vllm_adds_is_left_out() -> None:
    stored_later = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "from_the_future": {"a": 1},
    }
    told = Blocks("w").take(decode_batch(msgspec.msgpack.encode([1.0, [stored_later], 0, "more"])))
    assert isinstance(told[-1], Held)


# ---- the sockets


class Publisher:
    """As vLLM's: PUB, and ROUTER for replay, in one thread. lose: batches that are never published."""

    def __init__(self, port: int = 0, replay_port: int = 0) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for sock, at in ((self._pub, port), (self._router, replay_port)):
            sock.setsockopt(zmq.LINGER, 0)
            sock.bind(f"tcp://127.0.0.1:{at or '*'}")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept: list[tuple[int, bytes]] = []
        self.number = 0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def say(self, *events: Any, lose: bool = False, forget: bool = False) -> None:
        payload = msgspec.msgpack.encode(EventBatch(1.0, list(events)))
        with self._lock:
            if not forget:
                self.kept.append((self.number, payload))
            if not lose:
                self._pub.send_multipart((b"", self.number.to_bytes(8, "big"), payload))
            self.number += 1

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            with self._lock:
                kept = list(self.kept)
            for number, payload in kept:
                if number >= int.from_bytes(start, "big"):
                    self._router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            self._router.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self) -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(WAIT_S)
            self._context.destroy(linger=0)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def loop(stack: ExitStack) -> Loop:
    made = Loop()
    stack.callback(made.close)
    return made


@pytest.fixture
def publisher(stack: ExitStack) -> Publisher:
    made = Publisher()
    stack.callback(made.close)
    return made


def follow(loop: Loop, publisher: Publisher, stack: ExitStack, *, replay: bool = True) -> tuple[Any, View]:
    view = View()

    async def begin() -> KvEventsFollower:
        made = KvEventsFollower("w", publisher.endpoint, publisher.replay if replay else "", view)
        made.start()
        return made

    follower = loop.call(begin)
    stack.callback(lambda: loop.call(follower.close))
    return follower, view


def tokens(number: int) -> list[int]:
    return [number * 10 + n for n in range(4)]


def digest(number: int) -> bytes:
    return next(chain(tokens(number), 4))


def block(number: int) -> BlockStored:
    return stored(tokens(number), first=number)


def _joined(publisher: Publisher, view: View, *, number: int = 0) -> None:
    """Subscribed: PUB drops what nobody listens to yet."""
    give_up = time.monotonic() + WAIT_S
    while digest(number) not in held(view):
        assert time.monotonic() < give_up
        publisher.say(block(number))
        time.sleep(0.05)


def test_what_the_engine_has_from_before_and_what_it_gets_is_known(
    loop: Loop, publisher: Publisher, stack: ExitStack
) -> None:
    publisher.say(block(1))
    publisher.say(block(2))
    _, view = follow(loop, publisher, stack)
    eventually(lambda: held(view) == {digest(1), digest(2)}, "replayed")
    _joined(publisher, view, number=3)
    publisher.say(BlockRemoved([1]), block(4))
    eventually(lambda: held(view) == {digest(2), digest(3), digest(4)}, "as it is")


def test_what_is_lost_on_the_way_is_asked_for(loop: Loop, publisher: Publisher, stack: ExitStack) -> None:
    follower, view = follow(loop, publisher, stack)
    _joined(publisher, view)
    publisher.say(block(1), lose=True)
    publisher.say(block(2))
    eventually(lambda: held(view) == {digest(0), digest(1), digest(2)}, "all of it")
    assert (follower.statistics().gaps, follower.statistics().lost) == (1, 0)


def test_what_cannot_be_had_any_more_makes_it_begin_anew(
    loop: Loop, publisher: Publisher, stack: ExitStack
) -> None:
    follower, view = follow(loop, publisher, stack)
    _joined(publisher, view)
    publisher.kept.clear()
    publisher.say(BlockRemoved([0]), lose=True, forget=True)
    publisher.say(block(2))
    eventually(lambda: held(view) == {digest(2)}, "only what is certain")
    assert follower.statistics().lost == 1


def test_an_engine_that_restarts_has_an_empty_cache(
    loop: Loop, publisher: Publisher, stack: ExitStack
) -> None:
    _, view = follow(loop, publisher, stack)
    _joined(publisher, view)
    for number in range(5, 9):
        publisher.say(block(number))
    eventually(lambda: digest(8) in held(view), "known")
    ports = [int(at.rpartition(":")[2]) for at in (publisher.endpoint, publisher.replay)]
    publisher.close()
    again = Publisher(*ports)
    stack.callback(again.close)
    _joined(again, view, number=1)
    eventually(lambda: held(view) == {digest(1)}, "what it has now")


def test_rubbish_costs_what_was_known_and_no_more(
    loop: Loop, publisher: Publisher, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.router.feed import kvevents

    monkeypatch.setattr(kvevents, "RETRY_S", 0.2)
    follower, view = follow(loop, publisher, stack)
    _joined(publisher, view)
    with publisher._lock:
        publisher._pub.send_multipart((b"", b"short", b""))
    eventually(lambda: "none of vLLM's" in follower.statistics().error, "said")
    _joined(publisher, view, number=1)


def test_an_engine_that_publishes_nothing_is_told_of_once_it_should_have(
    loop: Loop,
    publisher: Publisher,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from kvferry.router.feed import kvevents

    follower, view = follow(loop, publisher, stack)

    def prompt(tokens: int) -> None:
        loop.call(lambda: follower.prompt("cmpl-1", [1] * tokens, salt=""))

    prompt(kvevents.SURE_TOKENS)
    assert not follower.statistics().error
    monkeypatch.setattr(kvevents, "SILENT_S", 0.0)
    prompt(8)  # fills no block
    assert not follower.statistics().error
    for _ in range(3):
        prompt(kvevents.SURE_TOKENS)
    assert "--kv-events-config" in follower.statistics().error
    assert len(caplog.messages) == 1
    _joined(publisher, view)
    assert not follower.statistics().error
    prompt(kvevents.SURE_TOKENS)
    assert not follower.statistics().error


def test_a_prompt_is_told_by_its_tokens(loop: Loop, publisher: Publisher, stack: ExitStack) -> None:
    follower, view = follow(loop, publisher, stack)
    _joined(publisher, view)
    asyncio.run_coroutine_threadsafe(follower.prompt("cmpl-1", [*tokens(0), 7], salt=""), loop.loop)
    eventually(lambda: view.prompts, "told")
    (prompt,) = view.prompts
    assert (prompt.request_id, prompt.digests, prompt.prompt_tokens) == ("cmpl-1", digest(0), 5)


def test_long_prompts_are_named_bit_by_bit(loop: Loop, publisher: Publisher, stack: ExitStack) -> None:
    follower, view = follow(loop, publisher, stack)
    _joined(publisher, view)

    async def turns() -> int:
        naming = asyncio.create_task(follower.prompt("r", [1] * 40_000, salt=""))
        count = 0
        while not naming.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert asyncio.run_coroutine_threadsafe(turns(), loop.loop).result(WAIT_S) > 10_000 // 128
    assert view.prompts[-1].prompt_tokens == 40_000
