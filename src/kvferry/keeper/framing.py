"""How the messages of ``wire`` become bytes: one frame each (``kvferry.frames``)."""

import msgspec

from kvferry import __version__
from kvferry.frames import Speaker, decode_payload, encode_frame, other_protocol
from kvferry.keeper.wire import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL,
    FromKeeper,
    Message,
    Refusal,
    ToKeeper,
)
from kvferry.link import Speech

SPEECH = Speech(
    max_hello_bytes=MAX_HELLO_BYTES,
    max_frame_bytes=MAX_FRAME_BYTES,
    wants_tls=Refusal(
        message="this keeper talks TLS, and what came was plain: give keeper_tls_ca, a file with the "
        "authority of the keeper's certificate",
        version=__version__,
    ),
)

_to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)


def encode(message: Message) -> bytes:
    """A whole frame. Raises RefusedError when the message would exceed MAX_FRAME_BYTES."""
    return encode_frame(message, limit=MAX_FRAME_BYTES)


def decode_to_keeper(payload: bytes | memoryview) -> ToKeeper:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_to_keeper, payload, sender="peer")


def decode_from_keeper(payload: bytes | memoryview) -> FromKeeper:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_from_keeper, payload, sender="keeper")


def hello_mismatch(payload: bytes | memoryview, *, version: str = __version__) -> str | None:
    """One line when the first frame is a Hello of another protocol version, else None."""
    return other_protocol(payload, here=Speaker("keeper", version, PROTOCOL), there="peer")
