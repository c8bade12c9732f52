"""Whether an answer is the one of an engine without a cache, or how it comes that it is another."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvferry.bench.soak.asking import Answer, Question
from kvferry.errors import RetryError

MAX_TIE = 1e-3
"""Of log probabilities in float32: two tokens that are as likely, so that rounding decides."""
MAX_TIE_16_BIT = 5e-2


class Finding(Enum):
    """EQUAL: to the cold answer. OWN_HIT: to that of an engine with as much of the prompt itself.

    TIE: they part where two tokens are as likely, up to rounding, as to an engine that computed it all.
    """

    EQUAL = "equal"
    OWN_HIT = "own hit"
    TIE = "tie"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a replica was asked and what it answered, wholly or until the client went away."""

    replica: str
    question: Question
    answer: Answer


@dataclass(slots=True)
class Judge:
    """reference: asks an engine without the connector. tie: the largest gap that rounding may turn."""

    reference: Callable[[Question], Answer]
    tie: float
    _salts: "itertools.count[int]" = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, exchange: Exchange) -> Finding:
        """Raises RetryError when the reference does not answer."""
        answer, prompt = exchange.answer.tokens, exchange.question.prompt
        if not answer:
            return Finding.EQUAL
        cold = self._ask(prompt, len(answer), salt=self._salt())
        if cold.cached:
            raise RetryError(f"the reference did not compute {cold.cached} tokens of a new prompt")
        if cold.tokens == answer:
            return Finding.EQUAL
        if exchange.answer.cached and self._own_hit(prompt, exchange.answer) == answer:
            return Finding.OWN_HIT
        return Finding.TIE if self._tied(prompt, answer, cold.tokens) else Finding.WRONG

    def _own_hit(self, prompt: tuple[int, ...], answer: Answer) -> list[int]:
        """What it answers when it has as many tokens itself."""
        salt = self._salt()
        self._ask(prompt[: answer.cached + 1], 1, salt=salt)
        return self._ask(prompt, len(answer.tokens), salt=salt).tokens

    def _tied(self, prompt: tuple[int, ...], answer: list[int], cold: list[int]) -> bool:
        at = next(i for i, pair in enumerate(zip(answer, cold, strict=True)) if pair[0] != pair[1])
        again = self._ask((*prompt, *cold[:at]), 1, salt=self._salt(), logprobs=2)
        likely = again.likely[0] if again.likely else {}
        chosen, other = likely.get(cold[at]), likely.get(answer[at])
        return chosen is not None and other is not None and abs(chosen - other) <= self.tie

    def _ask(self, prompt: tuple[int, ...], tokens: int, *, salt: str, logprobs: int | None = None) -> Answer:
        return self.reference(Question(prompt, tokens, salt=salt, logprobs=logprobs))

    def _salt(self) -> str:
        with self._lock:
            return f"judge {next(self._salts)}"
