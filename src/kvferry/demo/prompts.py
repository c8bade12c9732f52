"""The demo's prompts: one long document that many questions share, made here, the same on every run."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.errors import MisconfiguredError

Messages = list[dict[str, str]]
Tokenize = Callable[[Sequence[dict[str, str]]], tuple[int, ...]]

QUESTIONS = (
    "Which vessel carried timber, and on which day did it arrive?",
    "Who was the pilot of the vessel that waited longest for the tide?",
    "Summarise what the log says about fog in one sentence.",
    "How many crates of oranges were unloaded at the east quay?",
    "Name two captains who paid their dues late.",
    "What did the harbour master order after the storm?",
    "Which berth was closed for repairs, and why?",
    "List the cargo of the last vessel in the log.",
    "When did the lighthouse lamp fail, and who mended it?",
    "Whose dues were forgiven, and what had come with them?",
)
_SEED = 20
_VESSELS = ("Aurora", "Bellwether", "Cormorant", "Dunlin", "Esperance", "Fulmar", "Guillemot", "Halcyon")
_CARGO = ("timber", "salt", "oranges", "slate", "copper wire", "grain", "cotton", "tinned fish")
_PEOPLE = ("Mrs Okafor", "Mr Lindqvist", "Captain Moreau", "Ms Tanaka", "Mr Achebe", "Captain Ruiz")
_WEATHER = ("fog until noon", "a fresh westerly", "heavy rain", "a flat calm", "hail in the evening")
_PLACES = ("the east quay", "berth four", "the coal wharf", "the fish market", "the dry dock")
_FILLER = " tide"
_MAX_FITTING = 12
_SLACK = 12  # the shared prefix may end up to this many tokens past a block's end


def _entry(day: int, rng: random.Random) -> str:
    """One day of the harbour's log, about 70 tokens."""
    return (
        f"Day {day}: the {rng.choice(_VESSELS)} came in with {rng.randint(3, 400)} crates of "
        f"{rng.choice(_CARGO)}, bound for {rng.choice(_PLACES)}, in {rng.choice(_WEATHER)}. "
        f"{rng.choice(_PEOPLE)} piloted her and waited {rng.randint(1, 9)} hours for the tide; "
        f"{rng.choice(_PEOPLE)} noted dues of {rng.randint(10, 900)} shillings, "
        f"{rng.choice(('paid', 'owed', 'disputed', 'forgiven'))} on the same day.\n"
    )


def document(entries: int, *, filler: int, seed: int = _SEED) -> str:
    """The log with so many entries, then so many filler words (one token each)."""
    rng = random.Random(seed)
    body = "".join(_entry(day, rng) for day in range(1, entries + 1))
    return (
        "You keep the log of a small harbour. Answer from the log.\n"
        + body
        + "End of log."
        + _FILLER * filler
    )


def chat(text: str, question: str) -> Messages:
    """The document as the system's message, then one question."""
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all the prompts begin with in common."""
    shortest = min(len(prompt) for prompt in prompts)
    for position in range(shortest):
        if len({prompt[position] for prompt in prompts}) > 1:
            return position
    return shortest


@dataclass(frozen=True, slots=True)
class PromptSet:
    """prompts: one per question. shared: tokens they have in common; just past a block's end.

    boundary: the last block's end within ``shared``: what a perfect cache can reuse. entries: the document's.
    """

    prompts: tuple[tuple[int, ...], ...]
    shared: int
    boundary: int
    entries: int = 1


def prompt_set(tokenize: Tokenize, *, target_tokens: int, block_tokens: int, max_tokens: int) -> PromptSet:
    """Prompts of about ``target_tokens`` whose shared prefix ends just past a block's end.

    Then no question, with its answer, completes a further block, so that every request of the run has
    the same reusable boundary: the one condition under which answers may be compared word for word.

    Raises MisconfiguredError when the model's tokenizer does not allow it.
    """
    entries, filler = max(1, target_tokens // 80), 0
    for _ in range(_MAX_FITTING):
        text = document(entries, filler=filler)
        prompts = tuple(tokenize(chat(text, question)) for question in QUESTIONS)
        shared = shared_tokens(prompts)
        longest = max(len(prompt) for prompt in prompts)
        if longest < target_tokens - 2 * block_tokens:
            per_entry = max(1, shared // entries)
            entries += max(1, (target_tokens - longest - block_tokens) // per_entry)
            continue
        if longest > target_tokens + 2 * block_tokens:
            entries -= max(1, (longest - target_tokens) // max(1, shared // entries))
            continue
        past = shared % block_tokens
        room = longest - shared + max_tokens + past <= block_tokens
        if past <= _SLACK and room:
            return PromptSet(prompts, shared, shared - past, entries)
        filler += block_tokens - past + 2 if past > _SLACK else 1
    raise MisconfiguredError(
        f"could not fit questions into blocks of {block_tokens} tokens with this model's tokenizer; "
        "try another --model"
    )
