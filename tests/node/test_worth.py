"""Which parts will be wanted again: conversations, and not prompts that come once."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.node.worth import Worth

SPACE = b"n" * 16
OTHER = b"o" * 16


def chunks(name: str, count: int) -> list[bytes]:
    return [f"{name}-{number}".encode() for number in range(count)]


class Fleet:
    """Prompts one after another, everything of which is found later."""

    def __init__(self, limit: int = 1000) -> None:
        self.worth = Worth(limit)
        self.known: set[bytes] = set()

    def serve(self, prompt: Sequence[bytes], answer: Sequence[bytes] = (), *, space: bytes = SPACE) -> bool:
        """A request, in steps of prefill and decoding. Whether what it adds is likely to be wanted again."""
        known = 0
        while known < len(prompt) and prompt[known] in self.known:
            known += 1
        self.worth.found(space, prompt, known)
        whole = [*prompt, *answer]
        steps = {self.worth.likely(space, whole[:end]) for end in range(known + 1, len(whole) + 1)}
        self.known.update(whole)
        assert len(steps) <= 1
        return steps == {True}


def test_the_turns_of_a_conversation_are_likely_after_its_first() -> None:
    fleet = Fleet()
    history = chunks("system", 3)
    assert not fleet.serve(history)
    for turn in range(6):
        question, answer = chunks(f"question {turn}", 1), chunks(f"answer {turn}", 2)
        assert fleet.serve([*history, *question], answer)
        history += [*question, *answer]


def test_prompts_that_come_once_are_not_whatever_head_they_share() -> None:
    """Be it longer than what each of them brings: but for the first, which could be a conversation."""
    for shared in (0, 1, 8, 30):
        fleet = Fleet()
        head = chunks("system", shared)
        fleet.serve(head)
        likely = [fleet.serve([*head, *chunks(f"document {number}", 12)]) for number in range(20)]
        assert not any(likely[1:])
        assert not likely[0] or shared >= 12


def test_short_questions_after_a_shared_head_that_end_within_a_chunk_are_not() -> None:
    """All of the prompt's whole chunks are known: what follows is each time something else."""
    fleet = Fleet()
    head = chunks("system", 8)
    fleet.serve(head)
    likely = [fleet.serve(head, chunks(f"answer {number}", 1)) for number in range(10)]
    assert not any(likely[1:])


def test_a_conversation_whose_prompt_ends_with_a_chunk_goes_on() -> None:
    fleet = Fleet()
    history = chunks("turn", 4)
    fleet.serve(history)
    assert fleet.serve(history, chunks("answer", 2))


def test_a_prompt_that_is_asked_for_again_before_it_was_stored_is_the_same_prompt() -> None:
    fleet = Fleet()
    history = chunks("turn", 6)
    fleet.serve(history)
    fleet.worth.found(SPACE, [*history, b"new"], 6)
    assert fleet.serve([*history, b"new"])


def test_namespaces_are_told_apart() -> None:
    fleet = Fleet()
    history = chunks("turn", 6)
    fleet.serve(history)
    fleet.worth.found(SPACE, [*history, b"new"], 6)
    assert not fleet.worth.likely(OTHER, [*history, b"new"])


def test_what_was_never_asked_for_is_not_likely() -> None:
    assert not Worth().likely(SPACE, chunks("prompt", 5))
    assert not Worth().likely(SPACE, [])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_what_is_remembered_is_bounded(requests: list[tuple[int, int, int]]) -> None:
    fleet = Fleet(limit=7)
    for head, number, tail in requests:
        fleet.serve([*chunks("head", head), *chunks(f"tail {head} {number}", tail)])
        assert len(fleet.worth._marks) <= 7
        assert len(fleet.worth._continued) <= 7
