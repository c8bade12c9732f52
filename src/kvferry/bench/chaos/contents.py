"""What the engines ask for, and what every part holds: functions of a seed, the same in every process.

A part's bytes follow from its digest, so whoever loads one can say whether each byte is right. Prompts
share system texts and grow by turns, as conversations do; conversations come and go with time, so that
there is always something new to store, something to reuse and something to evict.
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from kvferry.client.messages import NamespaceInfo
from kvferry.identity.chunks import ChunkChain
from kvferry.identity.domain import DomainKey
from kvferry.identity.names import NAMESPACE_BYTES

DOMAIN = "chaos"
CHUNK_TOKENS = 16
PART_BYTES = (512 << 10, 48 << 10)  # two stripes, and one: a part of each kind
STATES = (0, 1)  # trailing numbers where the second part is a state: it exists at the end of a turn only
SYSTEM_TEXTS = 3
SYSTEM_CHUNKS = 4
TURN_CHUNKS = 2
MAX_TURNS = 10
MAX_CHUNKS = SYSTEM_CHUNKS + TURN_CHUNKS * MAX_TURNS
_BASE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """digests: of its chunks, in order. A few tokens more follow, as every real prompt has them."""

    digests: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        return len(self.digests) * CHUNK_TOKENS + 5


def namespace_of(seed: int) -> NamespaceInfo:
    """The namespace of one run. Of even seeds a prefix ends at a state; of odd ones anywhere."""
    name = blake2b(f"kvferry bench chaos {seed}".encode(), digest_size=NAMESPACE_BYTES).digest()
    trailing = () if seed % 2 else STATES
    return NamespaceInfo(name, PART_BYTES, CHUNK_TOKENS, DOMAIN, "chaos", trailing)


def is_stored(namespace: NamespaceInfo, part: int, at: int) -> bool:
    """Whether an engine has that part of the chunk at that position to store."""
    return not (namespace.trailing and namespace.trailing[part]) or (at + 1) % TURN_CHUNKS == 0


class Contents:
    """The right bytes of every part."""

    def __init__(self, seed: int) -> None:
        base = random.Random(seed).randbytes(_BASE_BYTES)
        self._base = base + base[: max(PART_BYTES)]

    def of(self, digest: bytes, part: int) -> bytes:
        """The part's bytes: its own name, then random bytes from a place that the name decides."""
        name = digest + bytes([part])
        start = int.from_bytes(blake2b(name, digest_size=8).digest(), "little") % _BASE_BYTES
        return name + self._base[start : start + PART_BYTES[part] - len(name)]


class Prompts:
    """Prompts of conversations that are under way now.

    conversations: how many at a time. lasts_s: for how long each of them is asked about.
    """

    def __init__(self, seed: int, namespace: bytes, *, conversations: int, lasts_s: float) -> None:
        self._seed = seed
        self._namespace = namespace
        self._conversations = conversations
        self._step_s = lasts_s / conversations
        self._key = DomainKey.default(DOMAIN)
        self._digests = lru_cache(maxsize=4 * conversations)(self._chain)

    def pick(self, rng: random.Random, since_start_s: float) -> Prompt:
        """One of the conversations of this moment, some turns into it. All engines must share the start."""
        newest = int(since_start_s / self._step_s)
        conversation = newest + rng.randrange(self._conversations)
        turns = 1 + int((MAX_TURNS) * rng.random() ** 1.5)
        return Prompt(self._digests(conversation)[: SYSTEM_CHUNKS + TURN_CHUNKS * turns])

    def _chain(self, conversation: int) -> tuple[bytes, ...]:
        chain = ChunkChain(self._key, self._namespace, chunk_tokens=CHUNK_TOKENS)
        system = conversation % SYSTEM_TEXTS
        chain.extend([self._seed % 997 + system] * (SYSTEM_CHUNKS * CHUNK_TOKENS))
        turns = TURN_CHUNKS * MAX_TURNS * CHUNK_TOKENS
        return (*chain.digests, *chain.extend([1000 + conversation] * turns))
