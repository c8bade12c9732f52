"""A bound on bytes written per second: a token bucket whose debt says when to go on. Pure."""

IDLE_CREDIT_S = 1.0  # what was not used lately may be caught up on, so much of it


class WriteRate:
    """bytes_per_s: None never makes anybody wait. Times are monotonic seconds.

    In any ``t`` seconds at most ``bytes_per_s * (t + IDLE_CREDIT_S)`` are spent, and one spending more.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait_s(self, now: float) -> float:
        """How long to leave writing alone; 0 when something may be written."""
        return max(0.0, self._free_at - now)

    def spend(self, nbytes: int, now: float) -> None:
        """These are being written, whatever ``wait_s`` said."""
        if self._bytes_per_s is not None:
            self._free_at = max(self._free_at, now - IDLE_CREDIT_S) + nbytes / self._bytes_per_s
