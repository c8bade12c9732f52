"""What is copied next, and what happens when that fails. Pure: times in, decisions out.

    want ──► queued ──take──► reading ──read──► writing ──ended──► forgotten
               ▲                 │                 │
               └─────failed in passing (again), after a pause that doubles

A line copies to one place: to the disk, or to objects. It reads a few parts at a time, and fewer while
requests wait for stages. Between two batches it rests, so that reading takes a share of the time only.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.backlog import Backlog, Wanted
from kvferry.keeper.bykey import ByKey

MAX_TRIES = 5
MIN_PAUSE_S = 0.1
MAX_BATCH_PARTS = 64
WAITED_FOR_DIVISOR = 4
MAX_REST_S = 5.0


@dataclass(slots=True, eq=False)
class Task:
    """A part under way. removed: it was deleted meanwhile, so that what was written of it must go again."""

    wanted: Wanted
    reading: bool = True
    removed: bool = False

    @property
    def ref(self) -> PartRef:
        """Which part."""
        return self.wanted.ref


@dataclass(slots=True)
class LineCounts:
    """Since start. there: was below already. gone: left Valkey before. dropped: the backlog was full."""

    parts: int = 0
    nbytes: int = 0
    there: int = 0
    gone: int = 0
    dropped: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])


class Line:
    """The copies to one place.

    batch_bytes: read at a time, but always a part; a quarter of that while requests wait. share: of the time
    spent reading, at most. pause_s: longest between two attempts while everything fails.
    """

    def __init__(self, backlog: Backlog, *, batch_bytes: int, share: float, pause_s: float) -> None:
        self.counts = LineCounts()
        self._backlog = backlog
        self._batch_bytes = batch_bytes
        self._share = share
        self._longest_pause_s = pause_s
        self._tasks: dict[PartRef, Task] = {}
        self._keys = ByKey()  # of the tasks
        self._reading = 0
        self._began = 0.0
        self._rest_until = 0.0
        self._pause_until = 0.0
        self._pause_s = 0.0
        self._succeeded = False

    @property
    def parts(self) -> int:
        """Parts that wait or are under way."""
        return len(self._backlog) + len(self._tasks)

    @property
    def waiting(self) -> Iterable[Wanted]:
        """Those that wait, the most promising first."""
        return self._backlog

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return self._backlog.nbytes + sum(ref.nbytes for ref in self._tasks)

    @property
    def running(self) -> int:
        """Parts under way."""
        return len(self._tasks)

    @property
    def paused(self) -> bool:
        """Whether the last attempt failed, and nothing succeeded since."""
        return self._pause_s > 0

    def oldest_s(self, now: float) -> float:
        """How long the oldest of them has been wanted; 0 when there is none."""
        times = [task.wanted.since for task in self._tasks.values()]
        waiting = self._backlog.oldest_since()
        times += [waiting] if waiting is not None else []
        return max(0.0, now - min(times)) if times else 0.0

    def knows(self, ref: PartRef) -> bool:
        """Whether it waits or is under way."""
        return ref in self._tasks or ref in self._backlog

    def want(self, ref: PartRef, rank: int, now: float, *, named: bool = False) -> None:
        """Copy it some time. What is under way already is not wanted twice. named: see ``Wanted``."""
        if ref not in self._tasks:
            self.counts.dropped += len(self._backlog.offer(Wanted(ref, rank, now, named=named)))

    def adopt(self, ref: PartRef, rank: int, now: float) -> Task | None:
        """Its bytes are in memory already: under way from now on. None if it was, or the line is paused."""
        if ref in self._tasks or self.paused:
            return None
        wanted = self._backlog.take(ref) if ref in self._backlog else Wanted(ref, rank, now)
        return self._begin(Task(wanted, reading=False))

    def take(self, now: float, *, waited_for: bool, reserve: Callable[[PartRef], bool]) -> list[Task]:
        """The next batch to read, empty when it is not the time.

        waited_for: whether requests wait for stages. reserve: finds memory for one more part, or says no.
        """
        if self._reading or now < self._rest_until or now < self._pause_until:
            return []
        left = self._batch_bytes // WAITED_FOR_DIVISOR if waited_for or self.paused else self._batch_bytes
        chosen: list[Wanted] = []
        try:
            while len(chosen) < MAX_BATCH_PARTS and (wanted := self._backlog.peek()) is not None:
                left -= wanted.ref.nbytes
                if (chosen and left < 0) or not reserve(wanted.ref):
                    break
                chosen.append(self._backlog.take(wanted.ref))
        except BaseException:
            for wanted in chosen:
                self._backlog.offer(wanted)
            raise
        self._reading = len(chosen)
        self._began = now
        return [self._begin(Task(wanted)) for wanted in chosen]

    def due_at(self, now: float) -> float | None:
        """When ``take`` may have something that it does not have now; None: when something happens."""
        until = max(self._rest_until, self._pause_until)
        return until if until > now and len(self._backlog) and not self._reading else None

    def read(self, task: Task, now: float) -> None:
        """Its bytes are in memory, or it ends; idempotent."""
        if not task.reading:
            return
        task.reading = False
        self._reading -= 1
        if not self._reading:
            rest_s = (now - self._began) * (1 / self._share - 1)
            self._rest_until = now + min(rest_s, MAX_REST_S)

    def copied(self, task: Task, now: float) -> None:
        """It is there now."""
        self._end(task, now)
        self._pause_s, self._pause_until, self._succeeded = 0.0, now, True
        self.counts.parts += 1
        self.counts.nbytes += task.ref.nbytes

    def was_there(self, task: Task, now: float) -> None:
        """It was there before."""
        self._end(task, now)
        self.counts.there += 1

    def gone(self, task: Task, now: float) -> None:
        """It is no longer where it was to be read from."""
        self._end(task, now)
        self.counts.gone += 1

    def given_up(self, task: Task, cause: str, now: float) -> None:
        """It cannot be copied."""
        self._end(task, now)
        self.counts.failed[cause] += 1

    def again(self, task: Task, cause: str, now: float) -> None:
        """It failed in passing. While everything fails, that is no part's own fault and none is given up."""
        self._end(task, now)
        self.counts.failed[cause] += 1
        if now >= self._pause_until:  # what fails together is one failure
            self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), self._longest_pause_s)
            self._pause_until = now + self._pause_s
        tries = task.wanted.tries + self._succeeded
        self._succeeded = False
        if not task.removed and tries < MAX_TRIES:
            self.counts.dropped += len(self._backlog.offer(task.wanted._replace(tries=tries)))

    def forget(self, unwanted: Callable[[PartRef], bool]) -> None:
        """Those are deleted: none of them is copied any more, and what is under way will be removed again."""
        self._backlog.discard(unwanted)
        for ref, task in self._tasks.items():
            task.removed = task.removed or unwanted(ref)

    def forget_named(self, keys: Collection[PartKey]) -> None:
        """The same of the parts with these keys, whatever else waits."""
        self._backlog.discard_named(keys)
        for ref in self._keys.of(keys):
            self._tasks[ref].removed = True

    def _begin(self, task: Task) -> Task:
        self._tasks[task.ref] = task
        self._keys.add(task.ref)
        return task

    def _end(self, task: Task, now: float) -> None:
        self.read(task, now)
        del self._tasks[task.ref]
        self._keys.discard(task.ref)
