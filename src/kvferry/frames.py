"""How messages are framed on a stream socket.

A frame is a little-endian u32 payload length, then that many bytes of MessagePack: one tagged message.
Lengths are checked before anything is allocated. Which messages there are is their room's business
(``node.framing``, ``keeper.framing``); only the first ones, ``Hello`` and ``Refusal``, have something in
common, so that two versions can always tell each other what is wrong.
"""

import struct
from typing import NamedTuple, TypeVar

import msgspec

from kvferry.errors import RefusedError

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES = 4 << 20
MAX_SHOWN = 64  # characters of another version's text
MAX_REFUSAL = 512  # characters of one that are shown

T = TypeVar("T")


class _AnyHello(msgspec.Struct, tag="Hello", frozen=True):
    """What every version's Hello has."""

    protocol: int
    version: str = "unknown"


class _AnyRefusal(msgspec.Struct, tag="Refusal", frozen=True):
    """What every version's Refusal has."""

    message: str
    protocol: int = 0
    version: str = "unknown"


class Speaker(NamedTuple):
    """One end of a connection, for people: what it is called, and what it speaks."""

    name: str
    version: str
    protocol: int


_encoder = msgspec.msgpack.Encoder()
_any_hello = msgspec.msgpack.Decoder(_AnyHello)
_any_refusal = msgspec.msgpack.Decoder(_AnyRefusal)


def encode_frame(message: msgspec.Struct, *, limit: int = FRAME_LIMIT_BYTES) -> bytes:
    """A whole frame. Raises RefusedError when the payload would exceed the limit."""
    payload = _encoder.encode(message)
    if len(payload) > limit:
        raise RefusedError(f"a {type(message).__name__} of {len(payload)} bytes exceeds the frame limit")
    return LENGTH.pack(len(payload)) + payload


def decode_payload(decoder: "msgspec.msgpack.Decoder[T]", payload: bytes | memoryview, *, sender: str) -> T:
    """Raises RefusedError on anything that is not exactly one known message."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"malformed message from the {sender}: {error}") from error


def other_protocol(payload: bytes | memoryview, *, here: Speaker, there: str) -> str | None:
    """One line when the first frame is a Hello of another protocol version, else None."""
    try:
        hello = _any_hello.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if hello.protocol == here.protocol:
        return None
    return (
        f"this {here.name} is kvferry {here.version} (protocol {here.protocol}), the {there} is kvferry "
        f"{hello.version[:MAX_SHOWN]} (protocol {hello.protocol}): install the same version on both sides"
    )


def refusal_text(payload: bytes | memoryview) -> str | None:
    """The message of a Refusal of any version, fit for a log, else None."""
    try:
        said = _any_refusal.decode(payload).message[:MAX_REFUSAL]
        return "".join(character if character.isprintable() else "?" for character in said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class FrameBuffer:
    """Cuts a byte stream into frames. Never holds more than one frame's limit plus one read."""

    def __init__(self, *, limit: int = FRAME_LIMIT_BYTES) -> None:
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
