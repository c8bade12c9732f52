"""What each architecture keeps, beside what transformers takes for the same config."""

import json
from collections import Counter
from typing import Any

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.models.layers import Span
from kvferry.models.reading import READERS, read_model

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SPANS = {"full_attention": Span.FULL, "sliding_attention": Span.WINDOW, "chunked_attention": Span.CHUNK}


# Their code comes with their checkpoints, or with an engine.
OWN_CODE = {
    "aquila", "arctic", "baichuan", "bailing_hybrid", "bailing_moe", "bailing_moe_v2", "chatglm",
    "deci", "deepseek", "deepseek_ref", "dots3_note", "ernie4_5_moe_vl", "exaone", "hunyuan",
    "inkling_model", "internlm", "internlm2", "internlm3", "kimi_k2", "mimo", "mimo_v2", "minicpm",
    "minimax_m1", "minimax_m3", "minimax_text_01", "molmo", "nemotron-nas", "openelm", "orion",
    "pangu_ultra_moe", "phi3_v", "phi4mm", "qwen", "sarvam_mla", "step3_text", "xverse",
}  # fmt: skip
# Their layers differ in heads, or the fields mean something else: test_caches.py compares the cache itself.
BY_LAYER = {"falcon", "gemma4", "gemma4_text", "gemma4_unified_text", "inkling_mm_model", "inkling_text"}


@pytest.mark.parametrize("model_type", sorted(set(READERS) - OWN_CODE - BY_LAYER))
def test_layers_and_heads_are_those_of_the_reference_code(model_type: str) -> None:
    """Of its default config, which is refused where it lacks what published ones have."""
    from transformers import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[model_type]()
    fields = json.loads(config.to_json_string(use_diff=False))
    try:
        model = read_model(fields, name=model_type)
    except MisconfiguredError as error:
        assert any(word in str(error) for word in ("the config has no ", "there is no head_dim"))
        return
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    bounded = not 0 < model.max_context <= window
    kinds = Counter(SPANS[kind] for kind in getattr(text, "layer_types", None) or () if kind in SPANS)
    shared = sum(layer.shares_layer is not None for layer in model.layers)
    if kinds and bounded and not shared:
        assert Counter(layer.span for layer in model.layers if layer.heads or layer.latent) == kinds
    width = getattr(text, "head_dim", None)
    for layer in model.layers:
        if layer.heads is not None:
            assert width in (None, layer.heads.key_dim)
            assert layer.heads.kv_heads == (
                getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            )
