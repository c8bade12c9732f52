"""What the tests of an engine's life share: small models, an engine with more verbs, and stored chunks."""

from pathlib import Path
from typing import Any

from tests.engines.vllm_engines import Engine, NodeProcess, arguments
from tests.engines.vllm_requests import REUSE_S

DRIVER = "tests.engines.vllm_life_driver"
MODELS = "tests.engines.vllm_life_models"


def life_engine(name: str, model: Path, node: NodeProcess, directory: Path, **more: Any) -> Engine:
    """Started, not yet ready. cores: 0."""
    cores = more.pop("cores", "0")
    options = arguments(model, node.socket, **more)
    return Engine(name, directory=directory, cores=cores, arguments=options, driver=DRIVER)


def until_stored(node: NodeProcess, chunks: int) -> None:
    """Wait until the node has so many. An engine's own counters come with its next request only."""
    node.wait_for(lambda: node.chunks() >= chunks, what=f"{chunks} chunks", timeout_s=REUSE_S)
