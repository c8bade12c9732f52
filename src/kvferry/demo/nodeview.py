"""What the demo and the benchmarks ask a node, one short connection each: it may die in between."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry.client.admin import AdminClient
from kvferry.demo.processes import wait_until
from kvferry.errors import KvferryError


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

    def drop_memory(self) -> int:
        """Forget what host memory holds; returns the bytes."""
        with AdminClient(self.socket_path) as admin:
            return admin.drop("memory")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """A status query over one connection that stays open: for polling closely."""
        with AdminClient(self.socket_path) as admin:
            yield admin.status

    def wait(self, ready: Callable[[dict[str, Any]], bool], *, what: str, timeout_s: float) -> float:
        """Poll the status until ``ready(status)``; returns the seconds it took. Raises RetryError."""
        with self.watching() as status:
            return wait_until(lambda: ready(status()), what=what, timeout_s=timeout_s)
