"""One record to or from a segment, without copying where the caller's memory is aligned. All of it may block.

A record is one read or one write of up to three pieces: its head, the whole blocks of the part, which
are the caller's memory, and the part's last, partial block, which has a block of its own. Memory that does
not begin at a block goes through a buffer. Each thread has its own ``RecordIO``.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.errors import CorruptError
from kvferry.identity.names import PartRef
from kvferry.identity.stripes import checksum, part_checksums, stripe_plan
from kvferry.tiers.disk.address import address_of
from kvferry.tiers.disk.files import Buffers, aligned_memory
from kvferry.tiers.disk.format import (
    BLOCK_BYTES,
    Mark,
    Preamble,
    head_bytes,
    pack_head,
    pack_preamble,
    padded,
    read_preamble,
    verify_head,
)
from kvferry.tiers.disk.places import Place, Reservation

KEPT_BUFFER_BYTES = 32 << 20
"""A larger buffer is given back at once."""


class Moves(Protocol):
    """What is needed of the files: one read or write each. They raise OSError."""

    def read(self, number: int, buffers: Buffers, offset: int) -> int:
        """How many bytes were read into the buffers."""
        ...

    def write(self, number: int, buffers: Buffers, offset: int) -> int:
        """How many bytes were written."""
        ...


class RecordIO:
    """Buffers of one thread. Methods raise OSError as the files do."""

    def __init__(self, files: Moves) -> None:
        self._files = files
        self._head = aligned_memory(BLOCK_BYTES)
        self._tail = aligned_memory(BLOCK_BYTES)
        self._buffer = aligned_memory(BLOCK_BYTES)

    def write(self, reservation: Reservation, data: memoryview, checksums: Sequence[bytes]) -> None:
        """The part and what precedes it. checksums: none where the data has none yet."""
        head = pack_head(reservation.preamble, checksums or part_checksums(data))
        start = self._head_buffer(len(head))
        start[:] = head
        whole, rest = self._pieces(data, fill=True)
        _move(self._files.write, reservation.place, [start, *whole, *rest])

    def read(self, place: Place, ref: PartRef, into: memoryview) -> tuple[bytes, ...]:
        """Its bytes, verified; returns its checksums. CorruptError if they are not what was stored."""
        start = self._head_buffer(head_bytes(ref.nbytes))
        whole, rest = self._pieces(into, fill=False)
        _move(self._files.read, place, [start, *whole, *rest])
        checksums = verify_head(start, ref)
        self._hand_over(into, whole, rest)
        for stripe, expected in zip(stripe_plan(ref.nbytes), checksums, strict=True):
            if checksum(into[stripe.offset : stripe.offset + stripe.nbytes]) != expected:
                raise CorruptError(f"stored record: the checksum of stripe {stripe.index} does not match")
        return checksums

    def is_whole(self, segment: int, ref: PartRef, offset: int) -> bool:
        """Whether all its bytes are there and can be read, for recovery."""
        try:
            self.read_whole(Place(segment, 0, offset), ref)
        except (CorruptError, OSError):
            return False
        return True

    def read_whole(self, place: Place, ref: PartRef) -> tuple[memoryview, tuple[bytes, ...]]:
        """The part in memory of this thread, until it reads or writes another. CorruptError as ``read``."""
        data = self._whole_buffer(padded(ref.nbytes))[: ref.nbytes]
        return data, self.read(place, ref, data)

    def mark(self, place: Place, mark: Mark) -> None:
        """So that it is not found again after a restart. Its bytes stay until they are written over."""
        block = self._head[:BLOCK_BYTES]
        if self._files.read(place.segment, [block], place.offset) != BLOCK_BYTES:
            return
        found = read_preamble(block)
        if found is not None and found.generation == place.generation:
            self._write_preamble(place, found._replace(mark=mark))

    def write_void(self, reservation: Reservation) -> None:
        """In place of a record that could not be written: what follows it is found after a restart."""
        self._write_preamble(reservation.place, reservation.preamble._replace(mark=Mark.VOID))

    def _write_preamble(self, place: Place, preamble: Preamble) -> None:
        block = self._head[:BLOCK_BYTES]
        block[:] = pack_preamble(preamble).ljust(BLOCK_BYTES, b"\0")
        _move(self._files.write, place, [block])

    def write_block(self, segment: int, block: bytes) -> None:
        """The first of a segment."""
        self._head[:BLOCK_BYTES] = block
        _move(self._files.write, Place(segment, 0, 0), [self._head[:BLOCK_BYTES]])

    def read_block(self, segment: int, offset: int) -> memoryview:
        """One block, until the next is read or written; less where the file ends."""
        block = self._head[:BLOCK_BYTES]
        return block[: self._files.read(segment, [block], offset)]

    def _pieces(self, memory: memoryview, *, fill: bool) -> tuple[list[memoryview], list[memoryview]]:
        """The whole blocks, and the partial one. fill: with what the memory holds, as needed."""
        if not _is_aligned(memory):
            buffer = self._whole_buffer(padded(memory.nbytes))
            if fill:
                _copy(buffer, memory)
            return [buffer], []
        split = memory.nbytes // BLOCK_BYTES * BLOCK_BYTES
        rest = memory.nbytes - split
        if fill and rest:
            self._tail[:rest] = memory[split:]
        return [memory[:split]] if split else [], [self._tail] if rest else []

    def _hand_over(self, into: memoryview, whole: list[memoryview], rest: list[memoryview]) -> None:
        """What did not go into the caller's memory by itself."""
        if not _is_aligned(into):
            _copy(into, whole[0])
        elif rest:
            split = into.nbytes // BLOCK_BYTES * BLOCK_BYTES
            into[split:] = self._tail[: into.nbytes - split]

    def _head_buffer(self, nbytes: int) -> memoryview:
        if self._head.nbytes < nbytes:
            self._head = aligned_memory(nbytes)
        return self._head[:nbytes]

    def _whole_buffer(self, nbytes: int) -> memoryview:
        if nbytes > KEPT_BUFFER_BYTES:
            return aligned_memory(nbytes)
        if self._buffer.nbytes < nbytes:
            self._buffer = aligned_memory(nbytes)
        return self._buffer[:nbytes]


def _move(step: Callable[[int, Buffers, int], int], place: Place, buffers: list[memoryview]) -> None:
    """All of them, in as many steps as it takes. CorruptError where a file ends before."""
    offset, left = place.offset, buffers
    while left:
        moved = step(place.segment, left, offset)
        if moved <= 0:
            raise CorruptError(f"segment {place.segment} ends at {offset}")
        moved = moved // BLOCK_BYTES * BLOCK_BYTES or moved  # of a block that was cut, all again
        offset += moved
        left = _after(left, moved)


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    left: list[memoryview] = []
    for buffer in buffers:
        skipped = min(nbytes, buffer.nbytes)
        nbytes -= skipped
        if skipped < buffer.nbytes:
            left.append(buffer[skipped:])
    return left


def _is_aligned(memory: memoryview) -> bool:
    return address_of(memory) % BLOCK_BYTES == 0


def _copy(target: memoryview, source: memoryview) -> None:
    """As many bytes as both have, other threads running meanwhile."""
    ctypes.memmove(address_of(target), address_of(source), min(target.nbytes, source.nbytes))
