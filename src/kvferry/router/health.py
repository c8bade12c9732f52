"""Whether a worker can be asked: evidence in, states out. Pure; times are monotonic seconds.

    UP ──a failure──► SUSPECT ──probe well──► UP
     └─────────────────┴──refused; probes missed in a row; requests failed in a row──► DOWN
    DOWN ──probe well──► UP, and where requests failed: TRIAL ──request well──► UP
     └──probe missed: the wait doubles, 1 s, 2 s ... 30 s        └──probe missed, request failed──► DOWN
    any ──drain──► DRAINING ──its requests have ended, or time is up──► REMOVED

UP is asked, and on TRIAL one request at a time; SUSPECT where there are none of these; DOWN only where
nobody else is left and its last probe was well. No request but a trial's pays for finding out that a
worker is back. What a client can cause is no evidence: 4xx, and 501 for what is not supported.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.breaker import FAILURE, SILENCE, Breaker

PROBE_GAP_S = 0.25  # at least, between one that ended and one that a failed request asks for
NOT_ITS_FAULT = frozenset((501, 505))  # what was asked for is not supported, there or anywhere


class State(enum.Enum):
    """Values: as metrics and status say it."""

    UP = "up"
    SUSPECT = "suspect"
    TRIAL = "trial"
    DOWN = "down"
    DRAINING = "draining"
    REMOVED = "removed"


class Failure(enum.Enum):
    """What a request met. Values: as metrics say it."""

    REFUSED = "refused"  # no connection: nobody listens there
    LOST = "lost"  # the connection ended before the answer did
    ERROR = "error"  # 5xx
    SILENT = "silent"  # no byte in time, or no connection
    UNTRIED = "untried"  # it was not even tried: the router has no descriptors left


class Probed(enum.Enum):
    """How ``/health`` was answered."""

    WELL = "well"
    REFUSED = "refused"
    MISSED = "missed"  # not in time, or with an error


@dataclass(frozen=True, slots=True)
class Limits:
    """interval_s: between probes, drawn up to a fifth longer or shorter. misses: probes until it is down."""

    interval_s: float = 2.0
    timeout_s: float = 3.0
    misses: int = 2
    failures: int = SILENCE
    min_wait_s: float = 1.0
    max_wait_s: float = 30.0


DEFAULT_LIMITS = Limits()


class Change(NamedTuple):
    """What an event led to. lost: what it held itself is gone, as far as can be known."""

    before: State
    after: State
    lost: bool = False
    answers: bool = False  # with errors, but it does: who waits there may go on waiting


def blames(status: int) -> bool:
    """Whether an answer with this status is the worker's fault."""
    return status >= 500 and status not in NOT_ITS_FAULT


