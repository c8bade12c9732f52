"""What an engine's allocator takes for a request: blocks, not tokens.

After vLLM 0.32 (``v1/kv_cache_interface.py``, ``v1/core/kv_cache_utils.py``, ``platforms/interface.py``).
Layers that keep the same tokens form groups of one size, short groups are padded, and every group takes whole
blocks of one page size: a window keeps the tokens of a step in flight beside it, and a block more. Where a
layer has recurrent state, a block of attention is made as large as that state, and prefix caching is on.
"""

import enum
from collections import Counter
from dataclasses import dataclass

from kvferry.models.layers import Layer, Span


class Allocator(enum.Enum):
    """How an engine keeps layers of different kinds."""

    GROUPED = "grouped"  # each kind keeps what it needs: vLLM's hybrid KV cache manager, its default
    WHOLE = "whole"  # every attention layer keeps every token: that manager off, or an engine without one


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How an engine rounds.

    block_tokens: tokens of a block. batched_tokens: tokens of a step, vLLM's ``max_num_batched_tokens``.
    """

    block_tokens: int = 16
    batched_tokens: int = 8192
    allocator: Allocator = Allocator.GROUPED


DEFAULT_RULES = EngineRules()
STATE_BLOCKS = 2  # of each recurrent layer: the running state, and the one at the last block's end for reuse
MLA_BLOCK_TOKENS = 128  # what blocks of latents are a multiple of where there is recurrent state beside them

_Kind = tuple[Span, int, int, int]  # span, its tokens, bytes per token, bytes of state


def reserved_bytes(pages: tuple[tuple[Layer, int, int], ...], tokens: int, rules: EngineRules) -> int:
    """What one rank takes for a request of ``tokens`` tokens.

    pages: the layers that keep anything, each with its bytes per token and of state on this rank.
    """
    if any(layer.every > 1 for layer, _, _ in pages):
        return sum(
            _compressed(layer, nbytes, tokens, rules) + STATE_BLOCKS * state for layer, nbytes, state in pages
        )
    kinds = Counter((layer.span, layer.span_tokens, nbytes, state) for layer, nbytes, state in pages)
    if not kinds:
        return 0
    if rules.allocator is Allocator.WHOLE or all(span is Span.FULL for span, _, _, _ in kinds):
        return sum(
            layers * (_blocks(tokens, rules.block_tokens) * rules.block_tokens * nbytes + state)
            for (_, _, nbytes, state), layers in kinds.items()
        )
    block = block_tokens(kinds, rules, latent=any(layer.latent for layer, _, _ in pages))
    page = max(max(nbytes * block, state) for _, _, nbytes, state in kinds)
    size = _group_size(list(kinds.values()))
    total = 0
    for kind, layers in kinds.items():
        total += _blocks(layers, size) * size * page * _kind_blocks(kind, tokens, page, block, rules)
    return total


def _compressed(layer: Layer, nbytes: int, tokens: int, rules: EngineRules) -> int:
    """Whole blocks of a compressing layer or of the window beside it, each of its own page: a lower bound.

    Engines add the compressor's own state and align pages, which is not counted.
    """
    kept = tokens
    if layer.span is Span.WINDOW and rules.allocator is Allocator.GROUPED:
        kept = min(tokens, layer.span_tokens - 1 + rules.batched_tokens + rules.block_tokens)
    return _blocks(kept, rules.block_tokens * layer.every) * rules.block_tokens * nbytes


def block_tokens(kinds: Counter[_Kind], rules: EngineRules, *, latent: bool) -> int:
    """Tokens of an attention block: raised, in whole steps, until it holds a layer's state."""
    state = max(state for _, _, _, state in kinds)
    narrowest = min((nbytes for _, _, nbytes, _ in kinds if nbytes), default=0)
    if not state or not narrowest:
        return rules.block_tokens
    step = max(rules.block_tokens, MLA_BLOCK_TOKENS) if latent else rules.block_tokens
    return _blocks(state, step * narrowest) * step


def _group_size(counts: list[int]) -> int:
    """Layers of a group: as many as the rarest kind has, or the commonest where that is under 1.5 times."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _kind_blocks(kind: _Kind, tokens: int, page: int, base: int, rules: EngineRules) -> int:
    span, length, nbytes, _ = kind
    if span is Span.NONE:
        return STATE_BLOCKS
    # A narrower page is filled with more tokens where it divides the widest, and padded where it does not.
    own = nbytes * base
    block = base * (page // own) if page % own == 0 else base
    whole = _blocks(tokens, block)
    if span is Span.WINDOW:
        return min(whole, _blocks(length - 1 + rules.batched_tokens, block) + 1)
    if span is Span.CHUNK:
        return min(whole, _blocks(length + rules.batched_tokens, block))
    return whole


def _blocks(amount: int, size: int) -> int:
    return -(-amount // size)
