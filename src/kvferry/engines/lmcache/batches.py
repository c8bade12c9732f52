"""One task of several objects on its way through the tier: counts what ends, and tells when all has."""

import threading
from collections.abc import Callable, Sequence

from kvferry.tiers.contract import FetchResult, Outcome


class Batch:
    """Outcomes of one task, in the order of its objects. ``ended`` is called once, by whoever ends the last.

    places: index of each item given to the tier in the task. The outcomes of the others are as given.
    """

    def __init__(
        self, outcomes: list[Outcome], places: Sequence[int], ended: Callable[[Sequence[Outcome]], None]
    ) -> None:
        self._outcomes = outcomes
        self._places = places
        self._ended = ended
        self._left = len(places)
        self._lock = threading.Lock()

    def done(self, index: int, outcome: Outcome) -> None:
        """See ``Tier.store``."""
        with self._lock:
            self._outcomes[self._places[index]] = outcome
            self._left -= 1
            last = self._left == 0
        if last:
            self._ended(self._outcomes)

    def fetched(self, index: int, result: FetchResult) -> None:
        """See ``Tier.fetch``."""
        self.done(index, result.outcome)

    def probed(self, outcomes: Sequence[Outcome]) -> None:
        """See ``Tier.probe``."""
        for place, outcome in zip(self._places, outcomes, strict=True):
            self._outcomes[place] = outcome
        self._ended(self._outcomes)
