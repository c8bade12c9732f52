"""Medians and quartiles: what every figure of the benchmarks is given with."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """median and quartiles of n values; quartiles equal the extremes for n below 4."""

    n: int
    median: float
    low: float
    high: float

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"n": self.n, "median": self.median, "quartiles": [self.low, self.high]}


def spread(values: Sequence[float]) -> Spread | None:
    """None for no values."""
    if not values:
        return None
    if len(values) < 4:
        return Spread(len(values), statistics.median(values), min(values), max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(len(values), median, low, high)
