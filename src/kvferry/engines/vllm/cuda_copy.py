"""Moves whole blocks between pinned pool memory and device memory, on streams of its own.

A part crosses the bus in one transfer into a staging buffer; one kernel per segment then scatters its
blocks (and gathers them the other way). Elements are as wide as the strides' alignment allows. Every
copying thread has its own stream and staging buffer, so transfers and kernels of two parts overlap.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.engines.vllm.layout import BlockLayout, Segment

if TYPE_CHECKING:
    from kvferry.engines.vllm.copy import Fence

_WIDTHS: tuple[tuple[int, torch.dtype], ...] = (
    (16, torch.complex128),
    (8, torch.int64),
    (4, torch.int32),
    (2, torch.int16),
    (1, torch.uint8),
)
_CUDA_SUCCESS = 0


def element_bytes(layout: BlockLayout) -> int:
    """The widest element that every offset, stride and run of the layout is a multiple of."""
    numbers = [layout.block_bytes]
    for segment in layout.segments:
        numbers += [segment.offset, segment.block_stride, segment.part_offset, segment.shape[-1]]
        numbers += segment.strides[:-1]
    return next(width for width, _ in _WIDTHS if all(number % width == 0 for number in numbers))


@dataclass(slots=True)
class Lane:
    """What one copying thread works with."""

    stream: Any
    staging: Any  # (blocks per chunk, elements of a block) on the device
    index: Any  # block numbers on the device
    index_host: Any  # the same, pinned
    done: Any


class CudaBlockCopier:
    """For KV on a CUDA device. storages: one flat uint8 tensor per allocation. blocks_per_part: at most."""

    def __init__(self, layout: BlockLayout, storages: Sequence[Any], *, blocks_per_part: int) -> None:
        self._layout = layout
        self._width = element_bytes(layout)
        self._dtype = dict(_WIDTHS)[self._width]
        self._device = storages[0].device
        self._blocks_per_part = blocks_per_part
        self._boxes = [(self._box(storages[s.storage], s), s) for s in layout.segments]
        self._lanes = threading.local()

    def _box(self, storage: Any, segment: Segment) -> Any:
        width = self._width
        usable = storage.numel() // width * width
        flat = storage[:usable].view(self._dtype)
        shape = (self._layout.blocks, *segment.shape[:-1], segment.shape[-1] // width)
        strides = (segment.block_stride // width, *(s // width for s in segment.strides[:-1]), 1)
        return flat.as_strided(shape, strides, segment.offset // width)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._layout.block_bytes

    def fence(self) -> "Fence | None":
        """An event behind everything queued on the engine's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        fence: Fence = event
        return fence

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: "Fence | None") -> None:
        """Host to device: one transfer, then one scatter per segment. Blocks the calling thread only."""
        lane, count = self._lane(), len(blocks)
        start = first * self._layout.block_bytes
        host = torch.frombuffer(part, dtype=torch.uint8)[start : start + count * self._layout.block_bytes]
        with self.on_stream(lane):
            self._begin(lane, blocks, after)
            staged = lane.staging[:count]
            staged.view(torch.uint8).view(-1).copy_(host, non_blocking=True)
            for box, segment in self._boxes:
                box.index_copy_(0, lane.index[:count], self._slice(staged, segment, count))
            lane.done.record(lane.stream)
        lane.done.synchronize()

    def save(self, blocks: Sequence[int], part: memoryview, *, after: "Fence | None") -> None:
        """Device to host: one gather per segment, then one transfer."""
        lane, count = self._lane(), len(blocks)
        host = torch.frombuffer(part, dtype=torch.uint8)[: count * self._layout.block_bytes]
        with self.on_stream(lane):
            self._begin(lane, blocks, after)
            staged = lane.staging[:count]
            for box, segment in self._boxes:
                self._slice(staged, segment, count).copy_(box.index_select(0, lane.index[:count]))
            host.copy_(staged.view(torch.uint8).view(-1), non_blocking=True)
            lane.done.record(lane.stream)
        lane.done.synchronize()

    def _begin(self, lane: Lane, blocks: Sequence[int], after: Any) -> None:
        if after is not None:
            lane.stream.wait_event(after)
        lane.index_host[: len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        lane.index.copy_(lane.index_host, non_blocking=True)

    def _slice(self, staged: Any, segment: Segment, count: int) -> Any:
        start = segment.part_offset // self._width
        stop = start + segment.nbytes // self._width
        shape = (count, *segment.shape[:-1], segment.shape[-1] // self._width)
        return staged[:, start:stop].unflatten(1, shape[1:])

    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self.new_lane(
                (self._blocks_per_part, self._layout.block_bytes // self._width), self._dtype
            )
            self._lanes.lane = lane
        return lane

    def new_lane(self, shape: tuple[int, int], dtype: torch.dtype) -> Lane:
        """What one thread needs: a stream, a staging buffer of this shape, room for block numbers."""
        return Lane(
            stream=torch.cuda.Stream(self._device),
            staging=torch.empty(shape, dtype=dtype, device=self._device),
            index=torch.empty(shape[0], dtype=torch.int64, device=self._device),
            index_host=torch.empty(shape[0], dtype=torch.int64, pin_memory=True),
            done=torch.cuda.Event(blocking=True),
        )

    @contextmanager
    def on_stream(self, lane: Lane) -> Iterator[None]:
        """Work inside goes to the lane's stream of this device."""
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            yield

    def close(self) -> None:
        """Let go of the engine's memory."""
        self._boxes = []
        self._lanes = threading.local()


class PinnedMemory:
    """Registers memory that is mapped already with the CUDA driver, so that transfers run at full speed."""

    def __init__(self, address: int, nbytes: int) -> None:
        """Raises OSError when the driver refuses; transfers then work, but slower."""
        self._address = address
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != _CUDA_SUCCESS:
            self._address = 0
            raise OSError(f"cudaHostRegister of {nbytes} bytes failed with code {code}")

    def close(self) -> None:
        """Unregister. Idempotent; no transfer may be running."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = 0
