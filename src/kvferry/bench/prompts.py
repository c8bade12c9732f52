"""Prompts as token ids: no two runs, and no two prefixes of one run, share a block."""

import random

FIRST_TOKEN = 1000  # clear of special tokens
LAST_TOKEN = 40000
QUESTION_TOKENS = 20


class Prompts:
    """Makes prefixes and questions from one seed."""

    def __init__(self, seed: int, *, vocabulary: int = LAST_TOKEN) -> None:
        self._rng = random.Random(seed)
        self._last = min(LAST_TOKEN, vocabulary - 1)

    def tokens(self, count: int) -> tuple[int, ...]:
        """So many tokens nobody had before."""
        return tuple(self._rng.randint(FIRST_TOKEN, self._last) for _ in range(count))

    def question(self) -> tuple[int, ...]:
        """Another question, always of the same length."""
        return self.tokens(QUESTION_TOKENS)

    def length(self, low: int, high: int) -> int:
        """A random length, both ends included."""
        return self._rng.randint(low, high)
