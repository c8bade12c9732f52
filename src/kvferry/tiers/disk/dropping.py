"""Drops under way: what they are about is not found from their call on, and leaves little by little. Pure."""

from collections import deque
from dataclasses import dataclass, field

from kvferry.identity.names import PartRef
from kvferry.tiers.disk.places import Place, Record


@dataclass(slots=True, eq=False)
class Sweep:
    """What a drop is about: parts of a namespace (None: of any) that lie before a place and were last used at
    ``latest`` (unix seconds; None: whenever) or earlier. What is written later lies behind that place.

    segments: number and generation of those to be looked through. under_way: copies whose writing goes on.
    parts, nbytes: gone so far. places: to be marked removed, pinned; the owner of the log takes them.
    refs, own: of the segment being looked through, what is left of it, and what of it is gone.
    """

    namespace: bytes | None
    latest: float | None
    before: tuple[int, int]
    segments: deque[tuple[int, int]]
    under_way: set[PartRef] = field(default_factory=set[PartRef])
    parts: int = 0
    nbytes: int = 0
    places: list[Place] = field(default_factory=list[Place])
    at: tuple[int, int] | None = None
    refs: list[PartRef] = field(default_factory=list[PartRef])
    own: list[Place] = field(default_factory=list[Place])

    def covers(self, ref: PartRef, record: Record) -> bool:
        """Whether it is dropped."""
        place = record.place
        return (
            (self.namespace is None or ref.key.namespace == self.namespace)
            and (self.latest is None or record.used_at <= self.latest)
            and (place.generation, place.offset) < self.before
        )

    @property
    def through(self) -> bool:
        """Whether every segment was looked through."""
        return self.at is None and not self.segments

    @property
    def over(self) -> bool:
        """Whether nothing is left but marks."""
        return self.through and not self.under_way
