"""Results of tasks, waiting to be fetched by LMCache, and the event descriptor that says so."""

import os
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

MAX_RESULTS = 65536
"""Results that nobody fetches are forgotten, oldest first."""
Result = TypeVar("Result")


class Outbox(Generic[Result]):
    """One per kind of task. ``put`` may be called by any thread; a result is taken once."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Result] = OrderedDict()
        self._closed = False

    def put(self, task: int, result: Result) -> None:
        """Keep a result and wake LMCache's controller."""
        with self._lock:
            if self._closed:
                return
            self._results[task] = result
            if len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            os.eventfd_write(self.fd, 1)

    def take(self, task: int) -> Result | None:
        """The result of one task; None while there is none, and once it has been taken."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        """Every result there is."""
        with self._lock:
            found, self._results = self._results, OrderedDict()
        return dict(found)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
