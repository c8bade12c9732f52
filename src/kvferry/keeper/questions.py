"""What a node waits for: questions, each asked of several keepers at once, and how they end. Pure.

Every method returns the calls that are due: each index of a question is answered once, whatever keepers
say, and however often.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvferry.keeper.wire import Parts, Where
from kvferry.loop import Timer
from kvferry.tiers.contract import Outcome

if TYPE_CHECKING:
    from kvferry.keeper.peer import Peer

Calls = list[Callable[[], None]]


class Question(Protocol):
    """One call of a node. tickets: of the messages that ask it."""

    tickets: list[int]
    timer: Timer | None

    @property
    def over(self) -> bool:
        """Every index has its answer."""
        ...

    def give_up(self, places: Sequence[int], outcome: Outcome) -> Calls:
        """These will not be answered."""
        ...

    def end(self, outcome: Outcome) -> Calls:
        """Nothing more will be."""
        ...


class Locating:
    """``done`` is called with all of it, once nothing is missing."""

    def __init__(self, count: int, done: Callable[[Sequence[Where]], None]) -> None:
        self.tickets: list[int] = []
        self.timer: Timer | None = None
        self._where = [Where.UNKNOWN] * count
        self._missing = set(range(count))
        self._done = done
        self._over = False

    @property
    def over(self) -> bool:
        """See ``Question``."""
        return self._over

    def located(self, places: Sequence[int], where: Sequence[Where]) -> Calls:
        """A keeper's answer for these places."""
        for place, found in zip(places, where, strict=True):
            if place in self._missing:
                self._missing.discard(place)
                self._where[place] = found
        return self._calls()

    def give_up(self, places: Sequence[int], outcome: Outcome) -> Calls:
        """See ``Question``."""
        del outcome
        self._missing.difference_update(places)
        return self._calls()

    def end(self, outcome: Outcome) -> Calls:
        """See ``Question``."""
        del outcome
        self._missing.clear()
        return self._calls()

    def _calls(self) -> Calls:
        if self._over or self._missing:
            return []
        self._over = True
        return [partial(self._done, tuple(self._where))]


class Staging:
    """``done`` is called for each index."""

    def __init__(self, count: int, done: Callable[[int, Outcome], None]) -> None:
        self.tickets: list[int] = []
        self.timer: Timer | None = None
        self._missing = dict.fromkeys(range(count))  # in order
        self._done = done

    @property
    def over(self) -> bool:
        """See ``Question``."""
        return not self._missing

    def give_up(self, places: Sequence[int], outcome: Outcome) -> Calls:
        """See ``Question``. Also how an answer comes."""
        calls: Calls = []
        for place in places:
            if place in self._missing:
                del self._missing[place]
                calls.append(partial(self._done, place, outcome))
        return calls

    def end(self, outcome: Outcome) -> Calls:
        """See ``Question``."""
        return self.give_up(list(self._missing), outcome)


class Asked:
    """The part of a question that one message asks of one keeper. places: of its indexes in the question.

    at: when.
    """

    __slots__ = ("_left", "at", "parts", "peer", "places", "question")

    def __init__(
        self, peer: "Peer", question: Question, places: Sequence[int], *, parts: Parts, at: float
    ) -> None:
        self.peer = peer
        self.question = question
        self.places = places
        self.parts = parts
        self.at = at
        self._left = set(range(len(places)))

    @property
    def answered(self) -> bool:
        """Wholly."""
        return not self._left

    def take(self, index: int) -> bool:
        """Whether an answer for that index is one that was waited for."""
        if index not in self._left:
            return False
        self._left.discard(index)
        return True

    def give_up(self, outcome: Outcome) -> Calls:
        """The keeper will say no more."""
        left = sorted(self._left)
        self._left.clear()
        return self.question.give_up([self.places[index] for index in left], outcome)
