"""How the KV of one chunk lies in its parts, and the copies to and from a model's tensors.

Layers that keep the same tokens form a group, and a part holds one group of one chunk: layer by layer the
keys, then the values, each as [heads, tokens, head size] without gaps. A part of sliding-window layers
holds only the chunk's last tokens, as many as a boundary at its end can need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from kvferry.identity.geometry import Geometry, GroupKind, KvGroup


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What one layer keeps per token. index: in the cache. window_tokens: 0 for full attention.

    key_heads, key_size, value_heads, value_size: of keys and values; they may differ.
    """

    index: int
    window_tokens: int
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int

    @property
    def token_items(self) -> int:
        """Elements per token."""
        return self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def name(self) -> str:
        """As it enters the namespace."""
        return f"{self.index}:{self.key_heads}x{self.key_size}/{self.value_heads}x{self.value_size}"


@dataclass(frozen=True, slots=True)
class Kv:
    """Keys and values of one layer, as [heads, tokens, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor

    def tokens(self, first: int, last: int) -> "Kv":
        """The same memory, of tokens first .. last - 1."""
        return Kv(self.keys[:, first:last], self.values[:, first:last])

    def copy_from(self, other: "Kv") -> None:
        """Waits for the device where it must, so that the bytes are there when it returns."""
        self.keys.copy_(other.keys)
        self.values.copy_(other.values)


@dataclass(frozen=True)
class PartForm:
    """One group's part of a chunk. tokens: how many of the chunk's last ones it holds."""

    layers: tuple[LayerForm, ...]
    tokens: int
    window_tokens: int

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(layer.token_items * self.tokens for layer in self.layers))

    def views(self, flat: torch.Tensor) -> Iterator[tuple[LayerForm, Kv]]:
        """Each layer's share of a part. flat: all of it, in elements."""
        for layer, start in zip(self.layers, self._starts, strict=False):
            middle = start + layer.key_heads * layer.key_size * self.tokens
            end = start + layer.token_items * self.tokens
            keys = flat[start:middle].view(layer.key_heads, self.tokens, layer.key_size)
            values = flat[middle:end].view(layer.value_heads, self.tokens, layer.value_size)
            yield layer, Kv(keys, values)


@dataclass(frozen=True)
class KvLayout:
    """A model's KV in parts. Part numbers are those of ``geometry``. device: where the model keeps it."""

    parts: tuple[PartForm, ...]
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device

    @property
    def chunk_tokens(self) -> int:
        """Of the geometry."""
        return self.geometry.chunk_tokens

    def flat(self, view: memoryview) -> torch.Tensor:
        """Pool memory as a tensor of elements, without a copy."""
        return torch.frombuffer(view, dtype=self.dtype)


def plan_layout(
    layers: Sequence[LayerForm], *, dtype: torch.dtype, device: torch.device, chunk_tokens: int
) -> KvLayout:
    """Raises MisconfiguredError for chunk_tokens that make a part too large."""
    windows = sorted({layer.window_tokens for layer in layers})
    groups, forms = [], []
    for window in windows:
        members = tuple(layer for layer in layers if layer.window_tokens == window)
        group = KvGroup(
            kind=GroupKind.WINDOW if window else GroupKind.FULL,
            block_tokens=1,
            stages=(tuple(layer.name for layer in members),),
            block_bytes=(sum(layer.token_items for layer in members) * dtype.itemsize,),
            kv_heads=1,
            window_tokens=window,
        )
        groups.append(group)
        forms.append(PartForm(members, group.part_blocks(chunk_tokens), window))
    geometry = Geometry(groups=tuple(groups), chunk_tokens=chunk_tokens)
    return KvLayout(tuple(forms), geometry, dtype, device)


def dtype_name(dtype: Any) -> str:
    """As other engines write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
