"""Eviction policies that were weighed against the pool's own, block by block, as plain as they are described.

Each takes the path of a request, as numbers of blocks from the prompt's first one on, and says how many of
the first ones it held. All stamp and insert a path from its tail to its head, so that heads stay longer.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from typing import Protocol


class Candidate(Protocol):
    """A cache of a number of blocks, empty at first."""

    def request(self, path: Sequence[int]) -> int:
        """Blocks found, from the first one on. The whole path is wanted in the cache afterwards."""
        ...


def _found(path: Sequence[int], *held: Container[int]) -> int:
    for number, block in enumerate(path):
        if not any(block in part for part in held):
            return number
    return len(path)


class TwoQueues:
    """New blocks, and those that were used. The coldest new one leaves while new ones have over a share."""

    def __init__(self, capacity: int, share: float) -> None:
        self._capacity, self._new_room = capacity, int(capacity * share)
        self._new: OrderedDict[int, int] = OrderedDict()
        self._used: OrderedDict[int, int] = OrderedDict()
        self._clock = 0

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._new, self._used)
        used = False
        for number in reversed(range(len(path))):
            block = path[number]
            self._clock += 1
            used = self._used.pop(block, None) is not None or used
            used = (self._new.pop(block, None) is not None and number < found) or used
            (self._used if used else self._new)[block] = self._clock
        while len(self._new) + len(self._used) > self._capacity:
            self._victims().popitem(last=False)
        return found

    def _victims(self) -> OrderedDict[int, int]:
        if not self._new or not self._used:
            return self._new or self._used
        if len(self._new) > self._new_room:
            return self._new
        return min(self._new, self._used, key=lambda queue: next(iter(queue.values())))


class Arc:
    """ARC (Megiddo and Modha, 2003): as two queues; which one was too short moves their border."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._new_room = capacity, 0.0
        self._new, self._used, self._left_new, self._left_used = (OrderedDict[int, None]() for _ in range(4))

    def request(self, path: Sequence[int]) -> int:
        new, used, left_new, left_used = self._new, self._used, self._left_new, self._left_used
        found = _found(path, new, used)
        keep = False
        for number in reversed(range(len(path))):
            block = path[number]
            if block in left_new:
                self._new_room = min(self._capacity, self._new_room + max(1, len(left_used) / len(left_new)))
            elif block in left_used:
                self._new_room = max(0, self._new_room - max(1, len(left_new) / len(left_used)))
            keep = keep or block in used or block in left_new or block in left_used
            keep = keep or (block in new and number < found)
            for queue in (new, used, left_new, left_used):
                queue.pop(block, None)
            (used if keep else new)[block] = None
        while len(new) + len(used) > self._capacity:
            if new and (len(new) > self._new_room or not used):
                left_new[new.popitem(last=False)[0]] = None
            else:
                left_used[used.popitem(last=False)[0]] = None
        while left_new and len(new) + len(left_new) > self._capacity:
            left_new.popitem(last=False)
        while left_used and len(left_new) + len(left_used) > self._capacity:
            left_used.popitem(last=False)
        return found


class S3Fifo:
    """S3-FIFO (Yang et al., 2023): a small queue of 10%, a main one, and names of what left the small one."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._small_room = capacity, max(1, capacity // 10)
        self._small, self._main, self._left = (OrderedDict[int, None]() for _ in range(3))
        self._uses: dict[int, int] = {}

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._uses)
        for block in reversed(path):
            if block in self._uses:
                self._uses[block] = min(3, self._uses[block] + 1)
                continue
            self._uses[block] = 0
            known = block in self._left
            self._left.pop(block, None)
            (self._main if known else self._small)[block] = None
        while len(self._uses) > self._capacity:
            if len(self._small) >= self._small_room or not self._main:
                self._from_small()
            else:
                self._from_main()
        return found

    def _from_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block]:
            self._uses[block] = 0
            self._main[block] = None
            return
        del self._uses[block]
        self._left[block] = None
        if len(self._left) > self._capacity:
            self._left.popitem(last=False)

    def _from_main(self) -> None:
        block, _ = self._main.popitem(last=False)
        if self._uses[block]:
            self._uses[block] -= 1
            self._main[block] = None
        else:
            del self._uses[block]


class Sieve:
    """SIEVE (Zhang et al., 2024): first in first out, but a hand passes over, once, what was used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used: dict[int, bool] = {}
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._used)
        for block in reversed(path):
            if block in self._used:
                self._used[block] = True
                continue
            self._used[block] = False
            self._older[block], self._newer[block] = self._newest, None
            if self._newest is None:
                self._oldest = block
            else:
                self._newer[self._newest] = block
            self._newest = block
        while len(self._used) > self._capacity:
            self._evict()
        return found

    def _evict(self) -> None:
        block = self._oldest if self._hand is None else self._hand
        while block is not None and self._used[block]:
            self._used[block] = False
            block = self._newer[block]
        if block is None:  # past the newest: begin again
            self._hand = None
            return
        older, newer = self._older.pop(block), self._newer.pop(block)
        del self._used[block]
        self._hand = newer
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older


