"""Requests in flight: the reference points, and what they follow from."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries, find_model
from kvferry.models.concurrency import (
    Budget,
    LengthShare,
    mean_weight_bytes,
    mixed_requests_in_flight,
    requests_in_flight,
    weights_dtype,
    weights_of,
)
from kvferry.models.gpus import find_gpu, gpus
from kvferry.models.precision import kv_dtype
from kvferry.models.published import WEIGHT_BYTES
from kvferry.models.sizes import Sizing

GIB = 1 << 30
BF16, FP8 = kv_dtype("bf16"), kv_dtype("fp8")
H100 = Budget(80 * 10**9, 0.9, 16 * 10**9, 1, 3 * 10**9)


def test_llama_8b_at_128k_is_16_gib_a_request() -> None:
    assert Sizing(find_model("llama-3.1-8b"), BF16).request(131_072).gpu_reserved == 16 * GIB


def test_llama_70b_at_128k_is_40_gib_and_with_64_kv_heads_320() -> None:
    assert Sizing(find_model("llama-3.3-70b"), BF16).request(131_072).kv == 40 * GIB
    many = find_model("llama-3.3-70b", {"num_key_value_heads": 64})
    assert Sizing(many, BF16).request(131_072).kv == 320 * GIB


def test_llama_8b_on_one_80_gb_gpu_leaves_49_gib() -> None:
    assert find_gpu("h100").memory_bytes == H100.memory_bytes
    assert H100.kv_bytes / GIB == pytest.approx(49, abs=0.5)
    sizing = Sizing(find_model("llama-3.1-8b"), BF16)
    assert requests_in_flight(H100, sizing, 131_072) == 3
    assert requests_in_flight(H100, Sizing(sizing.model, FP8), 131_072) == 6


def test_weights_of_the_catalogue_are_parameters_times_bytes() -> None:
    model = find_model("llama-3.1-8b")
    assert weights_of(model, "bf16", None).nbytes == pytest.approx(16e9, rel=0.01)
    assert weights_of(model, "fp8", None).nbytes == pytest.approx(8e9, rel=0.01)
    assert weights_of(model, None, 5 * 10**9).nbytes == 5 * 10**9


def test_weights_that_nothing_says_are_refused() -> None:
    with pytest.raises(MisconfiguredError, match="--weights"):
        weights_of(find_model("kimi-k3"), None, None)


def test_weights_of_a_model_directory_are_those_stored(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    assert weights_of(find_model(str(tmp_path)), None, None).nbytes == 100
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 90}}))
    assert weights_of(find_model(str(tmp_path)), None, None).nbytes == 90


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(MisconfiguredError, match=r"weights take 141\.0 GB.*--tp"):
        Budget(80 * 10**9, 0.9, 141 * 10**9, 1, 3 * 10**9)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_longer_requests_never_leave_room_for_more(tokens: int, more: int) -> None:
    sizing = Sizing(find_model("gpt-oss-120b"), BF16)
    assert requests_in_flight(H100, sizing, tokens) >= requests_in_flight(H100, sizing, tokens + more)


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8))
def test_a_mix_lies_between_its_shortest_and_its_longest(lengths: list[int]) -> None:
    sizing = Sizing(find_model("llama-3.1-8b"), BF16)
    mixed = mixed_requests_in_flight(H100, sizing, [LengthShare(n, 1 / len(lengths)) for n in lengths])
    most = H100.kv_bytes / sizing.request(min(lengths)).gpu_reserved
    fewest = H100.kv_bytes / sizing.request(max(lengths)).gpu_reserved
    assert fewest * (1 - 1e-9) <= mixed <= most * (1 + 1e-9)


def test_every_gpu_is_dated_with_a_source_and_so_is_every_price() -> None:
    assert len(gpus()) >= 12
    for gpu in gpus().values():
        assert gpu.date and gpu.source
        assert gpu.memory_gb and gpu.bandwidth_gb_s and gpu.bf16_tflops
        assert not gpu.usd_per_hour or (gpu.price_date and gpu.price_source)


def test_a_file_replaces_a_gpu_and_adds_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[gpu]]\nname = "H100"\nmemory_gb = 79.2\nusd_per_hour = 2\nprice_date = "2026-11"\n'
        '[[gpu]]\nname = "mine"\nmemory_gb = 10\n'
    )
    assert find_gpu("h100", file).memory_gb == 79.2
    assert find_gpu("mine", file).source == str(file)
    assert find_gpu("h200", file).memory_gb == 141
    with pytest.raises(MisconfiguredError, match="not known"):
        find_gpu("mine")


@pytest.mark.parametrize(
    "text",
    [
        "gpu = 1",
        "[[gpu]]\nmemory_gb = 1",
        '[[gpu]]\nname = "x"',
        '[[gpu]]\nname = "x"\nmemory = 1',
        '[[gpu]]\nname = "x"\nmemory_gb = "80"',
        '[[gpu]]\nname = "x"\nmemory_gb = -1',
        '[[gpu]]\nname = "x"\nmemory_gb = 1\naliases = "y"',
        '[[gpu]]\nname = "x"\nmemory_gb = 1\nsource = 1',
        "[[gpu",
        "gpus = []",
    ],
)
def test_a_file_that_is_no_list_of_gpus_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(MisconfiguredError):
        gpus(file)


@pytest.mark.parametrize(
    ("name", "dtype", "gigabytes"),
    [
        ("deepseek-v3", "fp8", 673),
        ("gpt-oss-120b", "mxfp4", 65.3),  # 60.8 GiB on its card
        ("gpt-oss-20b", "mxfp4", 13.8),  # 12.8 GiB on its card
        ("kimi-k2.6", "int4", 579),
        ("deepseek-v3.1", "fp8", 673),
        ("minimax-m2", "fp8", 231),
        ("llama-3.1-8b", "bf16", 16.06),
    ],
)
def test_weights_are_those_of_the_checkpoint_that_is_published(
    name: str, dtype: str, gigabytes: float
) -> None:
    model = find_model(name)
    found = weights_of(model, None, None)
    assert found.nbytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert weights_dtype(model, None) == dtype
    assert (f"({dtype}, as published)" in found.why) == (dtype != "bf16")
    assert mean_weight_bytes(model, None) * model.parameters == pytest.approx(found.nbytes)
    wide = weights_of(model, "bf16", None)
    assert wide.nbytes == round(2 * model.parameters)
    assert (f"published in {dtype}" in wide.why) == (dtype != "bf16")


@pytest.mark.parametrize("name", [entry.name for entry in entries() if "quantization_config" in entry.config])
def test_every_quantized_model_of_the_catalogue_is_of_a_known_kind(name: str) -> None:
    model = find_model(name)
    assert model.published.dtype in WEIGHT_BYTES
    assert model.published.dtype != "bf16"
    assert not model.parameters or 0 < model.published.wide < 0.4 * model.parameters


def grouped(**weights: object) -> dict[str, object]:
    """A ``quantization_config`` of one group of layers."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("said", "dtype", "nbytes"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 1),
        ({"quant_method": "fbgemm_fp8"}, "fp8", 1),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.53125),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 0.515625),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "int4", 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, "int4", 0.515625),
        ({"quant_method": "gptq", "bits": 8}, "int8", 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", 0.515625),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 1),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1),
        (grouped(num_bits=8, type="float"), "fp8", 1),
        (grouped(num_bits=4, type="float", group_size=16), "nvfp4", 0.5625),
        (grouped(num_bits=4, type="float", group_size=32), "mxfp4", 0.53125),
        ({"quant_method": "novel"}, "", 0),
        ({"config_groups": {"a": None}}, "", 0),
        ({"config_groups": []}, "", 0),
        ({"quant_method": 7, "bits": "4"}, "", 0),
        ([], "bf16", 2),
        (None, "bf16", 2),
    ],
)
def test_a_config_says_what_its_weights_take(tmp_path: Path, said: object, dtype: str, nbytes: float) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    found = find_model(str(tmp_path)).published
    assert (found.dtype, found.nbytes) == (dtype, nbytes)


def test_weights_of_an_unknown_kind_are_asked_for() -> None:
    model = find_model("llama-3.1-8b", {"quantization_config": {"quant_method": "novel"}})
    with pytest.raises(MisconfiguredError, match=r"novel.*--weights"):
        weights_of(model, None, None)
    assert weights_of(model, "fp8", None).nbytes == round(model.parameters)


@pytest.mark.parametrize("given", [0, 1, 16, 16_000, 700 * 10**6, 70 * 10**9])
def test_weights_that_no_such_model_has_are_refused(given: int) -> None:
    with pytest.raises(MisconfiguredError, match="like 16GB"):
        weights_of(find_model("llama-3.1-8b"), None, given)
