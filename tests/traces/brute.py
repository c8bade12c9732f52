"""Policies written block by block over a prefix tree, slow and plain, for small random traces.

They are rules of the PyPI package kvcache-simulator 0.1.3: a request hits the held blocks from its first one
on without a gap; LRU and the optimum hold a block only with its parent, and never let go of what the current
request hit; the optimum lets a block in only for one that is needed later.
"""

from collections.abc import Sequence

Path = tuple[int, ...]  # a block is named by all keys up to its own


def paths(keys: Sequence[int]) -> list[Path]:
    """The blocks of a prompt."""
    return [tuple(keys[: end + 1]) for end in range(len(keys))]


def prefix_hits(blocks: Sequence[Path], held: set[Path] | dict[Path, int]) -> int:
    """How many blocks are held from the first one on."""
    for number, block in enumerate(blocks):
        if block not in held:
            return number
    return len(blocks)


def fifo(prompts: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Hit blocks per request."""
    queue: list[Path] = []
    found = []
    for keys in prompts:
        found.append(prefix_hits(paths(keys), set(queue)))
        for block in paths(keys):
            if block not in queue:
                queue = [*queue, block][-capacity:]
    return found


def lru(prompts: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Hit blocks per request."""
    return _tree(prompts, capacity, optimum=False)


def optimum(prompts: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Hit blocks per request."""
    return _tree(prompts, capacity, optimum=True)


def _tree(prompts: Sequence[Sequence[int]], capacity: int, *, optimum: bool) -> list[int]:
    ranks: dict[Path, int] = {}  # held: what leaves first has the lowest rank
    clock, found = 0, []
    for request, keys in enumerate(prompts):
        blocks = paths(keys)
        known = prefix_hits(blocks, ranks)
        found.append(known)
        safe = set(blocks[:known])
        for number, block in enumerate(blocks):
            clock += 1
            rank = -_next_use(prompts, block, request) if optimum else clock
            if number >= known and len(ranks) >= capacity:
                leaves = [
                    held for held in ranks if held not in safe and not any(o[:-1] == held for o in ranks)
                ]
                victim = min(leaves, key=lambda leaf: ranks[leaf], default=None)
                if victim is None or (optimum and ranks[victim] >= rank):
                    break
                del ranks[victim]
                if victim == block[:-1]:
                    break
            ranks[block] = rank
    return found


def _next_use(prompts: Sequence[Sequence[int]], block: Path, request: int) -> int:
    for later in range(request + 1, len(prompts)):
        if tuple(prompts[later][: len(block)]) == block:
            return later
    return len(prompts) + 1
