"""A circuit breaker, as a pure state machine: failures and times in, decisions out.

             weight of failures in a row reaches ``threshold``
    CLOSED ───────────────────────────────────────────────────► OPEN ──┐ probe failed:
      ▲                                                          │  ▲  │ wait doubles,
      └──────────────── a probe (or any reply) succeeded ────────┘  └──┘ up to max_wait_s

While OPEN nothing is sent but probes; those are asked for by ``probe_due`` and come from the owner's
own thread, so that no request ever pays for finding out that a server is back.
"""

from dataclasses import dataclass

FAILURE = 1
"""Weight of one dropped connection: a server may drop one and be well."""
SILENCE = 3
"""Weight of a server that took a request and went silent: waiting for it again costs a whole deadline."""


@dataclass(slots=True)
class Breaker:
    """One per shard. Times are monotonic seconds. Not thread-safe: the owner holds its lock."""

    threshold: int = SILENCE
    min_wait_s: float = 0.05
    max_wait_s: float = 1.0
    opened: int = 0
    weight: int = 0
    _is_open: bool = False
    _wait_s: float = 0.0
    _probe_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests should be refused at once."""
        return self._is_open

    def failed(self, weight: int, now: float) -> bool:
        """Count a failure; True if this one opened the breaker."""
        self.weight += weight
        if self._is_open or self.weight < self.threshold:
            return False
        self._is_open = True
        self.opened += 1
        self._wait_s = self.min_wait_s
        self._probe_at = now + self._wait_s
        return True

    def succeeded(self) -> None:
        """A reply arrived: close, and forget earlier failures."""
        self.weight = 0
        self._is_open = False

    def probe_due(self, now: float) -> bool:
        """Whether the owner should probe the server now."""
        return self._is_open and now >= self._probe_at

    def probe_failed(self, now: float) -> None:
        """The probe had no good answer: wait longer before the next one."""
        self._wait_s = min(self._wait_s * 2, self.max_wait_s)
        self._probe_at = now + self._wait_s

    def next_probe_at(self) -> float | None:
        """When the next probe is due, or None while closed."""
        return self._probe_at if self._is_open else None
