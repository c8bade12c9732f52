"""Moves whole blocks between pool memory and an engine's KV memory, as opaque bytes.

A part is ``blocks_per_chunk`` blocks one after the other; a block is its layout's segments one after the
other. ``CpuBlockCopier`` moves a block over all layers in one call of numpy's strided copy, which drops
the GIL and never starts threads of its own. ``cuda_copy`` does the same for device memory.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.engines.vllm.layout import BlockLayout

Bytes = npt.NDArray[np.uint8]


class Fence(Protocol):
    """A point in the engine's work that a copy must not overtake."""


class BlockCopier(Protocol):
    """Copies between a part in host memory and blocks. Called from several threads at once."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def fence(self) -> Fence | None:
        """What the engine has queued so far; None where the engine works synchronously."""

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: Fence | None) -> None:
        """Fill ``blocks`` from the part, starting with its block number ``first``. Returns when done."""

    def save(self, blocks: Sequence[int], part: memoryview, *, after: Fence | None) -> None:
        """Fill the part from ``blocks``. Returns when done."""

    def close(self) -> None:
        """Release what was allocated for copying."""


class CpuBlockCopier:
    """For KV in host memory.

    storages: one flat byte array per allocation, in the order the layout numbers them.
    """

    def __init__(self, layout: BlockLayout, storages: Sequence[Bytes]) -> None:
        self._block_bytes = layout.block_bytes
        self._boxes = [
            (
                np.ndarray(
                    (layout.blocks, *segment.shape),
                    dtype=np.uint8,
                    buffer=storages[segment.storage].data,
                    offset=segment.offset,
                    strides=(segment.block_stride, *segment.strides),
                ),
                segment.part_offset,
                segment.part_offset + segment.nbytes,
                segment.shape,
            )
            for segment in layout.segments
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._block_bytes

    def fence(self) -> Fence | None:
        """None: the forward pass has ended when a hook runs."""
        return None

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: Fence | None) -> None:
        """Fill ``blocks`` from the part. Raises IndexError for blocks that do not exist."""
        data = np.frombuffer(part, dtype=np.uint8)
        for position, block in enumerate(blocks, start=first):
            base = position * self._block_bytes
            for box, start, stop, shape in self._boxes:
                np.copyto(box[block], data[base + start : base + stop].reshape(shape))

    def save(self, blocks: Sequence[int], part: memoryview, *, after: Fence | None) -> None:
        """Fill the part from ``blocks``. Raises IndexError for blocks that do not exist."""
        data = np.frombuffer(part, dtype=np.uint8)
        for position, block in enumerate(blocks):
            base = position * self._block_bytes
            for box, start, stop, shape in self._boxes:
                np.copyto(data[base + start : base + stop].reshape(shape), box[block])

    def close(self) -> None:
        """Let go of the engine's memory."""
        self._boxes = []
