"""Fixtures of engine tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm_engines import make_models
from tests.patience import patient_engine, patient_node

MODELS = ("llama", "onehead", "gemma", "gptoss", "llama4", "qwen3next", "granite", "deepseek")


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """What runs inside this process; a process that a test starts is told by itself.

    By module: the tests of other rooms that come after these are about the deadlines as shipped.
    """
    with patient_engine(), patient_node():
        yield


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, last first."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with small random models and two adapters."""
    return make_models(tmp_path_factory.mktemp("models"), *MODELS, "adapter1", "adapter2")


@pytest.fixture(scope="session")
def kit() -> Any:
    """Models of transformers and their answers; imports torch."""
    import tests.engines.transformers_models as kit

    return kit


@pytest.fixture
def open_cache(
    kit: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """Opens a prefix cache that the test closes; all of a test share a pool. CHUNK: the module's."""
    opened: Callable[..., Any] = kit.opener(stack, monkeypatch, chunk_tokens=request.module.CHUNK)
    return opened
