"""Which chunks a prefix of text is, learned from requests whose text was known here. Pure.

A node tells the chunks of a request that this router sent: the request's names then mean those chunks. Where
inside a prompt a name ends, in tokens, is known at the prompt's end and estimated in between by length; two
prompts that share a name show where the estimate was too long, since there their chunks part. Where they
part much earlier, the text has become other tokens since: a template that says the day, another template.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvferry.identity.names import DIGEST_BYTES
from kvferry.router.contract import Key

MAX_LINKS = 1 << 18
MAX_DIGEST_BYTES = 64 << 20  # of all prompts together
_WORDS = DIGEST_BYTES // 8
FEW_CHUNKS = 4
"""An estimate that is so many chunks, and so many times, too long is none: what is known is obsolete."""


def chunk_numbers(digests: bytes) -> Sequence[int]:
    """A number for each digest: its head. Digests are keyed: numbers are as good as random."""
    words = array("Q")
    words.frombytes(digests[: len(digests) // DIGEST_BYTES * DIGEST_BYTES])
    return words[::_WORDS]


class Prompt(msgspec.Struct, eq=False, gc=False):
    """The chunks of one prompt, for all names that end in it."""

    digests: bytes
    names: int = 0


class Link(msgspec.Struct, eq=False, gc=False):
    """The prompt's first ``chunks`` chunks are of this prefix whole; ``tokens`` is its length."""

    prompt: Prompt
    chunks: int
    tokens: int

    @property
    def digests(self) -> bytes:
        """Of the chunks."""
        return self.prompt.digests[: self.chunks * DIGEST_BYTES]


class Links:
    """By namespace (a small number) and name."""

    def __init__(self, limit: int = MAX_LINKS, limit_bytes: int = MAX_DIGEST_BYTES) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._links: OrderedDict[bytes, Link] = OrderedDict()
        self.digest_bytes = 0

    def __len__(self) -> int:
        return len(self._links)

    def longest(self, space: int, keys: Sequence[Key]) -> tuple[int, Link] | None:
        """The longest of these prefixes that is known, and its place among them."""
        links = self._links
        tail = _tail(space)
        for place in range(len(keys) - 1, -1, -1):
            name = keys[place].name + tail
            link = links.get(name)
            if link is not None:
                links.move_to_end(name)
                return place, link
        return None

    def learn(
        self, space: int, keys: Sequence[Key], digests: bytes, *, prompt_tokens: int, chunk_tokens: int
    ) -> None:
        """The prompt with these prefixes, the last of them all of it, has these chunks."""
        if not keys or prompt_tokens <= 0:
            return
        tail = _tail(space)
        known = len(digests) // DIGEST_BYTES
        limits: dict[int, int] = {}  # chunks that a name has at most, where an older prompt says so
        obsolete = False
        length, tokens, first = 0, 0, 0
        for place in range(len(keys) - 1, -1, -1):
            link = self._links.get(keys[place].name + tail)
            if link is None:
                continue
            if place == len(keys) - 1:
                whole = min(prompt_tokens // chunk_tokens, known)
                if (link.tokens, link.chunks) == (prompt_tokens, whole) and digests.startswith(link.digests):
                    return  # known to its end
            elif digests.startswith(link.digests) and link.tokens <= prompt_tokens:
                length, tokens, first = keys[place].length, link.tokens, place + 1
                break
            common = _common(digests, link.digests)
            obsolete = obsolete or link.chunks >= FEW_CHUNKS * max(common, 1)
            if not obsolete and place < len(keys) - 1:  # where all of it ends is certain
                limits[place] = common
        prompt = Prompt(digests[: known * DIGEST_BYTES])
        rest = keys[-1].length - length
        for place in range(first, len(keys)):
            share = (keys[place].length - length) / rest if rest > 0 else 1.0
            at = round(tokens + share * (prompt_tokens - tokens))
            chunks = min(at // chunk_tokens, known, limits.get(place, known))
            self._put(keys[place].name + tail, Link(prompt, chunks, at))

    def _put(self, name: bytes, link: Link) -> None:
        self._drop(self._links.pop(name, None))
        if not link.prompt.names:
            self.digest_bytes += len(link.prompt.digests)
        link.prompt.names += 1
        self._links[name] = link
        while self._links and (len(self._links) > self._limit or self.digest_bytes > self._limit_bytes):
            self._drop(self._links.popitem(last=False)[1])

    def _drop(self, link: Link | None) -> None:
        if link is not None:
            link.prompt.names -= 1
            if not link.prompt.names:
                self.digest_bytes -= len(link.prompt.digests)


def _tail(space: int) -> bytes:
    return space.to_bytes(4, "little") if space else b""


def _common(one: bytes, other: bytes) -> int:
    """How many chunks both begin with."""
    low, high = 0, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:  # chained digests: once apart, apart for ever
        middle = (low + high + 1) // 2
        end = middle * DIGEST_BYTES
        if one[end - DIGEST_BYTES : end] == other[end - DIGEST_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low
