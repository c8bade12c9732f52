"""What a node and a router read of each other, and what a router reads of vLLM's KV events."""

from collections.abc import Sequence

import msgspec

from kvferry.errors import RefusedError
from kvferry.feed import wire
from kvferry.feed.framing import decode_from_router, decode_to_router, encode, hello_mismatch, split
from kvferry.feed.picture import Picture
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.router.feed.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    Blocks,
    BlockStored,
    EventBatch,
    decode_batch,
)
from kvferry.router.feed.stream import Stream

MAX_INPUT_BYTES = 16 << 10
CHUNKS = bytes(range(96))
EVENTS: tuple[wire.AnyEvent, ...] = (
    wire.Space(1, bytes(16), "model", 128, 1 << 20),
    wire.EngineUp(1, "engine", 1, 4096),
    wire.Prompt(1, 1, "cmpl-1", CHUNKS, 400, 128),
    wire.Result(1, "cmpl-1", 400, 128, 256, 0, "complete"),
    wire.Held(wire.Level.MEMORY, 0, 1, CHUNKS),
    wire.Gone(wire.Level.VALKEY, 0, 1, CHUNKS),
    wire.Cleared(wire.Level.ENGINE, 1),
    wire.Rate(wire.Level.VALKEY, 0.001, 1e9),
    wire.Speed(1, 0.01, 1e-5, 1e-9),
    wire.EngineDown(1),
)
_FROM_ROUTER: Sequence[wire.Message] = (
    wire.Hello(protocol=wire.PROTOCOL, version="1", token="t" * 40, epoch=1 << 61, next=77),
    wire.Prefetch(namespace=bytes(16), chunks=CHUNKS),
    wire.Ping(),
    wire.Pong(),
)
_TO_ROUTER: Sequence[wire.Message] = (
    wire.Welcome(protocol=wire.PROTOCOL, version="1", node="n", epoch=5, next=3, snapshot=True, behind="v"),
    wire.Known(events=EVENTS),
    wire.KnownEnd(),
    wire.Events(first=3, events=EVENTS),
    wire.Refusal(message="no"),
)
FROM_ROUTER = [encode(message) for message in _FROM_ROUTER]
TO_ROUTER = [b"".join(map(encode, _TO_ROUTER[:4])), *map(encode, _TO_ROUTER)]
BATCHES = [
    msgspec.msgpack.encode(EventBatch(1.0, list(events)))
    for events in (
        [BlockStored([1, 2], None, list(range(8)), 4), BlockRemoved([1]), AllBlocksCleared()],
        [BlockStored([b"x" * 32], None, [1, 2, 3, 4], 4, "GPU", [["salt"]], 0)],
    )
]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _frames(data: bytes) -> list[bytes]:
    buffer, payloads = FrameBuffer(limit=MAX_INPUT_BYTES), []
    for at in range(0, len(data), 50):
        payloads += buffer.feed(data[at : at + 50])
    return payloads


def from_router(data: bytes) -> None:
    try:
        for payload in _frames(data):
            hello_mismatch(payload, version="1")
            message = decode_from_router(payload)
            if isinstance(message, wire.Prefetch):
                _require(all(len(chunk) == 32 for chunk in split(message.chunks)), "a bad chunk")
            encode(message)
    except RefusedError:
        pass


def to_router(data: bytes) -> None:
    stream, picture = Stream(), Picture(max_shared_chunks=64)
    stream.hello("")
    try:
        for payload in _frames(data):
            refusal_text(payload)
            before = stream.next
            taken = stream.take(decode_to_router(payload))
            _require(taken.reset or stream.next >= before, "numbers go back")
            for event in taken.events:
                for told in picture.apply(event):
                    encode(wire.Events(1, (told,)))
    except RefusedError:
        pass
    _require(picture.count(wire.Level.VALKEY) <= 64, "too many chunks")


def kv_events(data: bytes) -> None:
    blocks = Blocks("w", max_blocks=16)
    try:
        for event in blocks.take(decode_batch(data)):
            encode(wire.Events(1, (event,)))
    except RefusedError:
        pass
    _require(len(blocks) <= 16, "too many blocks")
