"""Which keeper a chunk belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).

Each keeper has a weight for each chunk, and the highest has it. One that leaves gives its chunks to all
others evenly; one that joins takes its share from all; nothing else moves. Everybody who knows the same
names comes to the same result, with nobody to ask.
"""

from collections.abc import Sequence
from functools import lru_cache

import xxhash


@lru_cache(maxsize=1024)
def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _weight(chunk: bytes, name: str) -> tuple[int, str]:
    return xxhash.xxh3_64_intdigest(chunk, _seed(name)), name


def owner(chunk: bytes, names: Sequence[str]) -> str:
    """The name, of those that there are, that a chunk's digest belongs to. Raises ValueError for none."""
    return max(names, key=lambda name: _weight(chunk, name))


def ranking(chunk: bytes, names: Sequence[str]) -> list[str]:
    """The owner first, then who has the chunk without it, and so on."""
    return sorted(names, key=lambda name: _weight(chunk, name), reverse=True)
