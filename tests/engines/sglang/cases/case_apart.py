"""What must never be mixed: layouts, ranks, stages, weights, dtypes, adapters, salts; and clearing."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from tests.engines.sglang.cases import rig

from kvferry.engines.sglang import updates
from kvferry.errors import MisconfiguredError


@pytest.fixture
def checkpoint(tmp_path: Path, stack: ExitStack) -> Path:
    found = rig.model(tmp_path / "model")
    stack.enter_context(rig.serving(found))
    return found


@pytest.fixture
def socket(tmp_path: Path, stack: ExitStack) -> Path:
    return rig.start_node(tmp_path / "host", stack).settings.socket_path


def stored(store: Any, host: Any, pages: int = 2) -> list[str]:
    rig.scramble(host)
    names = rig.hashes(pages)
    assert store.batch_set_v1(names, rig.slots(host, pages)) == [True] * pages
    return names


def nothing_found(store: Any, host: Any, names: list[str]) -> None:
    before = rig.page_bytes(host, torch.arange(host.size))
    assert store.batch_exists(names) == 0
    assert store.batch_get_v1(names, rig.slots(host, len(names))) == [False] * len(names)
    assert rig.page_bytes(host, torch.arange(host.size)) == before


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another layout": ({"layout": "page_first_direct"}, {}),
    "another dtype": ({"dtype": torch.float16}, {}),
    "more heads": ({"heads": 4}, {}),
    "another tensor-parallel rank": ({}, {"tp_rank": 1}),
    "another tensor-parallel size": ({}, {"tp_size": 4}),
    "another pipeline stage": ({}, {"pp_rank": 1, "pp_size": 2}),
    "another context-parallel rank": ({}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
    "another trust domain": ({}, {"extra": {"domain": "others"}}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_pages_are_not_found_by_what_keeps_them_differently(
    what: str, socket: Path, checkpoint: Path, stack: ExitStack
) -> None:
    pool, config = DIFFERENT[what]
    _, here = rig.mha_pool()
    names = stored(rig.storage(socket, here, stack, tp_size=2), here)
    _, there = rig.mha_pool(**pool)
    stack.enter_context(rig.impatient())  # a node serves one trust domain
    nothing_found(rig.storage(socket, there, stack, **({"tp_size": 2} | config)), there, names)


def test_equal_bytes_of_two_ranks_are_stored_once(socket: Path, checkpoint: Path, stack: ExitStack) -> None:
    _, here = rig.mla_pool()
    _, there = rig.mla_pool()
    first = rig.storage(socket, here, stack, is_mla_model=True, tp_size=2)
    second = rig.storage(socket, there, stack, is_mla_model=True, tp_rank=1, tp_size=2)
    names = stored(first, here)
    there.kv_buffer.copy_(here.kv_buffer)
    assert second.batch_set_v1(names, rig.slots(there, 2)) == [True, True]
    statistics = second._pools["kv"].store.statistics()
    assert (statistics.stored_parts, statistics.saves) == (0, 1)


def test_other_weights_under_the_same_name_find_nothing(
    tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    _, here = rig.mha_pool()
    with rig.serving(rig.model(tmp_path / "model", weights=b"1")):
        names = stored(rig.storage(socket, here, stack), here)
    with rig.serving(rig.model(tmp_path / "model", weights=b"2")):
        nothing_found(rig.storage(socket, here, stack), here, names)
    with rig.serving(rig.model(tmp_path / "model", weights=b"1")):
        assert rig.storage(socket, here, stack).batch_exists(names) == len(names)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "awq"},
        {"json_model_override_args": '{"a": 1}'},
        {"kt_weight_path": "elsewhere"},
        {"mm_attention_backend": "sdpa"},
    ],
    ids=str,
)
def test_other_options_that_change_the_bytes_find_nothing(
    options: dict[str, Any], tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    path = rig.model(tmp_path / "model")
    _, here = rig.mha_pool()
    with rig.serving(path):
        names = stored(rig.storage(socket, here, stack), here)
    with rig.serving(path, **options):
        nothing_found(rig.storage(socket, here, stack), here, names)


def test_an_adapter_whose_content_changed_under_its_name_finds_nothing(
    tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    path, adapter = rig.model(tmp_path / "model"), tmp_path / "adapter"
    _, here = rig.mha_pool()
    rig.model(adapter, weights=b"1")
    loras = {"enable_lora": True, "lora_paths": [f"helper={adapter}"]}
    with rig.serving(path, **loras):
        names = stored(rig.storage(socket, here, stack), here)
        assert rig.storage(socket, here, stack).batch_exists(names) == len(names)
    rig.model(adapter, weights=b"2")
    with rig.serving(path, **loras):
        nothing_found(rig.storage(socket, here, stack), here, names)


@pytest.mark.parametrize(
    "options",
    [{"load_format": "remote_instance"}, {"checkpoint_engine_wait_weights_before_ready": True}],
    ids=str,
)
def test_weights_that_come_from_another_process_stop_the_start(
    options: dict[str, Any], tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    _, host = rig.mha_pool()
    with (
        rig.serving(rig.model(tmp_path / "model"), **options),
        pytest.raises(MisconfiguredError, match="another process"),
    ):
        rig.storage(socket, host, stack)


def _with_images(architecture: str, family: str, text: str, vision: str) -> str:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return json.dumps(
        {
            "architectures": [architecture],
            "model_type": family,
            "text_config": {"model_type": text, "num_key_value_heads": 2, **sizes},
            "vision_config": {"model_type": vision},
        }
    )


# SGLang serves the first with images unless told otherwise, the second for text alone.
QWEN = _with_images("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text", "qwen2_vl")
GEMMA = _with_images("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", "siglip_vision_model")


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (QWEN, {}, "start it for text alone"),
        (GEMMA, {"enable_multimodal": True}, "start it for text alone"),
        (rig.TEXT_MODEL, {"language_only": True}, "start it for text alone"),
        ("{}", {}, "cannot be told"),
    ],
    ids=["with images", "with images on demand", "with encoders elsewhere", "unknown"],
)
def test_a_model_that_takes_images_stops_the_start(
    config: str, options: dict[str, Any], said: str, tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    _, host = rig.mha_pool()
    with (
        rig.serving(rig.model(tmp_path / "model", config=config), **options),
        pytest.raises(MisconfiguredError, match=said),
    ):
        rig.storage(socket, host, stack)


@pytest.mark.parametrize(
    ("config", "options"),
    [(GEMMA, {}), (QWEN, {"language_model_only": True})],
    ids=["unless asked", "when asked"],
)
def test_a_model_that_could_take_images_is_served_when_started_for_text_alone(
    config: str, options: dict[str, Any], tmp_path: Path, socket: Path, stack: ExitStack
) -> None:
    _, host = rig.mha_pool()
    with rig.serving(rig.model(tmp_path / "model", config=config), **options):
        names = stored(rig.storage(socket, host, stack), host)
        assert rig.storage(socket, host, stack).batch_exists(names) == len(names)


def test_sglang_names_pages_of_other_adapters_and_salts_differently() -> None:
    tokens = rig.tokens(2)
    keys = [
        RadixKey(tokens),
        RadixKey(tokens, extra_key="adapter"),
        RadixKey(tokens, cache_salt="adapter"),
        RadixKey(tokens, extra_key="a", cache_salt="b"),
        RadixKey(tokens, extra_key="ab"),
        RadixKey(tokens, cache_salt="ab"),
    ]
    names = [name for key in keys for name in get_storage_hash_str(key, None, page_size=rig.PAGE)]
    assert len(set(names)) == 2 * len(keys)


def test_after_a_live_update_of_weights_nothing_is_found_or_stored(
    socket: Path, checkpoint: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    _, host = rig.mha_pool()
    store = rig.storage(socket, host, stack)
    names = stored(store, host)
    stack.callback(updates._changed.clear)

    class Worker:
        @staticmethod
        def weight_update_runners() -> list[Any]:
            return []

    updater = object.__new__(SchedulerWeightUpdaterManager)
    updater.tp_worker, updater.draft_worker = Worker(), None
    assert updater._select_runners() == []  # SGLang's own method still answers
    assert store.batch_exists(names) == 0
    assert store.batch_set_v1(names, rig.slots(host, 2)) == [False, False]
    assert store.batch_get_v1(names, rig.slots(host, 2)) == [False, False]


def test_clearing_hides_what_was_stored_from_this_engine_alone(
    socket: Path, checkpoint: Path, stack: ExitStack
) -> None:
    _, here = rig.mha_pool()
    _, there = rig.mha_pool()
    store, other = rig.storage(socket, here, stack), rig.storage(socket, there, stack)
    names = stored(store, here)
    store.clear()
    assert store.batch_exists(names) == 0
    assert other.batch_exists(names) == len(names)
    assert store._pools["kv"].store.wait_connected(rig.WAIT_S)
    assert stored(store, here) == names
    assert store.batch_exists(names) == len(names)


def test_ranks_that_share_pages_store_no_more_once_cleared(
    socket: Path, checkpoint: Path, stack: ExitStack
) -> None:
    _, host = rig.mla_pool()
    store = rig.storage(socket, host, stack, is_mla_model=True, tp_size=2)
    names = stored(store, host)
    store.clear()
    assert store.batch_exists(names) == 0
    assert store.batch_set_v1(names, rig.slots(host, 2)) == [False, False]
