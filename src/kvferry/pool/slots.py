"""Slab allocator: slots without external fragmentation (docs/decisions/slab-allocator.md).

The arena is cut into slabs of equal size. A *run* is one slab, or a few neighbouring ones, that serves
slots of one size: the part's bytes rounded up to a page. A run whose last slot is freed gives its slabs
back, and a free slab serves any size. The length of a run is the one that wastes least at its end, and
parts larger than a slab get runs of at least their size. Freed memory is reused last in, first out:
warm pages stay warm.
"""

from kvferry.errors import BrokenError, MisconfiguredError

PAGE_BYTES = 4096
MAX_SLAB_BYTES = 64 << 20
MIN_SLAB_BYTES = 2 << 20
WANTED_SLABS = 8
MAX_EXTRA_RUN_SLABS = 7
ACCEPTED_WASTE = 1 / 64


def slab_bytes_for(arena_bytes: int) -> int:
    """The slab size for a pool: at most 64 MiB, small enough for 8 slabs, in 2 MiB steps.

    Of the few largest sizes that is the one that leaves least of the pool over.
    """
    least = max(WANTED_SLABS, -(-arena_bytes // MAX_SLAB_BYTES))
    sizes = [
        arena_bytes // count // MIN_SLAB_BYTES * MIN_SLAB_BYTES
        for count in range(least, 2 * WANTED_SLABS + least)
    ]
    return min((size for size in sizes if size), key=lambda size: arena_bytes % size, default=MIN_SLAB_BYTES)


def slot_bytes_for(nbytes: int) -> int:
    """The slot size of a part of ``nbytes`` bytes: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Run:
    """Neighbouring slabs that serve slots of one size.

    ``held``, ``reused`` and ``stamp`` are the catalogue's notes, from which ``slab_victims`` chooses:
    how many slots are pinned or being filled, how many hold parts that were used, the latest recency stamp.
    """

    __slots__ = (
        "first_slab",
        "free",
        "fresh",
        "held",
        "reused",
        "slabs",
        "slot_bytes",
        "slots",
        "stamp",
        "used",
    )

    def __init__(self, first_slab: int, slabs: int, *, slot_bytes: int, slots: int) -> None:
        self.first_slab = first_slab
        self.slabs = slabs
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.fresh = 0  # slots from this index on were never given out
        self.free: list[int] = []  # offsets, most recently freed last
        self.used: set[int] = set()
        self.held = 0
        self.reused = 0
        self.stamp = 0


class SlotAllocator:
    """Gives out slots of ``arena_bytes`` bytes of memory that it never touches itself."""

    def __init__(self, arena_bytes: int, slab_bytes: int | None = None) -> None:
        """Raises MisconfiguredError when not even one slab fits."""
        self.slab_bytes = slab_bytes if slab_bytes is not None else slab_bytes_for(arena_bytes)
        if self.slab_bytes <= 0 or self.slab_bytes % PAGE_BYTES:
            raise MisconfiguredError(f"slab of {self.slab_bytes} bytes: must be a multiple of {PAGE_BYTES}")
        self.slab_count = arena_bytes // self.slab_bytes
        if self.slab_count < 1:
            raise MisconfiguredError(
                f"pool of {arena_bytes} bytes is smaller than one slab of {self.slab_bytes}; make it larger"
            )
        self.arena_bytes = arena_bytes
        self.used_bytes = 0
        self._taken = bytearray(self.slab_count)
        self._owner: list[Run | None] = [None] * self.slab_count
        self._free_slabs = list(range(self.slab_count - 1, -1, -1))  # top of the stack: lowest, then warmest
        self._open: dict[int, dict[Run, None]] = {}  # slot size -> runs with room, most recently freed last
        self._run_slabs: dict[int, int] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether an empty pool could hold a part of ``nbytes`` bytes."""
        return 0 < nbytes <= self.slab_count * self.slab_bytes

    def alloc(self, nbytes: int) -> int | None:
        """The offset of a slot for ``nbytes`` bytes, or None when nothing is free for that size."""
        if not self.fits(nbytes):
            return None
        slot_bytes = slot_bytes_for(nbytes)
        rooms = self._open.get(slot_bytes)
        run = next(reversed(rooms)) if rooms else self._new_run(slot_bytes)
        if run is None:
            return None
        if run.free:
            offset = run.free.pop()
        else:
            offset = run.first_slab * self.slab_bytes + run.fresh * slot_bytes
            run.fresh += 1
        run.used.add(offset)
        self.used_bytes += slot_bytes
        if len(run.used) == run.slots:
            del self._open[slot_bytes][run]
        return offset

    def free(self, offset: int) -> None:
        """Take a slot back. Raises BrokenError when it is not in use (double free)."""
        run = self.run_of(offset)
        if offset not in run.used:
            raise BrokenError(f"slot at {offset} freed twice or never given out")
        run.used.remove(offset)
        self.used_bytes -= run.slot_bytes
        rooms = self._open.setdefault(run.slot_bytes, {})
        rooms.pop(run, None)
        if run.used:
            run.free.append(offset)
            rooms[run] = None
            return
        for slab in range(run.first_slab + run.slabs - 1, run.first_slab - 1, -1):
            self._taken[slab] = 0
            self._owner[slab] = None
            self._free_slabs.append(slab)

    def run_of(self, offset: int) -> Run:
        """The run an offset lies in. Raises BrokenError where no run is."""
        slab = offset // self.slab_bytes
        run = self._owner[slab] if 0 <= slab < self.slab_count else None
        if run is None:
            raise BrokenError(f"slot at {offset} lies in no run")
        return run

    def slots_per_run(self, nbytes: int) -> int:
        """How many slots of that size one run holds."""
        slot_bytes = slot_bytes_for(nbytes)
        return self._length(slot_bytes) * self.slab_bytes // slot_bytes

    def slab_victims(self, nbytes: int, *, before: int | None, spare_reused: bool) -> tuple[Run, ...]:
        """Which runs to empty so that a new run for ``nbytes`` fits; empty when there is no choice.

        Of all windows long enough, the least recently touched one in which nothing is held, in which
        everything is older than ``before`` (None: any age) and, if asked, nothing in them was used. Runs of
        the same slot size are not considered: emptying them slot by slot serves as well. One pass over
        the slabs.
        """
        slot_bytes = slot_bytes_for(nbytes)
        length = self._length(slot_bytes)
        best: tuple[int, int] | None = None
        usable = 0  # slabs that may be taken, ending at this one
        for slab, run in enumerate(self._owner):
            if run is not None and (
                run.held
                or run.slot_bytes == slot_bytes
                or (before is not None and run.stamp >= before)
                or (spare_reused and run.reused)
            ):
                usable = 0
                continue
            usable += 1
            if usable >= length:
                window = self._owner[slab - length + 1 : slab + 1]
                stamp = max((other.stamp for other in window if other is not None), default=0)
                if best is None or stamp < best[0]:
                    best = (stamp, slab - length + 1)
        if best is None:
            return ()
        chosen = self._owner[best[1] : best[1] + length]
        return tuple({run: None for run in chosen if run is not None})

    def check(self) -> None:
        """Raise BrokenError when runs overlap or the books do not balance."""
        runs = {run: None for run in self._owner if run is not None}
        for run in runs:
            span = range(run.first_slab, run.first_slab + run.slabs)
            if any(self._owner[slab] is not run for slab in span) or not run.used:
                raise BrokenError(f"run at slab {run.first_slab} overlaps another or is empty")
            if len(run.used) + len(run.free) != run.fresh or run.fresh > run.slots:
                raise BrokenError(f"run at slab {run.first_slab} lost a slot")
            if (run in self._open.get(run.slot_bytes, {})) != (len(run.used) < run.slots):
                raise BrokenError(f"run at slab {run.first_slab} is listed wrongly as having room")
        if self.used_bytes != sum(len(run.used) * run.slot_bytes for run in runs):
            raise BrokenError("used bytes do not match the slots in use")
        free = {slab for slab in range(self.slab_count) if self._owner[slab] is None}
        if free != {slab for slab in range(self.slab_count) if not self._taken[slab]}:
            raise BrokenError("the map of free slabs is wrong")
        if not free <= set(self._free_slabs):
            raise BrokenError("a free slab was forgotten")

    def _length(self, slot_bytes: int) -> int:
        known = self._run_slabs.get(slot_bytes)
        if known is not None:
            return known
        least = -(-slot_bytes // self.slab_bytes)
        most = max(least, min(least + MAX_EXTRA_RUN_SLABS, self.slab_count // WANTED_SLABS))
        best, best_waste = least, 1.0
        for slabs in range(least, most + 1):
            waste = slabs * self.slab_bytes % slot_bytes / (slabs * self.slab_bytes)
            if waste < best_waste:
                best, best_waste = slabs, waste
            if waste <= ACCEPTED_WASTE:
                break
        self._run_slabs[slot_bytes] = best
        return best

    def _new_run(self, slot_bytes: int) -> Run | None:
        length = self._length(slot_bytes)
        first = self._take_slab() if length == 1 else self._taken.find(bytes(length))
        if first is None or first < 0:
            return None
        slots = length * self.slab_bytes // slot_bytes
        run = Run(first, length, slot_bytes=slot_bytes, slots=slots)
        for slab in range(first, first + length):
            self._taken[slab] = 1
            self._owner[slab] = run
        self._open.setdefault(slot_bytes, {})[run] = None
        if len(self._free_slabs) > 4 * self.slab_count:
            self._free_slabs = [slab for slab in dict.fromkeys(self._free_slabs) if not self._taken[slab]]
        return run

    def _take_slab(self) -> int | None:
        while self._free_slabs:
            slab = self._free_slabs.pop()
            if not self._taken[slab]:  # a longer run may have taken it from the middle of the stack
                return slab
        return None
