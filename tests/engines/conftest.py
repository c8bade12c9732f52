"""Fixtures of engine tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.vllm_engines import ROOT, environment

MODELS = ("llama", "onehead", "gemma", "gptoss", "llama4", "qwen3next", "granite", "deepseek")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, last first."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with small random models and two adapters."""
    directory = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "tests.engines.vllm_models", str(directory)]
    command += [*MODELS, "adapter1", "adapter2"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(), capture_output=True)
    return directory
