"""Engines over one node, driven at random: every block that is read holds its own prefix, nothing leaks."""

import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sides import SideFleet
from tests.runs import runs

from kvferry.engines.vllm import pins, saving, scheduler
from kvferry.testing.fake_engine import FakeEngine, FakeRequest

STEPS = 160


def prompt(rng: random.Random) -> list[int]:
    """Few openings and many endings, so that prefixes are shared."""
    opening = rng.randrange(3)
    shared = [opening * 1000 + i for i in range(rng.choice([8, 16, 24, 25, 31]))]
    return shared + [rng.randrange(50000) for _ in range(rng.randrange(1, 20))]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(runs(6)))
def test_random_life_keeps_bytes_right_and_returns_everything(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them under limits that are always reached."""
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(pins, "MAX_PINNED_SHARE", 0.2)
        monkeypatch.setattr(saving, "MAX_SAVES_PER_STEP", 1)
        monkeypatch.setattr(scheduler, "MAX_NAMED_TOKENS_PER_STEP", 1)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = SideFleet(directory, stack, chunk_blocks=rng.choice([1, 2]))
        ranks = rng.choice([1, 2])
        engines = [
            fleet.engine(blocks=rng.choice([16, 40]), ranks=ranks, tokens_per_step=24) for _ in range(2)
        ]
        alive: list[tuple[FakeEngine, FakeRequest]] = []
        for n in range(STEPS):
            engine = rng.choice(engines)
            match rng.random():
                case p if p < 0.25:
                    request = FakeRequest(f"{seed}-{n}", prompt(rng), output_tokens=rng.randrange(1, 9))
                    request.skip_reading_prefix_cache = rng.random() < 0.1
                    request.cache_salt = rng.choice([None, None, "one", "two", 5])
                    alive.append((engine, engine.add(request)))
                case p if p < 0.32 and alive:
                    owner, request = rng.choice(alive)
                    owner.abort(request)
                case p if p < 0.39 and alive:
                    owner, request = rng.choice(alive)
                    owner.preempt(request)
                case p if p < 0.41:
                    fleet.damage_node()
                case p if p < 0.45:
                    release = fleet.hold_loads()
                    engine.step()
                    release()
                case p if p < 0.46:
                    fleet.scheduler(engine).reset(rng.randbytes(16))
                case _:
                    engine.step()
        for engine in engines:
            fleet.settle(engine)
            assert len(engine.pool.free) == len(engine.pool.blocks)
            assert engine.pool.reset()
        fleet.at_rest()
