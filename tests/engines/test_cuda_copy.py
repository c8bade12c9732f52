"""The CUDA copier's gather and scatter, on CPU tensors: all of it but streams, pinning and the bus."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry.engines.vllm.gpu_check import ORDERS, Shape, views
from kvferry.engines.vllm.layout import plan_layout

pytestmark = pytest.mark.engine

SMALL = Shape(layers=3, heads=2, block_tokens=4, content=8, blocks=10, chunk_tokens=16)


class Nothing:
    """Streams and events of work that is done at once."""

    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_blocks_move_whole_and_alone_in_every_memory_order(order: str) -> None:
    import torch

    from kvferry.engines.vllm.cuda_copy import CudaBlockCopier, Lane, element_bytes

    class OnCpu(CudaBlockCopier):
        def new_lane(self, shape: tuple[int, int], dtype: torch.dtype) -> Lane:
            index = torch.empty(shape[0], dtype=torch.int64)
            staging = torch.empty(shape, dtype=dtype)
            return Lane(Nothing(), staging, index, index.clone(), Nothing())

        @contextmanager
        def on_stream(self, lane: Lane) -> Iterator[None]:
            yield

    layers, nbytes = views(SMALL, ORDERS[order])
    layout = plan_layout(layers, blocks=SMALL.blocks)
    cache = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    copier = OnCpu(layout, [cache], blocks_per_part=4)
    assert element_bytes(layout) == 16
    blocks, others = [7, 0, 3], [n for n in range(SMALL.blocks) if n not in (7, 0, 3)]

    def content(wanted: list[int]) -> list[bytes]:
        found = []
        for block in wanted:
            for layer in layers:
                at = layer.offset + block * layer.strides[0]
                box = torch.as_strided(
                    cache.view(torch.int16), layer.shape[1:], [s // 2 for s in layer.strides[1:]], at // 2
                )
                found.append(box.contiguous().numpy().tobytes())
        return found

    before = content(others)
    part = bytearray(torch.randint(0, 256, (layout.block_bytes * 4,), dtype=torch.uint8).numpy().tobytes())
    copier.load(memoryview(part), blocks, first=1, after=None)
    assert content(others) == before
    back = bytearray(layout.block_bytes * 3)
    copier.save(blocks, memoryview(back), after=None)
    assert back == part[layout.block_bytes :]
    old = content(blocks)
    copier.load(memoryview(back), list(reversed(blocks)), first=0, after=None)
    per_block = SMALL.layers
    assert content(blocks)[:per_block] == old[2 * per_block :]
