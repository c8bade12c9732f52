"""Reads of a tier that never end, and for which nobody waits any more, stop nobody else's stages."""

import time
from collections.abc import Callable, Sequence

import pytest
from tests.keeper.rig import EAGER, contents, fill, idle, prompt, stage

from kvferry.keeper.buffers import Use
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.stager import REFILL_DIVISOR
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import DEADLINE_S, Results
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome

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
