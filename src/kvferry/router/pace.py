"""How long a worker's prefill takes, and how much of it is ahead of a new request. Pure; times are seconds.

The model of prefill is the engine's own (``wire.Speed``), else one for all workers of a pool, fitted to the
times to first token seen; until then an assumption. Each worker has a factor on top, learned from what it
took against what was predicted: a throttled host, other traffic, an assumption that was off. Without
observations it fades to what is typical of the pool, so that a worker once slow is tried again, and one that
is new looks no better than those that are known.
"""

import math
from collections.abc import Hashable

from kvferry.costs import PrefillFit, PrefillModel

ASSUMED_PREFILL = PrefillModel(0.005, 1e-4, 0.0)
FADE_S = 45.0  # in which a factor loses half of its logarithm
FIRST_WEIGHT = 0.9  # of the first observation; later ones count less, down to LEAST_WEIGHT
LEAST_WEIGHT = 0.25
FIRST_SURPRISE = math.log(16.0)  # no further from what was predicted counts the first observation,
MAX_SURPRISE = math.log(4.0)  # and none of the later ones
MAX_FACTOR = math.log(64.0)
SLACK_S = 0.003  # below it, a time says nothing

FIT_AFTER = 8  # samples, for the first fit; half as many again for each following one
FIT_EVERY_S = 10.0
MAX_SAMPLES_BETWEEN = 512

TYPICAL_STEP = 0.05  # of a logarithm, for each observation: about their median

SLOPE_MEMORY = 0.98
ASSUMED_SLOPE_S = 2e-4


