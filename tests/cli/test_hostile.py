"""What answers, what surrounds the command and how it is stopped: one line, an exit code, nothing left."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node.fleet import Engine, digests

from kvferry import __version__
from kvferry.cli.main import MAX_LINE, main
from kvferry.client.messages import NamespaceInfo
from kvferry.config import NodeSettings
from kvferry.node.framing import encode
from kvferry.node.node import Node
from kvferry.node.wire import PROTOCOL, Document, Refusal, Welcome

POOL = "64MiB"
WAIT_S = 60.0
WELCOME = encode(Welcome(protocol=PROTOCOL, version=__version__, epoch=1, pid=1, pool_bytes=1))
ANSWERS = {
    "noise": b"\xff" * 5000,
    "zeros": b"\0" * 64,
    "nothing": b"",
    "text": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "escapes": encode(Refusal(message="one\ntwo\x1b[31m", version="0")),
    "no-json": WELCOME + encode(Document(json=b"{")),
    "deep-json": WELCOME + encode(Document(json=b"[" * 100_000)),
    "a-list": WELCOME + encode(Document(json=b"[]")),
    "empty": WELCOME + encode(Document(json=b"{}")),
    "of-another-shape": WELCOME + encode(Document(json=b'{"requests": [{}], "counters": 3}')),
}


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Something at ``path`` that answers one connection so and closes."""

    def serve() -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(1 << 16)
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(30)


@pytest.mark.parametrize("question", [["status"], ["explain", "x"], ["drop", "memory"]], ids=" ".join)
@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_answers_at_the_socket_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, question: list[str], answer: str
) -> None:
    with answering(tmp_path / "s", ANSWERS[answer]):
        code = main([*question, "--socket", str(tmp_path / "s")])
    out, err = capsys.readouterr()
    assert code in (1, 2)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err[:-1].isprintable()


@pytest.mark.parametrize("kind", ["a file", "a directory", "a link", "too long", "empty"])
@pytest.mark.parametrize("verb", ["node", "status"])
def test_a_path_that_is_no_socket_is_bad_input_and_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, verb: str
) -> None:
    path = tmp_path / "s"
    if kind == "a file":
        path.write_text("mine")
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(__file__)
    text = {"too long": str(path) * 10, "empty": ""}.get(kind, str(path))
    before = sorted(tmp_path.iterdir())
    more = ["--pool", POOL, "--metrics-port", "0"] if verb == "node" else []
    assert main([verb, "--socket", text, *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", ""],
        ["explain", "x" * 513],
        ["explain", "\udcff"],
        ["status", "--socket", "~nobody-of-this-name/s"],
        ["flags", "vllm", "--block-size", "-1"],
        ["flags", "vllm", "--domain", ""],
        ["flags", "vllm", "--token-file", ""],
        ["flags", "vllm", "--socket", "x" * 200],
        ["flags", "vllm", "--chunk-tokens", "\u0663\u0662"],
        ["bench", "tiers", "--parts", "nan"],
        ["bench", "tiers", "--parts", "1e9"],
        ["bench", "tiers", "--sample-mib", "99999999"],
        ["node", "--pool", "1" * 5000],
        ["node", "--metrics-port", "1" * 5000],
        ["node", "--config", ""],
    ],
    ids=lambda argv: " ".join(argv)[:40].encode("ascii", "replace").decode(),
)
def test_odd_values_are_one_bounded_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert len(err) <= MAX_LINE + 20


