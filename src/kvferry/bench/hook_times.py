"""Where the timed connector leaves its times. Imports no engine: the benchmark reads it too."""

import struct
from pathlib import Path

DIRECTORY_VARIABLE = "BENCH_HOOK_TIMES"
CONNECTOR = ("kvferry.bench.timed", "TimedConnector")
SECONDS = struct.Struct("d")


def total_seconds(directory: Path) -> float:
    """Sum over the processes that wrote there."""
    total = 0.0
    for file in directory.glob("*.seconds"):
        written = file.read_bytes()
        total += SECONDS.unpack(written)[0] if len(written) == SECONDS.size else 0.0
    return total
