"""Who waits for which part to be in Valkey: one stage per part, whoever asks. Pure.

    ask ──► QUEUED ──begin──► RUNNING ──finished──► everyone who waits is answered
               │                 └─ LATE, and somebody may wait longer ──► QUEUED
               └─ nobody waits any more ──► forgotten

Whose deadline comes first is served first, and of one request the head of the prompt first. A request is
answered once per part, by its deadline, whatever is under way for it then.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.below import Held
from kvferry.keeper.bykey import ByKey
from kvferry.tiers.contract import Outcome

MAX_WAITERS = 4
"""Answers owed for each part that may be on its way."""
MIN_KEPT = 1024


class Waiter(NamedTuple):
    """A part of a request: an index into it."""

    request: "Request"
    index: int  # type: ignore[assignment]  # hides tuple.index, which a waiter has no use for

    @property
    def ref(self) -> PartRef:
        """Which part."""
        return self.request.refs[self.index]


@dataclass(eq=False, slots=True)
class Request:
    """Parts that somebody wants in Valkey. deadline: monotonic seconds. open: indexes without an answer."""

    number: int
    refs: Sequence[PartRef]
    deadline: float
    open: set[int] = field(default_factory=set[int])


@dataclass(eq=False, slots=True)
class Stage:
    """A part on its way.

    deadline: of its present attempt. position: how many chunks came before it in the first request.
    held: where it was then. removed: it was deleted since.
    """

    ref: PartRef
    position: int
    held: Held
    waiters: list[Waiter] = field(default_factory=list[Waiter])
    running: bool = False
    removed: bool = False
    deadline: float = 0.0

    @property
    def latest(self) -> float:
        """When nobody waits for it any more."""
        return max((waiter.request.deadline for waiter in self.waiters), default=-math.inf)


class StageTable:
    """max_parts: that are on their way at a time, and a few times as many answers owed; more are refused."""

    def __init__(self, *, max_parts: int) -> None:
        self._max_parts = max_parts
        self._waiting = 0
        self._stages: dict[PartRef, Stage] = {}
        self._keys = ByKey()
        self._queue: list[tuple[float, int, int, int, Waiter]] = []
        self._entries = itertools.count()
        self._numbers = itertools.count(1)
        self._queued = 0

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def queued(self) -> int:
        """Parts that wait for their turn."""
        return self._queued

    def has(self, ref: PartRef) -> bool:
        """Whether it is on its way."""
        return ref in self._stages

    def remove(self, unwanted: Callable[[PartRef], bool]) -> None:
        """Those are deleted: what is on the way must not arrive."""
        for ref, stage in self._stages.items():
            stage.removed = stage.removed or unwanted(ref)

    def remove_named(self, keys: Iterable[PartKey]) -> None:
        """The same of the parts with these keys, whatever else is on the way."""
        for ref in self._keys.of(keys):
            self._stages[ref].removed = True

    def open(self, refs: Sequence[PartRef], deadline: float) -> Request:
        """A request, nothing of which is queued yet."""
        return Request(next(self._numbers), refs, deadline, set(range(len(refs))))

    def enqueue(self, request: Request, index: int, position: int, held: Held) -> bool:
        """That part of the request waits from now on; False if there are too many."""
        ref = request.refs[index]
        stage = self._stages.get(ref)
        if self._waiting >= MAX_WAITERS * self._max_parts:
            return False
        if stage is None:
            if len(self._stages) >= self._max_parts:
                return False
            stage = self._stages[ref] = Stage(ref, position, held)
            self._keys.add(ref)
            self._queued += 1
        stage.waiters.append(Waiter(request, index))
        self._waiting += 1
        if not stage.running:
            self._push(request, index)
        return True

    def peek(self) -> Stage | None:
        """The next to begin; None when nothing waits."""
        while self._queue:
            if self._waits(waiter := self._queue[0][4]):
                return self._stages[waiter.ref]
            heapq.heappop(self._queue)  # it runs, or nobody wants it any more
        return None

    def begin(self, stage: Stage) -> None:
        """It is under way from now on, until ``finished``. Its deadline is the latest of those who wait."""
        if stage.running or self._stages.get(stage.ref) is not stage:
            raise BrokenError("a stage begins twice")
        stage.running = True
        stage.deadline = stage.latest
        self._queued -= 1

    def finished(self, stage: Stage, outcome: Outcome) -> list[Waiter]:
        """Its attempt ended. Returns whom to tell; who can wait longer than it did waits on."""
        if not stage.running:
            raise BrokenError("a stage ends that does not run")
        stage.running = False
        self._queued += 1
        waiters, stage.waiters = stage.waiters, []
        if outcome is Outcome.LATE:
            stage.waiters = [w for w in waiters if w.request.deadline > stage.deadline]
            waiters = [w for w in waiters if w.request.deadline <= stage.deadline]
            for waiter in stage.waiters:
                self._push(waiter.request, waiter.index)
        self._waiting -= len(waiters)
        if not stage.waiters:
            self._forget(stage)
        return [waiter for waiter in waiters if self._answer(waiter)]

    def answered(self, request: Request, index: int) -> bool:
        """That part of the request has its answer now; False if it had one before."""
        return self._answer(Waiter(request, index))

    def close(self, request: Request) -> tuple[list[int], list[Stage]]:
        """It is over. Returns the indexes without an answer, and running stages that nobody wants now."""
        left = sorted(request.open)
        request.open.clear()
        unwanted: dict[Stage, None] = {}
        for index in left:
            stage = self._stages.get(request.refs[index])
            if stage is None:
                continue
            waiters = [waiter for waiter in stage.waiters if waiter.request is not request]
            self._waiting -= len(stage.waiters) - len(waiters)
            stage.waiters = waiters
            if waiters:
                continue
            if not stage.running:
                self._forget(stage)
            else:
                stage.deadline = (
                    -math.inf
                )  # whoever joins while it is being cancelled waits for another attempt
                unwanted[stage] = None
        return left, list(unwanted)

    def _answer(self, waiter: Waiter) -> bool:
        if waiter.index not in waiter.request.open:
            return False
        waiter.request.open.remove(waiter.index)
        return True

    def _push(self, request: Request, index: int) -> None:
        if len(self._queue) > 2 * self._waiting + MIN_KEPT:
            self._queue = [entry for entry in self._queue if self._waits(entry[4])]
            heapq.heapify(self._queue)
        entry = (request.deadline, request.number, index, next(self._entries), Waiter(request, index))
        heapq.heappush(self._queue, entry)

    def _waits(self, waiter: Waiter) -> bool:
        """Whether it is for this one that a part is next; it may have left."""
        stage = self._stages.get(waiter.ref)
        return stage is not None and not stage.running and waiter.index in waiter.request.open

    def _forget(self, stage: Stage) -> None:
        del self._stages[stage.ref]
        self._keys.discard(stage.ref)
        self._queued -= 1