@pytest.mark.parametrize(
    "argv",
    [
        ["--tokens", "0"],
        ["--cold-tokens", "-1"],
        ["--gap", "nan"],
        ["--gap", "inf"],
        ["--valkey", "x"],
        ["--report", "/proc/x.html"],
        ["--report", "/"],
    ],
    ids=" ".join,
)
def test_the_engine_benchmark_checks_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(["bench", "engines", *argv]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@given(st.text(max_size=3000))
def test_any_value_in_a_complaint_is_one_printable_line(value: str) -> None:
    written: list[str] = []

    class Sink:
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    with contextlib.redirect_stderr(Sink()):
        assert main([f"verb{value}"]) == 2
    line = "".join(written)
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert len(line) <= MAX_LINE + 20


def _command(*argv: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs kvferry through a shell that prepares its surroundings."""
    return subprocess.run(
        ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-m", "kvferry", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_standard_error_nothing_is_said_on_standard_output(tmp_path: Path) -> None:
    done = _command("status", "--socket", str(tmp_path / "none"), before="exec 2>&-;")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_full_disk_under_the_output_is_one_line() -> None:
    done = _command("flags", "vllm", before="exec >/dev/full;")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["kvferry: cannot write: No space left on device; make room for it"]


def test_a_node_of_few_descriptors_outlives_a_crowd_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "kvferry", "node", "--socket", str(path), "--pool", POOL]
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *command, "--metrics-port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        assert node.stderr is not None
        assert "kvferry" in node.stderr.readline()
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        assert main(["status", "--socket", str(path)]) == 0
        node.send_signal(signal.SIGTERM)
        assert "Traceback" not in node.stderr.read()
        assert node.wait(30) == 0
    assert not path.exists()


def test_what_programs_read_is_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s"
    node = Node(NodeSettings(pool_bytes=64 << 20, socket_path=path, metrics_port=0))
    try:
        node.start()
        for question, code in ((["status"], 0), (["explain", "x"], 1), (["drop", "memory"], 0)):
            assert main([*question, "--json", "--socket", str(path)]) == code
            json.loads(capsys.readouterr().out)
    finally:
        node.close()


def test_names_that_engines_and_api_clients_choose_cannot_speak_to_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    evil = "\x1b]0;x\x07\nvalkey    1 chunk\u202e"
    node = Node(NodeSettings(pool_bytes=64 << 20, socket_path=tmp_path / "s", metrics_port=0))
    try:
        node.start()
        space = NamespaceInfo(b"n" * 16, (1 << 20,), 128, f"d{evil}", f"l{evil}")
        engine = Engine(tmp_path / "s", space, name=f"e{evil}")
        try:
            engine.connected().lookup(digests(1), f"r{evil}")
            for question in (["status"], ["status", "--json"], ["explain", "r"], ["explain", "r", "--json"]):
                assert main([*question, "--socket", str(tmp_path / "s")]) == 0
                out = capsys.readouterr().out
                assert out.replace("\n", "").isprintable()
                assert not [line for line in out.splitlines() if line.startswith("valkey    1 chunk")]
        finally:
            engine.close()
    finally:
        node.close()


def test_the_socket_of_another_user_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr("kvferry.cli.address.os.getuid", lambda: owner + 1)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "s"))
        assert main(["status", "--socket", str(tmp_path / "s")]) == 2
    assert f"{tmp_path / 's'} belongs to user {owner}" in capsys.readouterr().err


def test_a_wrong_token_is_bad_input_that_names_the_way_and_shows_neither(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    node = Node(NodeSettings(pool_bytes=64 << 20, socket_path=path, metrics_port=0), token="geheim")
    monkeypatch.setenv("KVFERRY_TOKEN", "anheim")
    try:
        node.start()
        assert main(["status", "--socket", str(path)]) == 2
    finally:
        node.close()
    err = capsys.readouterr().err
    assert str(path) in err
    assert "KVFERRY_TOKEN" in err
    assert "heim" not in err.replace(str(path), "")


@pytest.fixture
def hang_up_by_default() -> Iterator[None]:
    """As in a terminal: a child inherits it when hang-ups are ignored here, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_ends_a_node_cleanly(tmp_path: Path, hang_up_by_default: None) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "kvferry", "node", "--socket", str(path), "--pool", POOL]
    with subprocess.Popen([*command, "--metrics-port", "0"], stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        assert "kvferry" in node.stderr.readline()
        node.send_signal(signal.SIGHUP)
        try:
            assert node.wait(WAIT_S) == 0
        finally:
            node.kill()
        assert node.stderr.read().endswith("stopping on SIGHUP\n")
    assert not path.exists()
