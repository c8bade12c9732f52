"""The settings as arguments of vLLM 0.32, SGLang 0.5.23 and a node. Tests give them to the real parsers."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.advise.settings import Settings

BLOCK_TOKENS = 16
HICACHE_PAGE_TOKENS = 64


def offloading_config(settings: Settings) -> dict[str, Any]:
    """vLLM's own offloading to host memory, in chunks of 64 tokens. The bytes are of all ranks together."""
    chunk: dict[str, Any] = {"block_size": settings.offload_block_tokens}
    if not settings.one_group:  # blocks of several sizes: then vLLM wants the chunk in blocks
        chunk = {"blocks_per_chunk": settings.offload_block_tokens // BLOCK_TOKENS}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": settings.offload_bytes, **chunk},
    }


def transfer_config(settings: Settings, connector: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The value of --kv-transfer-config; connector: kvferry's own. None: no tier."""
    if settings.pool:
        return connector
    return offloading_config(settings) if settings.offload_bytes else None


def vllm_arguments(settings: Settings, *, model: str, connector: Mapping[str, Any]) -> list[str]:
    """What follows ``vllm serve``."""
    found = [
        *(model, "--max-model-len", str(settings.max_model_len)),
        *("--gpu-memory-utilization", f"{settings.utilization:g}"),
        *("--max-num-batched-tokens", str(settings.batched_tokens)),
        "--enable-prefix-caching",
    ]
    if settings.tensor > 1:
        found += ["--tensor-parallel-size", str(settings.tensor)]
    if settings.kv_dtype != "auto":
        found += ["--kv-cache-dtype", settings.kv_dtype]
    if settings.skip_windows:
        found += ["--kv-cache-dtype-skip-layers", "sliding_window"]
    config = transfer_config(settings, connector)
    if config is not None:
        found += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
    return found


def sglang_arguments(
    settings: Settings, *, model: str, backend: Mapping[str, Any], overhead_share: float
) -> list[str]:
    """What follows ``python -m sglang.launch_server``. overhead_share: of a GPU, not for weights or KV.

    Its memory fraction counts weights and KV alone; its host memory is given for each rank, in GB of 10^9.
    """
    found = [
        *("--model-path", model, "--context-length", str(settings.max_model_len)),
        *(
            "--mem-fraction-static",
            f"{max(0.05, math.floor(100 * (settings.utilization - overhead_share)) / 100):g}",
        ),
        *("--chunked-prefill-size", str(settings.batched_tokens)),
        *("--schedule-policy", "lpm"),
    ]
    if settings.tensor > 1:
        found += ["--tp-size", str(settings.tensor)]
    if settings.kv_dtype == "fp8":
        found += ["--kv-cache-dtype", "fp8_e4m3"]
    if settings.sglang_rank_bytes:
        found += [
            *("--page-size", str(HICACHE_PAGE_TOKENS), "--enable-hierarchical-cache"),
            *("--hicache-size", str(max(1, settings.sglang_rank_bytes // 1_000_000_000))),
            *("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"),
            *("--hicache-write-policy", "write_through"),
        ]
    if settings.pool:
        policy = "best_effort" if settings.latency else "wait_complete"
        found += [
            *("--hicache-storage-prefetch-policy", policy, "--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps(backend, separators=(",", ":"))),
        ]
    return found


def node_arguments(settings: Settings, *, replicas: int, valkey: str) -> list[str]:
    """What follows ``kvferry node`` on each host: its pool is the host memory of all replicas there."""
    pool = settings.offload_bytes * replicas
    found = ["--pool", f"{pool // 1_000_000_000}GB"]
    return [*found, "--valkey", valkey] if settings.shared else found


def lines(arguments: Sequence[str], *, command: str, columns: int) -> list[str]:
    """A command over lines to paste into a shell; JSON takes as many lines as it needs."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups:
            groups.append([shlex.quote(argument)])
        else:
            groups[-1].append(argument)
    found, line = [], command
    for flag, *values in groups:
        group = " ".join([flag, *map(shlex.quote, values)])
        if len(line) + 3 + len(group) <= columns:
            line = f"{line} {group}"
            continue
        found.append(f"{line} \\")
        line = f"    {group}"
        if len(line) + 2 > columns and values and values[0].startswith("{"):
            *before, line = _json_lines(f"    {flag} '", values[0], columns=columns)
            found += before
    return [*found, line]


def _json_lines(start: str, value: str, *, columns: int) -> list[str]:
    """A quoted JSON object, broken after commas: white space means nothing there."""
    found, line = [], start
    for part in re.split(r'(?<=,)(?=")', value.replace("'", "'\\''")):
        if len(line) + len(part) + 1 > columns and line.strip():
            found.append(line)
            line = "      "
        line += part
    return [*found, f"{line}'"]
