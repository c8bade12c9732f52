"""Weights that a token uses, where that is fewer than the model has (mixtures of experts).

From the models' own cards, as their makers round them; a name that ends like ``-a22b`` says it itself.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvferry.models.layers import Model

ACTIVE = {
    "deepseek-r1": 37e9,
    "deepseek-v3": 37e9,
    "deepseek-v3.2": 37e9,
    "deepseek-v4-flash": 13e9,
    "deepseek-v4-pro": 49e9,
    "glm-5": 40e9,
    "glm-5.1": 40e9,
    "glm-5.2": 40e9,
    "gpt-oss-120b": 5.1e9,
    "gpt-oss-20b": 3.6e9,
    "granite-4.0-h-small": 9e9,
    "hunyuan-large": 52e9,
    "kimi-k2": 32e9,
    "kimi-k2.5": 32e9,
    "kimi-k2.6": 32e9,
    "llama-4-maverick": 17e9,
    "llama-4-scout": 17e9,
    "mimo-v2-flash": 15e9,
    "minimax-m2": 10e9,
    "minimax-m2.1": 10e9,
    "minimax-m2.5": 10e9,
    "minimax-m2.7": 10e9,
    "minimax-m3": 23e9,
    "mixtral-8x22b": 39e9,
    "mixtral-8x7b": 12.9e9,
}
# Architectures that are mixtures of experts, whether or not a trimmed config still says so.
_EXPERTS = re.compile(r"moe|deepseek_v|kimi|gpt_oss|mixtral|llama4|minimax|mimo_v2|longcat|dots1|step3|pangu")
_IN_NAME = re.compile(r"-a([0-9]+(?:\.[0-9]+)?)b(?:-|$)")
_EXPERT_FIELD = re.compile(r"^(?:n_routed_experts|num_(?:local_)?experts|moe_num_experts)$")
QUERY_HEADS = ("num_attention_heads", "num_heads", "n_head", "num_query_heads")


def has_experts(model: Model, config: Mapping[str, Any]) -> bool:
    """Whether a token uses a part of the weights only."""
    fields = (value for name, value in config.items() if _EXPERT_FIELD.match(name))
    return (
        model.name in ACTIVE
        or _IN_NAME.search(model.name.lower()) is not None
        or _EXPERTS.search(model.model_type) is not None
        or any(isinstance(value, int) and value > 1 for value in fields)
    )


def active_parameters(model: Model, config: Mapping[str, Any], weights: float) -> float | None:
    """Weights that a token uses; None where nothing says it. weights: how many there are."""
    if not has_experts(model, config):
        return weights or None
    if (named := _IN_NAME.search(model.name.lower())) is not None:
        return float(named[1]) * 1e9
    return ACTIVE.get(model.name)


def query_heads(config: Mapping[str, Any]) -> int:
    """Heads that ask; 0 where the config does not say."""
    for name in QUERY_HEADS:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0
