"""What is worth carrying over from a segment that leaves. Pure."""

from collections.abc import Iterable

from kvferry.identity.names import PartRef
from kvferry.tiers.disk.format import record_bytes
from kvferry.tiers.disk.places import Record

CARRIED_SHARE = 2
"""Half a segment at most is carried over, so that each eviction gives room."""


def last_used(parts: Iterable[tuple[PartRef, Record]], *, room: int, most: int) -> list[PartRef]:
    """Those that were used since they were written, the last used first: ``most`` at most, as far as their
    records fit ``room`` bytes."""
    used = sorted((part for part in parts if part[1].used), key=lambda part: part[1].used, reverse=True)
    chosen: list[PartRef] = []
    for ref, _ in used[:most]:
        room -= record_bytes(ref.nbytes)
        if room < 0:
            break
        chosen.append(ref)
    return chosen
