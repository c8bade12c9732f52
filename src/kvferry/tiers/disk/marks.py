"""What was removed and must still be written down, and who waits for that. Used under the tier's lock."""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.log import SegmentLog
from kvferry.tiers.disk.places import Place
from kvferry.tiers.disk.work import Drop, Removal, Report

MAX_REMOVALS = 65536
"""Removals that wait; what is beyond is gone, but may be found again after a restart."""
MARKS_AT_ONCE = 32
"""So many are written before anything else has its turn."""
MAX_DROPS = 64
"""Under way at a time: each is asked about every part that is looked for. No more are begun."""
PARTS_AT_ONCE = 256
"""So many a drop looks at before anybody else has the lock: less than a millisecond."""


class Marks:
    """tell: how to have a report called."""

    def __init__(self, log: SegmentLog, tell: Callable[[Report], None]) -> None:
        self._log = log
        self._tell = tell
        self._removals: deque[Removal] = deque()
        self._of_drops: deque[Removal] = deque()  # many: whoever removes a part does not wait for them
        self._drops: list[Drop] = []

    def __bool__(self) -> bool:
        """Whether anything is to be written."""
        return bool(self._removals or self._of_drops)

    @property
    def places(self) -> int:
        """To be written."""
        return sum(len(removal.places) for removal in [*self._removals, *self._of_drops])

    @property
    def sweeping(self) -> bool:
        """Whether a drop has parts to look at still."""
        return any(not drop.sweep.through for drop in self._drops)

    def add(self, removal: Removal) -> None:
        """Its places are pinned until they are written."""
        if not removal.places:
            self._tell(removal.end)
        elif len(self._removals) >= MAX_REMOVALS:
            for place in removal.places:
                self._log.segments.unpin(place)
            self._tell(partial(removal.end, Outcome.REFUSED))
        else:
            self._removals.append(removal)

    @property
    def may_drop(self) -> bool:
        """Whether there may be another."""
        return len(self._drops) < MAX_DROPS

    def add_drop(self, drop: Drop) -> None:
        """``sweep`` sees to it."""
        self._drops.append(drop)

    def sweep(self) -> bool:
        """Go on with the drops, a little. Whether there is something to write or erase now."""
        found = False
        for drop in self._drops:
            if drop.erasing is not None:
                continue
            self._log.sweep(drop.sweep, PARTS_AT_ONCE)
            found |= self._take_places(drop)
            if drop.sweep.over:
                drop.erasing = self._log.segments.leaving
                found = True
            if not drop.sweep.through:  # one at a time
                break
        self._tell_drops()
        return found

    def _take_places(self, drop: Drop) -> bool:
        """Its marks are many, and none is left out."""
        places, drop.sweep.places = drop.sweep.places, []
        if places:
            drop.marks.append(Removal(places, math.inf, None))
            self._of_drops.append(drop.marks[-1])
        return bool(places)

    def next(self) -> tuple[Removal, list[Place]] | None:
        """What is to be written next; answered by ``written``."""
        queue = self._removals or self._of_drops
        if not queue:
            return None
        removal = queue[0]
        return removal, removal.places[-MARKS_AT_ONCE:]

    def written(self, removal: Removal, places: list[Place], *, failed: bool) -> None:
        """They are over, failed or not: a part that is found again after a restart is verified like any."""
        del removal.places[-len(places) :]
        for place in places:
            self._log.segments.unpin(place)
        if failed:
            removal.outcome = Outcome.FAILED
        if not removal.places:
            (self._of_drops if removal in self._of_drops else self._removals).remove(removal)
            self._tell(removal.end)
            self._tell_drops()

    def erased(self, number: int, generation: int) -> None:
        """A segment that held parts is not found any more."""
        for drop in self._drops:
            if drop.erasing is not None:
                drop.erasing.discard((number, generation))
        self._tell_drops()

    def hurry(self, deadline: float) -> None:
        """Nobody who drops waits for longer."""
        for drop in self._drops:
            drop.deadline = min(drop.deadline, deadline)

    def overdue(self, now: float, outcome: Outcome) -> list[Report]:
        """Of those who waited too long, and are told that outcome: it will be written, but nobody hears."""
        waiting = [each for each in self._waiting() if each.awaited and now >= each.deadline]
        return [partial(each.end, outcome) for each in waiting]

    def next_deadline(self) -> float:
        """Monotonic seconds; infinite when nobody waits."""
        return min((each.deadline for each in self._waiting() if each.awaited), default=math.inf)

    def close(self) -> list[Report]:
        """Nothing is written any more."""
        return [partial(each.end, Outcome.LATE) for each in self._waiting()]

    def _waiting(self) -> list[Removal | Drop]:
        return [*self._removals, *self._drops]

    def _tell_drops(self) -> None:
        for drop in [drop for drop in self._drops if drop.over]:
            self._drops.remove(drop)
            self._tell(drop.end)
