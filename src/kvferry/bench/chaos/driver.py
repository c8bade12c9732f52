"""Decides when which fault begins, and brings everything to rest afterwards."""

import contextlib
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.bench.chaos import leaks
from kvferry.bench.chaos.faults import KILLS, OTHERS, Fault, FaultKind, Procedure, World
from kvferry.bench.chaos.fleet import WAIT_S, Fleet, Plan, wait
from kvferry.bench.chaos.processes import Census
from kvferry.errors import KvferryError, RetryError

KILLS_PER_DECK = 8
REUSE_S = 20.0
WARM_S = 1800.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rest:
    """The fleet with nothing under way. held: what its nodes did not let go of."""

    census: dict[str, Census | None]
    held: list[str]


class Driver:
    """Decides when which fault begins."""

    def __init__(self, fleet: Fleet, plan: Plan, progress: Progress) -> None:
        self._fleet = fleet
        self._plan = plan
        self._progress = progress
        self._rng = random.Random(f"faults {plan.seed}")
        self._world = World(fleet.cluster, fleet.nodes, fleet.engines, self._rng)
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Fault, str, Procedure]] = []
        self._told = 0.0

    def start(self) -> None:
        """Until every engine has been served from the pool, and one host from the other by Valkey."""
        chunks = self._fleet.tally.chunks
        self._wait(lambda: all(engine.ready for engine in self._fleet.engines), "the engines")
        self._wait(lambda: chunks["memory"] > 0 and chunks["valkey"] > 0, "reuse from memory and Valkey")

    def warm_up(self) -> None:
        """Until the plan's requests before the faults were answered."""
        lookups, plan = self._fleet.tally.operations, self._plan
        requests = plan.warm_requests * plan.users * len(self._fleet.engines)
        self._wait(lambda: lookups.get("lookup", Counter()).total() >= requests, "the warm-up", WARM_S)

    def rest(self) -> Rest:
        """The engines pause, the nodes come to rest; what each process holds then, and should not."""
        self._fleet.pause(self._tick)
        left: list[str] = []
        for node in self._fleet.nodes:
            left += leaks.at_rest(node, within_s=self._plan.settle_s, tick=self._tick)
        return Rest({process.name: process.census() for process in self._fleet.processes}, left)

    def break_things(
        self, decks: Iterator[list[FaultKind]], *, each: Callable[[], None] = lambda: None
    ) -> None:
        """Every fault of these decks, until the plan's time is up. each: called all the time."""
        deadline = time.monotonic() + self._plan.seconds
        begin = time.monotonic()
        deck = next(decks, [])
        while deck and (now := time.monotonic()) < deadline:
            if now >= begin and self._begin_one(deck):
                begin = now + self._rng.uniform(0.5, 1.5) * self._plan.pace_s
                deck = deck or next(decks, [])
            self._advance()
            self._tick()
            each()
            time.sleep(self._plan.tick_s)

    def heal(self) -> None:
        """Let every fault end, see the Cluster whole and reuse return."""
        while self._running:
            self._advance()
            self._tick()
            time.sleep(self._plan.tick_s)
        self._fleet.cluster.mend()
        self._wait(self._fleet.cluster.whole, "the Cluster to be whole again")
        with contextlib.suppress(RetryError):
            self._wait(
                lambda: all(fault.reuse_s is not None for fault in self._fleet.faults), "reuse", REUSE_S
            )

    def _begin_one(self, deck: list[FaultKind]) -> bool:
        for kind in deck:
            begun = self._world.begin(kind)
            if begun is not None:
                deck.remove(kind)
                fault, target, procedure = begun
                self._fleet.faults.append(fault)
                heapq.heappush(self._running, (0.0, next(self._numbers), fault, target, procedure))
                return True
        return False

    def _advance(self) -> None:
        """Run every procedure that is due."""
        while self._running and self._running[0][0] <= time.monotonic():
            _, number, fault, target, procedure = heapq.heappop(self._running)
            try:
                wait_s = next(procedure)
            except StopIteration:
                self._ended(fault, target)
            except KvferryError as error:  # a server that is asked to do something may be failing over
                fault.note = f"{fault.note}; ended early: {error}".lstrip("; ")
                self._fleet.cluster.mend()
                self._ended(fault, target)
            else:
                entry = (time.monotonic() + wait_s, number, fault, target, procedure)
                heapq.heappush(self._running, entry)

    def _ended(self, fault: Fault, target: str) -> None:
        fault.ended = time.monotonic()
        fault.lifted = fault.lifted or fault.ended
        self._world.busy.discard(target)

    def _tick(self) -> None:
        self._fleet.tick()
        now = time.monotonic()
        if now > self._told + self._plan.progress_s:
            self._told = now
            tally = self._fleet.tally
            active = ", ".join(f"{fault.kind} {fault.target}" for _, _, fault, _, _ in self._running)
            kills = sum(1 for fault in self._fleet.faults if fault.kind in KILLS)
            self._progress(
                f"{now - self._fleet.started:6.0f} s  {kills} kills of {len(self._fleet.faults)} faults, "
                f"{tally.total:,} operations, {tally.wrong} wrong  {active}"
            )

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        wait(ready, what, self._tick, timeout_s)


def decks(kills: int, rng: random.Random) -> Iterator[list[FaultKind]]:
    """Until there were that many kills, of every kind in turn; each deck has one of every other fault."""
    kinds = itertools.islice(itertools.cycle(KILLS), kills)
    while chosen := list(itertools.islice(kinds, KILLS_PER_DECK)):
        deck = [*chosen, *OTHERS]
        rng.shuffle(deck)
        yield deck
