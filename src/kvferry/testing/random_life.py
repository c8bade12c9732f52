"""Engines over one node that live at random: every block that is read holds its own prefix, nothing is left.

A failure names the seed and the last events. The same seed makes the same events; what copying threads do
between them is not repeated.
"""

import random
from collections import deque
from collections.abc import Callable

from kvferry.testing.connector_fleet import ConnectorFleet
from kvferry.testing.engine_books import FakeRequest
from kvferry.testing.expectations import equal, expect
from kvferry.testing.fake_engine import FakeEngine

STEPS = 160
TOKENS_PER_STEP = 24
SHOWN_EVENTS = 12


Extra = Callable[[random.Random, FakeEngine], None]
"""Something else that may happen to an engine at any time."""


class RandomLife:
    """Two engines and their requests. extra: happens now and then."""

    def __init__(self, fleet: ConnectorFleet, *, seed: int, extra: Extra | None = None) -> None:
        self.events: deque[str] = deque(maxlen=SHOWN_EVENTS)
        self._fleet = fleet
        self._seed = seed
        self._random = random.Random(seed)
        self._extra = extra
        self._ranks = self._random.choice([1, 2])
        self._engines = [self._engine(), self._engine()]
        self._alive: list[tuple[FakeEngine, FakeRequest]] = []
        self._names = 0

    def run(self, steps: int = STEPS) -> None:
        """Live, then come to rest. AssertionError, with what reproduces it, when a property breaks."""
        try:
            for _ in range(steps):
                self._happen()
            self.events.append("the end")
            self._rest()
        except Exception as error:
            told = "; ".join(self.events)
            raise AssertionError(
                f"seed {self._seed}: {type(error).__name__}: {error}; after: {told}"
            ) from error

    def _happen(self) -> None:
        chance = self._random.random
        at = self._random.randrange(len(self._engines))
        engine = self._engines[at]
        match chance():
            case p if p < 0.25:
                self._add(engine, at)
            case p if p < 0.32 and self._alive:
                owner, request = self._random.choice(self._alive)
                self._note(f"abort {request.request_id} ({request.status.value})")
                owner.abort(request)
            case p if p < 0.39 and self._alive:
                owner, request = self._random.choice(self._alive)
                self._note(f"preempt {request.request_id} ({request.status.value})")
                owner.preempt(request)
            case p if p < 0.41:
                rank = self._random.choice([None, *range(self._ranks)])
                self._note(f"damage rank {rank}")
                self._fleet.damage_node(rank=rank)
            case p if p < 0.46:
                self._held(engine, at)
            case p if p < 0.47:
                self._note("restart the node")
                self._fleet.restart_node()
            case p if p < 0.48:
                self._kill(at)
            case p if p < 0.49 and self._extra is not None:
                self._note(f"extra at engine {at}")
                self._extra(self._random, engine)
            case _:
                engine.step()

    def _add(self, engine: FakeEngine, at: int) -> None:
        self._names += 1
        request = FakeRequest(f"{self._seed}-{self._names}", self._prompt())
        request.output_tokens = self._random.randrange(1, 9)
        request.skip_reading_prefix_cache = self._random.random() < 0.1
        request.cache_salt = self._random.choice([None, None, "one", "two", 5])
        self._note(f"add {request.request_id} to engine {at}")
        self._alive.append((engine, engine.add(request)))

    def _prompt(self) -> list[int]:
        """Few openings and many endings, so that prefixes are shared."""
        opening = self._random.randrange(3)
        shared = [opening * 1000 + i for i in range(self._random.choice([8, 16, 24, 25, 31]))]
        return shared + [self._random.randrange(50000) for _ in range(self._random.randrange(1, 20))]

    def _held(self, engine: FakeEngine, at: int) -> None:
        """Steps while no transfer gets further."""
        hold = self._random.choice([self._fleet.hold_loads, self._fleet.hold_saves])
        self._note(f"{hold.__name__} while engine {at} steps")
        release = hold()
        for _ in range(self._random.randrange(1, 4)):
            engine.step()
        release()

    def _kill(self, at: int) -> None:
        self._note(f"kill engine {at}")
        killed = self._engines[at]
        self._fleet.kill_engine(killed)
        self._alive = [(owner, request) for owner, request in self._alive if owner is not killed]
        self._engines[at] = self._engine()

    def _engine(self) -> FakeEngine:
        blocks = self._random.choice([16, 40])
        return self._fleet.engine(blocks=blocks, ranks=self._ranks, tokens_per_step=TOKENS_PER_STEP)

    def _rest(self) -> None:
        for engine in self._engines:
            self._fleet.settle(engine)
            equal(len(engine.pool.free), len(engine.pool.blocks), "free blocks in the end")
            expect(engine.pool.reset(), "blocks are in use")
        self._fleet.at_rest()

    def _note(self, event: str) -> None:
        self.events.append(event)
