"""Multi-turn traffic with one hot prefix, planned ahead: a seed is the same requests at the same times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.router.bodies import encoded, prose


@dataclass(frozen=True, slots=True)
class Mix:
    """conversations begin as a Poisson process of ``rate`` per second, a share ``hot`` of them with the hot
    prefix, the others with one of ``cold_prefixes``. Lengths are characters. think_s: mean, between turns.

    answer: characters of the made-up answer that the next turn quotes; tokens: what the worker generates.
    """

    conversations: int = 80
    rate: float = 4.0
    turns: int = 5
    hot: float = 0.6
    cold_prefixes: int = 8
    prefix: int = 8000
    question: int = 400
    answer: int = 200
    tokens: int = 16
    think_s: float = 2.0
    model: str = "mock"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request at its time, in seconds. hot: its conversation has the hot prefix."""

    at: float
    body: bytes
    hot: bool
    turn: int


def plan(mix: Mix, *, seed: int, tag: str = "") -> list[Turn]:
    """All turns, in order of time. A turn comes when its user has thought, answered or not.

    tag: begins every prompt, so that nothing of a plan with another tag can be reused.
    """
    rng = random.Random(seed)
    system = [tag + prose(rng, mix.prefix) for _ in range(mix.cold_prefixes + 1)]
    turns: list[Turn] = []
    begun = 0.0
    for number in range(mix.conversations):
        begun += rng.expovariate(mix.rate)
        hot = rng.random() < mix.hot
        prefix = system[0] if hot else system[1 + rng.randrange(mix.cold_prefixes)]
        talk = [{"role": "system", "content": prefix}]
        at = begun
        for turn in range(mix.turns):
            talk.append({"role": "user", "content": f"{number}.{turn} {prose(rng, mix.question)}"})
            turns.append(Turn(at, encoded(talk, mix.tokens, model=mix.model), hot, turn))
            talk.append({"role": "assistant", "content": prose(rng, mix.answer)})
            at += mix.think_s * (0.5 + rng.random())
    return sorted(turns, key=lambda turn: turn.at)


def tokens(turns: Sequence[Turn], *, characters_per_token: int) -> float:
    """About how many prompt tokens they have together."""
    return sum(len(turn.body) for turn in turns) / characters_per_token
