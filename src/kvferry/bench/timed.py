"""The connector with a stopwatch round every method that the engine waits for.

End-to-end times of a cold prompt are noisier than what the connector costs, so the benchmark also adds up
the time the engine spends inside the connector. Each process keeps its sum in a mapped file of its own.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.bench.hook_times import DIRECTORY_VARIABLE, SECONDS
from kvferry.engines.vllm.connector import KvferryConnector

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
            stopwatch = _Stopwatch(Path(directory) / f"{os.getpid()}-{id(self)}.seconds")
            for name in TIMED:
                if hasattr(self, name):
                    setattr(self, name, stopwatch.round(getattr(self, name)))


class _Stopwatch:
    """Adds up seconds, where another process can read them at any time."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SECONDS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SECONDS.size)
        self._total_s = 0.0

    def round(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._total_s += time.perf_counter() - begun
                SECONDS.pack_into(self._memory, 0, self._total_s)

        return timed
