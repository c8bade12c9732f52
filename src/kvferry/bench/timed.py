"""The connector with a stopwatch round every method that the engine waits for.

End-to-end times of a cold prompt are noisier than what the connector costs, so the benchmark also adds up
the time the engine spends inside the connector. Each process appends to a file of its own.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.bench.hook_times import DIRECTORY_VARIABLE
from kvferry.engines.vllm.connector import KvferryConnector

FLUSH_S = 0.05
TIMED = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
)


class TimedConnector(KvferryConnector):
    """Use it in place of KvferryConnector; the environment names a directory for the times."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if directory:
            stopwatch = _Stopwatch(Path(directory) / f"{os.getpid()}.seconds")
            for name in TIMED:
                if hasattr(self, name):
                    setattr(self, name, stopwatch.round(getattr(self, name)))


class _Stopwatch:
    """Adds up seconds and keeps the sum in a file, written at most every FLUSH_S."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total_s = 0.0
        self._written_at = 0.0

    def round(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                ended = time.perf_counter()
                self._total_s += ended - begun
                if ended - self._written_at > FLUSH_S:
                    self._written_at = ended
                    self._path.write_text(repr(self._total_s), encoding="ascii")

        return timed
