"""Mock workers in one process of their own, told what to do over HTTP.

with running_workers(WorkerSettings(), WorkerSettings(), tier=TierSettings(), directory=tmp_path) as workers:
    workers[0].behave(slow=4)
"""

import asyncio
import contextlib
import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.demo.ports import listens
from kvferry.testing.processes import Program
from kvferry.testing.servers import free_ports
from kvferry.testing.worker import MockWorker
from kvferry.testing.worker_engine import SharedTier, WorkerSettings

ASK_S = 30.0


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Of a ``SharedTier``. token_s: seconds per token loaded."""

    token_s: float = 1e-6
    latency_s: float = 0.001


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """A mock worker in another process."""

    settings: WorkerSettings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def behave(self, **changes: Any) -> None:
        """Change fields of its ``Behaviour``."""
        self.tell({"behaviour": changes})

    def statistics(self) -> dict[str, Any]:
        """As ``MockWorker.statistics``."""
        return self.tell(None)

    def restart(self) -> None:
        """As a crash and a new start."""
        self.tell({"restart": True})

    def drop(self, *, tier: bool = False) -> None:
        """Forget its prefix cache, and what the shared tier holds."""
        self.tell({"drop_tier": tier})
        self._ask("POST", "/reset_prefix_cache", b"")

    def tell(self, what: dict[str, Any] | None) -> dict[str, Any]:
        """What ``/mock`` answers."""
        body = json.dumps(what).encode() if what is not None else b""
        answer: dict[str, Any] = json.loads(self._ask("POST" if body else "GET", "/mock", body))
        return answer

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.settings.port, timeout=ASK_S)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            return connection.getresponse().read()


@contextlib.contextmanager
def running_workers(
    *settings: WorkerSettings,
    directory: Path,
    tier: TierSettings | None = None,
    cores: frozenset[int] = frozenset(),
) -> Iterator[tuple[RemoteWorker, ...]]:
    """All in one process; settings without a port get one. tier: shared by all of them."""
    ports = free_ports(len(settings))
    given = tuple(replace(one, port=one.port or port) for one, port in zip(settings, ports, strict=True))
    told = {"workers": [asdict(one) for one in given], "tier": asdict(tier) if tier is not None else None}
    command = [sys.executable, "-m", "kvferry.testing.worker_fleet", json.dumps(told)]
    name = f"workers-{given[0].port}"

    def ready() -> bool:
        return all(listens(one.port) for one in given)

    with Program(name, command, directory=directory, ready=ready, cores=cores):
        yield tuple(RemoteWorker(one) for one in given)


async def serve(settings: Sequence[WorkerSettings], tier: TierSettings | None) -> None:
    """Until cancelled."""
    shared = SharedTier(token_s=tier.token_s, latency_s=tier.latency_s) if tier is not None else None
    async with contextlib.AsyncExitStack() as stack:
        for one in settings:
            await stack.enter_async_context(MockWorker(one, tier=shared))
        await asyncio.Event().wait()


def main(told: str) -> None:
    """As ``running_workers`` starts it; with uvloop where that is installed."""
    document = json.loads(told)
    settings = [WorkerSettings(**one) for one in document["workers"]]
    tier = TierSettings(**document["tier"]) if document["tier"] else None
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(settings, tier))


if __name__ == "__main__":
    main(sys.argv[1])
