"""Reads and writes the layers of a transformers ``Cache``: what each keeps, and of which tokens.

| layer | keeps |
|---|---|
| DynamicLayer | all tokens, in tensors that grow |
| DynamicSlidingWindowLayer | the last window - 1; all since it was made, while it records its past |
| StaticLayer | all tokens, at the head of tensors of a fixed length |
| StaticSlidingWindowLayer | the last ones that fit, at the end of its tensors once they are full |
"""

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvferry.engines.transformers.layout import Kv, KvLayout, LayerForm
from kvferry.errors import RefusedError

FULL_LAYERS = (DynamicLayer, StaticLayer)
WINDOW_LAYERS = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)


@dataclass(frozen=True, slots=True)
class Span:
    """What one layer keeps: tokens first .. first + kv's number of tokens - 1."""

    first: int
    kv: Kv


def window_of(layer: Any) -> int | None:
    """The window of a layer of a cache, 0 for full attention; None for a kind that is not supported.

    Exactly these classes: what a subclass keeps besides would be lost.
    """
    if type(layer) in FULL_LAYERS:
        return 0
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    return None


def length(cache: Cache) -> int:
    """Tokens in the cache; 0 before its first use."""
    return int(cache.get_seq_length()) if len(cache.layers) else 0


def spans(cache: Cache, layout: KvLayout) -> dict[int, Span]:
    """What a cache of one sequence holds, by layer. RefusedError unless it is of the layout's form."""
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        raise RefusedError(f"a {type(cache).__name__} is not supported: DynamicCache and StaticCache are")
    found: dict[int, Span] = {}
    tokens = length(cache)
    for part in layout.parts:
        for form in part.layers:
            if form.index >= len(cache.layers):
                raise RefusedError(f"the cache has {len(cache.layers)} layers, the model more")
            layer: Any = cache.layers[form.index]
            _check(layer, form, layout)
            found[form.index] = _span(layer, tokens)
    return found


def _check(layer: Any, form: LayerForm, layout: KvLayout) -> None:
    keys, values = layer.keys, layer.values
    if type(layer) not in FULL_LAYERS + WINDOW_LAYERS or keys is None or values is None:
        raise RefusedError(f"layer {form.index} of the cache is a {type(layer).__name__}, or empty")
    if keys.shape[0] != 1:
        raise RefusedError(f"the cache holds {keys.shape[0]} sequences: one at a time is stored")
    shape = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
    wanted = (form.key_heads, form.key_size, form.value_heads, form.value_size)
    if shape != wanted or {keys.dtype, values.dtype} != {layout.dtype}:
        raise RefusedError(
            f"layer {form.index} of the cache holds {shape} of {keys.dtype}, this model makes {wanted} of "
            f"{layout.dtype}: another model's cache"
        )


def _span(layer: Any, tokens: int) -> Span:
    keys, values = layer.keys[0], layer.values[0]
    if isinstance(layer, StaticLayer):
        # The oldest of a full window is not read again, and may never have been there (``fill``).
        oldest = 1 if type(layer) is StaticSlidingWindowLayer and tokens >= layer.max_cache_len else 0
        kept = min(tokens, layer.max_cache_len)
        return Span(tokens - kept + oldest, Kv(keys[:, oldest:kept], values[:, oldest:kept]))
    return Span(tokens - keys.shape[1], Kv(keys, values))


def empty_cache(config: Any) -> DynamicCache:
    """For a prompt that begins here. Its sliding-window layers keep what they have passed, to be saved."""
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def unused(cache: StaticCache) -> StaticCache:
    """The same. RefusedError when it cannot be filled."""
    if type(cache) is not StaticCache or cache.offloading:
        raise RefusedError(f"a {type(cache).__name__} is not loaded into: a StaticCache, not offloaded, is")
    if length(cache):
        raise RefusedError(f"the cache to load into holds {length(cache)} tokens: give an unused one")
    return cache


def fill(cache: Cache, loaded: dict[int, Kv], tokens: int) -> None:
    """Put ``tokens`` tokens into an empty cache. loaded: by layer, the last ones it needs of them."""
    for index, kv in loaded.items():
        layer: Any = cache.layers[index]
        keys, values = kv.keys.unsqueeze(0), kv.values.unsqueeze(0)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        if type(layer) is StaticSlidingWindowLayer:
            _fill_static_window(layer, kv, tokens)
        elif type(layer) is StaticLayer:
            layer.update(keys, values)
        else:
            layer.keys, layer.values = keys, values
            if type(layer) is DynamicSlidingWindowLayer:
                layer.cumulative_length = tokens


def _fill_static_window(layer: Any, kv: Kv, tokens: int) -> None:
    """A full one has room for one token more than the window reaches back, which is dropped unread."""
    room = layer.max_cache_len
    kept = min(tokens, kv.keys.shape[1], room)
    first = 0 if tokens < room else room - kept
    inside = Kv(layer.keys[0], layer.values[0])
    inside.tokens(first, first + kept).copy_from(kv.tokens(kv.keys.shape[1] - kept, kv.keys.shape[1]))
    layer.cumulative_length_int = tokens
    if tokens <= room:
        layer.cumulative_length.fill_(tokens)


def room(cache: Cache) -> int:
    """How many tokens fit; a DynamicCache has no bound."""
    bounds = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    return min(bounds, default=1 << 62)
