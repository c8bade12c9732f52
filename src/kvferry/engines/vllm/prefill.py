"""Learns how long this engine's prefill takes, by watching its steps from the scheduler's side."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from kvferry.client.messages import Prefill
from kvferry.costs import PrefillFit, PrefillModel

MIN_TOKENS = 64  # below this a step is decoding, or overhead
MAX_OTHER_TOKENS = 16  # decodes of other requests in the step
REFIT_S = 2.0
REST_S = 0.0002  # the scheduler's thread, which waits for the interpreter, takes it meanwhile
MAX_STEPS_IN_FLIGHT = 64
UNKNOWN = Prefill(0.0, 0.0, 0.0)


def _let_go() -> None:
    time.sleep(REST_S)


class _Step(NamedTuple):
    began: float
    new_tokens: int
    context_tokens: int


class PrefillWatch:
    """Times steps that prefill one request and fits a model in a thread of its own.

    A step's time is from its plan, or from the end of the step before where the engine runs ahead, to its
    result's return.
    """

    def __init__(self) -> None:
        self._fit = PrefillFit()
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._last_end = 0.0
        self._fitted_at = -REFIT_S
        self._fresh = False  # samples that no fit has seen
        self._fitting: Future[PrefillModel | None] | None = None
        self._model: PrefillModel | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvferry-prefill")

    def planned(self, step: int, prefills: Sequence[tuple[int, int]], *, now: float) -> bool:
        """prefills: (new tokens, context before them) per request. Whether this step is worth timing."""
        new, context = max(prefills, default=(0, 0))
        others = sum(tokens for tokens, _ in prefills) - new
        if new < MIN_TOKENS or others > MAX_OTHER_TOKENS:
            return False
        self._steps[step] = _Step(now, new, context)
        if len(self._steps) > MAX_STEPS_IN_FLIGHT:
            self._steps.popitem(last=False)
        return True

    def returned(self, step: int, *, now: float) -> None:
        """The step's result is here. Later reports of other ranks change nothing."""
        timed = self._steps.pop(step, None)
        if timed is not None:
            seconds = now - max(timed.began, self._last_end)
            self._collect()
            if self._fitting is None:
                self._fit.observe(timed.new_tokens, timed.context_tokens, seconds)
                self._fresh = True
        self._last_end = now

    def prefill(self, *, now: float) -> Prefill:
        """The coefficients for a lookup; zeros while nothing is known."""
        self._collect()
        if self._fitting is None and self._fresh and now - self._fitted_at >= REFIT_S:
            self._fitted_at, self._fresh = now, False
            self._fitting = self._pool.submit(self._fit.model, rest=_let_go)
        model = self._model
        return UNKNOWN if model is None else Prefill(model.base_s, model.per_token_s, model.per_token2_s)

    def seconds(self, new_tokens: int) -> float:
        """Predicted time of a cold prefill; 0 while nothing is known."""
        return 0.0 if self._model is None else self._model.seconds(new_tokens)

    def _collect(self) -> None:
        if self._fitting is not None and self._fitting.done():
            self._model = self._fitting.result()
            self._fitting = None

    def close(self) -> None:
        """Stop the fitting thread."""
        self._pool.shutdown(wait=True)
