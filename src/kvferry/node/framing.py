"""How messages are framed on a Unix stream socket.

A frame is a little-endian u32 payload length, then that many bytes of MessagePack: one tagged message.
Lengths are checked before anything is allocated.
"""

import struct
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from kvferry.errors import RefusedError
from kvferry.identity.names import DIGEST_BYTES
from kvferry.node.wire import (
    CHECKSUM_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromClient,
    FromNode,
    Message,
)

LENGTH = struct.Struct("<I")
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


class FrameBuffer:
    """Cuts a byte stream into frames. Never holds more than one frame's limit plus one read."""

    def __init__(self, *, limit: int = MAX_FRAME_BYTES) -> None:
        """limit: longest payload, in bytes; raise it when the other side has shown who it is."""
        self.limit = limit
        self._data = bytearray()

    @property
    def held_bytes(self) -> int:
        """Of a frame that is not complete yet."""
        return len(self._data)

    def clear(self) -> None:
        """Give up what is not complete."""
        self._data.clear()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises RefusedError on a length over the limit."""
        self._data += data
        frames: list[bytes] = []
        start = 0
        while len(self._data) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data, start)
            if length > self.limit:
                raise RefusedError(f"a frame of {length} bytes exceeds the limit of {self.limit}")
            end = start + LENGTH.size + length
            if len(self._data) < end:
                break
            frames.append(bytes(memoryview(self._data)[start + LENGTH.size : end]))
            start = end
        if start:
            del self._data[:start]
        return frames


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
