"""vLLM's connector lives at random over a real node, half of it under limits that are always reached."""

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sides import FULL, STATE, SideFleet, window

from kvferry.engines.vllm import lookups, pins, saving
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.random_life import RandomLife

KINDS = (FULL, (*FULL, window(10), STATE), (*FULL, *FULL, window(3)))


@pytest.mark.parametrize("seed", range(9))
def test_random_life_keeps_bytes_right_and_returns_everything(
    seed: int, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(pins, "MAX_PINNED_SHARE", 0.2)
        monkeypatch.setattr(saving, "MAX_SAVES_PER_STEP", 1)
        monkeypatch.setattr(lookups, "MAX_NAMED_TOKENS_PER_STEP", 1)
    fleet = SideFleet(tmp_path, stack, chunk_blocks=1 + seed // 2 % 2, groups=KINDS[seed % len(KINDS)])

    def reset(rng: random.Random, engine: FakeEngine) -> None:
        """As after a change of weights."""
        fleet.scheduler(engine).reset(rng.randbytes(16))

    RandomLife(fleet, seed=seed, extra=reset).run()
