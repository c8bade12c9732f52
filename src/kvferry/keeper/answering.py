"""Whether a keeper answers questions, however alive its connection looks: a breaker over answers in time.

While it is open nothing is asked of the keeper but a trial, a question that no request waits for.
"""

from collections.abc import Callable
from functools import partial

from kvferry.breaker import FAILURE, SILENCE, Breaker
from kvferry.keeper.wire import Locate, Message, Parts
from kvferry.loop import Loop, Timer

SILENT_S = 0.2
HESITANT_S = 0.03
"""Who waited so long in vain tells something; three times is enough."""
MIN_WAIT_S = 0.25
MAX_WAIT_S = 5.0
TRIAL_S = 1.0


class Answering:
    """Of one keeper; loop thread only, but for ``fails``."""

    def __init__(self, loop: Loop, *, ask: Callable[[Message], None], ticket: Callable[[], int]) -> None:
        """ask: sends a message. ticket: a new one."""
        self._loop = loop
        self._ask = ask
        self._new_ticket = ticket
        self._breaker = Breaker(min_wait_s=MIN_WAIT_S, max_wait_s=MAX_WAIT_S)
        self._ticket = 0  # of the trial under way
        self._timer: Timer | None = None

    @property
    def fails(self) -> bool:
        """Whether it is not to be asked."""
        return self._breaker.is_open

    def unanswered(self, parts: Parts, waited_s: float) -> None:
        """A question about these had no answer in its time."""
        weight = SILENCE if waited_s >= SILENT_S else FAILURE if waited_s >= HESITANT_S else 0
        if weight and self._breaker.failed(weight, self._loop.clock()):
            refs = parts.refs()[:1]
            self._wait(Parts.of(refs)[0])

    def answered(self) -> None:
        """It answers, or is another one."""
        self._breaker.succeeded()
        self._ticket = 0
        if self._timer is not None:
            self._timer.cancel()

    def settles(self, ticket: int) -> bool:
        """Whether that is the answer to the trial, which is then over."""
        if not ticket or ticket != self._ticket:
            return False
        self.answered()
        return True

    def _wait(self, parts: Parts) -> None:
        when = self._breaker.next_probe_at()
        if when is not None:
            self._timer = self._loop.at(when, partial(self._try, parts))

    def _try(self, parts: Parts) -> None:
        self._ticket = self._new_ticket()
        self._ask(Locate(ticket=self._ticket, parts=parts, deadline_s=TRIAL_S))
        self._timer = self._loop.at(self._loop.clock() + TRIAL_S, partial(self._vain, parts))

    def _vain(self, parts: Parts) -> None:
        self._ticket = 0
        self._breaker.probe_failed(self._loop.clock())
        self._wait(parts)