class TinyLfu:
    """W-TinyLFU (Einziger et al., 2017): a window of 1%; from it, what is asked for more often gets in."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._window_room = capacity, max(1, capacity // 100)
        self._safe_room = int(0.8 * (capacity - self._window_room))
        self._window, self._trial, self._safe = (OrderedDict[int, None]() for _ in range(3))
        self._asked: Counter[int] = Counter()  # exact, where the paper has a sketch
        self._until_halved = 10 * capacity

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._window, self._trial, self._safe)
        for block in reversed(path):
            self._asked[block] = min(15, self._asked[block] + 1)
            if block in self._window:
                self._window.move_to_end(block)
            elif block in self._trial or block in self._safe:
                self._trial.pop(block, None)
                self._safe[block] = None
                self._safe.move_to_end(block)
                while len(self._safe) > self._safe_room:
                    self._trial[self._safe.popitem(last=False)[0]] = None
            else:
                self._window[block] = None
        while len(self._window) > self._window_room:
            self._let_in(self._window.popitem(last=False)[0])
        self._until_halved -= len(path)
        if self._until_halved <= 0:
            self._until_halved = 5 * self._capacity
            self._asked = Counter({block: times // 2 for block, times in self._asked.items() if times > 1})
        return found

    def _let_in(self, block: int) -> None:
        if self._window_room + len(self._trial) + len(self._safe) >= self._capacity:
            main = self._trial or self._safe
            coldest = next(iter(main), None)
            if coldest is None or self._asked[block] <= self._asked[coldest]:
                return
            del main[coldest]
        self._trial[block] = None


class Gdsf:
    """GDSF (Cherkasova, 1998), all blocks of one size and cost: uses, plus the value of what left last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[int, int] = {}
        self._now: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._floor = self._clock = 0

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._now)
        value = 0
        for block in reversed(path):
            self._uses[block] = self._uses.get(block, 0) + 1
            value = max(value, self._floor + self._uses[block])  # a head no less than its tail
            self._clock += 1
            self._now[block] = value, self._clock
            heapq.heappush(self._heap, (value, self._clock, block))
        while len(self._now) > self._capacity:
            value, clock, block = heapq.heappop(self._heap)
            if self._now.get(block) == (value, clock):
                self._floor = value
                del self._now[block], self._uses[block]
        return found


class UsesAndAge:
    """Queues by number of uses, also of blocks that left lately; the greatest age per (uses + 1) leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(8)]
        self._uses: dict[int, int] = {}
        self._left: OrderedDict[int, int] = OrderedDict()
        self._stored = 0

    def request(self, path: Sequence[int]) -> int:
        found = _found(path, self._uses)
        self._stored += len(path) - found
        level = 0
        for number in reversed(range(len(path))):
            block = path[number]
            uses = self._uses.get(block)
            if uses is None:
                uses = self._left.pop(block, -1) + 1
            else:
                del self._queues[uses][block]
                uses += number < found
            level = max(level, min(uses, len(self._queues) - 1))
            self._uses[block] = level
            self._queues[level][block] = self._stored
        while len(self._uses) > self._capacity:
            self._evict()
        return found

    def _evict(self) -> None:
        filled = [uses for uses, queue in enumerate(self._queues) if queue]
        uses = max(filled, key=lambda uses: self._age(uses) / (uses + 1))
        block, _ = self._queues[uses].popitem(last=False)
        self._left[block] = self._uses.pop(block)
        if len(self._left) > 2 * self._capacity:
            self._left.popitem(last=False)

    def _age(self, uses: int) -> int:
        return self._stored - next(iter(self._queues[uses].values())) + 1
