"""Policies to compare with: each a ``contract.Guide`` that knows less than the cost model. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from kvferry.errors import BrokenError
from kvferry.router.contract import Asked, Flight
from kvferry.router.load import CountedFlight, Loads

POLICIES = ("cost", "round_robin", "least_load", "session", "cache_aware")
"""By their names in settings, the default first."""
CHARACTERS_PER_TOKEN = 4.0  # of a prompt nothing else is known of


def guessed_tokens(asked: Asked) -> int:
    """Prompt tokens by its length alone."""
    return round(asked.keys[-1].length / CHARACTERS_PER_TOKEN) if asked.keys else 0


class Counting:
    """What all of them do alike."""

    name = ""

    def __init__(self) -> None:
        self.loads = Loads()
        self._turns = 0

    def choose(self, asked: Asked, among: Sequence[str], now: float) -> str:
        """One of these; not empty."""
        raise NotImplementedError

    def turned(self, among: Sequence[str]) -> Iterator[str]:
        """All of them, each time from the next one on."""
        self._turns += 1
        return (among[(self._turns + place) % len(among)] for place in range(len(among)))

    def begin(self, asked: Asked, *, among: Sequence[str], now: float) -> Flight:
        """See ``Guide``."""
        if not among:
            raise BrokenError("no worker to choose from")
        return CountedFlight(self.choose(asked, among, now), self.loads, prefill_tokens=guessed_tokens(asked))

    def worker_added(self, worker: str) -> None:
        """See ``Guide``."""
        self.loads.added(worker)

    def worker_lost(self, worker: str) -> None:
        """See ``Guide``."""
        self.loads.removed(worker)

    def explain(self, request_id: str) -> Mapping[str, object] | None:
        """See ``Guide``. They have no reasons to tell."""
        del request_id
        return None

    def statistics(self) -> Mapping[str, object]:
        """See ``Guide``."""
        return {"policy": self.name, "workers": self.loads.statistics()}


class RoundRobin(Counting):
    """One after the other."""

    name = "round_robin"

    def choose(self, asked: Asked, among: Sequence[str], now: float) -> str:
        """See ``Counting``."""
        del asked, now
        return next(self.turned(among))


class LeastLoad(Counting):
    """The fewest uncached prefill tokens waiting and, of equals, the fewest streams; turns on a tie."""

    name = "least_load"

    def choose(self, asked: Asked, among: Sequence[str], now: float) -> str:
        """See ``Counting``."""
        del asked, now
        return min(self.turned(among), key=self._order)

    def _order(self, worker: str) -> tuple[int, int]:
        load = self.loads.of(worker)
        return load.waiting_tokens, load.requests


class SessionAffinity(Counting):
    """A session stays at one worker (rendezvous hashing); without one, the fewest requests, in turns.

    A session is what the body names (``user``, ``prompt_cache_key``), else the beginning of its prompt.
    """

    name = "session"

    def choose(self, asked: Asked, among: Sequence[str], now: float) -> str:
        """See ``Counting``."""
        del now
        session = asked.session.encode() if asked.session else asked.keys[0].name if asked.keys else b""
        if session:
            return max(among, key=lambda worker: blake2b(session + worker.encode(), digest_size=8).digest())
        return min(self.turned(among), key=lambda worker: self.loads.of(worker).requests)
