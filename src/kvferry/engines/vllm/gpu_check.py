"""``python -m kvferry.engines.vllm.gpu_check``: does copying to and from this GPU work, and how fast?

For several memory orders of a KV cache: fills pool memory with known bytes, scatters it into the cache's
blocks on a side stream, gathers it back and compares every byte, neighbours included. Pool memory is
registered with the driver as a worker does it; where that is refused the check goes on and says so.
Exit code 0: all bytes right. 1: some were not. 2: no CUDA device, or no PyTorch that can use it.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.engines.vllm.layout import BlockLayout, LayerView, plan_layout

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
ITEM_BYTES = 2
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a KV cache: as one rank of an 8B model has it."""

    layers: int = 32
    heads: int = 8
    block_tokens: int = 16
    content: int = 256  # key and value of one head, in elements
    blocks: int = 1024
    chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one memory order. Bandwidth in GB/s, copies into and out of the engine's blocks included."""

    order: str
    intact: bool
    load_gb_s: float
    save_gb_s: float
    segments: int
    element_bytes: int


def views(shape: Shape, order: Sequence[int]) -> tuple[list[LayerView], int]:
    """Layer views of one allocation whose axes (layer, block, head, token, content) lie in ``order``."""
    sizes = (shape.layers, shape.blocks, shape.heads, shape.block_tokens, shape.content)
    strides = [0] * len(sizes)
    step = ITEM_BYTES
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    layers = [
        LayerView(f"layer{n}", 0, n * strides[0], sizes[1:], tuple(strides[1:]), ITEM_BYTES)
        for n in range(shape.layers)
    ]
    return layers, step


def check_order(name: str, shape: Shape, *, device: Any, host: Any, rounds: int) -> Outcome:
    """One memory order: bytes, then bandwidth. host: pinned uint8 tensor that holds the parts."""
    import torch

    from kvferry.engines.vllm.cuda_copy import CudaBlockCopier, element_bytes

    layers, nbytes = views(shape, ORDERS[name])
    layout = plan_layout(layers, blocks=shape.blocks)
    cache = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    per_part = shape.chunk_tokens // shape.block_tokens
    copier = CudaBlockCopier(layout, [cache], blocks_per_part=per_part)
    parts = _parts(host, layout.block_bytes * per_part)
    order = torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[at : at + per_part] for at in range(0, shape.blocks - per_part, per_part)][: len(parts)]
    intact = _bytes_hold(copier, cache, parts, tables, layout)
    load_s = _timed(lambda part, table: copier.load(part, table, first=0, after=None), parts, tables, rounds)
    save_s = _timed(lambda part, table: copier.save(table, part, after=None), parts, tables, rounds)
    moved = layout.block_bytes * per_part * len(tables) * rounds / 1e9
    outcome = Outcome(
        name, intact, moved / load_s, moved / save_s, len(layout.segments), element_bytes(layout)
    )
    copier.close()
    return outcome


def _parts(host: Any, part_bytes: int) -> list[memoryview]:
    whole = memoryview(host.numpy())
    return [whole[at : at + part_bytes] for at in range(0, len(whole) - part_bytes + 1, part_bytes)]


def _bytes_hold(
    copier: Any, cache: Any, parts: list[memoryview], tables: list[list[int]], layout: BlockLayout
) -> bool:
    """Scatter a part, gather it back, and look that no other block changed."""
    import torch

    part, table, untouched = parts[0], tables[0], tables[1]
    before = bytearray(layout.block_bytes * len(untouched))
    after = bytearray(len(before))
    back = bytearray(layout.block_bytes * len(table))
    copier.save(untouched, memoryview(before), after=None)
    copier.load(part, table, first=0, after=copier.fence())
    copier.save(table, memoryview(back), after=None)
    copier.save(untouched, memoryview(after), after=None)
    # A second opinion that does not use the copier: the block's bytes by PyTorch's own strides.
    segment = layout.segments[0]
    box = torch.as_strided(
        cache, segment.shape, segment.strides, segment.offset + table[0] * segment.block_stride
    )
    reference = bytes(box.contiguous().cpu().numpy().tobytes())
    return bytes(part) == bytes(back) and before == after and reference == bytes(part[: segment.nbytes])


def _timed(copy: Any, parts: list[memoryview], tables: list[list[int]], rounds: int) -> float:
    """Seconds, with as many threads as a worker uses."""
    from concurrent.futures import ThreadPoolExecutor

    from kvferry.engines.vllm.transfers import LOAD_THREADS

    work = list(zip(parts, tables, strict=False))
    with ThreadPoolExecutor(LOAD_THREADS) as pool:
        list(pool.map(lambda one: copy(*one), work))
        began = time.perf_counter()
        for _ in range(rounds):
            list(pool.map(lambda one: copy(*one), work))
        return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Run all orders and print a table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.engines.vllm.gpu_check", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed passes over the parts (default 5)")
    parser.add_argument("--host-mib", type=int, default=1024, help="pool memory to use (default 1024)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args(argv)
    try:
        import torch
    except ImportError:
        print("gpu_check: PyTorch is not installed: run it in the engine's environment", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device is visible to PyTorch: nothing was checked", file=sys.stderr)
        return 2
    return _run(torch, host_bytes=args.host_mib << 20, rounds=args.rounds, as_json=args.json)


def _run(torch: Any, *, host_bytes: int, rounds: int, as_json: bool) -> int:
    from kvferry.engines.vllm.cuda_copy import PinnedMemory

    device = torch.device("cuda", torch.cuda.current_device())
    host = torch.randint(0, 256, (host_bytes,), dtype=torch.uint8)
    pinned: PinnedMemory | None = None
    try:
        pinned = PinnedMemory(host.data_ptr(), host.numel())
    except OSError as error:
        print(f"gpu_check: {error}: bandwidth below is that of unpinned memory", file=sys.stderr)
    outcomes = [check_order(name, Shape(), device=device, host=host, rounds=rounds) for name in ORDERS]
    if pinned is not None:
        pinned.close()
    if as_json:
        print(
            json.dumps(
                {"device": torch.cuda.get_device_name(device), "orders": [asdict(o) for o in outcomes]}
            )
        )
    else:
        print(f"{torch.cuda.get_device_name(device)}, pinned: {'yes' if pinned else 'no'}")
        print(f"{'order':8}{'bytes':>8}{'load GB/s':>12}{'save GB/s':>12}{'segments':>10}{'element':>9}")
        for o in outcomes:
            word = "right" if o.intact else "WRONG"
            print(
                f"{o.order:8}{word:>8}{o.load_gb_s:12.1f}{o.save_gb_s:12.1f}{o.segments:10}{o.element_bytes:9}"
            )
    return 0 if all(outcome.intact for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
