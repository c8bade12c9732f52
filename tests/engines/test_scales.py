"""Quantised KV is named by its scales' values, layer by layer; what they are must be known."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.engines.vllm.facts import _scales
from kvferry.errors import MisconfiguredError


def _engine(dtype: str, **cache: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype, **cache))


def _layer(k: float, v: float) -> Any:
    return SimpleNamespace(
        _k_scale=np.array(k, dtype=np.float32), _v_scale=np.array([v, 2 * v], dtype=np.float32)
    )


LAYERS = {"first": _layer(0.5, 1.0), "second": _layer(0.25, 2.0)}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_every_layers_scales_are_told(dtype: str) -> None:
    assert dict(_scales(_engine(dtype), LAYERS)) == {
        "first.k": (0.5,),
        "first.v": (1.0, 2.0),
        "second.k": (0.25,),
        "second.v": (2.0, 4.0),
    }


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_kv_as_computed_has_none(dtype: str) -> None:
    assert _scales(_engine(dtype), LAYERS) == ()


def test_a_layer_without_scales_and_scales_that_requests_decide_are_refused() -> None:
    with pytest.raises(MisconfiguredError, match="third"):
        _scales(_engine("fp8"), {"third": SimpleNamespace(_k_scale=None, _v_scale=None)})
    with pytest.raises(MisconfiguredError, match="calculate_kv_scales"):
        _scales(_engine("fp8", calculate_kv_scales=True), LAYERS)
