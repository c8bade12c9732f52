"""What a model's layers keep of a sequence: frozen descriptions, read from a config by ``reading``.

Counts are of the whole model, before any parallel split. Dimensions are elements, not bytes: ``precision``
says how many bytes those take, ``sizes`` adds them up.
"""

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any

from kvferry.models.published import PLAIN, Published


class Span(enum.Enum):
    """Which tokens of a sequence a layer keeps."""

    FULL = "full"  # all
    WINDOW = "window"  # the last span_tokens
    CHUNK = "chunk"  # those of the current chunk of span_tokens
    NONE = "none"  # none: a state that does not grow, another layer's KV, or no attention


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values per KV head. Tensor-parallel ranks split the heads; more ranks than heads repeat them.

    key_dim, value_dim: elements of one head's key and value for one token.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed vector per token, the same on every tensor-parallel rank (MLA)."""

    latent_dim: int
    rope_dim: int


@dataclass(frozen=True, slots=True)
class Index:
    """The key of a sparse-attention indexer, one per token, the same on every tensor-parallel rank.

    fp8_scale_group: elements per 4-byte scale where the indexer can be fp8; 0 where it always has 16 bits.
    """

    key_dim: int
    fp8_scale_group: int


@dataclass(frozen=True, slots=True)
class State:
    """State per sequence, whatever its length: convolution taps and a recurrent matrix per head.

    conv_channels, conv_taps: elements of the short convolution's input that are kept, in the model's 16 bits.
    group_channels: how many of conv_channels belong to groups (Mamba-2), which are repeated where the ranks
        do not divide them.
    groups: their number; 0 where there are none.
    heads, rows, columns: of the recurrent state; heads are split over tensor-parallel ranks.
    recurrent_bytes: bytes of one of its elements.
    repeated: whether every tensor-parallel rank keeps all of it.
    """

    conv_channels: int
    conv_taps: int
    heads: int
    rows: int
    columns: int
    recurrent_bytes: int
    groups: int = 0
    group_channels: int = 0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the decoder. What it does not keep is None.

    shares_layer: the layer whose KV it reads instead of keeping its own.
    every: tokens that one kept entry stands for; more than 1 where attention compresses.
    beside: whether it is one more entry for the config's layer that the entry before belongs to. Such layers
        are never cut by a pipeline split. Entries are alike without it.
    """

    span: Span
    span_tokens: int = 0
    heads: Heads | None = None
    latent: Latent | None = None
    index: Index | None = None
    state: State | None = None
    shares_layer: int | None = None
    every: int = 1
    beside: bool = field(default=False, compare=False)

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return any(part is not None for part in (self.heads, self.latent, self.index, self.state))


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as its KV cache goes.

    layers: what is kept, an entry for each layer of the config, or more where a layer keeps two things.
    facts: the fields of the config that this was read from, with their values.
    notes: what a reader of the numbers should know: defaults of the architecture, layers left out.
    max_context: the longest sequence the config allows, in tokens; 0 where it does not say.
    published: what a weight takes in the checkpoint.
    """

    name: str
    model_type: str
    layers: tuple[Layer, ...]
    max_context: int
    facts: tuple[tuple[str, Any], ...]
    notes: tuple[str, ...]
    source: str = ""
    parameters: float = 0.0  # weights in all, as published; 0 where not known
    published: Published = PLAIN

    @property
    def numbers(self) -> tuple[int, ...]:
        """The config's layer of each entry of ``layers``, counted from 0."""
        return tuple(itertools.accumulate((not layer.beside for layer in self.layers), initial=-1))[1:]

    @property
    def layer_count(self) -> int:
        """Layers of the config."""
        return sum(not layer.beside for layer in self.layers)
