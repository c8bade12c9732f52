"""Made-up traffic for what the traces at hand lack: an hour each, of blocks of 512 tokens.

Times, lengths and popularity are drawn from log-normal, exponential and Zipf distributions with fixed seeds,
so a mix is the same every time.
"""

import random
from array import array
from collections.abc import Callable
from itertools import count

from kvferry.traces.request import Request

BLOCK_TOKENS = 512
HOUR_S = 3600.0
MAX_BLOCKS = 250
Keys = Callable[[int], list[int]]  # so many keys that nothing else has
Prompt = tuple[float, list[int]]  # when, and its keys


def _near(rng: random.Random, middle: float, spread: float = 0.8) -> int:
    return max(1, min(MAX_BLOCKS, round(middle * rng.lognormvariate(0, spread))))


def chat(keys: Keys, *, users: int = 3000, from_s: float = 0.0, span_s: float = HOUR_S) -> list[Prompt]:
    """People who answer after some two minutes, with a probability of 0.68."""
    rng = random.Random(1)
    systems = [keys(rng.randint(1, 6)) for _ in range(4)]
    made = []
    for _ in range(users):
        at = from_s + rng.random() * span_s
        prompt = rng.choice(systems) + keys(_near(rng, 8, 1.0))
        made.append((at, prompt))
        while rng.random() < 0.68:
            at += 20 + 100 * rng.lognormvariate(0, 0.9)
            prompt = prompt + keys(_near(rng, 2, 0.6))
            made.append((at, prompt))
    return made


def agents(keys: Keys, *, sessions: int = 250, from_s: float = 0.0, span_s: float = HOUR_S) -> list[Prompt]:
    """Tool loops of some 25 steps, seconds apart, now and then minutes; long contexts are cut short."""
    rng = random.Random(2)
    tools = [keys(rng.randint(15, 40)) for _ in range(3)]
    made = []
    for _ in range(sessions):
        at = from_s + rng.random() * span_s
        prompt = rng.choice(tools) + keys(_near(rng, 4))
        for _ in range(min(150, 1 + int(rng.expovariate(1 / 25)))):
            made.append((at, prompt))
            at += 2 + 12 * rng.lognormvariate(0, 1) + (rng.expovariate(1 / 300) if rng.random() < 0.05 else 0)
            prompt = prompt + keys(_near(rng, 1.5))
            if len(prompt) > MAX_BLOCKS:
                prompt = prompt[:30] + keys(12)
    return made


def rag(
    keys: Keys, *, requests: int = 6000, shifts: int = 1, from_s: float = 0.0, span_s: float = HOUR_S
) -> list[Prompt]:
    """Questions about 2,000 documents, some far more popular; which ones changes ``shifts`` - 1 times."""
    rng = random.Random(3)
    system = keys(2)
    documents = [keys(_near(rng, 14, 0.7)) for _ in range(2000)]
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]
    made = []
    for shift in range(shifts):
        rng.shuffle(documents)
        for document in rng.choices(documents, popularity, k=requests // shifts):
            at = from_s + (shift + rng.random()) * span_s / shifts
            made.append((at, system + document + keys(1)))
    return made


def one_shot(
    keys: Keys, *, requests: int = 2500, from_s: float = 0.0, span_s: float = HOUR_S
) -> list[Prompt]:
    """Long prompts that come once, all with one system prompt."""
    rng = random.Random(4)
    system = keys(2)
    return [(from_s + rng.random() * span_s, system + keys(_near(rng, 25, 0.7))) for _ in range(requests)]


def rounds(keys: Keys, *, documents: int = 300) -> list[Prompt]:
    """The same documents, one after the other, eight times: what LRU is worst at."""
    rng = random.Random(5)
    all_of_them = [keys(_near(rng, 14, 0.5)) for _ in range(documents)]
    step_s = HOUR_S / (8 * documents)
    return [(number * step_s, document + keys(1)) for number, document in enumerate(all_of_them * 8)]


def _scans(keys: Keys) -> list[Prompt]:
    bursts = [one_shot(keys, requests=600, from_s=600 + 900 * burst, span_s=240) for burst in range(3)]
    return [prompt for burst in bursts for prompt in burst]


def _in_turn(keys: Keys) -> list[Prompt]:
    third = HOUR_S / 3
    return [
        *chat(keys, users=1500, span_s=third),
        *agents(keys, sessions=150, from_s=third, span_s=third),
        *rag(keys, requests=2500, from_s=2 * third, span_s=third),
    ]


def _all(keys: Keys) -> list[Prompt]:
    return [
        *chat(keys, users=1500),
        *agents(keys, sessions=120),
        *rag(keys, requests=2500),
        *one_shot(keys, requests=1000),
    ]


MIXES: dict[str, Callable[[Keys], list[Prompt]]] = {
    "chat": chat,
    "agents": agents,
    "rag": rag,
    "rag, popularity shifts": lambda keys: rag(keys, shifts=4),
    "one-shot": one_shot,
    "rounds": rounds,
    "chat and bursts of one-shot": lambda keys: chat(keys) + _scans(keys),
    "chat and as much one-shot": lambda keys: chat(keys, users=1500) + one_shot(keys, requests=4000),
    "rounds and chat": lambda keys: rounds(keys) + chat(keys, users=1000),
    "chat, then agents, then rag": _in_turn,
    "all at once": _all,
}


def requests_of(mix: str) -> list[Request]:
    """The requests of a mix in the order of their times."""
    numbers = count()

    def keys(blocks: int) -> list[int]:
        return [next(numbers) for _ in range(blocks)]

    made = sorted(MIXES[mix](keys), key=lambda prompt: prompt[0])
    return [
        Request(at, len(prompt) * BLOCK_TOKENS, None, array("q", prompt).tobytes()) for at, prompt in made
    ]
