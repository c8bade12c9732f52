"""Small random models for tests of the transformers engine, and their greedy answers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvferry.engines.transformers import PrefixCache
from kvferry.local import LocalNode

VOCABULARY = 512
NEW_TOKENS = 12

POOL = "64MiB"
PATIENCE_S = 30.0  # no call fails for a busy host

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}


def opener(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, *, chunk_tokens: int
) -> Callable[..., PrefixCache]:
    """Opens prefix caches that share one pool; the stack closes them."""
    monkeypatch.setattr("kvferry.engines.transformers.prefix.ANSWER_S", PATIENCE_S)
    monkeypatch.setattr("kvferry.client.copying.RESERVE_S", PATIENCE_S)
    local = LocalNode(pool=POOL)
    stack.callback(local.close)

    def open_one(model: Any, **options: Any) -> PrefixCache:
        options = {"socket": local.socket_path, "chunk_tokens": chunk_tokens, **options}
        cache = PrefixCache(model, **options)
        stack.callback(cache.close)
        assert cache._store.wait_connected(60.0)
        return cache

    return open_one


def make(name: str, config: Any) -> Any:
    """A model of that class whose random output depends on its input."""
    torch.manual_seed(7)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model.eval()


def llama(**changes: Any) -> Any:
    """Grouped heads, in float32."""
    heads = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    return make("LlamaForCausalLM", transformers.LlamaConfig(**{**_SMALL, **heads, **changes}))


def gemma(**changes: Any) -> Any:
    """Five sliding layers to one of full attention, in bfloat16."""
    heads = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    options = {**_SMALL, **heads, "sliding_window": 100, **changes}
    return make("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**options)).to(torch.bfloat16)


def deepseek() -> Any:
    """Latent attention as transformers caches it: keys and values of different sizes."""
    config = transformers.DeepseekV3Config(
        **_SMALL,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=24,
    )
    return make("DeepseekV3ForCausalLM", config)


def mistral() -> Any:
    """Sliding windows in every layer."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**{**_SMALL, **heads, "sliding_window": 100})
    return make("MistralForCausalLM", config)


def eager() -> Any:
    """Another attention implementation, in float16."""
    return llama(attn_implementation="eager").to(torch.float16)


def seeing() -> Any:
    """Gemma 3 with eyes: a prompt without the ids 5 to 7 is text."""
    text = {**_SMALL, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, "head_dim": 32, "sliding_window": 100},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    return make("Gemma3ForConditionalGeneration", config)


def prompt(tokens: int, *, seed: int = 1) -> Any:
    """Random token ids from 8 on, [1, tokens]; equal seeds begin alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, VOCABULARY, (1, 2048), generator=generator)[:, :tokens]


def own_prefix(model: Any, ids: Any, tokens: int, cache: Any = None) -> Any:
    """What the model computes for the first tokens, in its own cache."""
    if cache is None:
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :tokens], past_key_values=cache, use_cache=True)
    return cache


def answer(model: Any, ids: Any, cache: Any) -> tuple[Any, Any]:
    """Tokens and logits of a greedy continuation."""
    given = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return given.sequences, torch.stack(given.logits)


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Bit for bit."""
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gemma": gemma,
    "deepseek": deepseek,
    "mistral": mistral,
    "eager": eager,
    "seeing": seeing,
}
