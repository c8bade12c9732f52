"""What is read from a config, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries, find_model
from kvferry.models.layers import Heads, Span
from kvferry.models.precision import kv_dtype
from kvferry.models.reading import READERS, read_model
from kvferry.models.sizes import Sizing

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def read(config: dict[str, Any]) -> Sizing:
    return Sizing(read_model(config, name="m"), kv_dtype("bf16"))


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field not in fields}


def test_an_unknown_model_type_is_refused_by_name() -> None:
    with pytest.raises(MisconfiguredError, match=r"'llamma' is not known.*did you mean llama"):
        read({**LLAMA, "model_type": "llamma"})


def test_a_config_without_a_model_type_is_refused_with_what_to_do() -> None:
    with pytest.raises(MisconfiguredError, match=r"no model_type.*--set model_type="):
        read(without(LLAMA, "model_type"))


@pytest.mark.parametrize("field", sorted(set(LLAMA) - {"model_type"}))
def test_each_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(MisconfiguredError, match=f"the config has no {field};.*--set {field}="):
        read(without(LLAMA, field))


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(MisconfiguredError, match="no num_hidden_layers, num_key_value_heads, hidden_size"):
        read(without(LLAMA, "num_hidden_layers", "num_key_value_heads", "hidden_size"))


def test_of_every_model_of_the_catalogue_no_field_that_changes_the_size_can_go_unnoticed() -> None:
    """Leaving a field out is refused, changes nothing, or is said in a note."""
    for entry in entries():
        whole = read_model(entry.config, name=entry.name)
        for field in entry.config:
            try:
                less = read_model(without(dict(entry.config), field), name=entry.name)
            except MisconfiguredError:
                continue
            harmless = less.layers == whole.layers or field in {
                # Their absence says something by itself: no window, no sharing, no indexer, nothing wider.
                "sliding_window", "num_kv_shared_layers", "index_head_dim", "use_cla",
                "num_global_key_value_heads", "index_topk_freq",
                # Without it a window that is longer is one all the same: nothing differs up to its length.
                "max_position_embeddings",
                # Where it is left out, the hidden size decides, and a note says so.
                "head_dim", "attention_head_dim",
            }  # fmt: skip
            assert harmless or set(less.notes) - set(whole.notes), (entry.name, field)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": "8"},
        {"num_key_value_heads": -1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": True},
        {"head_dim": 1.5},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["a", "b", "c", "d"]},
        {"hidden_size": 500, "num_attention_heads": 7},
        {"is_encoder_decoder": True},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 0, "head_dim": 64},
        {"num_attention_heads": 2, "num_key_value_heads": 4},
    ],
)
def test_values_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MisconfiguredError):
        read({**LLAMA, **change})


@pytest.mark.parametrize(
    ("field", "bound"), [("num_hidden_layers", 4096), ("head_dim", 1 << 24), ("num_key_value_heads", 1 << 24)]
)
@pytest.mark.parametrize("value", [0, 10**11, 10**23])
def test_a_number_beyond_its_bounds_is_refused_with_both(field: str, bound: int, value: int) -> None:
    with pytest.raises(MisconfiguredError, match=f"{field}: {value} is outside 1 to {bound}$"):
        read({**LLAMA, field: value})


def test_a_width_of_state_that_the_config_cannot_say_is_noted() -> None:
    assert any("float32" in note for note in find_model("kimi-k3").notes)


def test_the_head_width_of_the_config_counts_not_the_hidden_size() -> None:
    assert read({**LLAMA, "head_dim": 128}).full_token_bytes == 4 * 2 * 2 * 128 * 2
    assert read(LLAMA).full_token_bytes == 4 * 2 * 2 * 64 * 2


def test_without_a_head_width_the_hidden_size_decides_only_where_it_does_in_the_architecture() -> None:
    with pytest.raises(MisconfiguredError, match="no head_dim"):
        read({**LLAMA, "model_type": "qwen3"})


def test_the_text_part_of_a_nested_config_is_read() -> None:
    text = {**LLAMA, "model_type": "qwen3_vl_text", "head_dim": 64}
    nested = {"model_type": "qwen3_vl", "text_config": text}
    assert read(nested).full_token_bytes == read(LLAMA).full_token_bytes
    assert (
        read({"model_type": "llava", "text_config": LLAMA}).full_token_bytes == read(LLAMA).full_token_bytes
    )


def test_a_window_that_is_switched_off_is_none() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}
    off = read({**qwen, "use_sliding_window": False})
    assert off.bounded_token_bytes == 0
    assert any("use_sliding_window is false" in note for note in off.model.notes)
    on = read({**qwen, "use_sliding_window": True})
    assert [layer.span for layer in on.model.layers] == [Span.FULL] * 2 + [Span.WINDOW] * 2


def test_a_window_no_shorter_than_the_longest_sequence_is_none() -> None:
    phi = {**LLAMA, "model_type": "phi3", "sliding_window": 4096, "max_position_embeddings": 4096}
    assert read(phi).bounded_token_bytes == 0
    assert read({**phi, "sliding_window": 2047}).spans == (2047,)


def test_sparse_published_configs_of_gemma_3_take_the_architectures_defaults_and_say_so() -> None:
    sparse = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    sizing = read(sparse)
    assert sizing.model.layers[0].heads == Heads(4, 256, 256)
    assert sum(layer.span is Span.FULL for layer in sizing.model.layers) == 5
    assert any("head_dim: 256" in note for note in sizing.model.notes)


def test_keys_and_values_may_differ_in_width() -> None:
    layer = find_model("mimo-v2-flash").layers[0]
    assert layer.heads == Heads(4, 192, 128)


def test_layers_that_share_kv_name_the_layer_they_read() -> None:
    model = find_model("gemma-3n-e4b")
    assert [layer.shares_layer for layer in model.layers[20:25]] == [18, 18, 18, 18, 19]
    hunyuan = find_model("hunyuan-large")
    assert [layer.shares_layer for layer in hunyuan.layers[:4]] == [None, 0, None, 2]


def test_sliding_layers_may_have_heads_of_their_own() -> None:
    other = {"attention_type": "sliding_attention", "num_attention_groups": 4, "head_dim": 32}
    config = {
        "model_type": "step3p5",
        "num_hidden_layers": 2,
        "num_attention_groups": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    assert [layer.heads for layer in read({**config, "attention_other_setting": other}).model.layers] == [
        Heads(8, 128, 128),
        Heads(4, 32, 32),
    ]
    assert {layer.heads for layer in read(config).model.layers} == {Heads(8, 128, 128)}


def test_short_convolutions_are_state() -> None:
    config = {**LLAMA, "model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [1]}
    sizing = read(config)
    assert sizing.state_bytes == 3 * 512 * 2 * 2
    assert sizing.full_token_bytes == 2 * 2 * 64 * 2


def test_an_indexer_shared_over_layers_is_counted_where_it_is_kept() -> None:
    model = find_model("glm-5.3")
    assert sum(layer.index is not None for layer in model.layers) == 21


def test_a_replaced_field_goes_to_the_text_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": LLAMA}))
    model = find_model(str(tmp_path), {"num_key_value_heads": 8})
    assert model.layers[0].heads == Heads(8, 64, 64)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MisconfiguredError):
        find_model(str(tmp_path))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfiguredError, match="cannot read"):
        find_model(str(tmp_path))


def test_the_catalogue_is_large_dated_and_names_public_sources() -> None:
    assert len(entries()) >= 40
    assert len({entry.name for entry in entries()}) == len(entries())
    for entry in entries():
        assert entry.source.startswith("https://huggingface.co/")
        assert entry.read.startswith("2026-")
        assert entry.via
        assert find_model(entry.name) == find_model(entry.repo) or entry.repo != entry.name
        assert entry.config["model_type"] in READERS


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(MisconfiguredError, match=r"did you mean llama-3\.1-8b"):
        find_model("llama-3.1-8bb")
