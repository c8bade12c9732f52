"""The nodes and engines of a run: how they are started, killed, stopped, asked and counted."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import kvferry
from kvferry.bench.chaos.journal import JournalReader
from kvferry.bench.chaos.rig import EngineSettings
from kvferry.client.admin import AdminClient
from kvferry.demo.processes import Child, Children
from kvferry.errors import KvferryError
from kvferry.sources import ENVIRONMENT_PREFIX

POOL_MB = 64
STATUS_S = 2.0
NODE_COMMAND = (sys.executable, "-m", "kvferry", "node")
ENGINE_COMMAND = (sys.executable, "-m", "kvferry.bench.chaos.engine")


@dataclass(frozen=True, slots=True)
class Census:
    """What one process holds. anonymous_kb: resident memory of its own, without the pool."""

    descriptors: int
    threads: int
    anonymous_kb: int
    children: int


def census(pid: int) -> Census | None:
    """None when there is no such process."""
    proc = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        children = sum(len((task / "children").read_text().split()) for task in (proc / "task").iterdir())
        return Census(
            descriptors=len(os.listdir(proc / "fd")),
            threads=int(status["Threads"]),
            anonymous_kb=int(status["RssAnon"].split()[0]),
            children=children,
        )
    except (OSError, KeyError, ValueError):
        return None


def environment() -> dict[str, str]:
    """For children: this very package, and nothing of a fleet that the user may have."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    source = str(Path(kvferry.__file__).parents[1])
    own["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [own.get("PYTHONPATH")])])
    return own


class Process:
    """A process that dies and comes back under the same name."""

    def __init__(self, name: str, command: Sequence[str], children: Children) -> None:
        self.name = name
        self.command = tuple(command)
        self._children = children
        self.child: Child | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """While it runs."""
        return self.child.pid if self.child is not None else None

    @property
    def died(self) -> bool:
        """It should run, and does not."""
        return self.child is not None and self.child.exited()

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.child is None:
            self.child = self._children.start(self.name, self.command, env=environment())
            self.starts += 1

    def kill(self) -> None:
        """SIGKILL."""
        self._end(lambda child: child.kill_at_once())

    def terminate(self) -> None:
        """SIGTERM, as an operator would."""
        self._end(lambda child: child.stop())

    def send_signal(self, number: signal.Signals) -> None:
        """To the process alone."""
        if self.child is not None:
            self.child.send_signal(number)

    def census(self) -> Census | None:
        """None while it does not run."""
        return census(self.child.pid) if self.child is not None else None

    def _end(self, how: Any) -> None:
        if self.child is not None:
            how(self.child)
            self._children.stop(self.child)
            self.child = None


class NodeProcess(Process):
    """``kvferry node`` of one host."""

    def __init__(
        self,
        index: int,
        children: Children,
        *,
        valkey: str,
        pool_mb: int = POOL_MB,
        command: Sequence[str] = NODE_COMMAND,
    ) -> None:
        self.index = index
        self.socket = children.directory / f"host-{index}" / "node.sock"
        options = ["--socket", str(self.socket), "--pool", f"{pool_mb}MiB", "--metrics-port", "0"]
        super().__init__(f"node-{index}", [*command, *options, "--valkey", valkey], children)

    def status(self) -> dict[str, Any] | None:
        """``kvferry status --json``; None when it does not answer."""
        try:
            with contextlib.closing(AdminClient(self.socket, timeout_s=STATUS_S)) as admin:
                return admin.status()
        except KvferryError:
            return None


class EngineProcess(Process):
    """A byte-verifying engine on one host."""

    def __init__(self, index: int, node: NodeProcess, children: Children, settings: EngineSettings) -> None:
        self.index = index
        self.node = node
        encoded = msgspec.json.encode(settings).decode()
        super().__init__(settings.name, [*ENGINE_COMMAND, encoded], children)
        self.journal = JournalReader(Path(settings.journal))
        self.ready = False
        self.idle_since: float | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.child is None:
            self.ready, self.idle_since = False, None
        super().start()

    def pause(self) -> None:
        """Finish what is under way; ``idle_since`` is set when it says so."""
        self.idle_since = None
        self.send_signal(signal.SIGUSR1)

    def resume(self) -> None:
        """Go on."""
        self.idle_since = None
        self.send_signal(signal.SIGUSR2)
