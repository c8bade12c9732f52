"""The times of the timed connector, and where it leaves them. Imports no engine: benchmarks read it too."""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "BENCH_HOOK_TIMES"
CONNECTOR = ("kvferry.bench.timed", "TimedConnector")
HOOKS: tuple[str, ...] = (
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
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
)
SECONDS = struct.Struct(f"{len(HOOKS)}d")


def file_of(directory: Path, connector: object) -> Path:
    """Where a connector of this process writes."""
    return directory / f"{os.getpid()}-{id(connector)}.seconds"


class Stopwatch:
    """Adds up seconds, where another process can read them at any time.

    rested_s: seconds slept on purpose so far, which are left out.
    """

    def __init__(self, path: Path, *, rested_s: Callable[[], float]) -> None:
        path.write_bytes(bytes(SECONDS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SECONDS.size)
        self._seconds = [0.0] * len(HOOKS)
        self._rested_s = rested_s
        self._inside = False

    def round(self, method: Callable[..., Any], at: int) -> Callable[..., Any]:
        """The method, timed; what it calls of the others counts as its own."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            begun, rested_s = time.perf_counter(), self._rested_s()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self._seconds[at] += time.perf_counter() - begun - (self._rested_s() - rested_s)
                SECONDS.pack_into(self._memory, 0, *self._seconds)

        return timed


def seconds_by_hook(directory: Path, *, group: int | None = None) -> dict[str, float]:
    """Seconds spent in each hook so far; of the processes of one process group that live, or of all."""
    total = dict.fromkeys(HOOKS, 0.0)
    for file in directory.glob("*.seconds"):
        written = file.read_bytes()
        if len(written) != SECONDS.size or not _belongs(int(file.name.partition("-")[0]), group):
            continue
        for name, seconds in zip(HOOKS, SECONDS.unpack(written), strict=True):
            total[name] += seconds
    return total


def total_seconds(directory: Path, *, group: int | None = None) -> float:
    """Their sum."""
    return sum(seconds_by_hook(directory, group=group).values())


def _belongs(pid: int, group: int | None) -> bool:
    if group is None:
        return True
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == group
    return False
