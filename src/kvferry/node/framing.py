"""How the messages between a node and its clients become bytes: one frame each (``kvferry.frames``)."""

from collections.abc import Sequence

import msgspec

from kvferry.errors import RefusedError
from kvferry.frames import Speaker, decode_payload, encode_frame, other_protocol
from kvferry.identity.names import DIGEST_BYTES
from kvferry.node.wire import (
    CHECKSUM_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromClient,
    FromNode,
    Message,
)

_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def encode(message: Message) -> bytes:
    """A whole frame. Raises RefusedError when the message would exceed MAX_FRAME_BYTES."""
    return encode_frame(message, limit=MAX_FRAME_BYTES)


def decode_from_client(payload: bytes | memoryview) -> FromClient:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_from_client, payload, sender="client")


def decode_from_node(payload: bytes | memoryview) -> FromNode:
    """Raises RefusedError on anything that is not exactly one known message."""
    return decode_payload(_from_node, payload, sender="node")


def hello_mismatch(payload: bytes | memoryview, *, version: str) -> str | None:
    """One line when the first frame is a Hello of another protocol version, else None."""
    return other_protocol(payload, here=Speaker("node", version, PROTOCOL), there="client")


def split_digests(digests: bytes) -> list[bytes]:
    """Concatenated digests, apart. Raises RefusedError when the length is no multiple of a digest."""
    if len(digests) % DIGEST_BYTES:
        raise RefusedError(f"{len(digests)} bytes of digests are not a multiple of {DIGEST_BYTES}")
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def join_checksums(checksums: Sequence[bytes]) -> bytes:
    """The checksums of a part's stripes as one field."""
    return b"".join(checksums)


def split_checksums(checksums: bytes) -> tuple[bytes, ...]:
    """The checksums of a part's stripes, apart. Raises RefusedError on a broken length."""
    if len(checksums) % CHECKSUM_BYTES:
        raise RefusedError(f"{len(checksums)} bytes of checksums are not a multiple of {CHECKSUM_BYTES}")
    return tuple(checksums[at : at + CHECKSUM_BYTES] for at in range(0, len(checksums), CHECKSUM_BYTES))
