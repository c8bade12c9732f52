"""What a config says beside its architecture's usual fields: single layers, other names, the unread."""

from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import MisconfiguredError
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
    "max_position_embeddings": 4096,
}
MLA = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "hidden_size": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
KDA = {"linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}


def read(config: dict[str, Any]) -> Sizing:
    return Sizing(read_model(config, name="m"), kv_dtype("bf16"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 512),
        ("sliding_window", 1024),
        ("sliding_window", [None, 1024, 1024, 1024]),
        ("num_kv_shared_layers", 2),
        ("attention_chunk_size", 128),
        ("index_head_dim", 128),
        ("v_head_dim", 32),
        ("full_attention_interval", 2),
        ("compress_ratios", [4, 4, 4, 4]),
        ("linear_attn_config", {"num_heads": 1}),
        ("cross_attention_layers", [1]),
    ],
)
def test_a_field_that_shapes_the_cache_and_is_not_read_is_refused(field: str, value: object) -> None:
    with pytest.raises(MisconfiguredError, match=f"the config has {field}, .*--set {field}=null"):
        read({**LLAMA, field: value})


@pytest.mark.parametrize(
    "harmless",
    [
        {"kv_lora_rank": None, "num_kv_shared_layers": 0, "use_cla": False, "compress_ratios": []},
        {"sliding_window": 4096},
        {"sliding_window": None},
        {"attn_type_list": [1, 1, 1, 1]},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 512},
    ],
)
def test_a_field_that_says_nothing_changes_nothing(harmless: dict[str, Any]) -> None:
    assert read({**LLAMA, **harmless}).full_token_bytes == read(LLAMA).full_token_bytes


def test_fields_of_single_layers_take_the_place_of_common_ones() -> None:
    found = read(
        {**LLAMA, "per_layer_config": {"1": {"num_key_value_heads": 4}, "03": {"head_dim": 128, "ffn": 7}}}
    )
    assert [layer.heads for layer in found.model.layers] == [
        Heads(2, 64, 64), Heads(4, 64, 64), Heads(2, 64, 64), Heads(2, 128, 128),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"9": {"head_dim": 1}}, "changes layer 9"),
        ({"x": {"head_dim": 1}}, "'x', which is no layer"),
        ({"1": {"skip": ["attention"]}}, "gives layer 1 a skip"),
        ({"1": {"sliding_window": 8}}, "gives layer 1 a sliding_window"),
        ({"1": {"head_dim": 0}}, "head_dim: 0 is outside"),
        ([1], "an object with fields is needed"),
    ],
)
def test_fields_of_single_layers_that_cannot_be_meant_are_refused(given: object, words: str) -> None:
    with pytest.raises(MisconfiguredError, match=words):
        read({**LLAMA, "per_layer_config": given})


def test_layers_may_have_heads_and_windows_of_their_own_number() -> None:
    found = read({**LLAMA, "num_key_value_heads": [2, 4, 8, 0]}).model.layers
    assert [layer.heads and layer.heads.kv_heads for layer in found] == [2, 4, 8, None]
    with pytest.raises(MisconfiguredError, match="3 entries for 4 layers"):
        read({**LLAMA, "num_key_value_heads": [2, 4, 8]})
    slides = {
        **LLAMA, "model_type": "exaone_moe", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 64, "sliding_windows": [16, 32, 64, 0],
    }  # fmt: skip
    assert [layer.span_tokens for layer in read(slides).model.layers] == [16, 32, 64, 0]


def test_two_names_of_one_field_must_agree() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 256}
    assert read(gpt2).full_token_bytes == 2 * 2 * 256 * 2
    with pytest.raises(MisconfiguredError, match="which one"):
        read({**gpt2, "num_hidden_layers": 3})


def test_attentions_of_longcat_are_counted_once_whichever_field_counts_them() -> None:
    layers = {**MLA, "model_type": "longcat_flash", "num_layers": 3}
    assert read(layers).full_token_bytes == 2 * 3 * 576 * 2
    assert read({**layers, "num_hidden_layers": 6}).full_token_bytes == 2 * 3 * 576 * 2
    with pytest.raises(MisconfiguredError, match="no num_layers"):
        read({**MLA, "model_type": "longcat_flash"})
    with pytest.raises(MisconfiguredError, match="neither as many nor twice as many"):
        read({**layers, "num_hidden_layers": 5})


def test_a_latent_architecture_without_latents_has_plain_heads() -> None:
    plain = {**MLA, "use_mla": False, "kv_lora_rank": None, "qk_nope_head_dim": 0}
    assert read(plain).full_token_bytes == 3 * 2 * 8 * 64 * 2
    with pytest.raises(MisconfiguredError, match="which one is it"):
        read({**MLA, "use_mla": False})


