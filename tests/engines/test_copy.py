"""Blocks are copied whole and alone, whatever the order of layers, blocks, heads and tokens in memory."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.vllm.copy import CpuBlockCopier
from kvferry.engines.vllm.layout import LayerView, plan_layout
from kvferry.errors import MisconfiguredError

# The memory orders of vLLM's KVCacheLayout: axes L, B, H, N, C from the outermost in.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def views_of(
    shape: tuple[int, int, int, int, int], order: tuple[int, ...], *, item: int, pad: int = 0
) -> tuple[list[LayerView], int]:
    """Layer views of one allocation whose axes lie in ``order``; ``pad`` bytes behind the second axis."""
    strides = [0] * 5
    step = item
    for at in reversed(range(5)):
        strides[order[at]] = step
        step *= shape[order[at]]
        if at == 2:
            step += pad
    layers, blocks, heads, tokens, content = shape
    views = [
        LayerView(
            f"layer{n}",
            0,
            n * strides[0],
            (blocks, heads, tokens, content),
            (strides[1], strides[2], strides[3], strides[4]),
            item,
        )
        for n in range(layers)
    ]
    return views, step


def touched(views: list[LayerView], block: int, total: int) -> set[int]:
    """Byte offsets of one block, element by element."""
    found = set()
    for view in views:
        for index in itertools.product(*(range(size) for size in view.shape[1:])):
            at = view.offset + block * view.strides[0]
            at += sum(i * stride for i, stride in zip(index, view.strides[1:], strict=True))
            found |= set(range(at, at + view.item_bytes))
    assert max(found) < total
    return found


@given(
    order=st.sampled_from(sorted(LAYOUTS.values())),
    shape=st.tuples(
        st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)
    ),
    item=st.sampled_from([1, 2, 4]),
    pad=st.sampled_from([0, 8]),
)
@settings(max_examples=150, deadline=None)
def test_a_block_moves_whole_and_alone(
    order: tuple[int, ...], shape: tuple[int, int, int, int, int], item: int, pad: int
) -> None:
    views, total = views_of(shape, order, item=item, pad=pad)
    layout = plan_layout(views, blocks=shape[1])
    source = np.random.default_rng(1).integers(1, 256, total, dtype=np.uint8)
    part = bytearray(layout.block_bytes * 2)
    CpuBlockCopier(layout, [source]).save([1, 0], memoryview(part), after=None)
    target = np.zeros(total, dtype=np.uint8)
    CpuBlockCopier(layout, [target]).load(memoryview(part), [1], first=0, after=None)
    inside = sorted(touched(views, 1, total))
    assert layout.block_bytes == len(inside)
    assert (target[inside] == source[inside]).all()
    assert not np.delete(target, inside).any()


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC"])
def test_a_layer_outermost_block_is_one_box_of_one_run_per_layer(name: str) -> None:
    views, _ = views_of((30, 8, 3, 16, 128), LAYOUTS[name], item=2)
    (segment,) = plan_layout(views, blocks=8).segments
    assert segment.shape == (30, 3 * 16 * 128 * 2)


def test_a_block_outermost_block_is_one_run() -> None:
    views, _ = views_of((30, 8, 3, 16, 128), LAYOUTS["BLHNC"], item=2)
    (segment,) = plan_layout(views, blocks=8).segments
    assert segment.shape == (30 * 3 * 16 * 128 * 2,)


def test_pieces_of_a_block_count_as_one_block() -> None:
    views, _ = views_of((2, 8, 1, 4, 4), LAYOUTS["LBHNC"], item=2)
    assert plan_layout(views, blocks=4).block_bytes == 2 * plan_layout(views, blocks=8).block_bytes


def test_layers_that_share_memory_are_copied_once() -> None:
    views, _ = views_of((2, 4, 1, 4, 4), LAYOUTS["LBHNC"], item=2)
    shared = [*views, replace(views[0], name="shares")]
    assert plan_layout(shared, blocks=4).block_bytes == plan_layout(views, blocks=4).block_bytes


def test_layouts_with_different_orders_have_different_signatures() -> None:
    signatures = {
        plan_layout(views_of((2, 4, 3, 5, 7), o, item=2)[0], blocks=4).signature for o in LAYOUTS.values()
    }
    assert len(signatures) >= 2


def test_overlapping_strides_are_refused() -> None:
    with pytest.raises(MisconfiguredError, match="overlap"):
        plan_layout([LayerView("x", 0, 0, (2, 4, 4), (64, 4, 2), 1)], blocks=2)


def test_an_engine_without_kv_is_refused() -> None:
    with pytest.raises(MisconfiguredError, match="no KV"):
        plan_layout([], blocks=2)