class Prefills:
    """The pool's model of prefill, for workers whose engine says nothing."""

    def __init__(self) -> None:
        self._fit = PrefillFit()
        self._samples = 0
        self._due = FIT_AFTER
        self._fitted_at = -math.inf
        self.model = ASSUMED_PREFILL
        self.typical_tokens = 512.0

    def observe(self, new_tokens: int, context_tokens: int, seconds: float, now: float) -> bool:
        """One prefill that waited for nothing. Returns whether there is a new model."""
        self._fit.observe(new_tokens, context_tokens, seconds)
        self.typical_tokens += 0.05 * (new_tokens - self.typical_tokens)
        self._samples += 1
        if self._samples >= self._due and now - self._fitted_at >= FIT_EVERY_S:
            self._due = self._samples + min(max(self._samples // 2, FIT_AFTER), MAX_SAMPLES_BETWEEN)
            self._fitted_at = now
            model = self._fit.model()
            if model is not None and model.seconds(int(self.typical_tokens)) > 0:
                self.model = model
                return True
        return False


class Decodes:
    """How much longer a step of decode takes for each further stream: a line through what was seen.

    Seen while nothing prefilled there: what a prefill delays is in the wait of whoever comes after it.
    """

    def __init__(self) -> None:
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, streams: float, step_s: float) -> None:
        """Beside so many others, a token took so long on average."""
        self._w = SLOPE_MEMORY * self._w + 1.0
        self._x = SLOPE_MEMORY * self._x + streams
        self._y = SLOPE_MEMORY * self._y + step_s
        self._xx = SLOPE_MEMORY * self._xx + streams * streams
        self._xy = SLOPE_MEMORY * self._xy + streams * step_s

    @property
    def slope_s(self) -> float:
        """Per stream and token."""
        if self._w < 8:
            return ASSUMED_SLOPE_S
        mean_x, mean_y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - mean_x * mean_x
        if spread < 0.05 * (1.0 + mean_x):  # always about as many: nothing to tell it by
            return ASSUMED_SLOPE_S
        return max((self._xy / self._w - mean_x * mean_y) / spread, 0.0)


class Typical:
    """The factor of a worker nothing is known of."""

    def __init__(self) -> None:
        self.log = 0.0
        self._seen = 0

    def observe(self, sample: float) -> None:
        """Of some worker. The first ones move it farther."""
        self._seen += 1
        step = max(TYPICAL_STEP, MAX_SURPRISE / self._seen)
        self.log += min(max(sample - self.log, -step), step)


class Pace:
    """One worker's. Work is predicted without the factor, which is applied when it is asked for."""

    __slots__ = (
        "_at",
        "_log",
        "_seen",
        "_since",
        "_total",
        "_typical",
        "_unseen_until",
        "_waiting",
        "quiet",
        "unseen",
    )

    def __init__(self, typical: Typical) -> None:
        self._typical = typical
        self._log = 0.0
        self._at = -math.inf
        self._seen = 0
        self._since = 0.0
        self._total = 0.0
        self._waiting: dict[Hashable, float] = {}  # in order of arrival
        self._unseen_until = -math.inf
        self.unseen = 0  # requests of which nobody sees when their prefill is over
        self.quiet = 1  # number of the time without any prefill that it is; below 0: of the one that was last

    def factor(self, now: float) -> float:
        """What predictions are to be multiplied with."""
        return math.exp(self._faded(now))

    def _faded(self, now: float) -> float:
        typical = self._typical.log
        if not self._seen:
            return typical
        return typical + (self._log - typical) * math.pow(0.5, max(now - self._at, 0.0) / FADE_S)

    def begin_anew(self, typical: Typical) -> None:
        """Predictions are another model's from now on."""
        self._typical = typical
        self._log, self._seen = 0.0, 0

    def rescale(self, ratio: float) -> None:
        """Predictions are ``ratio`` times what they were: the factor makes up for it."""
        if self._seen:
            self._log -= math.log(ratio)

    def took(self, seconds: float, predicted_s: float, now: float) -> tuple[float, float]:
        """A prefill took so long; predicted: without the factor. Returns what ``corrected`` wants."""
        sample = math.log((max(seconds, 0.0) + SLACK_S) / (predicted_s + SLACK_S))
        before = self._faded(now)
        self._typical.observe(sample)
        most = MAX_SURPRISE if self._seen else FIRST_SURPRISE
        sample = min(max(sample, before - most), before + most)
        weight = max(FIRST_WEIGHT / (1 + self._seen), LEAST_WEIGHT) * predicted_s / (predicted_s + SLACK_S)
        self._seen += 1
        self._at = now
        self._log = min(max(before + weight * (sample - before), -MAX_FACTOR), MAX_FACTOR)
        return sample, weight

    def corrected(self, told: tuple[float, float], seconds: float, predicted_s: float) -> None:
        """That prefill was of another length than thought: it should have been predicted like this."""
        sample, weight = told
        better = math.log((max(seconds, 0.0) + SLACK_S) / (predicted_s + SLACK_S))
        better = min(max(better, -MAX_FACTOR), MAX_FACTOR)
        if better < sample:
            self._log = max(self._log + weight * (better - sample), -MAX_FACTOR)

    def begin(self, flight: Hashable, work_s: float, now: float) -> None:
        """A prefill joins the queue."""
        if not self._waiting:
            self._since = now
            self.quiet = -self.quiet
        self._waiting[flight] = work_s
        self._total += work_s

    def over(self, flight: Hashable, now: float) -> bool:
        """It is done, or left. Returns whether it was the last one."""
        work = self._waiting.pop(flight, None)
        if work is None:
            return False
        self._total = self._total - work if self._waiting else 0.0
        self._since = now
        if self._waiting:
            return False
        self.quiet = 1 - self.quiet
        return True

    def begin_unseen(self, work_s: float, now: float, factor: float) -> None:
        """One whose end nobody will see is taken to take what is predicted."""
        self.unseen += 1
        self._unseen_until = max(self._unseen_until, now) + work_s * factor

    def over_unseen(self) -> None:
        """Its whole answer came, or it left."""
        self.unseen -= 1

    @property
    def busy(self) -> bool:
        """Whether a prefill is under way or waits."""
        return bool(self._waiting)

    def ahead_s(self) -> float:
        """All predicted work, done or not."""
        return self._total

    def wait_s(self, now: float, factor: float) -> float:
        """How long a new request waits until its prefill begins.

        The first in line has been at it for a while. One that takes longer than all that is predicted will
        take as long again: a worker that hangs looks the worse the longer it does.
        """
        unseen = max(self._unseen_until - now, 0.0) if self.unseen else 0.0
        if not self._waiting:
            return unseen
        total = self._total * factor
        head = next(iter(self._waiting.values())) * factor
        elapsed = max(now - self._since, 0.0)
        return unseen + max(total - min(elapsed, head), 0.0) + max(elapsed - total - SLACK_S, 0.0)
