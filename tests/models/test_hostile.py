"""Configs that make no sense: a model or one of our errors, never anything else."""

import contextlib
import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries
from kvferry.models.overrides import SHAPING
from kvferry.models.precision import kv_dtype
from kvferry.models.reading import READERS, read_model
from kvferry.models.sizes import Sizing

SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
CONFIGS = [dict(entry.config) for entry in entries()]


@given(st.data())
def test_one_field_of_a_real_config_may_hold_anything(data: st.DataObject) -> None:
    config: dict[str, Any] = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    field = data.draw(st.sampled_from(sorted(config)))
    value = config[field]
    if isinstance(value, list) and value and data.draw(st.booleans()):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(VALUES)
    elif isinstance(value, dict) and value and data.draw(st.booleans()):
        value[data.draw(st.sampled_from(sorted(value)))] = data.draw(VALUES)
    else:
        config[field] = data.draw(VALUES)
    with contextlib.suppress(MisconfiguredError):
        sizing = Sizing(
            read_model(config, name="m"), kv_dtype("fp8"), tensor=data.draw(st.sampled_from([1, 2, 8]))
        )
        assert sizing.request(1000).gpu_reserved >= sizing.request(1000).gpu_live > 0


FIELDS = {field for config in CONFIGS for field in config} | set(SHAPING) | {
    "attention_window_size", "block_types", "conv1d_width", "conv_kernel", "d_model", "expand", "kv_channels",
    "linear_head_dim", "linear_num_heads", "mamba_d_conv", "mamba_d_head", "mamba_expand", "mamba_n_groups",
    "mamba_n_heads", "multi_query", "n_head", "n_layer", "num_heads", "per_layer_config", "state_size",
}  # fmt: skip


@given(
    st.sampled_from(sorted(READERS)),
    st.dictionaries(st.sampled_from(sorted(FIELDS - {"model_type"})), VALUES, max_size=12),
)
def test_any_fields_of_any_architecture(model_type: str, fields: dict[str, Any]) -> None:
    with contextlib.suppress(MisconfiguredError):
        read_model({**fields, "model_type": model_type}, name="m")


@given(
    st.dictionaries(st.sampled_from(["model_type", "text_config", "thinker_config", "llm_config"]), VALUES)
)
def test_nothing_at_all(config: dict[str, Any]) -> None:
    with contextlib.suppress(MisconfiguredError):
        read_model(config, name="m")
