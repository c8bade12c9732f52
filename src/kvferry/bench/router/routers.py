"""The routers that are compared, each started with the workers it is to choose from."""

import contextlib
import http.client
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import MisconfiguredError
from kvferry.testing.processes import Program
from kvferry.testing.servers import free_ports

READY_S = 60.0
HOW = (
    "python -m venv DIR && DIR/bin/pip install --no-deps -r locks/vllm-router.txt, "
    "then --vllm-router DIR/bin/vllm-router"
)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of vllm-router's cache_aware: its defaults."""

    cache: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5

    def __str__(self) -> str:
        return f"cache {self.cache:g}, abs {self.balance_abs}, rel {self.balance_rel:g}"

    def flags(self) -> list[str]:
        """For its command line."""
        return [
            *("--cache-threshold", str(self.cache), "--balance-abs-threshold", str(self.balance_abs)),
            *("--balance-rel-threshold", str(self.balance_rel)),
        ]


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to the workers. kind: direct, ours or vllm-router. options: further ones of the command."""

    name: str
    kind: str
    policy: str = ""
    thresholds: Thresholds = Thresholds()
    options: tuple[str, ...] = ()


DIRECT = Arm("direct", "direct")
OURS = Arm("kvferry", "ours")
CACHE_AWARE = Arm("vllm-router cache_aware", "vllm-router", "cache_aware")
ROUND_ROBIN = Arm("vllm-router round_robin", "vllm-router", "round_robin")


@dataclass(frozen=True, slots=True)
class Route:
    """A running arm. urls: to be asked in turn; one but for the direct arm. group: its processes; 0: none."""

    arm: Arm
    urls: tuple[str, ...]
    group: int = 0


def vllm_router(given: str | None) -> str:
    """Path of the command. MisconfiguredError, saying how to get it, when there is none."""
    found = shutil.which(given or os.environ.get("KVFERRY_VLLM_ROUTER") or "vllm-router")
    if found is None:
        raise MisconfiguredError(f"no vllm-router {given or 'on the path'}: {HOW}")
    return found


@contextlib.contextmanager
def running(
    arm: Arm, workers: Sequence[str], *, directory: Path, peer: str = "", options: Sequence[str] = ()
) -> Iterator[Route]:
    """Start it and wait until it is ready. peer: vllm-router's command. options: more of ours."""
    if arm.kind == "direct":
        yield Route(arm, tuple(workers))
        return
    port, metrics = free_ports(2)
    make = _ours if arm.kind == "ours" else _theirs
    command = make(arm, workers, port=port, metrics=metrics, peer=peer)
    if arm.kind == "ours":
        command += [] if "--feed" in arm.options else options
    env = {**os.environ, "RUST_LOG": "error"}
    name = f"router-{port}"
    with Program(
        name, command, directory=directory, ready=lambda: _healthy(port), start_s=READY_S, env=env
    ) as program:
        yield Route(arm, (f"http://127.0.0.1:{port}",), program.pid)


def _ours(arm: Arm, workers: Sequence[str], *, port: int, metrics: int, peer: str) -> list[str]:
    del peer
    command = [sys.executable, "-m", "kvferry", "router", "--listen", f"127.0.0.1:{port}"]
    command += ["--metrics-port", str(metrics)]
    command += [word for worker in workers for word in ("--worker", worker)]
    if arm.policy:
        command += ["--policy", arm.policy]
    return [*command, *arm.options]


def _theirs(arm: Arm, workers: Sequence[str], *, port: int, metrics: int, peer: str) -> list[str]:
    command = [peer, "--host", "127.0.0.1", "--port", str(port), "--policy", arm.policy]
    command += ["--prometheus-port", str(metrics), "--worker-startup-check-interval", "1"]
    command += ["--log-level", "error", "--request-timeout-secs", "600"]
    if arm.policy == "cache_aware":
        command += arm.thresholds.flags()
    return [*command, *arm.options, "--worker-urls", *workers]


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False
