"""The reference values of 34 models, every one to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.models.catalogue import find_model
from kvferry.models.precision import kv_dtype
from kvferry.models.sizes import Sizing

VECTORS = Path(__file__).parents[3] / "shared" / "data" / "geometry_vectors.json"
# Their values of the recurrent state were left open: 0 stands for "not given" there.
STATE_NOT_GIVEN = {"Qwen3-Next-80B-A3B", "Granite-4.0-H-Small"}


def _vectors() -> list[dict[str, Any]]:
    return json.loads(VECTORS.read_text())["vectors"] if VECTORS.exists() else []


@pytest.mark.skipif(not VECTORS.exists(), reason="the reference values are not on this machine")
@pytest.mark.parametrize("vector", _vectors(), ids=lambda vector: vector["model"])
def test_a_model_of_the_reference_is_exact(vector: dict[str, Any]) -> None:
    sizing = Sizing(find_model(vector["model"]), kv_dtype("bf16"))
    assert sizing.full_token_bytes == vector["bytes_per_token_full_layers"]
    assert sizing.bounded_token_bytes == vector["bytes_per_token_window_layers"]
    assert sizing.spans == ((vector["window"],) if vector["window"] else ())
    for tokens, nbytes in vector["kv_bytes_at"].items():
        assert sizing.request(int(tokens)).kv == nbytes
    if vector["model"] not in STATE_NOT_GIVEN:
        assert sizing.state_bytes == vector["fixed_state_bytes_per_seq"]
