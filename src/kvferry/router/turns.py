"""The simplest guide: workers take turns."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvferry.errors import BrokenError
from kvferry.router.contract import Asked, Ended, Usage


class TurnFlight:
    """See ``contract.Flight``."""

    __slots__ = ("_guide", "_worker")

    def __init__(self, guide: "Turns", worker: str) -> None:
        self._guide: Turns | None = guide
        self._worker = worker

    @property
    def worker(self) -> str:
        """Its URL."""
        return self._worker

    def first_byte(self, now: float) -> None:
        """Nothing follows from it."""

    def token(self, now: float) -> None:
        """Nor from this."""

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """Once."""
        guide, self._guide = self._guide, None
        if guide is None:
            raise BrokenError("a flight ended twice")
        guide.in_flight[self._worker] -= 1


class Turns:
    """See ``contract.Guide``."""

    def __init__(self) -> None:
        self.in_flight: Counter[str] = Counter()
        self._next = 0

    def begin(self, asked: Asked, *, among: Sequence[str], now: float) -> TurnFlight:
        """The next one."""
        del asked, now
        self._next += 1
        worker = among[self._next % len(among)]
        self.in_flight[worker] += 1
        return TurnFlight(self, worker)

    def worker_added(self, worker: str) -> None:
        """Nothing follows from it."""

    def worker_lost(self, worker: str) -> None:
        """Nor from this."""

    def explain(self, request_id: str) -> Mapping[str, object] | None:
        """It was its turn."""
        del request_id
        return None

    def statistics(self) -> Mapping[str, object]:
        """Requests in flight, by worker."""
        return {"in_flight": dict(self.in_flight)}
