"""How the messages between a node and its clients become bytes: one frame each (``kvferry.frames``)."""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from kvferry.errors import RefusedError
from kvferry.frames import LENGTH
from kvferry.identity.names import DIGEST_BYTES
from kvferry.node.wire import (
    CHECKSUM_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromClient,
    FromNode,
    Message,
)

MAX_SHOWN = 64  # characters of another version's text


class _AnyHello(msgspec.Struct, tag="Hello", frozen=True):
    """What every version's Hello has."""

    protocol: int
    version: str = "unknown"


class _AnyRefusal(msgspec.Struct, tag="Refusal", frozen=True):
    """What every version's Refusal has."""

    message: str
    protocol: int = 0
    version: str = "unknown"


_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_any_hello = msgspec.msgpack.Decoder(_AnyHello)
_any_refusal = msgspec.msgpack.Decoder(_AnyRefusal)


def encode(message: Message) -> bytes:
    """A whole frame. Raises RefusedError when the message would exceed MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise RefusedError(f"a {type(message).__name__} of {len(payload)} bytes exceeds the frame limit")
    return LENGTH.pack(len(payload)) + payload


def decode_from_client(payload: bytes | memoryview) -> FromClient:
    """Raises RefusedError on anything that is not exactly one known message."""
    try:
        return _from_client.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse("client", error)


def decode_from_node(payload: bytes | memoryview) -> FromNode:
    """Raises RefusedError on anything that is not exactly one known message."""
    try:
        return _from_node.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse("node", error)


def _refuse(sender: str, error: Exception) -> NoReturn:
    raise RefusedError(f"malformed message from the {sender}: {error}") from error


def hello_mismatch(payload: bytes | memoryview, *, version: str) -> str | None:
    """One line when the first frame is a Hello of another protocol version, else None."""
    try:
        hello = _any_hello.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if hello.protocol == PROTOCOL:
        return None
    return (
        f"this node is kvferry {version} (protocol {PROTOCOL}), the client is kvferry "
        f"{hello.version[:MAX_SHOWN]} (protocol {hello.protocol}): install the same version on both sides"
    )


def refusal_text(payload: bytes | memoryview) -> str | None:
    """The message of a Refusal of any version, else None."""
    try:
        return _any_refusal.decode(payload).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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
