"""How messages are framed on a stream socket.

A frame is a little-endian u32 payload length, then that many bytes of MessagePack: one tagged message.
Lengths are checked before anything is allocated.
"""

import struct

from kvferry.errors import RefusedError

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES = 4 << 20


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
