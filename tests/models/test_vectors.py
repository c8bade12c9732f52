"""The reference values of 34 models, to the byte: those kept here, and all of a file if there is one.

The file is named by the environment variable KVFERRY_TEST_DATA: a directory with ``geometry_vectors.json``.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.models.catalogue import find_model
from kvferry.models.precision import kv_dtype
from kvferry.models.sizes import Sizing

NAMED = os.environ.get("KVFERRY_TEST_DATA")
DATA = Path(NAMED) if NAMED else Path(__file__).parents[3] / "shared" / "data"
VECTORS = DATA / "geometry_vectors.json"
# Their values of the recurrent state were left open: 0 stands for "not given" there.
STATE_NOT_GIVEN = {"Qwen3-Next-80B-A3B", "Granite-4.0-H-Small"}


class Known(NamedTuple):
    """Bytes in 16 bits, one copy. window: tokens, 0 where there is none. state: None where nobody says."""

    full_token: int
    window_token: int
    window: int
    kv_at_128k: int
    state: int | None


KNOWN = {
    "llama-3.1-8b": Known(131_072, 0, 0, 17_179_869_184, 0),
    "llama-3.1-70b": Known(327_680, 0, 0, 42_949_672_960, 0),
    "llama-3.1-405b": Known(516_096, 0, 0, 67_645_734_912, 0),
    "qwen3-0.6b": Known(114_688, 0, 0, 15_032_385_536, 0),
    "qwen3-32b": Known(262_144, 0, 0, 34_359_738_368, 0),
    "qwen3-30b-a3b": Known(98_304, 0, 0, 12_884_901_888, 0),
    "qwen3-coder-480b-a35b": Known(253_952, 0, 0, 33_285_996_544, 0),
    "qwen3-vl-8b": Known(147_456, 0, 0, 19_327_352_832, 0),
    "qwen2.5-7b": Known(57_344, 0, 0, 7_516_192_768, 0),
    "qwen2.5-72b": Known(327_680, 0, 0, 42_949_672_960, 0),
    "mixtral-8x7b": Known(131_072, 0, 0, 17_179_869_184, 0),
    "minimax-m3": Known(137_472, 0, 0, 18_018_729_984, 0),
    "command-r-v01": Known(1_310_720, 0, 0, 171_798_691_840, 0),
    "deepseek-v3": Known(70_272, 0, 0, 9_210_691_584, 0),
    "deepseek-v3.2": Known(85_888, 0, 0, 11_257_511_936, 0),
    "glm-5.2": Known(95_232, 0, 0, 12_482_248_704, 0),
    "kimi-k3": Known(27_648, 0, 0, 3_623_878_656, 449_372_160),
    "gpt-oss-120b": Known(36_864, 36_864, 128, 4_836_556_800, 0),
    "gemma-3-27b": Known(81_920, 425_984, 1024, 11_173_625_856, 0),
    "gemma-3n-e4b": Known(8_192, 32_768, 512, 1_090_519_040, 0),
    "gemma-4-31b": Known(81_920, 819_200, 1024, 11_576_279_040, 0),
    "mimo-v2-flash": Known(23_040, 199_680, 128, 3_045_457_920, 0),
    "command-a-03-2025": Known(65_536, 196_608, 4096, 9_395_240_960, 0),
    "llama-4-scout": Known(49_152, 147_456, 8192, 7_650_410_496, 0),
    "qwen3.5-27b": Known(65_536, 0, 0, 8_589_934_592, 153_944_064),
    "nemotron-3-nano-30b-a3b": Known(6_144, 0, 0, 805_306_368, 49_082_368),
    "llama-3.3-nemotron-super-49b": Known(200_704, 0, 0, 26_306_674_688, 0),
    "mistral-small-24b-2501": Known(163_840, 0, 0, 21_474_836_480, 0),
    "mistral-7b-v0.1": Known(0, 131_072, 4096, 536_870_912, 0),
    "gemma-2-27b": Known(188_416, 188_416, 4096, 25_467_813_888, 0),
    "qwen3-next-80b-a3b": Known(24_576, 0, 0, 3_221_225_472, None),
    "granite-4.0-h-small": Known(16_384, 0, 0, 2_147_483_648, None),
    "hunyuan-large": Known(131_072, 0, 0, 17_179_869_184, 0),
    "phi-3-mini-128k": Known(393_216, 0, 0, 51_539_607_552, 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_keeps_the_bytes_it_is_known_for(name: str) -> None:
    sizing, known = Sizing(find_model(name), kv_dtype("bf16")), KNOWN[name]
    assert sizing.full_token_bytes == known.full_token
    assert sizing.bounded_token_bytes == known.window_token
    assert sizing.spans == ((known.window,) if known.window else ())
    assert sizing.request(131_072).kv == known.kv_at_128k
    if known.state is not None:
        assert sizing.state_bytes == known.state


def _vectors() -> list[dict[str, Any]]:
    """A directory that was named has to have them; without one, those kept above are all."""
    if not NAMED and not VECTORS.exists():
        return []
    vectors: list[dict[str, Any]] = json.loads(VECTORS.read_text())["vectors"]
    return vectors


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
