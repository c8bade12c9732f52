"""What each kind of architecture keeps, beside the cache that transformers fills for the same config.

The models have no weights and compute nothing (torch's meta device): only the shapes of their caches count.
"""

import json
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import pytest

from kvferry.models.layers import Layer, Model, Span
from kvferry.models.reading import read_model

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOKENS = 20


class Kept(NamedTuple):
    """Elements of one layer. window: 0 where it keeps all."""

    per_token: int
    window: int
    conv_channels: int
    recurrent: int


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 4, "head_dim": 64}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("phi3", {"sliding_window": 64}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    ("gemma3_text", {"num_hidden_layers": 8}),
    ("gemma4_text", {"num_hidden_layers": 6, "num_global_key_value_heads": 2, "attention_k_eq_v": True}),
    ("cohere2", {"num_hidden_layers": 9}),
    ("llama4_text", {"num_hidden_layers": 5}),
    ("gpt_oss", {}),
    ("exaone4", {"sliding_window": 64, "num_hidden_layers": 8}),
    ("falcon", {"multi_query": False}),
    ("gpt2", {"n_layer": 2}),
    ("jamba", {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1}),
    ("bamba", {"attn_layer_indices": [1, 3]}),
    ("falcon_h1", {}),
    ("zamba2", {"num_hidden_layers": 54}),
    ("qwen3_next", {"num_hidden_layers": 8}),
    ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    ("inkling_text", {"num_hidden_layers": 6, "local_layer_ids": [0, 1, 4]}),
    ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"] * 2}),
    ("mamba2", {}),
]


@pytest.mark.parametrize(("model_type", "fields"), CASES, ids=[name for name, _ in CASES])
def test_layers_keep_what_the_reference_code_keeps(model_type: str, fields: dict[str, Any]) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    default = type(CONFIG_MAPPING[model_type]())
    config = default(**{"num_hidden_layers": len(fields.get("layer_types", [0] * 4))} | fields)
    read = read_model(json.loads(config.to_json_string(use_diff=False)), name=model_type)
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model = AutoModel.from_config(config).eval()
        done = model(input_ids=torch.ones((1, TOKENS), dtype=torch.long), use_cache=True)
    filled = done.past_key_values if "past_key_values" in done else done.cache_params
    assert list(ours(read)) == [theirs(layer) for layer in filled.layers]


def ours(model: Model) -> Iterator[Kept]:
    """Of each layer of the config, all of its entries together."""
    for number in range(model.layer_count):
        entries = [layer for at, layer in zip(model.numbers, model.layers, strict=True) if at == number]
        heads = [layer for layer in entries if layer.heads is not None]
        states = [layer.state for layer in entries if layer.state is not None]
        yield Kept(
            per_token=sum(map(elements, heads)),
            window=max((layer.span_tokens for layer in heads if layer.span is not Span.FULL), default=0),
            conv_channels=sum(state.conv_channels for state in states),
            recurrent=sum(state.heads * state.rows * state.columns for state in states),
        )


def elements(layer: Layer) -> int:
    assert layer.heads is not None
    return layer.heads.kv_heads * (layer.heads.key_dim + layer.heads.value_dim)


def theirs(layer: Any) -> Kept:
    """Convolutions keep one tap more there: the newest input, which an engine has at hand."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    conv, recurrent = (getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states"))
    held = [part for part in (keys, values) if part is not None and part.ndim == 4]
    return Kept(
        per_token=sum(part.shape[1] * part.shape[3] for part in held),
        window=getattr(layer, "sliding_window", None) or 0,
        conv_channels=sum(prod(part.shape[1:-1]) for part in conv.values() if part is not None),
        recurrent=sum(prod(part.shape) for part in recurrent.values() if part is not None),
    )
