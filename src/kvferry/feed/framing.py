"""How the messages of ``wire`` become bytes: one frame each (``kvferry.frames``)."""

import msgspec

from kvferry import __version__
from kvferry.feed.wire import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL,
    FromRouter,
    Message,
    Refusal,
    ToRouter,
)
from kvferry.frames import Speaker, decode_payload, encode_frame, other_protocol
from kvferry.identity.names import DIGEST_BYTES
from kvferry.link import Speech

SPEECH = Speech(
    max_hello_bytes=MAX_HELLO_BYTES,
    max_frame_bytes=MAX_FRAME_BYTES,
    wants_tls=Refusal(
        message="this node's feed talks TLS, and what came was plain: give feed_tls_ca, a file with the "
        "authority of the node's certificate",
        version=__version__,
    ),
)

_from_router: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)


def encode(message: Message) -> bytes:
    """A whole frame. Raises RefusedError when the message would exceed MAX_FRAME_BYTES."""
    return encode_frame(message, limit=MAX_FRAME_BYTES)


def decode_from_router(payload: bytes | memoryview) -> FromRouter:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_from_router, payload, sender="router")


def decode_to_router(payload: bytes | memoryview) -> ToRouter:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_to_router, payload, sender="node")


def hello_mismatch(payload: bytes | memoryview, *, version: str = __version__) -> str | None:
    """One line when the first frame is a Hello of another protocol version, else None."""
    return other_protocol(payload, here=Speaker("node's feed", version, PROTOCOL), there="router")


def split(digests: bytes) -> list[bytes]:
    """One by one. What is left over at the end is no digest and is left out."""
    whole = len(digests) - len(digests) % DIGEST_BYTES
    return [digests[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES)]
