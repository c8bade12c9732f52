"""vLLM's KV cache groups as this system names them, and which of them cannot be shared."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvferry.errors import MisconfiguredError
from kvferry.identity.geometry import GroupKind, KvGroup

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_ALIGNED = "align"
# How configurations call the KV heads of their layers, and what these are computed from layer by layer.
_HEADS = re.compile(
    r"kv_heads|key_value_heads|kv_n_heads|n_head_kv|attention_groups|group_num|heads_in_group"
)


def kv_groups(kv_cache: "KVCacheConfig") -> tuple[KvGroup, ...]:
    """In vLLM's order, without their layers, which workers know.

    Raises MisconfiguredError for a group that cannot be shared; ``unshared`` says so before.
    """
    return tuple(_shape(_specs(group)[0]) for group in kv_cache.kv_cache_groups)


def _specs(group: "KVCacheGroupSpec") -> list[Any]:
    """Of its layers, which keep the same tokens but may differ in the bytes they take."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return list(iter_layer_specs(group.kv_cache_spec))


def _shape(spec: Any) -> KvGroup:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    kind, window = GroupKind.FULL, 0
    if isinstance(spec, MambaSpec):
        kind = GroupKind.STATE
    elif isinstance(spec, SlidingWindowSpec):
        kind, window = GroupKind.WINDOW, int(spec.sliding_window + spec.extra_retained_tokens)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        kind, window = GroupKind.WINDOW, int(spec.attention_chunk_size)
    elif not isinstance(spec, FullAttentionSpec):
        raise MisconfiguredError(f"KV caches of kind {type(spec).__name__} cannot be shared")
    return KvGroup(kind, int(spec.block_size), stages=(), block_bytes=(), kv_heads=1, window_tokens=window)


def unshared(kv_cache: "KVCacheConfig") -> str | None:
    """Why some group's KV cannot be shared; None when all can."""
    for group in kv_cache.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer:
            return "a KV group that the engine keeps to itself (HiSparse)"
        for spec in _specs(group):
            reason = _unshared_spec(spec)
            if reason is not None:
                return reason
    if not kv_cache.kv_cache_groups:
        return "a model without KV caches"
    return None


def _unshared_spec(spec: Any) -> str | None:
    """Why what such a layer keeps is no function of the tokens before it, or not one of ours."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        HiddenStateCacheSpec,
        MambaSpec,
        RSWASpec,
        SlidingWindowSpec,
    )

    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != _ALIGNED:
            return f"recurrent state that is not kept at block boundaries (mode {spec.mamba_cache_mode})"
        return None
    if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return f"KV caches of kind {type(spec).__name__}"
    if isinstance(spec, RSWASpec | HiddenStateCacheSpec) or not spec.prefix_cacheable:
        return f"KV caches of kind {type(spec).__name__}, which depend on more than the tokens before them"
    if spec.tokens_per_state != 1 or getattr(spec, "non_causal", False):
        return "compressed or non-causal KV"
    return None


def kv_heads(specs: Iterable[Any], *, total_heads: int, ranks: int) -> int:
    """``KvGroup.kv_heads`` of a group whose layers a worker sees as ``specs``.

    total_heads: KV heads that the model's configuration names. Where it does not fit what the layers have,
    every rank keeps parts of its own.
    """
    found = {_layer_heads(spec, total_heads=total_heads, ranks=ranks) for spec in specs}
    return found.pop() if len(found) == 1 else 0


def _layer_heads(spec: Any, *, total_heads: int, ranks: int) -> int:
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else 0
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) or spec.max_tp_shards == 1:
        return 1
    if spec.num_kv_heads == max(1, total_heads // ranks):
        return total_heads
    return int(spec.num_kv_heads) * ranks if ranks == 1 or spec.num_kv_heads > 1 else 0


def surely_equal_heads(config: object, *, total_heads: int, ranks: int) -> int:
    """``total_heads`` for ``kv_heads``; 0, no number, where ranks might take unlike heads for copies of one.

    More ranks than heads hold copies. But of a layer with more heads than the rest, as sliding-window layers
    may have (``swa_num_key_value_heads``), each rank has one too, and no two are equal. config: the model's,
    as plain dictionaries and lists.
    """
    return total_heads if total_heads >= ranks or set(_head_counts(config)) <= {total_heads} else 0


def _head_counts(config: object, name: str = "") -> Iterator[int]:
    """Every number of KV heads that it gives, wherever."""
    if isinstance(config, dict):
        for inner, value in config.items():
            yield from _head_counts(value, str(inner))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _head_counts(value, name)
    elif isinstance(config, int) and not isinstance(config, bool) and _HEADS.search(name):
        yield config


def layers_by_group(kv_cache: "KVCacheConfig", registered: Iterable[str]) -> list[list[str]]:
    """The registered layers of each group, as they were registered.

    Of several groups, a layer in none shares the memory of another. One group has all.
    """
    groups = kv_cache.kv_cache_groups
    names = list(registered)
    if len(groups) == 1:
        return [names]
    return [[name for name in names if name in set(group.layer_names)] for group in groups]


def layer_specs(kv_cache: "KVCacheConfig") -> list[list[Any]]:
    """By group, as the process that asks sees them: only workers see every layer's."""
    return [_specs(group) for group in kv_cache.kv_cache_groups]
