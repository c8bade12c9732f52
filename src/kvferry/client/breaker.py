"""Decides when a node that stays silent is left alone, and when it is given up. Pure.

    CLOSED ──a call went unanswered──► OPEN ──anything heard──► CLOSED
      └──suspected, silent for patience_s──┘ └──silent for give_up_s──► the connection is given up

While it is open calls are answered "recompute" at once, and a ping asks whether the node is back. It stays
open when a connection was given up: only a node that answers, or is known to be gone, closes it.
"""

PING_EVERY_S = 0.5
GIVE_UP_S = 5.0
PATIENCE_S = 0.25  # for the answer to a ping of a node that is suspected: less than a recompute takes


class Breaker:
    """Times are monotonic seconds."""

    def __init__(self, *, ping_every_s: float = PING_EVERY_S, give_up_s: float = GIVE_UP_S) -> None:
        self.opened = 0
        self._ping_every_s = ping_every_s
        self._give_up_s = give_up_s
        self._since: float | None = None
        self._next_ping = 0.0
        self._suspected: float | None = None

    @property
    def is_open(self) -> bool:
        """Calls would go unanswered, as far as is known."""
        return self._since is not None

    def unanswered(self, now: float) -> None:
        """A call's bounded wait has ended without an answer."""
        if self._since is None:
            self._since = now
            self._next_ping = now
            self.opened += 1

    def suspect(self, now: float) -> None:
        """Something did not come that might have: the node has ``PATIENCE_S`` to answer a ping."""
        if self._since is None and self._suspected is None:
            self._suspected = now
            self._next_ping = now

    def heard(self) -> None:
        """The node said something, or is known to be gone, or the connection is a new one."""
        self._since = None
        self._suspected = None

    def look(self, now: float) -> None:
        """Time has passed: a suspect that stayed silent counts as a call without an answer."""
        if self._suspected is not None and now >= self._suspected + PATIENCE_S:
            self._suspected = None
            self.unanswered(now)

    def ping_due(self, now: float) -> bool:
        """Whether to ping now; the next one is due later then."""
        if (self._since is None and self._suspected is None) or now < self._next_ping:
            return False
        self._next_ping = now + self._ping_every_s
        return True

    def given_up(self, now: float) -> bool:
        """Whether the connection should be dropped and made anew."""
        return self._since is not None and now >= self._since + self._give_up_s

    def next_look(self) -> float | None:
        """When to look again; None while closed."""
        if self._since is not None:
            return min(self._next_ping, self._since + self._give_up_s)
        if self._suspected is not None:
            return min(self._next_ping, self._suspected + PATIENCE_S)
        return None
