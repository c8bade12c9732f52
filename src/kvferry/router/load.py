"""What each worker has to do: uncached prefill tokens that wait, and streams that decode. Pure.

    begin ──► waiting: its prefill counts ──first_byte──► decoding: a stream counts ──end──► nothing
                 └──────────────────────────────end──────────────────────────────────────────┘

A prefill is over with the first byte. What is counted is owned by one flight and given back once, by ``end``.
"""

from dataclasses import dataclass

from kvferry.errors import BrokenError
from kvferry.router.contract import Ended, Usage


@dataclass(slots=True)
class WorkerLoad:
    """One worker. waiting_tokens: of prefill not over yet. The rest are counts since the start."""

    requests: int = 0
    waiting_tokens: int = 0
    decoding: int = 0
    chosen: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    hit_tokens_expected: int = 0
    hit_tokens_seen: int = 0

    def statistics(self) -> dict[str, int]:
        """For ``Guide.statistics``."""
        return {name: getattr(self, name) for name in self.__slots__}


class Loads:
    """By worker. A worker that is removed keeps its entry until its last flight has ended."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerLoad] = {}
        self._removed: set[str] = set()

    def of(self, worker: str) -> WorkerLoad:
        """Made when there is none."""
        load = self._workers.get(worker)
        if load is None:
            load = self._workers[worker] = WorkerLoad()
        return load

    def added(self, worker: str) -> None:
        """It is among the workers."""
        self._removed.discard(worker)
        self.of(worker)

    def removed(self, worker: str) -> None:
        """It may be among them no longer. If it is chosen or added again its counts go on."""
        self._forget()
        self._removed.add(worker)

    def ended(self, worker: str) -> None:
        """A flight of it is over."""
        if worker in self._removed and self.of(worker).requests == 0:
            del self._workers[worker]
            self._removed.discard(worker)

    def _forget(self) -> None:
        for worker in list(self._removed):
            self.ended(worker)

    def statistics(self) -> dict[str, dict[str, int]]:
        """By worker."""
        self._forget()
        return {worker: load.statistics() for worker, load in self._workers.items()}


class CountedFlight:
    """A ``contract.Flight`` that counts. prefill_tokens: expected to be computed for it."""

    __slots__ = ("_began", "_ended", "_hit_tokens", "_load", "_loads", "_prefill_tokens", "_worker")

    def __init__(self, worker: str, loads: Loads, *, prefill_tokens: int, hit_tokens: int = 0) -> None:
        self._worker = worker
        self._loads = loads
        self._load = loads.of(worker)
        self._prefill_tokens = prefill_tokens
        self._hit_tokens = hit_tokens
        self._began = False
        self._ended = False
        self._load.requests += 1
        self._load.chosen += 1
        self._load.waiting_tokens += prefill_tokens

    @property
    def worker(self) -> str:
        """See ``Flight``."""
        return self._worker

    def sent(self) -> None:
        """See ``Flight``."""

    def first_byte(self, now: float) -> None:
        """See ``Flight``. Only the first call counts."""
        del now
        if not self._began and not self._ended:
            self._began = True
            self._load.waiting_tokens -= self._prefill_tokens
            self._load.decoding += 1

    def token(self, now: float) -> None:
        """See ``Flight``."""

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """See ``Flight``."""
        del how, now
        if self._ended:
            raise BrokenError(f"a request at {self._worker} ended twice")
        self._ended = True
        load = self._load
        if self._began:
            load.decoding -= 1
        else:
            load.waiting_tokens -= self._prefill_tokens
        load.requests -= 1
        load.ended += 1
        if usage is not None:
            load.prompt_tokens += usage.prompt_tokens
            load.hit_tokens_expected += self._hit_tokens
            load.hit_tokens_seen += usage.cached_tokens or 0
        self._loads.ended(self._worker)
