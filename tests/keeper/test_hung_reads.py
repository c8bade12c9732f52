"""Reads and writes of a disk that never end, and for which nobody waits, stop nothing else."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.keeper.rig import EAGER, contents, fill, holds, idle, prompt, stage

from kvferry.keeper.buffers import Use
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.stager import REFILL_DIVISOR
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import DEADLINE_S, Results
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem

SHARE = EAGER.shares(objects=True)[Use.STAGE]


class _Nothing:
    """A transfer that nobody can end."""

    def cancel(self) -> None:
        """In vain."""


class _Hung(MemoryTier):
    """Its reads last until ``let_go``, whatever their deadline."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.calls: list[tuple[Sequence[FetchItem], Callable[[int, FetchResult], None]]] = []

    def fetch(  # type: ignore[override]
        self, items: Sequence[FetchItem], *, deadline: float, done: Callable[[int, FetchResult], None]
    ) -> _Nothing:
        self.calls.append((items, done))
        return _Nothing()

    def let_go(self) -> None:
        while self.calls:
            items, done = self.calls.pop()
            super().fetch(items, deadline=time.monotonic() + DEADLINE_S, done=done)


@pytest.mark.parametrize("divisor", [5, 4, 3, 1])
def test_reads_that_hang_and_that_nobody_waits_for_do_not_stop_stages_from_objects(divisor: int) -> None:
    """Though they fill the share of stages."""
    count = min(4, divisor)
    valkey, disk, objects = MemoryTier("valkey"), _Hung(), MemoryTier("objects")
    keeper = Keeper(valkey=valkey, disk=disk, objects=objects, limits=EAGER)
    try:
        large, small = prompt("large", count, nbytes=SHARE // divisor), prompt("small", 8)
        for ref in large:
            disk.parts[ref.key] = bytes(contents(ref))
        fill(objects, small)
        late = Results(count)
        running = keeper.stage(large, deadline=time.monotonic() + DEADLINE_S, done=late.done)
        eventually(lambda: keeper.statistics().stages.running == count, "reading")
        assert SHARE - keeper.statistics().buffer_bytes < SHARE // REFILL_DIVISOR
        running.cancel()
        assert late.wait() == [Outcome.LATE] * count
        assert stage(keeper, small) == [Outcome.OK] * 8
        again = Results(count)
        running = keeper.stage(large, deadline=time.monotonic() + DEADLINE_S, done=again.done)
        eventually(lambda: keeper.statistics().stages.joined_parts == count, "joined")
        running.cancel()
        assert again.wait() == [Outcome.LATE] * count
        disk.let_go()
        idle(keeper)
        assert keeper._stager._abandoned_bytes == 0
    finally:
        disk.let_go()
        keeper.close()


class _HungWrites(_Hung):
    """Its writes neither."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: list[tuple[Sequence[StoreItem], Callable[[int, Outcome], None]]] = []

    def store(  # type: ignore[override]
        self, items: Sequence[StoreItem], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> _Nothing:
        self.stores.append((items, done))
        return _Nothing()

    def let_go(self) -> None:
        super().let_go()
        while self.stores:
            items, done = self.stores.pop()
            super(_Hung, self).store(items, deadline=time.monotonic() + DEADLINE_S, done=done)


def test_a_disk_whose_writes_hang_keeps_nothing_from_objects_and_no_memory_but_its_share() -> None:
    """More than all buffers hold, told before that shows and after."""
    valkey, disk, objects = MemoryTier("valkey"), _HungWrites(), MemoryTier("objects")
    limits = replace(EAGER, copy_s=0.1)
    keeper = Keeper(valkey=valkey, disk=disk, objects=objects, limits=limits)
    refs = prompt("before", 40, nbytes=500_000)
    later = prompt("after", 10, nbytes=500_000)
    share = limits.shares(objects=True)[Use.COPY]
    try:
        fill(valkey, [*refs, *later])
        keeper.stored(refs, positions=range(40), likely=[True] * 40)
        eventually(lambda: holds(objects, refs), "in objects")
        keeper.stored(later, positions=range(10), likely=[True] * 10)
        eventually(lambda: holds(objects, later), "in objects")
        assert 0 < len(disk.stores) * 500_000 <= share
        eventually(
            lambda: keeper.statistics().buffer_bytes <= share + (1 << 20), "buffers of hung writes only"
        )
        disk.let_go()
        eventually(lambda: bool(disk.stores) or holds(disk, refs), "the disk goes on")
        eventually(lambda: (disk.let_go(), holds(disk, [*refs, *later]))[1], "all on the disk")
        idle(keeper)
    finally:
        disk.let_go()
        keeper.close()


def test_a_disk_whose_reads_hang_keeps_what_valkey_has_from_no_bucket() -> None:
    valkey, disk, objects = MemoryTier("valkey"), _Hung(), MemoryTier("objects")
    keeper = Keeper(valkey=valkey, disk=disk, objects=objects, limits=replace(EAGER, copy_s=0.1))
    refs, others = prompt("on the disk", 30, nbytes=500_000), prompt("other", 5)
    for ref in [*refs, *others]:
        disk.parts[ref.key] = bytes(contents(ref))
    try:
        fill(valkey, [*refs, *others])
        keeper.used(refs)  # on the disk, and not in objects
        eventually(lambda: disk.calls, "a read")
        eventually(lambda: holds(objects, refs[-5:]), "from Valkey")
        keeper.used(others)
        eventually(lambda: holds(objects, others), "from Valkey")
        disk.let_go()
        eventually(lambda: (disk.let_go(), holds(objects, refs))[1], "all")
        idle(keeper)
    finally:
        disk.let_go()
        keeper.close()
