"""What is said to be reserved, beside what vLLM's own allocator takes for the same layers."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.models.catalogue import find_model
from kvferry.models.layers import Layer, Span
from kvferry.models.precision import kv_dtype
from kvferry.models.reserve import EngineRules
from kvferry.models.sizes import Sizing, rank_heads, state_bytes, token_bytes

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RULES = EngineRules(block_tokens=16, batched_tokens=8192)


def attention_spec(layer: Layer, block: int, tensor: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    if layer.latent is not None:
        size = layer.latent.latent_dim + layer.latent.rope_dim
        return vllm.MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=torch.bfloat16)
    heads = layer.heads
    assert heads is not None
    shape = {
        "block_size": block,
        "num_kv_heads": rank_heads(heads.kv_heads, tensor),
        "head_size": heads.key_dim,
        "head_size_v": heads.value_dim,
        "dtype": torch.bfloat16,
    }
    if layer.span is Span.WINDOW:
        return vllm.SlidingWindowSpec(**shape, sliding_window=layer.span_tokens)
    if layer.span is Span.CHUNK:
        del shape["head_size_v"]
        return vllm.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=layer.span_tokens)
    return vllm.FullAttentionSpec(**shape)


def specs_of(layers: tuple[Layer, ...], tensor: int) -> dict[str, Any]:
    """As a model runner would give them, with the block that vLLM's platform chooses beside a state."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    dtype = kv_dtype("bf16")
    state = max(state_bytes(layer, tensor) for layer in layers)
    block = RULES.block_tokens
    if state:
        step = 128 if any(layer.latent for layer in layers) else block
        per_token = min(token_bytes(layer, dtype, tensor) for layer in layers if layer.span is Span.FULL)
        block = step * -(-state // (step * per_token))
    specs: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        if layer.state is not None:
            specs[f"l{index}"] = MambaSpec(
                block_size=block,
                shapes=((state_bytes(layer, tensor),),),
                dtypes=(torch.uint8,),
                page_size_padded=block * per_token,
                mamba_cache_mode="align",
            )
        elif layer.keeps:
            specs[f"l{index}"] = attention_spec(layer, block, tensor)
    return specs


def vllm_bytes(layers: tuple[Layer, ...], tokens: int, tensor: int) -> int:
    from vllm.v1.core import kv_cache_utils

    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=tokens),
        max_in_flight_tokens=RULES.batched_tokens,
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=RULES.batched_tokens
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align",
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs_of(layers, tensor))
    return kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b", "gpt-oss-120b", "gemma-2-27b", "gemma-3-27b", "gemma-3n-e4b", "gemma-4-31b",
        "llama-4-scout", "mimo-v2-flash", "command-a-03-2025", "qwen3.5-27b",
        "nemotron-3-nano-30b-a3b", "granite-4.0-h-small", "kimi-k3", "deepseek-v3",
    ],
)  # fmt: skip
def test_the_engine_reserves_what_is_said(name: str, tensor: int) -> None:
    model = find_model(name)
    if any(layer.heads and layer.heads.kv_heads < tensor for layer in model.layers):
        tensor = 2
    sizing = Sizing(model, kv_dtype("bf16"), tensor=tensor, engine=RULES)
    for tokens in (32_768, 131_072):
        assert sizing.request(tokens).gpu_reserved == vllm_bytes(model.layers, tokens, tensor)
