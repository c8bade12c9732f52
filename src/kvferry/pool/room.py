"""Where room for a part comes from when nothing is free: which slots to empty. Decides, evicts nothing."""

from collections.abc import Sequence

from kvferry.pool.policy import EvictionPolicy
from kvferry.pool.slots import Run, SlotAllocator, slot_bytes_for


class RoomFinder:
    """Chooses between a victim of the wanted slot size and the slabs of other sizes.

    Slabs move to another size only when everything in them is colder than the coldest part of that size,
    or when that size has nothing to evict. They are compared once per run's worth of own evictions, so a
    reservation costs constant time but for that.
    """

    def __init__(self, slots: SlotAllocator, policy: EvictionPolicy) -> None:
        self._slots = slots
        self._policy = policy
        self._until_look: dict[int, int] = {}  # slot size -> own evictions before the next comparison

    def choose(self, nbytes: int, *, spare_from: int | None) -> Sequence[int]:
        """Offsets of the slots to empty so that ``nbytes`` fit; empty when nothing may be evicted.

        spare_from: parts stamped at or after this mark are left alone.
        """
        slot_bytes = slot_bytes_for(nbytes)
        victim = self._policy.victim(slot_bytes, before=spare_from)
        if victim is not None and self._until_look.get(slot_bytes, 0) > 0:
            self._until_look[slot_bytes] -= 1
            return (victim.offset,)
        self._until_look[slot_bytes] = self._slots.slots_per_run(nbytes)
        sparing = self._policy.spares_reused(victim)
        before = victim.stamp if victim is not None else spare_from
        runs = self._slots.slab_victims(nbytes, before=before, spare_reused=sparing)
        if not runs and victim is None and sparing:
            runs = self._slots.slab_victims(nbytes, before=before, spare_reused=False)
        if runs:
            return _used(runs)
        return () if victim is None else (victim.offset,)


def _used(runs: Sequence[Run]) -> list[int]:
    return [offset for run in runs for offset in run.used]
