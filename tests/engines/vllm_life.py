"""What the tests of an engine's life share: small models, an engine with more verbs, and stored chunks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm_engines import ROOT, Engine, NodeProcess, arguments, environment
from tests.engines.vllm_requests import REUSE_S

DRIVER = "tests.engines.vllm_life_driver"


def make_models(directory: Path, *names: str) -> Path:
    """Of ``vllm_life_models``, in a process of its own."""
    command = [sys.executable, "-m", "tests.engines.vllm_life_models", str(directory), *names]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(), capture_output=True)
    return directory


def life_engine(name: str, model: Path, node: NodeProcess, directory: Path, **more: Any) -> Engine:
    """Started, not yet ready. cores: 0."""
    cores = more.pop("cores", "0")
    options = arguments(model, node.socket, **more)
    return Engine(name, directory=directory, cores=cores, arguments=options, driver=DRIVER)


def until_stored(node: NodeProcess, chunks: int) -> None:
    """Wait until the node has so many. An engine's own counters come with its next request only."""
    node.wait_for(lambda: node.chunks() >= chunks, what=f"{chunks} chunks", timeout_s=REUSE_S)
