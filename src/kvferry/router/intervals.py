"""Quantiles and shares with intervals that hold whatever the distribution is. Pure.

A quantile's interval is between two order statistics, chosen by the binomial distribution (David and
Nagaraja, Order Statistics, 7.1); a share's is Wilson's. Where so few samples can give none, there is none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    low, high = _ranks(n, q, (1 - confidence) / 2)
    return Estimate(
        ordered[min(n - 1, max(0, math.ceil(q * n) - 1))],
        ordered[low - 1] if low else None,
        ordered[high - 1] if high else None,
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


@lru_cache(maxsize=64)
def _ranks(n: int, q: float, tail: float) -> tuple[int, int]:
    """The largest rank that is below the quantile, and the smallest that is not, but for the tail; 0: none.

    The k-th smallest is above the quantile where at most k - 1 samples are below it: X <= k - 1, X binomial.
    """
    begin = max(0, math.floor(n * q - 9 * math.sqrt(n * q * (1 - q))))  # what is below is beyond counting
    chosen = math.lgamma(n + 1) - math.lgamma(begin + 1) - math.lgamma(n - begin + 1)
    exactly = math.exp(chosen + begin * math.log(q) + (n - begin) * math.log1p(-q))
    at_most, low = 0.0, 0
    for k in range(begin, n):
        at_most += exactly
        if at_most <= tail:
            low = k + 1
        if 1 - at_most <= tail:
            return low, k + 1
        exactly *= (n - k) / (k + 1) * q / (1 - q)
    return low, 0
