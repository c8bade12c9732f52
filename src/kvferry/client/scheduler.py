"""The scheduler side of an engine: asks how far a prefix reaches, without ever blocking."""

import time
from collections.abc import Callable
from pathlib import Path

from kvferry.client.messages import LookupAnswer, LookupRequest, NamespaceInfo
from kvferry.node.wire import Report


class SchedulerClient:
    """One per engine process. Every method returns at once and raises nothing for a lost node."""

    def __init__(
        self,
        *,
        socket_path: Path | str,
        engine: str,
        namespace: NamespaceInfo,
        lookup_wait_s: float = 0.05,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def lookup(self, request: LookupRequest) -> None:
        """Submit. At most one lookup per request_id is outstanding; a second one replaces nothing."""
        raise NotImplementedError

    def poll(self, request_id: str) -> LookupAnswer | None:
        """None: not yet, ask again next step. The answer is handed out once. Unknown ids: count 0."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Forget a lookup; a load that its answer brings is ended."""
        raise NotImplementedError

    def end(self, load_id: int) -> None:
        """The load is over on every rank. Consumes the load; frees what is left of it in the node."""
        raise NotImplementedError

    def report(self, report: Report) -> None:
        """The engine's side of a request's story, for ``kvferry explain``. Best effort."""
        raise NotImplementedError

    def close(self) -> None:
        """Idempotent; joins the thread."""
        raise NotImplementedError
