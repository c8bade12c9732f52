"""What clients have no business with, however they write it."""

import pytest

from kvferry.router.control import controls

THEIRS = [
    "/",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/resp_1/cancel",
    "/v1/messages",
    "/v1/models",
    "/v1/models/org/reset-7b",
    "/v1/models/lora-weights",
    "/v1/audio/transcriptions",
    "/v1/realtime",
    "/v1/files/metrics.txt",
    "/inference/v1/generate",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/score",
    "/v2/rerank",
    "/cohere/v2/chat",
    "/invocations",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/docs",
    "/openapi.json",
    "/get_model_info",
    "/echo",
    "/any/path?reset_prefix_cache=1",
]
OPERATORS = [
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/sleep",
    "/sleep?level=1",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/pause",
    "/resume",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/scale_elastic_ep",
    "/server_info",
    "/metrics",
    "/metrics/",
    "/start_profile",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/flush_cache",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/configure_logging",
    "/set_internal_state",
    "/abort_request",
    "/hicache/storage-backend",
    "/load_lora_adapter",
    "/freeze_gc",
    "/sl%65ep",
    "//sleep",
    "/%2fsleep",
    "/v1/%6coad_lora_adapter",
    "/v1%2Fload_lora_adapter",
    "/SLEEP",
    "/sleep;a=b",
    "/api/sleep",
    "/v1/../sleep",
    "/v1/%2e%2e/sleep",
    "/./sleep",
    "/v1\\load_lora_adapter",
    "/prefix/v1/load_lora_adapter",
    "/sleep%20",
    "/some_new_weights_thing",
    "/v9/reset_everything",
]


@pytest.mark.parametrize("target", THEIRS)
def test_what_serves_prompts_is_for_everybody(target: str) -> None:
    assert not controls(target.encode())


@pytest.mark.parametrize("target", OPERATORS)
def test_what_controls_engines_is_not_for_clients_in_any_spelling(target: str) -> None:
    assert controls(target.encode())
