"""How a router's memory goes with the number of distinct prefixes it has seen."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.router import client
from kvferry.bench.router.routers import Arm, running
from kvferry.bench.router.usage import resident_bytes
from kvferry.errors import BrokenError
from kvferry.testing.servers import free_ports
from kvferry.testing.worker_engine import WorkerSettings
from kvferry.testing.worker_fleet import RemoteWorker, running_workers

MESSAGES = 20  # of a request: so many prefixes that nobody has seen
STREAMS = 32
STEPS = 10
LATE = 3
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one arm's processes, in bytes, after each of ``prefixes``."""

    arm: str
    prefixes: tuple[int, ...]
    resident_bytes: tuple[int, ...]

    @property
    def late(self) -> float:
        """How much it grew over the last ``LATE`` steps: by then every table of ours is full."""
        return self.resident_bytes[-1] / self.resident_bytes[-1 - LATE] - 1

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "late": self.late}


class Talks:
    """Requests of ``MESSAGES`` messages, none like one before."""

    def __init__(self) -> None:
        self._number = 0

    def next(self) -> bytes:
        """One more."""
        self._number += 1
        talk = [
            {"role": "user" if turn % 2 else "assistant", "content": f"{self._number}.{turn} {'x' * 24}"}
            for turn in range(MESSAGES)
        ]
        body = {"model": "mock", "messages": talk, "stream": True, "max_tokens": 1}
        return json.dumps({**body, "stream_options": {"include_usage": True}}).encode()


def measure(
    arms: Sequence[Arm], *, prefixes: int, directory: Path, peer: str, say: Callable[[str], None]
) -> list[Growth]:
    """Each arm alone, with workers that publish a feed."""
    found = []
    for arm in arms:
        with ExitStack() as stack:
            settings = [
                WorkerSettings(name=f"w{number}", block_characters=BLOCK, feed_port=port)
                for number, port in enumerate(free_ports(2))
            ]
            workers = stack.enter_context(running_workers(*settings, directory=directory))
            found.append(_grow(arm, workers, prefixes=prefixes, directory=directory, peer=peer, say=say))
    return found


def _grow(
    arm: Arm,
    workers: Sequence[RemoteWorker],
    *,
    prefixes: int,
    directory: Path,
    peer: str,
    say: Callable[[str], None],
) -> Growth:
    talks = Talks()
    seen, resident = [0], []
    urls = [worker.url for worker in workers]
    feeds = [
        word
        for worker in workers
        for word in ("--feed", f"{worker.url}=127.0.0.1:{worker.settings.feed_port}")
    ]
    with running(arm, urls, directory=directory, peer=peer, options=feeds) as route:
        resident.append(resident_bytes(route.group))
        for step in range(1, STEPS + 1):
            requests = prefixes * step // STEPS // MESSAGES - seen[-1] // MESSAGES
            samples = client.run(
                client.count_loop(route.urls[0], talks.next, streams=STREAMS, count=requests)
            )
            for sample in samples:
                if sample.error:
                    raise BrokenError(f"{arm.name}: a request failed: {sample.error}")
            seen.append(seen[-1] + requests * MESSAGES)
            resident.append(resident_bytes(route.group))
            say(f"{arm.name}: {seen[-1]:,} prefixes, {resident[-1] / 1e6:.0f} MB")
    return Growth(arm.name, tuple(seen), tuple(resident))
