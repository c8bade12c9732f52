"""What is where of one prompt: its chunks, followed from its start until nobody has the next one. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.router.knowledge.links import Link
from kvferry.router.knowledge.nodes import Space


class Step(NamedTuple):
    """The places of this mask have so many chunks from the start, and not the next."""

    chunks: int
    mask: int


class Held(NamedTuple):
    """Tokens of a prompt's start: that the engine has; that are in its host's memory or the engine; that any
    tier can bring there. Each at least the one before.
    """

    engine: int
    memory: int
    shared: int


@dataclass(frozen=True, slots=True)
class Depths:
    """Of one prompt in one namespace; steps with the most chunks first.

    local: by what a place has itself. reach: by what it has or can get. tokens: of the known prefix.
    """

    space: Space
    link: Link
    local: Sequence[Step]
    reach: Sequence[Step]

    def held(self, engine_bit: int, memory_bit: int) -> Held:
        """By whoever has these places."""
        each, most = self.space.chunk_tokens, self.link.tokens
        engine = min(_depth(self.local, engine_bit) * each, most)
        memory = max(engine, min(_depth(self.local, memory_bit) * each, most))
        return Held(engine, memory, max(memory, min(_depth(self.reach, memory_bit) * each, most)))


def follow(
    chunks: Sequence[int], mask_of: Callable[[int], int], *, shared: int, members: Callable[[int], int]
) -> tuple[list[Step], list[Step]]:
    """local and reach of ``Depths``. shared: the bits of shared tiers. members: who can get from these."""
    local_steps: list[Step] = []
    reach_steps: list[Step] = []
    local = reach = -1
    place = 0
    for place, chunk in enumerate(chunks):
        mask = mask_of(chunk)
        common = mask & shared
        wide = mask | members(common) if common else mask
        if not place:
            local, reach = mask, wide
            if not reach:
                return [], []
            continue
        if local & mask != local:
            local_steps.append(Step(place, local & ~mask))
            local &= mask
        if reach & wide != reach:
            reach_steps.append(Step(place, reach & ~wide))
            reach &= wide
            if not reach:
                break
    else:
        place = len(chunks)
        if place:
            local_steps.append(Step(place, local))
            reach_steps.append(Step(place, reach))
    return local_steps[::-1], reach_steps[::-1]


def _depth(steps: Sequence[Step], bit: int) -> int:
    if bit:
        for chunks, mask in steps:
            if mask & bit:
                return chunks
    return 0
