"""How fast a tier moves bytes: latency and bandwidth from completed transfers, bytes in flight counted.

A transfer that starts while A bytes are in flight ends after about latency + (A + own) / bandwidth,
since transfers share the tier in order. Fitting that line to completed transfers gives both numbers from
concurrent transfers as well as from single ones.
"""

import math
from dataclasses import dataclass

MEMORY_OF_A_SAMPLE = 0.96  # weight kept by older samples per new one
SURPRISE_MEMORY = 0.1  # and per sample that is much faster than predicted: a bad spell is over
SURPRISE_RATIO = 0.5
MAX_SLOWDOWN_PER_SAMPLE = 8.0  # one stuck transfer is not a slow tier
SMALL_BYTES = 256 << 10  # transfers below it tell little about bandwidth
FIRST_PROBE_S = 1.0
MAX_PROBE_S = 60.0
MIN_SILENCE_S = 0.25  # who waited less may have asked too late
SILENT_S = 1e6  # what a silent tier is predicted to take: more than anybody waits


@dataclass(frozen=True, slots=True)
class TierRate:
    """A snapshot of one tier for ``decide``. bytes_per_s: None while nothing is known.

    probe_due: nothing was learnt for so long that a slow estimate deserves a trial.
    """

    bytes_per_s: float | None
    latency_s: float
    inflight_bytes: int
    probe_due: bool

    def seconds(self, nbytes: int) -> float | None:
        """Predicted time until ``nbytes`` more bytes are here; None while nothing is known."""
        if self.bytes_per_s is None:
            return None
        return self.latency_s + (self.inflight_bytes + nbytes) / self.bytes_per_s


UNKNOWN_RATE = TierRate(bytes_per_s=None, latency_s=0.0, inflight_bytes=0, probe_due=False)


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """A transfer in flight; given to ``RateEstimate.end`` exactly once."""

    nbytes: int
    ahead_bytes: int
    started_s: float


class RateEstimate:
    """Learns the rate of one tier. Times are monotonic seconds, passed in."""

    def __init__(self) -> None:
        # Weighted sums of 1, x = 1 / bytes, y = seconds per byte, and their products.
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._inflight_bytes = 0
        self._learnt_s: float | None = None
        self._probe_s = FIRST_PROBE_S
        self._moved_s = -math.inf  # when bytes came last
        self._silent = False

    def begin(self, nbytes: int, now: float) -> TransferTicket:
        """A transfer of ``nbytes`` bytes starts."""
        ticket = TransferTicket(nbytes, self._inflight_bytes, now)
        self._inflight_bytes += nbytes
        return ticket

    def end(self, ticket: TransferTicket, now: float) -> None:
        """It ended with its bytes moved."""
        self.moved(now)
        self._inflight_bytes -= ticket.nbytes
        self._took(ticket, now)

    def moved(self, now: float) -> None:
        """Some bytes of some transfer came: whatever else is late, the tier is not silent."""
        self._moved_s = now
        if self._silent:
            self._silent = False
            self._probe_s = FIRST_PROBE_S

    def timed_out(self, ticket: TransferTicket, now: float) -> None:
        """It was given up before its bytes had moved, which would have taken longer.

        Where nothing moved at all meanwhile, the tier is silent: slower than any wait, but for trials.
        """
        self._inflight_bytes -= ticket.nbytes
        waited_s = now - ticket.started_s
        expected = self._expected_s(ticket.ahead_bytes + ticket.nbytes)
        if self._moved_s > ticket.started_s:
            if expected is None or waited_s > expected:
                self._took(ticket, now)
        elif waited_s >= MIN_SILENCE_S and ticket.nbytes > 0:
            self._silent = True
            self._learnt_s = now

    def _took(self, ticket: TransferTicket, now: float) -> None:
        seconds = now - ticket.started_s
        total = ticket.ahead_bytes + ticket.nbytes
        if ticket.nbytes <= 0 or seconds <= 0:
            return
        memory = MEMORY_OF_A_SAMPLE
        expected = self._expected_s(total)
        if expected is not None:
            if seconds < SURPRISE_RATIO * expected:
                memory = SURPRISE_MEMORY
                self._probe_s = FIRST_PROBE_S
            seconds = min(seconds, MAX_SLOWDOWN_PER_SAMPLE * expected)
        self._learn(total, seconds, memory)
        self._learnt_s = now

    def forget(self, ticket: TransferTicket) -> None:
        """It ended in a way that says nothing about speed: a miss, an error, a cancel."""
        self._inflight_bytes -= ticket.nbytes

    def probing(self, now: float) -> None:
        """A trial was let through: the next one waits twice as long, unless this one shows better."""
        self._learnt_s = now
        self._probe_s = min(MAX_PROBE_S, 2 * self._probe_s)

    def rate(self, now: float) -> TierRate:
        """The current estimate."""
        latency_s, per_byte_s = self._line()
        known = self._w > 0 and per_byte_s > 0
        bytes_per_s = 1 / per_byte_s if known else None
        return TierRate(
            bytes_per_s=bytes_per_s if bytes_per_s or not self._silent else 1.0,
            latency_s=SILENT_S if self._silent else latency_s if known else 0.0,
            inflight_bytes=self._inflight_bytes,
            probe_due=self._learnt_s is not None and now - self._learnt_s >= self._probe_s,
        )

    def _learn(self, nbytes: int, seconds: float, memory: float) -> None:
        weight = (nbytes / (nbytes + SMALL_BYTES)) ** 2
        x, y = 1 / nbytes, seconds / nbytes
        self._w = memory * self._w + weight
        self._x = memory * self._x + weight * x
        self._y = memory * self._y + weight * y
        self._xx = memory * self._xx + weight * x * x
        self._xy = memory * self._xy + weight * x * y

    def _expected_s(self, nbytes: int) -> float | None:
        if self._w <= 0:
            return None
        latency_s, per_byte_s = self._line()
        return latency_s + nbytes * per_byte_s

    def _line(self) -> tuple[float, float]:
        """Latency and seconds per byte: the weighted line y = per_byte + latency * x, neither negative."""
        if self._w <= 0:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - mean_x * mean_x
        if spread <= 1e-4 * mean_x * mean_x:  # all of one size: nothing to tell latency by
            return 0.0, mean_y
        latency_s = max(0.0, (self._xy / self._w - mean_x * mean_y) / spread)
        per_byte_s = mean_y - latency_s * mean_x
        if per_byte_s <= 0 or not math.isfinite(per_byte_s):
            return 0.0, mean_y
        return latency_s, per_byte_s
