"""Prompts for tests with real engines, and waiting until they are reused."""

import random
import time
from typing import Any

import pytest
from tests.engines.vllm_engines import Engine, NodeProcess
from tests.engines.vllm_models import VOCABULARY

BLOCK = 128
REUSE_S = 60.0


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids; equal seeds share their beginning."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def until_cached(
    engine: Engine,
    asked: list[int],
    cached: int,
    *,
    helper: Engine | None = None,
    node: NodeProcess | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Ask until that much of the prompt was reused: stores finish a moment after the answer.

    helper: asked before every further try. node: tells its side when it never happens.
    """
    give_up = time.monotonic() + REUSE_S
    while True:
        found = engine.generate(asked, **options)
        if found["cached"] == cached:
            return found
        if time.monotonic() > give_up:
            told = node.tail(40) if node is not None else ""
            pytest.fail(f"reused {found['cached']} tokens of {cached}: {engine.ask('metrics')}\n{told}")
        if helper is not None:
            helper.generate(asked, **options)
        engine.reset()
