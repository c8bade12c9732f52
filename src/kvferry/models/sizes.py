"""Exact KV bytes of a model: per token, per request, per GPU and per replica.

*One copy* is the KV of a request once, as a shared tier would store it. A *GPU* holds its share of that:
tensor-parallel ranks split KV heads and repeat what cannot be split (latents, indexer keys, heads fewer than
ranks), and pipeline stages hold their own layers. A *replica* is all GPUs of one engine, repeats counted.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from kvferry.errors import MisconfiguredError
from kvferry.models.layers import Layer, Model, Span, State
from kvferry.models.precision import KvDtype
from kvferry.models.reserve import DEFAULT_RULES, EngineRules, reserved_bytes

MAX_RANKS = 1024
CONV_BYTES = 2  # the convolution's taps are kept in the model's own 16 bits


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """One request of ``tokens`` tokens. All fields are bytes.

    kv: what attention can still read, one copy. peak: the most that was while it grew: more than ``kv`` only
    where layers attend within chunks. state: of recurrent layers, one copy, whatever the length.
    gpu_live: KV and state of the fullest GPU; gpu_reserved: what the engine takes for them.
    replica_live, replica_reserved: the same over all GPUs of a replica.
    """

    tokens: int
    kv: int
    peak: int
    state: int
    gpu_live: int
    gpu_reserved: int
    replica_live: int
    replica_reserved: int


def rank_heads(kv_heads: int, tensor: int) -> int:
    """KV heads of one tensor-parallel rank. Raises MisconfiguredError where engines would not start."""
    if max(kv_heads, tensor) % min(kv_heads, tensor):
        raise MisconfiguredError(
            f"{kv_heads} KV heads over {tensor} tensor-parallel ranks: one must divide the other; "
            "choose another --tp"
        )
    return max(1, kv_heads // tensor)


def token_bytes(layer: Layer, dtype: KvDtype, tensor: int = 1) -> int:
    """What one rank keeps in ``layer`` for each entry of its span: for a token, unless it compresses."""
    total = 0
    if layer.heads is not None:
        total += rank_heads(layer.heads.kv_heads, tensor) * dtype.head_bytes(layer.heads)
    if layer.latent is not None:
        total += dtype.latent_bytes(layer.latent)
    if layer.index is not None:
        total += dtype.index_bytes(layer.index)
    return total


def state_bytes(layer: Layer, tensor: int = 1) -> int:
    """What one rank keeps in ``layer`` for a sequence of any length."""
    state = layer.state
    if state is None:
        return 0
    if state.repeated:
        tensor = 1
    recurrent = (
        _share(state.heads, tensor, "state heads") * state.rows * state.columns * state.recurrent_bytes
    )
    return _conv_channels(state, tensor) * state.conv_taps * CONV_BYTES + recurrent


def _conv_channels(state: State, tensor: int) -> int:
    """Of one rank. Groups that the ranks do not divide are repeated, one for each rank (vLLM's rule)."""
    channels = state.conv_channels
    if state.groups and state.groups % tensor:
        channels += (tensor - state.groups) * (state.group_channels // state.groups)
    return _share(channels, tensor, "convolution channels")


def _share(count: int, tensor: int, what: str) -> int:
    if count % tensor:
        raise MisconfiguredError(
            f"{count} {what} over {tensor} tensor-parallel ranks do not divide; choose another --tp"
        )
    return count // tensor


def live_tokens(layer: Layer, tokens: int) -> int:
    """Of ``tokens``, how many a next token can still attend to in ``layer``; of compressed ones, entries."""
    if layer.span is Span.WINDOW:
        return min(tokens, layer.span_tokens)
    if layer.span is Span.CHUNK and tokens:
        return (tokens - 1) % layer.span_tokens + 1
    return tokens // layer.every if layer.span is Span.FULL else 0


def peak_tokens(layer: Layer, tokens: int) -> int:
    """The most ``live_tokens`` was for any length up to ``tokens``."""
    return min(tokens, layer.span_tokens) if layer.span is Span.CHUNK else live_tokens(layer, tokens)


def stages(count: int, pipeline: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, spread as vLLM does: the rest goes to late stages but the last."""
    if not 1 <= pipeline <= count:
        raise MisconfiguredError(f"--pp is {pipeline} for {count} layers: give 1 to {count}")
    sizes = [count // pipeline] * pipeline
    for late in range(2, count % pipeline + 2):
        sizes[-late] += 1
    starts = [sum(sizes[:stage]) for stage in range(pipeline + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(starts))


@dataclass(frozen=True)
class Sizing:
    """The KV bytes of a model in one deployment.

    tensor, pipeline: ranks of a replica in each direction. engine: how its allocator rounds.
    """

    model: Model
    dtype: KvDtype
    tensor: int = 1
    pipeline: int = 1
    engine: EngineRules = DEFAULT_RULES

    def __post_init__(self) -> None:
        """Raise MisconfiguredError for a split that no engine starts with, or a dtype that does not fit."""
        for flag, ranks in (("--tp", self.tensor), ("--pp", self.pipeline)):
            if not 1 <= ranks <= MAX_RANKS:
                raise MisconfiguredError(f"{flag} is {ranks}: give 1 to {MAX_RANKS}")
        if self.dtype.name == "fp8_ds_mla" and not any(layer.latent for layer in self.model.layers):
            raise MisconfiguredError(
                f"fp8_ds_mla is a layout of MLA, which {self.model.name} has not; use fp8"
            )
        for layer in self.model.layers:
            token_bytes(layer, self.dtype, self.tensor)
            state_bytes(layer, self.tensor)
        stages(self.model.layer_count, self.pipeline)

    @cached_property
    def full_token_bytes(self) -> int:
        """Bytes that each token adds for good, one copy: of layers that keep all.

        Rounded up where compressed entries do not come to whole bytes a token.
        """
        return self._token_bytes(Span.FULL)

    @cached_property
    def bounded_token_bytes(self) -> int:
        """Bytes per token of layers with a window or a chunk, one copy."""
        return self._token_bytes(Span.WINDOW) + self._token_bytes(Span.CHUNK)

    def _token_bytes(self, span: Span) -> int:
        layers = [layer for layer in self.model.layers if layer.span is span]
        return math.ceil(sum(Fraction(token_bytes(layer, self.dtype), layer.every) for layer in layers))

    @cached_property
    def state_bytes(self) -> int:
        """Bytes per sequence of recurrent layers, one copy."""
        return sum(map(state_bytes, self.model.layers))

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """The lengths of windows and chunks in the model, in tokens."""
        return tuple(sorted({layer.span_tokens for layer in self.model.layers if layer.span_tokens}))

    @cached_property
    def stage_layers(self) -> tuple[tuple[Layer, ...], ...]:
        """What each pipeline stage keeps: all entries of its layers."""
        entries = tuple(zip(self.model.numbers, self.model.layers, strict=True))
        return tuple(
            tuple(layer for number, layer in entries if number in stage)
            for stage in stages(self.model.layer_count, self.pipeline)
        )

    def _rank(self, layers: tuple[Layer, ...], tokens: int) -> int:
        return sum(
            token_bytes(layer, self.dtype, self.tensor) * live_tokens(layer, tokens)
            + state_bytes(layer, self.tensor)
            for layer in layers
        )

    def _reserved(self, layers: tuple[Layer, ...], tokens: int) -> int:
        pages = tuple(
            (layer, token_bytes(layer, self.dtype, self.tensor), state_bytes(layer, self.tensor))
            for layer in layers
            if layer.keeps
        )
        return reserved_bytes(pages, tokens, self.engine)

    def request(self, tokens: int) -> RequestBytes:
        """What one request of ``tokens`` tokens takes, in bytes."""
        layers = self.model.layers
        live = [self._rank(stage, tokens) for stage in self.stage_layers]
        reserved = [self._reserved(stage, tokens) for stage in self.stage_layers]
        return RequestBytes(
            tokens=tokens,
            kv=sum(token_bytes(layer, self.dtype) * live_tokens(layer, tokens) for layer in layers),
            peak=sum(token_bytes(layer, self.dtype) * peak_tokens(layer, tokens) for layer in layers),
            state=self.state_bytes,
            gpu_live=max(live),
            gpu_reserved=max(reserved),
            replica_live=self.tensor * sum(live),
            replica_reserved=self.tensor * sum(reserved),
        )