class Health:
    """One worker, which is believed to be up until something says otherwise."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, now: float = 0.0) -> None:
        self.limits = limits
        self.failures = dict.fromkeys(Failure, 0)
        self.probes_missed = 0
        self.drain_until = 0.0
        self._state = State.UP
        self._breaker = Breaker(
            threshold=limits.failures, min_wait_s=limits.min_wait_s, max_wait_s=limits.max_wait_s
        )
        self._wants_trial = False  # requests failed: a probe alone does not bring it back
        self._missed = 0  # probes in a row
        self._probed_at = now - PROBE_GAP_S
        self._next_probe = now
        self._boot: float | None = None
        self._boot_wanted = True
        self._was_away = False  # since its boot was last looked at, and perhaps as another process
        self._told = False  # that what it held is lost, since it was last up

    @property
    def state(self) -> State:
        """Now."""
        return self._state

    @property
    def probe_well(self) -> bool:
        """How its last probe was answered."""
        return self._missed == 0

    @property
    def times_down(self) -> int:
        """How often it went down."""
        return self._breaker.opened

    @property
    def boot_wanted(self) -> bool:
        """Whether ``booted`` should be told when its process began."""
        return self._boot_wanted and self._state in (State.UP, State.TRIAL)

    def next_probe_at(self) -> float | None:
        """None: never again."""
        if self._state in (State.DRAINING, State.REMOVED):
            return None
        if self._state is State.DOWN:
            return self._breaker.next_probe_at()
        return self._next_probe

    def failed(self, what: Failure, now: float) -> Change:
        """A request met this."""
        before = self._state
        self.failures[what] += 1
        if before in (State.DRAINING, State.REMOVED) or what is Failure.UNTRIED:
            return Change(before, before)
        if what is Failure.REFUSED:
            return self._refused(now)
        if before is State.TRIAL:
            self._breaker.probe_failed(now)
            self._to(State.DOWN)
        elif before is not State.DOWN:
            opened = self._breaker.failed(FAILURE, now)
            self._wants_trial = opened
            self._to(State.DOWN if opened else State.SUSPECT)
            self._next_probe = max(now, self._probed_at + PROBE_GAP_S)
        return Change(before, self._state, answers=what is Failure.ERROR)

    def succeeded(self) -> Change:
        """An answer with a status below 400 begins."""
        before = self._state
        if before in (State.UP, State.SUSPECT, State.TRIAL):
            self._breaker.succeeded()
            self._wants_trial = False
            self._missed = 0
            self._to(State.UP)
        return Change(before, self._state)

    def probed(self, how: Probed, now: float, *, jitter: float, stretch: float = 1.0) -> Change:
        """A probe has ended. jitter: drawn between -1 and 1. stretch: of the interval to the next one."""
        before = self._state
        if before in (State.DRAINING, State.REMOVED):
            return Change(before, before)
        self._probed_at = now
        self._next_probe = now + self.limits.interval_s * stretch * (1 + jitter / 5)
        if how is Probed.WELL:
            self._missed = 0
            if before is State.DOWN and self._wants_trial:
                self._to(State.TRIAL)
            elif before in (State.DOWN, State.SUSPECT):
                if before is State.DOWN:
                    self._breaker.succeeded()
                self._to(State.UP)
            return Change(before, self._state)
        self._missed += 1
        self.probes_missed += 1
        if how is Probed.REFUSED:
            return self._refused(now)
        if before in (State.DOWN, State.TRIAL):
            self._breaker.probe_failed(now)
            self._to(State.DOWN)
        elif self._missed >= self.limits.misses:
            self._breaker.failed(self.limits.failures, now)
            self._to(State.DOWN)
        else:
            self._to(State.SUSPECT)
        return Change(before, self._state)

    def booted(self, started: float | None) -> Change:
        """When its process says it began, by its own clock; None: it does not say."""
        known = self._boot is not None and started is not None
        lost = started != self._boot if known else self._was_away
        self._boot = started
        self._boot_wanted = False
        self._was_away = False
        return Change(self._state, self._state, lost=lost)

    def drain(self, *, until: float) -> None:
        """No new requests; those it has may go on until then."""
        if self._state is not State.REMOVED:
            self._state = State.DRAINING
            self.drain_until = until

    def remove(self) -> None:
        """It is gone from the list."""
        self._state = State.REMOVED

    def _refused(self, now: float) -> Change:
        """Nobody listens: whoever does next is another process."""
        before = self._state
        if before in (State.DOWN, State.TRIAL):
            self._breaker.probe_failed(now)
        else:
            self._breaker.failed(self.limits.failures, now)
        self._missed = max(self._missed, 1)
        self._wants_trial = False
        self._to(State.DOWN)
        lost, self._told = not self._told, True
        self._boot = None
        self._was_away = False
        return Change(before, State.DOWN, lost=lost)

    def _to(self, state: State) -> None:
        if state is State.DOWN and self._state is not State.DOWN:
            self._boot_wanted = True
            self._was_away = not self._told
        elif state is State.UP:
            self._told = False
        self._state = state
