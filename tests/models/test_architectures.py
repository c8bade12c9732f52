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


# Their code comes with their checkpoints.
OWN_CODE = {
    "aquila", "baichuan", "deci", "exaone", "hunyuan", "internlm2", "internlm3", "kimi_k2", "mimo", "mimo_v2",
    "minicpm", "minimax_m3", "nemotron-nas", "pangu_ultra_moe", "xverse",
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(set(READERS) - OWN_CODE))
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
        assert Counter(layer.span for layer in model.layers if layer.heads) == kinds
    width = getattr(text, "head_dim", None)
    for layer in model.layers:
        if layer.heads is not None:
            assert width in (None, layer.heads.key_dim)
            assert layer.heads.kv_heads == (
                getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            )