def test_mamba_keeps_a_state_of_the_models_own_width() -> None:
    """Mamba 2.8B: 64 layers of 5,120 channels, 3 taps and 16 of state each, in 16 bits."""
    found = read(
        {
            "model_type": "mamba",
            "num_hidden_layers": 64,
            "hidden_size": 2560,
            "expand": 2,
            "state_size": 16,
            "conv_kernel": 4,
        }
    )
    assert found.state_bytes == 64 * 5120 * (3 + 16) * 2
    assert found.full_token_bytes == found.request(1000).kv == 0
    assert found.request(10).gpu_reserved >= found.request(10).gpu_live == found.state_bytes


def test_attention_and_mamba_side_by_side_count_as_one_layer() -> None:
    found = read(
        {
            **LLAMA,
            "model_type": "falcon_h1",
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
        }
    )
    assert found.model.layer_count == 4
    assert found.full_token_bytes == read(LLAMA).full_token_bytes
    assert found.state_bytes == 4 * ((512 + 256) * 3 * 2 + 512 * 128 * 2)


def test_inkling_convolves_keys_values_and_outputs_of_each_layer() -> None:
    found = read(
        {
            "model_type": "inkling_text",
            "num_hidden_layers": 66,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 16,
            "swa_head_dim": 128,
            "sliding_window_size": 512,
            "sconv_kernel_size": 4,
            "local_layer_ids": [index for index in range(66) if (index + 1) % 6],
        }
    )
    assert found.full_token_bytes == 11 * 2 * 8 * 128 * 2
    assert found.bounded_token_bytes == 55 * 2 * 16 * 128 * 2
    taps = 11 * (2 * 8 * 128 + 2 * 6144) + 55 * (2 * 16 * 128 + 2 * 6144)
    assert found.state_bytes == 3 * 2 * taps


def test_pooled_index_keys_are_one_for_several_tokens() -> None:
    """GLM-5.3-Flash: 11 of 45 layers attend, by a key for each 4 tokens."""
    kinds = ["indexed_attention" if index % 4 == 3 else "linear_attention" for index in range(45)]
    found = read(
        {
            **MLA,
            **KDA,
            "model_type": "glm5_next_text",
            "num_hidden_layers": 45,
            "qk_rope_head_dim": 0,
            "layer_types": kinds,
            "indexer_types": ["full"] * 45,
            "index_head_dim": 128,
            "index_kpool": 4,
        }
    )
    assert found.model.layer_count == 45
    assert found.full_token_bytes == 11 * (512 * 2 + 128 * 2 // 4)
    delta = 3 * 64 * 128 * 3 * 2 + 64 * 128 * 128 * 4
    assert found.state_bytes == 34 * delta + 11 * 2 * 128 * 4 * 2
    one, two = (Sizing(found.model, found.dtype, tensor=tp).request(4096) for tp in (1, 2))
    tails = 11 * 2 * 128 * 4 * 2  # on every rank
    assert two.gpu_live == one.gpu_live - 34 * delta // 2
    assert two.replica_live - one.replica_live == two.kv + tails
    assert one.gpu_reserved >= one.gpu_live


def test_windows_may_keep_wider_latents_than_layers_that_keep_all() -> None:
    found = read(
        {
            **MLA,
            "model_type": "dots3_note",
            "swa_kv_lora_rank": 1024,
            "swa_qk_rope_head_dim": 64,
            "sliding_window": 512,
            "sliding_window_size": 513,
            "index_head_dim": 128,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        }
    )
    assert found.full_token_bytes == (576 + 128) * 2
    assert found.bounded_token_bytes == 2 * 1088 * 2
    assert [layer.span for layer in found.model.layers] == [Span.FULL, Span.WINDOW, Span.WINDOW]


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"])
def test_draft_layers_are_left_out_and_said(field: str) -> None:
    found = read({**LLAMA, field: 2}).model
    assert found.layer_count == 4
    assert any("2 draft layers" in note for note in found.notes)


def test_lightning_attention_keeps_a_matrix_per_head_and_every_eighth_layer_a_latent() -> None:
    ling = {**MLA, "model_type": "bailing_hybrid", "num_hidden_layers": 16, "layer_group_size": 8}
    found = read(ling)
    assert found.full_token_bytes == 2 * 576 * 2
    assert found.state_bytes == 14 * 8 * 64 * 64 * 2
    with pytest.raises(MisconfiguredError, match="no whole groups"):
        read({**ling, "num_hidden_layers": 17})


def test_the_page_says_how_many_model_types_are_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "size.md").read_text()
    assert f"{len(READERS)} model types are known." in page
