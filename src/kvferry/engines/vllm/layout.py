"""Where the bytes of one engine block lie, for any arrangement of layers, blocks, heads and tokens.

vLLM keeps KV in one allocation per worker and hands out one strided tensor per layer. A block is copied
as opaque bytes in memory order: what they mean is the engine's business, that both sides agree is the
namespace's (``signature`` enters it). The planning here is plain arithmetic on byte strides and serves
CPU and CUDA memory alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import MisconfiguredError

MAX_SEGMENTS = 4096


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's cache tensor in bytes. Dimension 0 counts blocks (or a block's equal pieces).

    storage: which allocation, as a small number. offset: of the tensor's first byte in it.
    """

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class Extent(NamedTuple):
    """``size`` steps of ``stride`` bytes."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of bytes that every block has: outer extents, then one contiguous run.

    offset: of block 0 in the storage. shape and strides are in bytes; the last stride is 1.
    part_offset: where the box's bytes begin within a block's bytes in a part.
    """

    storage: int
    offset: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    part_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box per block."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All of a block. block_bytes: how many bytes one block has over all layers."""

    segments: tuple[Segment, ...]
    blocks: int
    block_bytes: int
    signature: str


def plan_layout(layers: Sequence[LayerView], *, blocks: int) -> BlockLayout:
    """Merge the layers' views into as few boxes as possible.

    Layers that share memory (cross-layer sharing) count once. Raises MisconfiguredError for views that
    overlap themselves or do not divide into ``blocks``.
    """
    boxes = [_layer_box(layer, blocks) for layer in _distinct(layers)]
    if not boxes:
        raise MisconfiguredError("the engine registered no KV cache tensors")
    segments: list[Segment] = []
    part_offset = 0
    for run in _equal_runs(boxes):
        segment = _merge(run, part_offset)
        segments.append(segment)
        part_offset += segment.nbytes
    if len(segments) > MAX_SEGMENTS:
        raise MisconfiguredError(
            f"a KV block is scattered over {len(segments)} pieces; at most {MAX_SEGMENTS}"
        )
    text = ";".join(f"{len(run)}x{run[0].layer}" for run in _equal_runs(boxes))
    return BlockLayout(tuple(segments), blocks, part_offset, text)


@dataclass(frozen=True, slots=True)
class _Box:
    storage: int
    offset: int
    block_stride: int
    extents: tuple[Extent, ...]  # outermost first; the last one has stride 1
    layer: str  # item size, logical shape and memory order of a block within its layer


def _distinct(layers: Sequence[LayerView]) -> list[LayerView]:
    seen: set[tuple[int, int]] = set()
    kept = []
    for layer in layers:
        place = (layer.storage, layer.offset)
        if place not in seen:
            seen.add(place)
            kept.append(layer)
    return kept


def _layer_box(layer: LayerView, blocks: int) -> _Box:
    if blocks < 1 or layer.shape[0] % blocks:
        raise MisconfiguredError(f"{layer.name}: {layer.shape[0]} pieces do not divide into {blocks} blocks")
    pieces = layer.shape[0] // blocks
    extents = [Extent(size, stride) for size, stride in zip(layer.shape[1:], layer.strides[1:], strict=True)]
    if pieces > 1:
        extents.insert(0, Extent(pieces, layer.strides[0]))
    order = sorted(range(len(extents)), key=lambda axis: -extents[axis].stride)
    merged = _coalesce([*extents, Extent(layer.item_bytes, 1)], layer.name)
    logical = "x".join(str(size) for size in layer.shape[1:])
    memory = "".join(str(axis) for axis in order)
    text = f"{layer.item_bytes}b/{pieces}p/{logical}/{memory}"
    return _Box(layer.storage, layer.offset, pieces * layer.strides[0], merged, text)


def _coalesce(extents: Sequence[Extent], name: str) -> tuple[Extent, ...]:
    """Sort by stride and join neighbours that are contiguous."""
    ordered = sorted((e for e in extents if e.size > 1 or e.stride == 1), key=lambda e: (-e.stride, -e.size))
    merged: list[Extent] = []
    for extent in reversed(ordered):
        if not merged:
            merged.append(extent)
            continue
        inner = merged[-1]
        if extent.stride < inner.size * inner.stride:
            raise MisconfiguredError(f"{name}: KV strides overlap ({ordered}); this layout is not supported")
        if extent.stride == inner.size * inner.stride:
            merged[-1] = Extent(extent.size * inner.size, inner.stride)
        else:
            merged.append(extent)
    return tuple(reversed(merged))


def _equal_runs(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """Consecutive layers of equal form, a constant positive distance apart."""
    runs: list[list[_Box]] = []
    for box in boxes:
        run = runs[-1] if runs else None
        if run is not None and _continues(run, box):
            run.append(box)
        else:
            runs.append([box])
    return runs


def _continues(run: Sequence[_Box], box: _Box) -> bool:
    head, last = run[0], run[-1]
    distance = box.offset - last.offset
    same_form = (head.storage, head.block_stride, head.extents, head.layer) == (
        box.storage,
        box.block_stride,
        box.extents,
        box.layer,
    )
    return same_form and distance > 0 and (len(run) == 1 or distance == run[1].offset - head.offset)


def _merge(run: Sequence[_Box], part_offset: int) -> Segment:
    head = run[0]
    extents = list(head.extents)
    if len(run) > 1:
        extents.append(Extent(len(run), run[1].offset - head.offset))
    merged = _coalesce(extents, "layers")
    return Segment(
        storage=head.storage,
        offset=head.offset,
        block_stride=head.block_stride,
        shape=tuple(e.size for e in merged),
        strides=tuple(e.stride for e in merged),
        part_offset=part_offset,
    )
