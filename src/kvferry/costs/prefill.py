"""Prefill time as base + a n + b n^2, fitted to what an engine measured.

With c tokens of context already there, n new ones attend to n (n + 2 c) / 2 pairs, so the quadratic
term of (n, c) is (c + n)^2 - c^2 and one fit serves cold and warm prefills.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

MAX_SAMPLES_PER_SIZE = 8
MAX_SIZES = 32  # powers of two of new tokens
REWEIGHTINGS = 32  # at most
SETTLED = 5e-3  # a coefficient that changes by less than this share of itself has arrived
SMALLEST_RESIDUAL = 0.02  # of a logarithm; below it all samples count the same
SMALLEST_RATIO = 1e-6  # of predicted to measured
TERM_PENALTY = 1.02  # a further term must lower the error by at least 2% to be believed

Features = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Predicted prefill time. No coefficient is negative, so no prediction is."""

    base_s: float
    per_token_s: float
    per_token2_s: float

    def seconds(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Time to compute ``new_tokens`` after ``context_tokens`` that are there already; 0 for none."""
        if new_tokens <= 0:
            return 0.0
        terms = _features(new_tokens, context_tokens)
        return self.base_s * terms[0] + self.per_token_s * terms[1] + self.per_token2_s * terms[2]


class PrefillFit:
    """Learns a PrefillModel online from a bounded number of recent samples of every size.

    Least absolute error of the logarithm (by reweighting), so a request that waited behind something else
    once, or whose time was taken wrongly, moves nothing. Terms that the samples cannot tell apart are
    left out.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[Features, float]]] = {}
        self._model: PrefillModel | None = None
        self._stale = False

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """One measured prefill. What cannot be one (no tokens, no or infinite time) is ignored."""
        if new_tokens <= 0 or context_tokens < 0 or not math.isfinite(seconds) or seconds <= 0:
            return
        size = min(new_tokens.bit_length(), MAX_SIZES)
        samples = self._samples.setdefault(size, deque(maxlen=MAX_SAMPLES_PER_SIZE))
        samples.append((_features(new_tokens, context_tokens), seconds))
        self._stale = True

    def model(self, *, rest: Callable[[], None] = lambda: None) -> PrefillModel | None:
        """The current fit, or None before the first sample.

        rest: called every few tenths of a millisecond meanwhile. A fit is up to 10 ms of Python; a thread
        of its own lets go of the interpreter there, for one that must not wait.
        """
        if self._stale:
            self._model = _fit([sample for samples in self._samples.values() for sample in samples], rest)
            self._stale = False
        return self._model


def _features(new_tokens: int, context_tokens: int) -> Features:
    return (1.0, float(new_tokens), float(new_tokens) * (new_tokens + 2 * context_tokens))


def _fit(samples: Sequence[tuple[Features, float]], rest: Callable[[], None]) -> PrefillModel | None:
    best: tuple[float, Features] | None = None
    # Scaled so that every feature is about 1: the normal equations stay well conditioned.
    scales = [max(sample[0][term] for sample in samples) for term in range(3)]
    rows = [[features[term] / scales[term] / seconds for term in range(3)] for features, seconds in samples]
    distinct = len({features for features, _ in samples})
    for terms in [(1,), (0, 1), (1, 2), (0, 1, 2), (2,), (0, 2), (0,)]:
        if len(terms) > distinct:
            continue
        solved = _least_absolute(rows, terms, rest)
        if solved is None:
            continue
        error = _error(rows, solved)
        if best is None or error * TERM_PENALTY + 1e-6 < best[0]:
            best = (error, solved)
    if best is None:
        return None
    base, linear, square = (value / scale for value, scale in zip(best[1], scales, strict=True))
    return PrefillModel(base, linear, square)


def _least_absolute(
    rows: Sequence[Sequence[float]], terms: Sequence[int], rest: Callable[[], None]
) -> Features | None:
    """Coefficients for ``terms`` (0 for the others) that fit rows * x = 1; None if negative or unsolvable."""
    typical = median(1 / row[1] for row in rows)  # where to start: time in proportion to tokens
    weights = [_weight(typical * row[1]) for row in rows]
    solved: Features | None = None
    for _ in range(REWEIGHTINGS):
        rest()
        normal = [[0.0] * (len(terms) + 1) for _ in terms]
        for row, weight in zip(rows, weights, strict=True):
            for i, first in enumerate(terms):
                weighted = weight * row[first]
                normal[i][-1] += weighted
                for j, second in enumerate(terms):
                    normal[i][j] += weighted * row[second]
        values = _solve(normal)
        if values is None:
            return None
        full = [0.0, 0.0, 0.0]
        for term, value in zip(terms, values, strict=True):
            full[term] = value
        before, solved = solved, (full[0], full[1], full[2])
        if before is not None and all(
            abs(new - old) <= SETTLED * abs(new) for new, old in zip(solved, before, strict=True)
        ):
            break
        weights = [_weight(ratio) for ratio in _ratios(rows, solved)]
    return solved if solved is not None and min(solved) >= 0 else None


def _ratios(rows: Sequence[Sequence[float]], solved: Features) -> list[float]:
    """Predicted over measured."""
    return [max(row[0] * solved[0] + row[1] * solved[1] + row[2] * solved[2], SMALLEST_RATIO) for row in rows]


def _weight(ratio: float) -> float:
    """Gives the square of (ratio - 1) the slope of the logarithm's absolute value: 1 / ratio, either way."""
    return 1 / max(ratio, SMALLEST_RATIO) / max(abs(ratio - 1), SMALLEST_RESIDUAL)


def _error(rows: Sequence[Sequence[float]], solved: Features) -> float:
    return sum(abs(math.log(ratio)) for ratio in _ratios(rows, solved)) / len(rows)


def _solve(system: list[list[float]]) -> list[float] | None:
    """Gaussian elimination with pivoting of an augmented system of at most three unknowns."""
    size = len(system)
    largest = max((abs(value) for row in system for value in row[:-1]), default=0.0)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(system[row][column]))
        if abs(system[pivot][column]) <= 1e-12 * largest:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for row in range(size):
            if row != column:
                factor = system[row][column] / system[column][column]
                system[row] = [x - factor * y for x, y in zip(system[row], system[column], strict=True)]
    return [system[row][-1] / system[row][row] for row in range(size)]
