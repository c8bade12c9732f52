"""Where the timed connector leaves its times. Imports no engine: the benchmark reads it too."""

from pathlib import Path

DIRECTORY_VARIABLE = "BENCH_HOOK_TIMES"
CONNECTOR = ("kvferry.bench.timed", "TimedConnector")


def total_seconds(directory: Path) -> float:
    """Sum over the processes that wrote there."""
    total = 0.0
    for file in directory.glob("*.seconds"):
        text = file.read_text(encoding="ascii")
        total += float(text) if text else 0.0
    return total
