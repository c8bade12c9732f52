"""Notices that a running engine is given other weights, whoever forgets to reset the cache then.

vLLM tells a connector of new weights only through a reset of its cache, which callers may leave out
(``reset_prefix_cache()`` alone, or nothing). So the worker's own entry points are counted. While the
scheduler side has not heard of a change, nothing is loaded and nothing stored.

    entry point called ──► changes + 1 ──► next report ──► scheduler: new generation ──► next plan ──► heard

What loads weights past these entry points, as a worker extension of one's own may, must reset the cache
with its connector, or put the engine to sleep or pause it first, which does.
"""

import functools
from collections.abc import Callable
from typing import Any

ENTRY_POINTS = (
    "reload_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)


class WeightsWatch:
    """Worker's thread only. changes: so far. heard: how many of them the scheduler side knows of."""

    def __init__(self) -> None:
        self.changes = 0
        self.heard = 0

    @property
    def stale(self) -> bool:
        """Whether plans are still made for the weights of before."""
        return self.heard < self.changes

    def install(self, worker_class: type[Any]) -> None:
        """Count calls of the entry points that this class has itself."""
        for name in ENTRY_POINTS:
            original = worker_class.__dict__.get(name)
            if original is not None:
                setattr(worker_class, name, self._counted(original))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.changes += 1
            try:
                return original(*arguments, **named)
            finally:
                self.changes += 1  # what was heard of while it ran is out of date again

        return counted


@functools.cache
def watch_weights() -> WeightsWatch:
    """Of this process's workers; installed with the first call."""
    from vllm.v1.worker.gpu_worker import Worker

    watch = WeightsWatch()
    watch.install(Worker)
    return watch
