"""Quantiles and shares with intervals that hold whatever the distribution is. Pure.

A quantile's interval is between two order statistics, chosen by the binomial distribution (David and
Nagaraja, Order Statistics, 7.1); a share's is Wilson's. Where so few samples can give none, there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """of: samples. low, high: None where there are too few for that side."""

    value: float
    low: float | None
    high: float | None
    of: int

    @property
    def enough(self) -> bool:
        """Whether the interval has both ends."""
        return self.low is not None and self.high is not None


def quantile(samples: Sequence[float], q: float, *, confidence: float = CONFIDENCE) -> Estimate | None:
    """None without samples."""
    n = len(samples)
    if n == 0:
        return None
    ordered = sorted(samples)
    value = ordered[min(n - 1, max(0, math.ceil(q * n) - 1))]
    below = _at_most(n, q)
    tail = (1 - confidence) / 2
    # P(at most k - 1 samples below the quantile) <= tail: the k-th smallest is below it, but for that.
    low = next((k for k in range(n, 0, -1) if below[k - 1] <= tail), None)
    high = next((k for k in range(1, n + 1) if 1 - below[k - 1] <= tail), None)
    return Estimate(
        value,
        ordered[low - 1] if low is not None else None,
        ordered[high - 1] if high is not None else None,
        n,
    )


def share(hits: int, of: int, *, confidence: float = CONFIDENCE) -> Estimate | None:
    """Of hits among so many. None of none."""
    if of == 0:
        return None
    z = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    middle = (hits + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(hits * (of - hits) / of + z * z / 4)
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    high = 1.0 if hits == of else min(1.0, middle + half)
    return Estimate(hits / of, low, high, of)


def ratio(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    """Of two quantiles of separate samples. Give both at ``paired(confidence)`` for that of the ratio."""
    if above is None or below is None or below.value <= 0:
        return None
    low = above.low / below.high if above.low is not None and below.high else None
    high = above.high / below.low if above.high is not None and below.low else None
    return Estimate(above.value / below.value, low, high, min(above.of, below.of))


def paired(confidence: float = CONFIDENCE) -> float:
    """At which confidence two intervals hold together, with at least this one (Bonferroni)."""
    return 1 - (1 - confidence) / 2


def _at_most(n: int, q: float) -> list[float]:
    """P(X <= k) for k = 0 ... n, X binomial."""
    log_q, log_p = math.log(q), math.log1p(-q)
    total, found = 0.0, []
    for k in range(n + 1):
        chosen = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        total += math.exp(chosen + k * log_q + (n - k) * log_p)
        found.append(min(1.0, total))
    return found
