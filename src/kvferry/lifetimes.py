"""How soon what was used so often, so long ago, is used again: learned while it happens.

The clock is what was stored: a tick is an eighth of the capacity. Everything is in a cohort, by level (how
often it was used, ``TOP`` at most) and by the tick of its last use, and stays there when it is evicted, until
``AGES`` ticks have passed. So per level and age there is a life table: how much was there, how much was used
again. From it follows what one unit of memory yields from that age on if it is held as long as is best:

                     used again by then                    more ╭──── used more often
    worth = max  ─────────────────────────          worth       │╲
          until    memory taken until then                      ╰─╲── older

A worth never rises with age, nor falls with use; so what was used before something and with it each time (the
head of a prefix) is worth at least as much. The cohorts also say how old the oldest part of an LRU cache of
this capacity would be, and so what it would have found. While that is more, what was used last longest ago
leaves first, as it does while there is next to nothing that was not used yet.
"""

from itertools import accumulate

TICKS = 8  # in the time that it takes to store a whole capacity
AGES = 6 * TICKS  # told apart, in ticks; what is older is worth what that age is
LEVELS = 4
TOP = LEVELS - 1
NEVER = -(1 << 60)  # a tick long before all
NEW_SHARE = 1 / 32  # of the capacity is always for what was not used yet
_HALF_LIFE = 2 * TICKS  # of what was learned
_THOUGHT = [  # share of each level that is used again in a tick, by age, before anything is learned
    [first / (1 + 2 * age / TICKS) for age in range(AGES)] for first in (0.06, 0.12, 0.18, 0.24)
]
_PRIOR_WEIGHT = 0.05  # of a capacity seen for a tick: so much is what is thought worth


class Lifetimes:
    """The life table of one cache. Amounts are in the unit of ``capacity``, at least 1."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tick_amount = max(1, capacity // TICKS)
        self._stored = 0  # since the last tick
        self._fade = 0.5 ** (1 / _HALF_LIFE)
        self._alive = [[0.0] * AGES for _ in range(LEVELS)]  # now, by age
        self._seen = [[0.0] * AGES for _ in range(LEVELS)]  # alive at the end of a tick, over time
        self._again = [[0.0] * AGES for _ in range(LEVELS)]  # used again, over time
        self._again_now = [[0] * AGES for _ in range(LEVELS)]  # since the last tick
        self._found = self._lru_found = 0.0
        self._found_now = self._lru_found_now = self._oldest_now = 0
        self._oldest, self._oldest_share = NEVER, 1.0  # tick LRU holds only a part of, and how much of it
        self._worth: list[list[float]] = []
        self.now = 0
        self._lru_is_better = False
        self._new_room = int(capacity * NEW_SHARE)
        self._learn()

    @property
    def until_tick(self) -> int:
        """What may be stored before ages and worths change."""
        return self._tick_amount - self._stored

    def worth(self, level: int, tick: int) -> float:
        """Of what is at that level and was used last at that tick."""
        return self._worth[level][min(self.now - tick, AGES - 1)]

    def as_lru(self, new: int) -> bool:
        """Whether the least recently used leaves, whatever it is worth. new: what is held and never used."""
        return self._lru_is_better or new <= self._new_room

    def new_until(self, new: int) -> int:
        """By how much ``new`` must change, at least, to change that answer."""
        return new - self._new_room if new > self._new_room else self._new_room + 1 - new

    def remembered(self, tick: int) -> bool:
        """Whether what was used last at that tick is young enough to teach anything."""
        return self.now - tick < AGES

    def enter(self, level: int, amount: int) -> None:
        """So much is used or stored now."""
        self._alive[level][0] += amount

    def leave(self, level: int, tick: int, amount: int) -> None:
        """So much was taken away, or is entered anew: it says nothing about use."""
        age = self.now - tick
        if age < AGES:
            self._alive[level][age] -= amount

    def used(self, level: int, tick: int, amount: int, *, held: int) -> None:
        """So much is wanted again, ``held`` of it still there. It leaves its cohort."""
        age = self.now - tick
        if age < AGES:
            self._alive[level][age] -= amount
            self._again_now[level][age] += amount
        self._found_now += held
        if tick > self._oldest:
            self._lru_found_now += amount
        elif tick == self._oldest:
            self._oldest_now += amount

    def store(self, amount: int) -> None:
        """So much was stored: time passes."""
        self._stored += amount
        while self._stored >= self._tick_amount:
            self._stored -= self._tick_amount
            self._tick()

    def _tick(self) -> None:
        self.now += 1
        fade = self._fade
        for level, alive in enumerate(self._alive):
            now = self._again_now[level]
            self._seen[level] = [(x + y) * fade for x, y in zip(self._seen[level], alive, strict=True)]
            self._again[level] = [(x + y) * fade for x, y in zip(self._again[level], now, strict=True)]
            self._again_now[level] = [0] * AGES
            alive.insert(0, 0.0)
            alive.pop()
        self._learn()
        self._compare()
        self._imagine_lru()

    def _learn(self) -> None:
        weight = _PRIOR_WEIGHT * self._capacity
        worths: list[list[float]] = []
        for level in range(LEVELS):
            rates = [
                (again + weight * thought) / (seen + again + weight)
                for seen, again, thought in zip(
                    self._seen[level], self._again[level], _THOUGHT[level], strict=True
                )
            ]
            row = list(accumulate(_best_yields(rates), min))
            worths.append([max(pair) for pair in zip(row, worths[-1], strict=True)] if worths else row)
        self._worth = worths

    def _compare(self) -> None:
        """What was found with what LRU would have found."""
        lru_found = self._lru_found_now + self._oldest_now * self._oldest_share
        self._found = (self._found + self._found_now) * self._fade
        self._lru_found = (self._lru_found + lru_found) * self._fade
        self._found_now = self._lru_found_now = self._oldest_now = 0
        self._lru_is_better = self._lru_found > self._found

    def _imagine_lru(self) -> None:
        room = self._capacity - self._tick_amount / 2  # on average over the tick to come
        self._oldest, self._oldest_share = NEVER, 1.0
        for age in range(AGES):
            amount = sum(alive[age] for alive in self._alive)
            if amount > room:
                self._oldest, self._oldest_share = self.now - age, room / amount
                break
            room -= amount


def _best_yields(rates: list[float]) -> list[float]:
    """Per age, the most that is used again per memory taken, over all times to hold on from that age.

    rates: the share used again at each age of what is there at its beginning. The best time to let go is
    where the yields of what follows fall below the average so far: ages are merged from the last one on.
    """
    merged: list[tuple[float, float]] = []  # (used again, memory taken) of stretches of ages
    left = 1.0
    steps = []
    for rate in rates:
        steps.append((left * rate, left * (1 - rate / 2)))
        left *= 1 - rate
    yields = []
    for step in reversed(steps):
        again, taken = step
        while merged and merged[-1][0] * taken > again * merged[-1][1]:
            more, longer = merged.pop()
            again, taken = again + more, taken + longer
        merged.append((again, taken))
        yields.append(again / taken if taken else 0.0)
    return yields[::-1]
