"""``kvferry warm --engine``: prompts sent through an OpenAI API, whatever the engine does."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import warm_prompts
from kvferry.cli.main import main
from kvferry.errors import RetryError

Answer = tuple[int, dict[str, Any]]


class FakeEngine:
    """asked: paths and bodies. faults: answers in place of the next ones. cached: None: not told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.faults: list[Answer] = []
        self.models = ["m"]
        self.cached: int | None = 4
        self.counters: float | None = None
        self.location = ""  # where it sends on to
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.keys.add(self.headers["Authorization"])
                if self.path == "/v1/models":
                    self._say(200, {"data": [{"id": name} for name in engine.models]})
                elif engine.counters is None:
                    self._say(404, {})
                else:
                    text = f'vllm:prefix_cache_hits_total{{engine="0"}} {engine.counters}\n'
                    self._send(200, text.encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.keys.add(self.headers["Authorization"])
                self._say(*engine.answer(self.path, body))

            def _say(self, code: int, document: dict[str, Any]) -> None:
                self._send(code, json.dumps(document).encode())

            def _send(self, code: int, content: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                if engine.location:
                    self.send_header("Location", engine.location)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                del args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        with self._lock:
            self.asked.append((path, body))
            self._now += 1
            self.most = max(self.most, self._now)
            fault = self.faults.pop(0) if self.faults else None
        try:
            if fault is not None:
                return fault
            usage: dict[str, Any] = {"prompt_tokens": 10}
            if self.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            elif self.counters is not None:
                self.counters += 6
            return 200, {"usage": usage}
        finally:
            with self._lock:
                self._now -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setattr(warm_prompts, "PAUSE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def warm(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """The command over these lines; what it prints, with its errors."""

    def run(*lines: object, code: int = 0, flags: tuple[str, ...] = ()) -> dict[str, Any]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        assert main(["warm", "--engine", engine.url, str(path), "--json", *flags]) == code
        out, err = capsys.readouterr()
        said: dict[str, Any] = json.loads(out) if out else {}
        return {**said, "err": err}

    return run


Warm = Callable[..., dict[str, Any]]


def test_every_prompt_is_sent_for_one_token_and_what_was_reused_is_summed(
    engine: FakeEngine, warm: Warm
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9, "cache_salt": "s"}
    said = warm(
        '"a text"\n',
        {"prompt": [1, 2, 3], "stream": True},
        chat,
        {"body": chat},
        flags=("--concurrency", "1"),
    )
    assert [path for path, _ in engine.asked] == ["/v1/completions"] * 2 + ["/v1/chat/completions"] * 2
    bodies = [body for _, body in engine.asked]
    assert all((body["max_tokens"], body["model"], body["stream"]) == (1, "m", False) for body in bodies)
    assert (bodies[0]["prompt"], bodies[1]["prompt"], bodies[2]["cache_salt"]) == ("a text", [1, 2, 3], "s")
    assert "max_completion_tokens" not in bodies[2]
    assert (said["prompts"], said["prompt_tokens"]) == (4, 40)
    assert (said["reused_tokens"], said["computed_tokens"], said["failed"]) == (16, 24, 0)


def test_a_text_file_is_one_prompt(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("one\ntwo\n")
    assert main(["warm", "--engine", f"{engine.url}/v1/", "--model", "m", str(path)]) == 0
    assert engine.asked[0][1]["prompt"] == "one\ntwo\n"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompts", "tokens", "reused", "computed", "time", "failed"]
    assert lines[1].split()[:4] == ["1", "10", "4", "6"]


def test_no_more_are_under_way_than_asked_for(engine: FakeEngine, warm: Warm) -> None:
    assert warm(*[f'"{n}"\n' for n in range(40)], flags=("--concurrency", "3"))["prompts"] == 40
    assert engine.most <= 3


def test_what_may_pass_is_tried_again_and_what_does_not_is_told_with_its_line(
    engine: FakeEngine, warm: Warm
) -> None:
    engine.faults = [
        (503, {}),
        (429, {"error": {"message": "busy"}}),
        (400, {"error": {"message": "too long"}}),
    ]
    said = warm('"a"\n', '"b"\n', "no json\n", '{"neither": 1}\n', code=1, flags=("--concurrency", "1"))
    assert (said["prompts"], said["failed"]) == (1, 3)
    assert sorted((each["place"].rpartition(":")[2], each["why"][:30]) for each in said["failures"]) == [
        ("1", "the engine refused it (400): t"),
        ("3", "it is no JSON: Expecting value"),
        ("4", "it is no text, and no object w"),
    ]
    assert "prompts.jsonl:1: the engine refused it (400): too long" in said["err"]
    engine.faults = [(500, {})] * warm_prompts.TRIES
    assert warm('"a"\n', code=1)["failed"] == 1


def test_where_the_engine_does_not_say_its_counters_do_or_nobody_does(engine: FakeEngine, warm: Warm) -> None:
    engine.cached = None
    said = warm('"a"\n')
    assert (said["reused_tokens"], said["computed_tokens"]) == (None, None)
    engine.counters = 100.0
    said = warm('"a"\n', '"b"\n')
    assert (said["reused_tokens"], said["computed_tokens"]) == (12, 8)


def test_an_engine_that_is_not_there_or_goes_away_ends_the_command_in_one_line(
    engine: FakeEngine, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.errors import ClosedError

    def gone(*args: object) -> None:
        raise ClosedError("no engine answers")

    with monkeypatch.context() as patched:
        patched.setattr(warm_prompts.Engine, "send", gone)
        said = warm(*[f'"{n}"\n' for n in range(50)], code=1)
        assert said["err"] == "kvferry: no engine answers\n"
    url = engine.url
    engine.url = "http://127.0.0.1:1"
    assert "no engine answers at http://127.0.0.1:1" in warm('"a"\n', code=1)["err"]
    engine.url = url


def test_the_model_is_the_engines_only_one_or_named(engine: FakeEngine, warm: Warm) -> None:
    engine.models = ["base", "adapter"]
    assert "serves base, adapter; name one with --model" in warm('"a"\n', code=2)["err"]
    assert "'other' is none of them" in warm('"a"\n', code=2, flags=("--model", "other"))["err"]
    assert warm('"a"\n', flags=("--model", "adapter"))["prompts"] == 1
    assert engine.asked[-1][1]["model"] == "adapter"


def test_a_key_is_shown_and_never_printed(
    engine: FakeEngine, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    engine.faults = [(401, {"error": {"message": "no"}})]
    said = warm('"a"\n', code=1)
    assert engine.keys == {"Bearer s3cret"}
    assert "s3cret" not in json.dumps(said)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_key_is_shown_to_nobody_to_whom_the_engine_sends_on(
    engine: FakeEngine, warm: Warm, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    other = FakeEngine()
    try:
        engine.faults, engine.location = [(code, {})], f"{other.url}/v1/models"
        said = warm('"a"\n', code=1)
    finally:
        other.close()
    assert f"sends on to another address ({code})" in said["err"]
    assert not other.keys
    assert len(engine.asked) == 1


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_comes_bit_by_bit_and_never_ends_is_given_up(start: bytes) -> None:
    """Though no single read takes long."""
    given_up = threading.Event()

    def drip(listener: socket.socket) -> None:
        with listener.accept()[0] as peer, suppress(OSError):
            peer.sendall(start)
            while not given_up.wait(0.01):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        asked = warm_prompts.Engine(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1.0)
        try:
            with pytest.raises(RetryError, match="no answer within 1 s"):
                asked._read("/v1/models", None, 1.0)
        finally:
            given_up.set()
            thread.join()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["warm"], "give one of these: --engine URL"),
        (["warm", "--request", "x", "--most-reused", "1h"], "give one of these"),
        (["warm", "--most-reused", "1h"], "--most-reused and --max belong together"),
        (["warm", "--request", "x", "--max", "1GiB"], "--most-reused and --max belong together"),
        (["warm", "--engine", "http://h"], "a file of prompts is missing"),
        (["warm", "prompts.jsonl"], "--engine URL is missing"),
        (["warm", "--engine", "h:8000", "p.jsonl"], "write http://host:8000"),
        (["warm", "--engine", "http://h:port", "p.jsonl"], "is no such address"),
        (["warm", "--engine", "http://u:s3cret@h", "p.jsonl"], "put a key into OPENAI_API_KEY"),
        (
            ["warm", "--engine", "http://h", "p.jsonl", "--into", "memory"],
            "--into is for what nodes and keepers have",
        ),
        (["warm", "--engine", "http://h", "p.jsonl", "--concurrency", "0"], "--concurrency: "),
        (["warm", "--most-reused", "soon", "--max", "1GiB"], "--most-reused: 'soon'"),
        (["warm", "--most-reused", "1h", "--max", "much"], "--max: 'much'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert "s3cret" not in err


def test_a_file_that_is_none_is_named(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none.jsonl", "No such file")):
        assert main(["warm", "--engine", engine.url, str(path)]) == 2
        assert f"{path}" in (err := capsys.readouterr().err)
        assert why in err
