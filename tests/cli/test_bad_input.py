"""What a user gets wrong ends in one line that names the value and a way out, and exit code 2."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli.main import VERBS, main
from kvferry.config import NodeSettings
from kvferry.node.node import Node

POOL = "64MiB"
FOREIGN_USER = 54321


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command line that must fail as bad input; returns the one line it said."""
    for name in list(os.environ):
        if name.startswith("KVFERRY_"):
            monkeypatch.delenv(name)

    def complain(*argv: str) -> str:
        code = main(argv)
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("kvferry: ")
        return lines[0]

    return complain


@pytest.mark.parametrize(
    ("argv", "value", "hint"),
    [
        (["stauts"], "'stauts'", "did you mean status?"),
        (["frobnicate"], "'frobnicate'", f"there are {', '.join(sorted(VERBS))}"),
        (["node", "--pol", "1GiB"], "--pol", "did you mean --pool?"),
        (["node", "--pool", "much"], "'much'", "write it like 4GiB"),
        (["node", "--pool", "500TiB"], "500 TiB", "larger than this host's memory"),
        (["node", "--valkey", "valky://h"], "'valky'", "did you mean valkey://?"),
        (["node", "--valkey", "valkey://h:port"], "'port'", "a number from 1 to 65535"),
        (["node", "--valkey", "valkey://u:secret@h"], "valkey://h:6379", "KVFERRY_VALKEY_PASSWORD"),
        (["node", "--deadline-cap-ms", "-5"], "-5", "10 to 600000"),
        (["node", "--config", "/nonexistent/a.toml"], "/nonexistent/a.toml", "No such file"),
        (["flags", "vllm", "--chunk-tokens", "100", "--block-size", "16"], "100", "96 is"),
        (["flags", "vllm", "--chunk-tokens", "many"], "'many'", "whole number"),
        (["flags", "triton"], "'triton'", "choose from"),
        (["flags"], "target", "see kvferry flags --help"),
        (["drop", "memory", "--namespace", "xyz"], "'xyz'", "32 hexadecimal digits"),
        (["drop", "tape"], "'tape'", "choose from"),
        (["drop", "disk"], "disk", "name --keepers"),
        (["drop", "objects"], "objects", "name --keepers"),
        (["drop", "valkey"], "Valkey", "name --keepers, or --valkey URL"),
        (["drop", "all"], "no tier to drop from", "start the node"),
        (["drop", "disk", "--older-than", "soon"], "'soon'", "like 12h or 30d"),
        (["drop", "all", "--request", "x", "--older-than", "1h"], "--request", "leave --namespace and"),
        (["drop", "valkey", "--valkey", "valky://h"], "'valky'", "did you mean valkey://?"),
        (["drop", "disk", "--keepers", "host:port"], "'port'", "1 to 65535"),
        (["explain"], "request", "see kvferry explain --help"),
        (["bench"], "benchmark", "see kvferry bench --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_a_way_out(
    run: Callable[..., str], argv: list[str], value: str, hint: str
) -> None:
    line = run(*argv)
    assert value in line
    assert hint in line
    assert "secret" not in line


def test_a_valkey_that_is_none_is_named(run: Callable[..., str], tmp_path: Path) -> None:
    """One that does not answer is waited for (``tests/node/test_awaits_valkey.py``)."""

    def greets(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"220 mail.example ESMTP\r\n")
                    connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greets, args=(server,))
        thread.start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        line = run(
            *("node", "--pool", POOL, "--socket", str(tmp_path / "s"), "--metrics-port", "0"),
            *("--valkey", f"valkey://{place}"),
        )
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert place in line
    assert "does not answer like Valkey" in line


def test_a_metrics_port_in_use_is_named(run: Callable[..., str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = run("node", "--pool", POOL, "--socket", str(tmp_path / "s"), "--metrics-port", port)
    assert f"metrics port {port} is in use" in line
    assert "--metrics-port" in line


def test_an_unwritable_socket_path_is_named(run: Callable[..., str]) -> None:
    line = run("node", "--pool", POOL, "--socket", "/proc/kvferry/node.sock", "--metrics-port", "0")
    assert "/proc/kvferry" in line
    assert "--socket" in line


def test_a_directory_of_another_user_is_not_used(run: Callable[..., str], tmp_path: Path) -> None:
    if os.getuid() == 0:
        directory = tmp_path / "theirs"
        directory.mkdir()
        os.chown(directory, FOREIGN_USER, FOREIGN_USER)
    else:
        directory = Path("/usr")
    line = run("node", "--pool", POOL, "--socket", str(directory / "node.sock"), "--metrics-port", "0")
    assert f"{directory} belongs to user" in line
    assert "--socket" in line


def test_a_second_node_at_one_socket_is_refused(run: Callable[..., str], tmp_path: Path) -> None:
    node = Node(NodeSettings(pool_bytes=64 << 20, socket_path=tmp_path / "s", metrics_port=0))
    try:
        line = run("node", "--pool", POOL, "--socket", str(tmp_path / "s"), "--metrics-port", "0")
    finally:
        node.close()
    assert f"a node already runs at {tmp_path / 's'}" in line


def test_no_node_is_a_failure_and_no_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", "--socket", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(tmp_path / "none") in err


def test_a_reader_that_leaves_is_not_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    complaint = process.stderr.read()
    process.stderr.close()
    process.wait(30)
    assert b"Traceback" not in complaint
