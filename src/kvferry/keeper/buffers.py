"""Memory that parts pass through on their way between tiers: bounded, aligned, used again.

A buffer begins at a page, so that a disk reads and writes it without a copy. The bound is cut into shares,
one for each kind of work, so that copies in the background never keep a stage from its memory.
"""

import contextlib
import enum
import mmap
from collections.abc import Mapping

from kvferry.errors import BrokenError

GRAIN_BYTES = 64 << 10
"""Sizes are rounded up to this, so that parts of about one size share buffers."""
FIT_DIVISOR = 4
"""A buffer at rest serves a part if at most this share of the part's size is left over."""


class Use(enum.Enum):
    """Kinds of work, each with a share."""

    STAGE = "stage"  # from below into Valkey: a request waits for it
    COPY = "copy"  # from Valkey to the disk
    FLUSH = "flush"  # to objects, which take many parts at a time


class Buffer:
    """One part's memory, until it is given back. ``memory`` is of the size asked for, or larger."""

    __slots__ = ("memory", "nbytes", "use")

    def __init__(self, memory: memoryview, use: Use | None) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.use = use


class Buffers:
    """Used by one thread. shares: bytes for each use; their sum is the bound, at rest and in use together."""

    def __init__(self, shares: Mapping[Use, int]) -> None:
        self.limit_bytes = sum(shares.values())
        self._shares = dict(shares)
        self._used = dict.fromkeys(Use, 0)
        self._idle: list[Buffer] = []  # the one given back last is the last
        self._mapped_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of buffers that are in use."""
        return sum(self._used.values())

    def share(self, use: Use) -> int:
        """Bytes that this use may take."""
        return self._shares.get(use, 0)

    def room(self, use: Use) -> int:
        """Bytes of its share that are free. Not below zero."""
        return max(0, self.share(use) - self._used[use])

    def holds(self, nbytes: int) -> bool:
        """Whether a part of that size can ever have a buffer."""
        return _rounded(nbytes) <= self.limit_bytes

    def fits(self, nbytes: int, use: Use) -> bool:
        """Whether ``take`` would give one now. A part alone in its use may take more than the share."""
        size = _rounded(nbytes)
        alone = self._used[use] == 0
        return (alone or size <= self.room(use)) and self.used_bytes + size <= self.limit_bytes

    def take(self, nbytes: int, use: Use) -> Buffer | None:
        """Memory of at least ``nbytes`` bytes with any contents; None while there is no room for it."""
        if not self.fits(nbytes, use):
            return None
        size = _rounded(nbytes)
        most = self.room(use) if self._used[use] else self.limit_bytes
        buffer = self._at_rest(size, min(most, size + size // FIT_DIVISOR)) or self._mapped(size)
        if buffer is None:
            return None
        buffer.use = use
        self._used[use] += buffer.nbytes
        return buffer

    def move(self, buffer: Buffer, use: Use) -> bool:
        """Count it to another use from now on; False, and nothing changes, where that has no room."""
        if buffer.use is None:
            raise BrokenError("a buffer that was given back changes its use")
        if self._used[use] and buffer.nbytes > self.room(use):
            return False
        self._used[buffer.use] -= buffer.nbytes
        self._used[use] += buffer.nbytes
        buffer.use = use
        return True

    def give(self, buffer: Buffer) -> None:
        """Back. Nothing may touch its memory any more. Raises BrokenError if it was given back before."""
        if buffer.use is None:
            raise BrokenError("a buffer was given back twice")
        self._used[buffer.use] -= buffer.nbytes
        buffer.use = None
        self._idle.append(buffer)

    def _at_rest(self, size: int, most: int) -> Buffer | None:
        """The warmest that fits and is not too large."""
        for at in range(len(self._idle) - 1, -1, -1):
            if size <= self._idle[at].nbytes <= most:
                return self._idle.pop(at)
        return None

    def _mapped(self, size: int) -> Buffer | None:
        """A new one; those at rest the longest make room for it."""
        while self._idle and self._mapped_bytes + size > self.limit_bytes:
            self._mapped_bytes -= self._idle.pop(0).nbytes
        if self._mapped_bytes + size > self.limit_bytes:
            return None
        try:
            memory = _map(size)
        except (OSError, MemoryError):  # the host has none now: as if others had it all
            return None
        self._mapped_bytes += size
        return Buffer(memory, None)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES


def _map(nbytes: int) -> memoryview:
    """Memory that core dumps leave out: it holds what users' prompts became. It goes with its last view."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return memoryview(mapping)
