"""The demo's prompts end where reuse can be compared word for word."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.demo.prompts import QUESTIONS, prompt_set, shared_tokens
from kvferry.errors import MisconfiguredError

MAX_TOKENS = 16


def _words(messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """A tokenizer: one token per word, with marks round each message as a chat template has them."""
    found: list[int] = []
    for message in messages:
        found.append(1)
        found += [2 + sum(word.encode()) % 40000 for word in message["content"].split()]
        found += [3, 4]
    return tuple(found)


@settings(deadline=None)
@given(block=st.sampled_from([64, 128, 256]), target=st.integers(2000, 7000))
def test_no_question_completes_a_block_beyond_the_shared_ones(block: int, target: int) -> None:
    made = prompt_set(_words, target_tokens=target, block_tokens=block, max_tokens=MAX_TOKENS)
    assert made.boundary % block == 0
    assert shared_tokens(made.prompts) == made.shared >= made.boundary
    assert len(set(made.prompts)) == len(QUESTIONS)
    for prompt in made.prompts:
        assert (len(prompt) + MAX_TOKENS - 1) // block * block == made.boundary
        assert abs(len(prompt) - target) <= 3 * block


def test_the_same_prompts_on_every_run() -> None:
    first, second = (
        prompt_set(_words, target_tokens=3000, block_tokens=128, max_tokens=MAX_TOKENS) for _ in range(2)
    )
    assert first == second


def test_blocks_that_no_question_fits_into_are_refused() -> None:
    with pytest.raises(MisconfiguredError, match="--model"):
        prompt_set(_words, target_tokens=3000, block_tokens=16, max_tokens=MAX_TOKENS)
