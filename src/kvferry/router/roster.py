"""Which workers there are, in which pools, with which models, and who may be asked now. Pure.

A worker whose models are not known yet may have any: nothing is refused at the start for not being known.
"""

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import RefusedError
from kvferry.router.health import DEFAULT_LIMITS, Change, Failure, Health, Limits, State
from kvferry.router.models import Model

DEFAULT_POOL = ""
PREFILL_POOL = "prefill"  # its workers prefill for those of the others
MAX_WORKERS = 4096
MAX_REMEMBERED = 1024  # pairs of pool and model


class Served(enum.Enum):
    """Whether a pool has a model."""

    YES = "yes"
    PERHAPS = "perhaps"  # not every worker has been asked
    NO = "no"


class Worker:
    """One of them. models: None until it has said them. models_at: when to ask for them again.

    engine: its kind, as it says with its models; empty: not known, as of one that was down and has not said
    it since. trouble: of its last probe, for people.
    """

    __slots__ = ("engine", "found_by_name", "health", "models", "models_at", "pool", "trouble", "url")

    def __init__(self, url: str, *, pool: str, health: Health, found_by_name: bool) -> None:
        """found_by_name: a name led to it, which may lead to others later."""
        self.url = url
        self.pool = pool
        self.health = health
        self.found_by_name = found_by_name
        self.models: tuple[Model, ...] | None = None
        self.models_at = 0.0
        self.engine = ""
        self.trouble = ""

    @property
    def state(self) -> State:
        """Of its health."""
        return self.health.state

    @property
    def leaving(self) -> bool:
        """Whether it gets no more requests."""
        return self.state in (State.DRAINING, State.REMOVED)

    def may_serve(self, model: str) -> bool:
        """Whether it has this model, as far as is known. An empty name: whichever it has."""
        return not model or self.models is None or any(served.name == model for served in self.models)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Of one worker. failures: what requests met there, since it was added."""

    url: str
    pool: str
    state: State
    failures: Mapping[Failure, int]
    probes_missed: int
    times_down: int


class Roster:
    """in_flight: requests at a worker now. noticed: called when the next probe is due at another time."""

    def __init__(self, *, in_flight: Callable[[str], int], limits: Limits = DEFAULT_LIMITS) -> None:
        self._in_flight = in_flight
        self._limits = limits
        self._workers: dict[str, Worker] = {}
        self._up: dict[tuple[str, str], tuple[str, ...]] = {}
        self._trials: tuple[Worker, ...] = ()
        self._pools: frozenset[str] = frozenset()
        self._departed: Counter[Failure] = Counter()  # failures of workers that are gone
        self.noticed: Callable[[Worker], None] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, url: str) -> Worker | None:
        """None: there is none with this URL."""
        return self._workers.get(url)

    def add(self, url: str, *, pool: str = DEFAULT_POOL, found_by_name: bool = False, now: float) -> Worker:
        """A new one, or the one that is there, which stays if it was about to leave.

        Raises RefusedError for one that is in another pool, and for one too many.
        """
        worker = self._workers.get(url)
        if worker is not None and not worker.leaving:
            if worker.pool != pool:
                raise RefusedError(f"{url} is in pool {worker.pool or 'default'}: remove it there first")
            worker.found_by_name = worker.found_by_name and found_by_name
            return worker
        if worker is None and len(self._workers) >= MAX_WORKERS:
            raise RefusedError(f"there are {MAX_WORKERS} workers: start another router for more")
        if worker is not None:
            self._departed.update(worker.health.failures)
        worker = Worker(url, pool=pool, health=Health(self._limits, now=now), found_by_name=found_by_name)
        self._workers[url] = worker
        self.changed()
        return worker

    def drain(self, url: str, *, until: float) -> bool:
        """It gets nothing more, and is gone when nothing is left there. False: there is none."""
        worker = self._workers.get(url)
        if worker is None:
            return False
        worker.health.drain(until=until)
        self.changed()
        return True

    def drained(self, now: float) -> list[Worker]:
        """Those that are gone with this call: they have nothing in flight, or had their time."""
        gone = [
            worker
            for worker in self._workers.values()
            if worker.state is State.DRAINING
            and (now >= worker.health.drain_until or self._in_flight(worker.url) == 0)
        ]
        for worker in gone:
            worker.health.remove()
            self._departed.update(worker.health.failures)
            del self._workers[worker.url]
        if gone:
            self.changed()
        return gone

    def note(self, url: str, event: Callable[[Health], Change]) -> Change | None:
        """Tell a worker's health something. None: there is no such worker any more."""
        worker = self._workers.get(url)
        if worker is None:
            return None
        probe_at = worker.health.next_probe_at()
        change = event(worker.health)
        if change.before is not change.after:
            self.changed()
        if change.lost or change.after is State.DOWN:  # who is there next may be another one
            worker.engine, worker.models_at = "", 0.0
        if self.noticed is not None and worker.health.next_probe_at() != probe_at:
            self.noticed(worker)
        return change

    def learned(self, url: str, models: tuple[Model, ...]) -> None:
        """What it says it has."""
        worker = self._workers.get(url)
        if worker is None:
            return
        owners = {model.owner for model in models}
        worker.engine = owners.pop() if len(owners) == 1 else ""
        if worker.models != models:
            worker.models = models
            self.changed()

    def changed(self) -> None:
        """A worker's state or models are others now."""
        self._up.clear()
        self._trials = tuple(worker for worker in self._workers.values() if worker.state is State.TRIAL)
        self._pools = frozenset(worker.pool for worker in self._workers.values())

    def candidates(self, pool: str, model: str, *, tried: Collection[str] = ()) -> Sequence[str]:
        """Who may be asked now, of those not tried; the same object as long as nothing changes.

        Those that are up, and one request for each on trial; else suspects; else those whose probes are well
        though requests failed there; else nobody.
        """
        if pool not in self._pools:
            return ()
        key = (pool, model)
        found = self._up.get(key)
        if found is None:
            found = self._in_state(pool, model, State.UP)
            if len(self._up) >= MAX_REMEMBERED:
                self._up.clear()
            self._up[key] = found
        if self._trials:
            found += tuple(
                worker.url
                for worker in self._trials
                if worker.pool == pool and worker.may_serve(model) and self._in_flight(worker.url) == 0
            )
        if tried:
            found = tuple(url for url in found if url not in tried)
        return found or self._rest(pool, model, tried)

    def served(self, pool: str, model: str) -> Served:
        """Whether this pool has that model, also where all that have it are down."""
        there = [worker for worker in self._workers.values() if worker.pool == pool and not worker.leaving]
        if any(worker.models is not None and worker.may_serve(model) for worker in there):
            return Served.YES
        told = there and all(worker.models is not None for worker in there)
        return Served.NO if told else Served.PERHAPS  # where nobody is, nobody can tell

    def failures(self) -> dict[Failure, int]:
        """What requests met, also at workers that are gone."""
        totals = self._departed.copy()
        for worker in self._workers.values():
            totals.update(worker.health.failures)
        return {what: totals[what] for what in Failure}

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """A snapshot."""
        return tuple(
            WorkerStatistics(
                worker.url,
                worker.pool,
                worker.state,
                dict(worker.health.failures),
                worker.health.probes_missed,
                worker.health.times_down,
            )
            for worker in self._workers.values()
        )

    def pools(self) -> tuple[str, ...]:
        """Those that have workers."""
        return tuple(dict.fromkeys(worker.pool for worker in self._workers.values()))

    def _in_state(self, pool: str, model: str, *states: State) -> tuple[str, ...]:
        return tuple(
            worker.url
            for worker in self._workers.values()
            if worker.pool == pool and worker.state in states and worker.may_serve(model)
        )

    def _rest(self, pool: str, model: str, tried: Collection[str]) -> tuple[str, ...]:
        suspects = [url for url in self._in_state(pool, model, State.SUSPECT) if url not in tried]
        if suspects:
            return tuple(suspects)
        return tuple(
            url
            for url in self._in_state(pool, model, State.DOWN, State.TRIAL)
            if url not in tried and self._workers[url].health.probe_well
        )
