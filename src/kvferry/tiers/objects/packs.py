"""A pack while it is put together in memory, and the memory of packs."""

import mmap
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.identity.names import PartRef
from kvferry.tiers.objects.format import (
    MAX_PACK_PARTS,
    PackIndex,
    key_of,
    pack_tail,
    record_bytes,
    tail_bytes,
)
from kvferry.tiers.objects.work import Item

LATEST = 10
"""A pack is closed after so many times ``linger_s``, although parts are still added to it."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of a pack. Unused pages of it cost nothing."""

    memory: mmap.mmap
    view: memoryview

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.memory)


class Buffers:
    """Used under the tier's lock. limit: bytes in use at a time. kept: so many are used again."""

    def __init__(self, *, usual_bytes: int, limit: int, kept: int) -> None:
        self._usual_bytes = usual_bytes
        self._limit = limit
        self._kept = kept
        self._spare: list[Buffer] = []
        self.used_bytes = 0

    def take(self, nbytes: int) -> Buffer | None:
        """At least so large. None: the limit is reached. OSError: this machine has no memory."""
        nbytes = max(nbytes, self._usual_bytes)
        if self.used_bytes + nbytes > self._limit:
            return None
        if nbytes == self._usual_bytes and self._spare:
            buffer = self._spare.pop()
        else:
            memory = mmap.mmap(-1, nbytes)
            buffer = Buffer(memory, memoryview(memory))
        self.used_bytes += nbytes
        return buffer

    def give_back(self, buffer: Buffer, uploaded: memoryview | None) -> None:
        """uploaded: what a request may still look at; then the memory is not used again."""
        self.used_bytes -= buffer.nbytes
        if uploaded is not None:
            try:
                uploaded.release()
            except BufferError:
                return
        if buffer.nbytes == self._usual_bytes and len(self._spare) < self._kept:
            self._spare.append(buffer)

    def trim(self) -> None:
        """Nothing is kept: nobody has stored for a while."""
        self._spare.clear()


@dataclass(slots=True, eq=False)
class Pending:
    """A part in a pack that is not in the bucket yet. removed: meanwhile; so it will not count."""

    ref: PartRef
    record: int
    waiting: list[Item] = field(default_factory=list)
    removed: bool = False


@dataclass(slots=True, eq=False)
class OpenPack:
    """Of one namespace. Times are monotonic seconds."""

    namespace: bytes
    buffer: Buffer
    opened: float = field(default_factory=time.monotonic)
    added: float = 0.0
    filled: int = 0
    keys: list[bytes] = field(default_factory=list)
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    parts: list[Pending] = field(default_factory=list)

    def fits(self, ref: PartRef) -> bool:
        """Whether it has room for one more."""
        need = self.filled + record_bytes(ref.nbytes) + tail_bytes(len(self.keys) + 1)
        return need <= self.buffer.nbytes and len(self.keys) < MAX_PACK_PARTS

    def reserve(self, ref: PartRef) -> tuple[Pending, int]:
        """The part's place, and its offset. ``fits`` said yes."""
        offset = self.filled
        pending = Pending(ref, len(self.keys))
        self.keys.append(key_of(ref))
        self.offsets.append(offset)
        self.parts.append(pending)
        self.filled += record_bytes(ref.nbytes)
        return pending, offset

    def undo(self) -> Pending:
        """What was reserved last will not come."""
        self.keys.pop()
        self.filled = self.offsets.pop()
        return self.parts.pop()

    def due(self, linger_s: float) -> float:
        """When it is to be closed."""
        return min(self.added + linger_s, self.opened + LATEST * linger_s)

    def finish(self) -> memoryview:
        """All of the object."""
        tail = pack_tail(self.namespace, self.keys, self.offsets)
        end = self.filled + len(tail)
        self.buffer.view[self.filled : end] = tail
        return self.buffer.view[:end]

    def index(self, ident: bytes) -> PackIndex:
        """Once it is in the bucket under that name."""
        nbytes = self.filled + tail_bytes(len(self.keys))
        return PackIndex(ident, nbytes, self.keys, self.offsets)


def smallest_buffer(ref: PartRef) -> int:
    """For a pack of this part alone."""
    return record_bytes(ref.nbytes) + tail_bytes(1)


Ready = Callable[[OpenPack], object]
"""Takes a pack that is closed."""
