"""Which keeper a chunk belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).

Each keeper has a weight for each chunk, and the highest has it. One that leaves gives its chunks to all
others evenly; one that joins takes its share from all; nothing else moves. Everybody who knows the same
names comes to the same result, with nobody to ask.
"""

from collections import Counter
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


def told_apart(keepers: Sequence[tuple[str, str]]) -> list[str]:
    """What to hash by, of names and addresses: the name, with its address where others have the same.

    It does not depend on their order, nor on which of them are up.
    """
    count = Counter(name for name, _ in keepers)
    return [name if count[name] == 1 else f"{name} at {address}" for name, address in keepers]


def namesakes(keepers: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Addresses by name, of those names that more than one has."""
    found: dict[str, list[str]] = {}
    for name, address in keepers:
        found.setdefault(name, []).append(address)
    return {name: addresses for name, addresses in found.items() if len(addresses) > 1}


def complaint(name: str, addresses: Sequence[str]) -> str:
    """One line about namesakes."""
    return (
        f"{len(addresses)} keepers are called {name!r}: {', '.join(addresses)}; give each a --name of its "
        "own, or name it once if it is one keeper"
    )
