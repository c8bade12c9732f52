"""Paths that are not like others: they control engines, or take prompts without a salt. Pure.

Engines decode a path before they look at it, so it is looked at decoded here, each of its parts, in any case.
The names are those of vLLM and SGLang; words catch what later versions add.
"""

import re
from urllib.parse import unquote_to_bytes

NOT_FOR_CLIENTS = "this controls the engine, or tells how it is: it is not for clients of the router"

_PARTS = re.compile(rb"[/\\]+")
_VERSION = re.compile(rb"v[0-9]+(?:(?:alpha|beta)[0-9]*)?")
_WORDS = re.compile(rb"[^a-z0-9]+")
# Anywhere in a path: engines may be served under a prefix.
_NAMES = frozenset(
    b"""
    abort_request abort_requests clear_hicache_storage_backend close_session collective_rpc configure_logging
    continue_generation fault_tolerance finish_weight_update flush_cache freeze_gc get_internal_state
    get_server_info get_world_size init_weight_transfer_engine is_paused is_scaling_elastic_ep is_sleeping
    kv_event_sources load_lora_adapter load_lora_adapter_from_tensors open_session pause pause_generation
    release_kv_cache_memory release_memory_occupation reset_encoder_cache reset_mm_cache reset_prefix_cache
    resume resume_memory_occupation scale_elastic_ep server_info set_internal_state set_trace_level
    shutdown_weight_transfer_engine sleep slow_down start_profile start_weight_update stop_profile
    unload_lora_adapter update_weight_version update_weights wake_up weight_checker weight_info
    """.split()
)
# Whose salt SGLang reads too.
_SALTED = frozenset((b"v1/chat/completions", b"v1/completions", b"v1/responses"))
# In one of the first two parts: "version" may well be part of a file's name, further on.
_TELL = frozenset(b"docs load openapi.json redoc version".split())
# In the first part, or the one after the version.
_STEMS = frozenset(
    b"""
    abort adapter adapters admin cache clear collective configure debug dump dumper elastic expert fault flush
    freeze hicache internal lora memory metrics pause profile profiler release reset resume rpc scale shutdown
    sleep slow trace unload wake weight weights
    """.split()
)


def controls(target: bytes) -> bool:
    """Whether clients have no business there. target: path and query. So is a path that means another one."""
    parts = _parts_of(target)
    if b"." in parts or b".." in parts or not _NAMES.isdisjoint(parts) or not _TELL.isdisjoint(parts[:2]):
        return True
    first = next((part for part in parts if not _VERSION.fullmatch(part)), b"")
    return not _STEMS.isdisjoint(_WORDS.split(first))


def reads_salt(target: bytes, engine: str) -> bool:
    """Whether an engine of this kind reads the ``cache_salt`` of what is posted there: vLLM 0.32, SGLang 0.5.

    Of a kind that is not known, only where all of them take prompts.
    """
    parts = _parts_of(target)
    if engine == "vllm":
        return b"cohere" not in parts and parts[-2:] != [b"v2", b"embed"]
    return b"/".join(parts) in _SALTED or (engine == "sglang" and parts == [b"generate"])


def _parts_of(target: bytes) -> list[bytes]:
    path = unquote_to_bytes(target.partition(b"?")[0]).lower()
    return [part.partition(b";")[0].strip() for part in _PARTS.split(path) if part]
