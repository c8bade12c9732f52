"""Two real LMCache servers over one Valkey Cluster, driven by LMCache's own ``bench server``."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.engines.lmcache.conftest import ROOM
from tests.servers import Cluster, Server, free_ports, running_cluster, running_server

from kvferry.testing.expectations import eventually
from kvferry.testing.processes import Program

pytestmark = pytest.mark.engine

START_S = 240.0
RUN_S = 240.0
SHAPE = "(2,128,16,2,64):bfloat16:4"
RANKS = 2
CHUNKS = 2  # full ones in TOKENS, by the server's 256
TOKENS = 600
_CHECKSUM = re.compile(r"\[seq (\d+)/(\w+)\] CHECKSUM: (\w+)")
_HITS = re.compile(r"\[seq (\d+)/cold\] LOOKUP: (\d+)/(\d+) chunks hit")


class LmcacheServer:
    """An LMCache server whose L2 adapters are ours."""

    def __init__(self, name: str, directory: Path, *urls: str) -> None:
        self._port, self._http = free_ports(2)
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-observability"]
        command += ["--port", str(self._port), "--http-port", str(self._http), "--l1-size-gb", "1"]
        command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        for url in urls:
            spec = {
                "type": "plugin",
                "module_path": "kvferry.engines.lmcache.adapter",
                "class_name": "KvferryL2Adapter",
                "adapter_params": {"valkey": url, "lookup_deadline_ms": 20_000, "load_deadline_ms": 20_000},
            }
            command += ["--l2-adapter", json.dumps(spec)]
        self._program = Program(
            name, command, directory=directory, ready=self._answers, env=_environment(), start_s=START_S
        )

    def __enter__(self) -> Self:
        self._program.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/status", timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def adapters(self) -> list[dict[str, Any]]:
        """What ours say of themselves."""
        found: list[dict[str, Any]] = self.status()["storage_manager"]["l2_adapters"]
        return found

    def bench(self, start: int, end: int) -> str:
        """What ``lmcache bench server`` prints about sequences of these numbers."""
        command = [sys.executable, "-m", "lmcache.cli.main", "bench", "server", "--mode", "cpu"]
        command += ["--rpc-url", f"tcp://127.0.0.1:{self._port}", "--url", f"http://127.0.0.1:{self._http}"]
        command += ["--start", str(start), "--end", str(end), "--interval", "0", "--tp-size", str(RANKS)]
        command += ["--num-tokens", str(TOKENS), "--kvcache-shape-spec", SHAPE]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=RUN_S, env=_environment()
        )
        return ran.stdout + ran.stderr

    def _answers(self) -> bool:
        try:
            return bool(self.status())
        except OSError:
            return False


def _environment() -> dict[str, str]:
    return {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    with running_server(*ROOM) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(*ROOM) as made:
        yield made


@pytest.fixture(scope="module")
def storing(
    tmp_path_factory: pytest.TempPathFactory, single: Server, cluster: Cluster
) -> Iterator[LmcacheServer]:
    """Stores in a single server and in a Cluster."""
    with LmcacheServer("storing", tmp_path_factory.mktemp("storing"), single.url, cluster.url) as server:
        yield server


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[LmcacheServer]:
    """Another host's server, on the Cluster alone."""
    with LmcacheServer("loading", tmp_path_factory.mktemp("loading"), cluster.url) as server:
        yield server


def _checksums(printed: str, kind: str) -> dict[str, str]:
    return {number: digest for number, of, digest in _CHECKSUM.findall(printed) if of == kind}


def test_what_one_server_computed_another_retrieves_byte_for_byte(
    storing: LmcacheServer, loading: LmcacheServer
) -> None:
    first = storing.bench(0, 2)
    assert _checksums(first, "cold").keys() == {"0", "1"}, first
    assert _checksums(first, "cold") == _checksums(first, "warm"), first
    objects = 2 * CHUNKS * RANKS
    eventually(
        lambda: [adapter["stored_objects"] for adapter in storing.adapters()] == [objects, objects],
        "everything is in both stores",
    )
    second = loading.bench(0, 2)
    assert _HITS.findall(second) == [("0", "2", "2"), ("1", "2", "2")], second
    assert _checksums(second, "warm") == _checksums(first, "cold"), second
    (adapter,) = loading.adapters()
    assert adapter["loaded_objects"] >= objects
    assert adapter["failed"] == {}


def test_a_server_whose_valkey_is_gone_serves_from_its_own_memory_and_stays_healthy(
    storing: LmcacheServer, single: Server
) -> None:
    single.stop()
    printed = storing.bench(10, 12)
    assert _checksums(printed, "cold").keys() == {"10", "11"}, printed
    assert _checksums(printed, "cold") == _checksums(printed, "warm"), printed
    eventually(
        lambda: [adapter["state"] for adapter in storing.adapters()] == ["down", "up"],
        "the outage is shown, of that store alone",
    )
    assert storing.status()["storage_manager"]["is_healthy"]
