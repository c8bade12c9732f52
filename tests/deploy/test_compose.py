"""The Compose recipe: what Compose makes of it is right, and its commands run as they stand."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.client.admin import AdminClient
from kvferry.testing.processes import Program
from kvferry.testing.servers import Server, free_ports, valkey_binary

RECIPE = Path(__file__).parents[2] / "deploy" / "compose"
SOCKET = "/run/kvferry/node.sock"
SECRETS = "/run/secrets"
GROUP = "10001"
PASSWORD = "a-password"
KVFERRY = [sys.executable, "-m", "kvferry"]


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    """As Compose resolves it. Compose refuses what it does not know."""
    compose = shutil.which("docker-compose")
    assert compose, "docker-compose is not installed: ./test installs it"
    found = subprocess.run(
        [compose, "--file", str(RECIPE / "compose.yaml"), "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    resolved: dict[str, Any] = yaml.safe_load(found.stdout)
    return resolved


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def _engines(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    engines = [service for name, service in recipe["services"].items() if name.startswith("engine-")]
    assert len(engines) == 2
    return engines


def test_node_and_engines_mount_one_directory_and_meet_at_one_socket(recipe: dict[str, Any]) -> None:
    node = recipe["services"]["node"]
    assert f"--socket={SOCKET}" in node["command"]
    for service in (node, *_engines(recipe)):
        assert f"run:{Path(SOCKET).parent}:rw" in service["volumes"]


def test_engines_are_of_the_group_that_the_node_admits(recipe: dict[str, Any]) -> None:
    assert f"--group={GROUP}" in recipe["services"]["node"]["command"]
    assert f"--gid {GROUP} kvferry" in (RECIPE / "node.Dockerfile").read_text()
    for engine in _engines(recipe):
        assert engine["group_add"] == [GROUP]


def test_engines_cannot_reach_valkey_and_nothing_but_their_api_is_published(recipe: dict[str, Any]) -> None:
    services = recipe["services"]
    assert recipe["networks"]["cache"]["internal"] is True
    for engine in _engines(recipe):
        assert set(engine["networks"]).isdisjoint(services["valkey"]["networks"])
        assert all(str(port).startswith("127.0.0.1:") for port in engine["ports"])
    assert "ports" not in services["valkey"]
    assert "ports" not in services["node"]


def test_the_engines_flag_is_what_kvferry_flags_prints(recipe: dict[str, Any]) -> None:
    words = f"flags vllm --socket {SOCKET} --group {GROUP} --domain-key-file {SECRETS}/domain_key".split()
    printed = subprocess.run([*KVFERRY, *words], capture_output=True, text=True, check=True)
    _, flag = shlex.split(printed.stdout)
    for engine in _engines(recipe):
        (given,) = [word for word in engine["command"] if word.startswith("--kv-transfer-config=")]
        assert json.loads(given.partition("=")[2]) == json.loads(flag)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another group: needs root")
def test_valkey_and_node_run_as_written(recipe: dict[str, Any], stack: ExitStack, tmp_path: Path) -> None:
    password_file = tmp_path / "valkey_password"
    password_file.write_text(PASSWORD + "\n")
    os.chown(password_file, 0, int(GROUP))
    password_file.chmod(0o640)
    valkey = _start_valkey(recipe, tmp_path, password_file)
    stack.callback(valkey.stop)
    assert valkey.ask("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"volatile-ttl"]
    assert valkey.ask("CONFIG", "GET", "maxmemory") == [b"maxmemory", str(32 << 30).encode()]

    run = tmp_path / "run"
    changes = {
        "--pool=64GiB": "--pool=64MiB",
        "--valkey=valkey://valkey:6379": f"--valkey={valkey.url}",
        f"--valkey-password-file={SECRETS}/valkey_password": f"--valkey-password-file={password_file}",
        f"--socket={SOCKET}": f"--socket={run / 'node.sock'}",
    }
    command = recipe["services"]["node"]["command"]
    assert set(changes) <= set(command)
    words = [*KVFERRY, "node", *(changes.get(word, word) for word in command), "--metrics-port", "0"]
    node = Program(
        "node", words, directory=tmp_path, ready=lambda: _status(run) is not None, env={**os.environ}
    )
    stack.callback(node.close)
    node.start()
    node.wait_for(lambda: _tier_state(run) == "up", what="the node to reach Valkey")
    assert (run / "node.sock").stat().st_gid == int(GROUP)
    assert node.terminate() == 0


def _start_valkey(recipe: dict[str, Any], directory: Path, password_file: Path) -> Server:
    """The recipe's script, on a free port of loopback and with this machine's server."""
    service = recipe["services"]["valkey"]
    (script,) = service["command"]
    port = free_ports(1)[0]
    for here, there in (
        (f"{SECRETS}/valkey_password", str(password_file)),
        ("/tmp/valkey.conf", str(directory / "valkey.conf")),
        ("exec valkey-server", f"exec {valkey_binary()}"),
        ("--maxmemory ", f"--port {port} --bind 127.0.0.1 --dir {directory} --maxmemory "),
    ):
        assert here in script
        script = script.replace(here, there)
    return Server([*service["entrypoint"], script], port, directory=directory, password=PASSWORD)


def _status(run: Path) -> dict[str, Any] | None:
    try:
        with AdminClient(run / "node.sock", group=int(GROUP)) as admin:
            return admin.status()
    except Exception:
        return None


def _tier_state(run: Path) -> str | None:
    status = _status(run)
    return None if status is None else str(status["tier"]["state"])
