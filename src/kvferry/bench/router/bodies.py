"""Chat bodies of a given size, as bytes, cheap to make: half is shared by all, half is nobody else's."""

import json
import random
from collections.abc import Sequence

MESSAGE_BYTES = 4096
POOL = 32  # own halves that are told apart by a number at their start
NUMBER = "#########"
_TEXT = """a cache holds what was computed once so that a request which begins alike need not compute it anew
while def return import class value "quoted" path/to/file [1, 2] {key: value} é ü 漢字 number and then"""
_WORDS = _TEXT.split()


def prose(rng: random.Random, length: int) -> str:
    """So many characters of lines, with the quotes and line ends that code and prose have."""
    words: list[str] = []
    count = 0
    while count < length:
        word = rng.choice(_WORDS)
        words.append(word + ("\n" if rng.random() < 0.08 else " "))
        count += len(word) + 1
    return "".join(words)[:length]


def messages(rng: random.Random, length: int, *, first: str = "user") -> list[dict[str, str]]:
    """A conversation of so many characters, in turns of at most ``MESSAGE_BYTES``."""
    roles = ("user", "assistant")
    found: list[dict[str, str]] = []
    while length > 0:
        size = min(length, MESSAGE_BYTES)
        role = first if not found else roles[len(found) % 2]
        found.append({"role": role, "content": prose(rng, size)})
        length -= size
    return found


class Bodies:
    """Bodies of about ``nbytes``, streamed, each different from all before it."""

    def __init__(self, nbytes: int, *, seed: int, max_tokens: int) -> None:
        """max_tokens: to be generated."""
        rng = random.Random(seed)
        half = max(16, nbytes * 2 // 5)  # JSON needs more bytes than characters
        shared = messages(rng, half, first="system")
        self._halves: list[tuple[bytes, bytes]] = []
        for _ in range(POOL):
            own = messages(rng, half)
            own[0]["content"] = NUMBER + own[0]["content"]
            self._halves.append(_cut([*shared, *own], max_tokens))
        self._number = 0

    def next(self) -> bytes:
        """One more."""
        self._number += 1
        before, after = self._halves[self._number % POOL]
        return b"%s%09d%s" % (before, self._number, after)


def encoded(conversation: Sequence[dict[str, str]], max_tokens: int, *, model: str = "mock") -> bytes:
    """As clients send it."""
    body = {
        "model": model,
        "messages": list(conversation),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
    }
    return json.dumps(body, ensure_ascii=False).encode()


def _cut(conversation: Sequence[dict[str, str]], max_tokens: int) -> tuple[bytes, bytes]:
    before, _, after = encoded(conversation, max_tokens).partition(NUMBER.encode())
    return before, after
