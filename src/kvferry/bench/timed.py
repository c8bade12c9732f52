"""The connector with a stopwatch round every method that the engine waits for.

End-to-end times of a cold prompt are noisier than what the connector costs, so the benchmarks also add up
the time the engine spends inside the connector. Each process keeps its sums in a mapped file of its own.
A step that has nothing to run sleeps in one of the methods: that is no time of the method's, and left out.
"""

import os
from pathlib import Path
from typing import Any

from kvferry.bench.hook_times import DIRECTORY_VARIABLE, HOOKS, Stopwatch, file_of
from kvferry.engines.vllm.connector import KvferryConnector


class TimedConnector(KvferryConnector):
    """Use it in place of KvferryConnector; the environment names a directory for the times."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if directory:
            stopwatch = Stopwatch(file_of(Path(directory), self), rested_s=self._rested_s)
            for at, name in enumerate(HOOKS):
                if hasattr(self, name):
                    setattr(self, name, stopwatch.round(getattr(self, name), at))

    def _rested_s(self) -> float:
        return sum(side.rested_s for side in (self._worker, self._scheduler) if side is not None)
