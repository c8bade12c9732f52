"""Conversations by a seed: they share beginnings, grow by turns, and are given up now and then."""

import random
from dataclasses import dataclass, field

FIRST_TOKEN = 3
ABORTED = 0.2  # of the requests
PRIORITIES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens. longest: of prompt and answer together, at most."""

    longest: int = 1280
    openings: int = 4  # shared beginnings
    opening: tuple[int, int] = (120, 400)
    words: tuple[int, int] = (20, 200)
    answer: tuple[int, int] = (2, 160)


@dataclass(slots=True)
class Conversation:
    """history: all that was said so far."""

    history: list[int] = field(default_factory=list[int])


class Traffic:
    """What one user says. vocabulary: of the model. Not thread-safe: one for each user."""

    def __init__(self, seed: str, *, vocabulary: int, shape: Shape) -> None:
        """seed: begins with what all users share."""
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary
        self._shape = shape
        shared = random.Random(seed.partition("/")[0])
        self._openings = [
            [shared.randrange(FIRST_TOKEN, vocabulary) for _ in range(shared.randint(*shape.opening))]
            for _ in range(shape.openings)
        ]

    def begins(self) -> Conversation:
        """A new one."""
        return Conversation(list(self._rng.choice(self._openings)))

    def says(self, conversation: Conversation) -> tuple[tuple[int, ...], int] | None:
        """The next prompt and how many tokens may answer it; None once there is no room for more."""
        words = self._rng.randint(*self._shape.words)
        answer = self._rng.randint(*self._shape.answer)
        if len(conversation.history) + words + answer > self._shape.longest:
            return None
        conversation.history += [self._rng.randrange(FIRST_TOKEN, self._vocabulary) for _ in range(words)]
        return tuple(conversation.history), answer

    def gives_up_after(self, tokens: int) -> int | None:
        """After how many of these tokens the user goes away; None for hearing it out."""
        return self._rng.randrange(tokens) if self._rng.random() < ABORTED else None

    def priority(self) -> int:
        """Lower is sooner."""
        return self._rng.randrange(PRIORITIES)

    def chooses(self, replicas: int) -> int:
        """Which replica is asked."""
        return self._rng.randrange(replicas)
