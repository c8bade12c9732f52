"""What the demo and the benchmarks ask a node, one short connection each: it may die in between."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry.client.admin import AdminClient
from kvferry.demo.processes import wait_until
from kvferry.errors import KvferryError

SAVED_WITHIN_S = 30.0
REPORTED_WITHIN_S = 1.0


class NodeView:
    """A node by its socket's path."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path

    def answers(self) -> bool:
        """Whether a node answers a status query now."""
        try:
            self.status()
        except KvferryError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """``NodeStatistics`` as a document. Raises ClosedError without a node."""
        with AdminClient(self.socket_path) as admin:
            return admin.status()

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """The records of a request, newest first."""
        with AdminClient(self.socket_path) as admin:
            return admin.explain(request_id)

    def settled_records(self, request_id: str) -> list[dict[str, Any]]:
        """The records of a request, once the engine has told its side too or REPORTED_WITHIN_S is over."""
        give_up = time.monotonic() + REPORTED_WITHIN_S
        while True:
            records = self.explain(request_id)
            if (records and records[0].get("report")) or time.monotonic() > give_up:
                return records
            time.sleep(0.02)

    def drop_memory(self) -> None:
        """Forget what host memory holds."""
        with AdminClient(self.socket_path) as admin:
            admin.drop("memory")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """A status query over one connection that stays open: for polling closely."""
        with AdminClient(self.socket_path) as admin:
            yield admin.status

    def wait(self, ready: Callable[[dict[str, Any]], bool], *, what: str, timeout_s: float) -> float:
        """Poll the status until ``ready(status)``; returns the seconds it took. Raises RetryError."""
        with self.watching() as status:
            return wait_until(lambda: ready(status()), what=what, timeout_s=timeout_s)

    def committed_parts(self) -> int:
        """Parts published in host memory since the node's start."""
        return int(self.status()["counters"]["committed_parts"])

    def wait_saved(self, *, parts: int, timeout_s: float = SAVED_WITHIN_S) -> None:
        """Until so many parts were published since the node's start, and all of them written back."""
        self.wait(
            lambda status: status["counters"]["committed_parts"] >= parts,
            what="saving the prefix to host memory",
            timeout_s=timeout_s,
        )
        self.wait_written_back(timeout_s=timeout_s)

    def wait_written_back(self, *, timeout_s: float = SAVED_WITHIN_S) -> None:
        """Until nothing is being published and nothing waits to be written to Valkey."""
        self.wait(
            lambda status: not status["writeback_backlog_parts"] and not status["catalogue"]["filling_parts"],
            what="writing to Valkey",
            timeout_s=timeout_s,
        )
