"""What lies behind a fleet's Valkey: an S3 server, and a keeper with a disk and a bucket."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.addresses import Address
from kvferry.demo.ports import free_port, free_ports
from kvferry.demo.processes import Child, Children, wait_until
from kvferry.demo.s3 import HIGHEST_PORT, PORTS, s3_answers, s3_command, s3_environment, sweep_s3_sockets
from kvferry.errors import KvferryError, RefusedError, RetryError
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.admin import KeeperAdmin
from kvferry.keeper.wire import DropTier
from kvferry.tiers.contract import Outcome

S3_READY_S = 60.0
KEEPER_READY_S = 60.0
KEPT_WITHIN_S = 60.0
BUCKET = "kvferry-demo"
BELOW = ("disk", "objects")


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """disk_bytes: what the keeper's segments may take. objects: s3:// or file:// URL; None: a server is
    started, with a bucket in it. at_start: whether all of it starts with the fleet."""

    disk_bytes: int = 2 << 30
    objects: str | None = None
    at_start: bool = True


class Backlog(NamedTuple):
    """What waits for the bucket. oldest_s: for how long the oldest of it has."""

    parts: int
    nbytes: int
    oldest_s: float


class Storage:
    """One keeper and what it keeps things in; each may be killed and started again on its own."""

    def __init__(
        self,
        settings: StorageSettings,
        *,
        children: Children,
        directory: Path,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._children = children
        self._directory = directory
        self._say = say
        self._s3: Child | None = None
        self._s3_ports = free_ports(PORTS, highest=HIGHEST_PORT)
        self._keeper: Child | None = None
        self.address = Address("127.0.0.1", free_port())

    @property
    def objects_url(self) -> str:
        """Where the keeper puts objects."""
        return self._settings.objects or f"s3://{BUCKET}/kv"

    def start(self, valkey_url: str, environment: Mapping[str, str]) -> None:
        """The S3 server, where it is ours, and the keeper."""
        if self._settings.objects is None:
            self._start_s3()
        self.start_keeper(valkey_url, environment)

    def _start_s3(self) -> None:
        directory = self._directory / "s3"
        directory.mkdir()
        child = self._children.start("s3", s3_command(directory, self._s3_ports))
        took = wait_until(
            lambda: s3_answers(self._s3_ports[0]),
            what="the S3 server",
            timeout_s=S3_READY_S,
            children=[child],
        )
        self._s3 = child
        self._say(f"S3 server ready on 127.0.0.1:{self._s3_ports[0]} ({took:.1f} s)")

    def start_keeper(self, valkey_url: str, environment: Mapping[str, str]) -> None:
        """Start it and wait until it answers. What its disk holds from before is found again."""
        command = [
            *(sys.executable, "-m", "kvferry", "keeper"),
            *("--listen", str(self.address)),
            *("--valkey", valkey_url),
            *("--disk", str(self._directory / "nvme")),
            *("--disk-size", str(self._settings.disk_bytes)),
            *("--objects", self.objects_url),
            *("--metrics-port", "0"),
        ]
        own = {**environment} if self._s3 is None else {**environment, **s3_environment(self._s3_ports[0])}
        child = self._children.start("keeper", command, env=own)
        took = wait_until(self.answers, what="the keeper", timeout_s=KEEPER_READY_S, children=[child])
        self._keeper = child
        disk = f"{self._settings.disk_bytes >> 20} MiB of disk"
        self._say(f"keeper ready: {disk}, {self.objects_url} ({took:.1f} s)")

    @property
    def keeper(self) -> Child:
        """The running keeper."""
        if self._keeper is None:
            raise RetryError("the keeper is not running")
        return self._keeper

    def kill_keeper(self) -> None:
        """SIGKILL, as a crash would."""
        self.keeper.kill_at_once()
        self._children.stop(self.keeper)
        self._keeper = None

    def stop_keeper(self) -> None:
        """An orderly stop, as in a rolling restart."""
        self._children.stop(self.keeper)
        self._keeper = None

    def sweep(self) -> None:
        """After the processes have ended."""
        if self._s3 is not None:
            sweep_s3_sockets(self._s3_ports)

    def answers(self) -> bool:
        """Whether a keeper answers now."""
        try:
            self.status()
        except KvferryError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """``KeeperStatistics`` as a document. Raises KvferryError without a keeper."""
        with KeeperAdmin(self.address, access=KeeperAccess()) as admin:
            found: dict[str, Any] = admin.status()["keeper"]
            return found

    def drop(self, tier: DropTier) -> None:
        """Forget all that one of its tiers holds. Raises RefusedError when it cannot."""
        with KeeperAdmin(self.address, access=KeeperAccess()) as admin:
            dropped = admin.drop(tier, alone=True)
        if dropped.outcome is not Outcome.OK:
            raise RefusedError(f"the keeper could not drop {tier.value}: {dropped.outcome.value}")

    def wait_kept(self, *, parts: int, timeout_s: float = KEPT_WITHIN_S) -> float:
        """Until disk and bucket hold so many parts each, and nothing waits to be copied.

        Returns the seconds it took. Raises RetryError.
        """

        def kept() -> bool:
            status = self.status()
            held = [int(tier["detail"]["parts"]) for tier in status["tiers"] if tier["name"] in BELOW]
            return min(held) >= parts and not any(status[line]["parts"] for line in ("keep", "flush"))

        return wait_until(kept, what=f"{parts} parts on disk and in the bucket", timeout_s=timeout_s)

    def wait_up(self, *, timeout_s: float) -> None:
        """Until all of the keeper's tiers are up. Raises RetryError."""
        wait_until(
            lambda: all(tier["state"] == "up" for tier in self.status()["tiers"]),
            what="the keeper's tiers being up",
            timeout_s=timeout_s,
        )

    def copied_parts(self) -> int:
        """To the disk, since the keeper's start."""
        return int(self.status()["keep"]["copied_parts"])

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """A status query over one connection that stays open: for polling closely."""
        with KeeperAdmin(self.address, access=KeeperAccess()) as admin:
            yield lambda: admin.status()["keeper"]

    def backlog(self) -> Backlog:
        """What waits for the bucket now."""
        line = self.status()["flush"]
        return Backlog(int(line["parts"]), int(line["nbytes"]), float(line["oldest_s"]))
