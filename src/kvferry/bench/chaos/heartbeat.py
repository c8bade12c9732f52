"""How long this process, or this machine, did not run when it should have.

A thread sleeps for short, equal times; where it wakes late, the process was stopped, had no core, or
another of its threads held the interpreter. What an answer's lateness owes to that is shown beside it.
"""

import threading
import time
from collections import deque

INTERVAL_S = 0.01
SMALLEST_GAP_S = 0.005
MAX_GAPS = 4096


class Heartbeat:
    """Remembers when the process lost time. ``close`` joins the thread."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)
        self._last = time.monotonic()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvferry-heartbeat", daemon=True)
        self._thread.start()

    def lost_s(self, began: float, ended: float) -> float:
        """Seconds between two monotonic times in which the process should have run and did not."""
        with self._lock:
            due = self._last + self._interval_s
            gaps = [*self._gaps, (due, max(due, time.monotonic()))]
        return sum(max(0.0, min(end, ended) - max(start, began)) for start, end in gaps if end > began)

    def longest_s(self) -> float:
        """The longest gap that is remembered."""
        with self._lock:
            return max((end - start for start, end in self._gaps), default=0.0)

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            now = time.monotonic()
            with self._lock:
                due = self._last + self._interval_s
                if now - due > SMALLEST_GAP_S:
                    self._gaps.append((due, now))
                self._last = now
