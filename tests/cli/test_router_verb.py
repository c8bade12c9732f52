"""`kvferry router` as a process, and the verbs that ask it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli import router_asked
from kvferry.demo.ports import listens
from kvferry.errors import MisconfiguredError
from kvferry.testing.processes import Program
from kvferry.testing.servers import free_ports
from kvferry.testing.worker_engine import WorkerSettings
from kvferry.testing.worker_fleet import RemoteWorker, running_workers

KVFERRY = (sys.executable, "-m", "kvferry")
ASK_S = 60.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[RemoteWorker, ...]]:
    with running_workers(WorkerSettings(step_s=0.005), WorkerSettings(), directory=tmp_path) as running:
        yield running


class Router(Program):
    """On a port of its own, with its socket in a directory of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.env = os.environ | {"XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.env.pop("KVFERRY_SOCKET", None)
        command = [*KVFERRY, "router", "--listen", f"127.0.0.1:{self.port}", "--metrics-port", "0"]
        super().__init__(
            "router",
            [*command, "--feed", "none", *arguments],
            directory=directory,
            env=self.env,
            ready=lambda: listens(self.port) and any(directory.glob("kvferry/router-*.sock")),
        )

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another verb, in the same shell."""
        return subprocess.run(
            [*KVFERRY, *arguments], env=self.env, capture_output=True, text=True, timeout=ASK_S, check=False
        )

    @contextlib.contextmanager
    def post(self, **more: object) -> Iterator[http.client.HTTPResponse]:
        """A chat completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_S)
        body = {"model": "mock", "messages": [{"role": "user", "content": "hello " * 100}], **more}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            with connection.getresponse() as answer:
                yield answer


def test_status_and_explain_find_the_router_and_say_what_it_did(
    tmp_path: Path, workers: tuple[RemoteWorker, ...]
) -> None:
    with Router(tmp_path, "--worker", *(worker.url for worker in workers)) as router:
        with router.post() as answer:
            name = json.loads(answer.read())["id"]
        text = router.ask("status", "--router")
        assert text.returncode == 0, text.stderr
        assert all(worker.url in text.stdout for worker in workers)
        assert "1: 0 in flight" in text.stdout and "1 done" in text.stdout
        document = json.loads(router.ask("status", "--router", "--json").stdout)
        assert [worker["state"] for worker in document["workers"]] == ["up", "up"]
        (socket_path,) = map(str, tmp_path.glob("kvferry/router-*.sock"))
        for order in (
            ("--router", name),
            (name, "--router"),
            ("--router", socket_path, name),
            (name, "--router", socket_path),
            ("--router", "--", name),
        ):
            told = router.ask("explain", *order)
            assert told.returncode == 0 and "sent to" in told.stdout, (order, told.stderr)
        for order in (("--router",), ("--router", socket_path), ()):
            told = router.ask("explain", *order)
            assert told.returncode == 2 and "name a request" in told.stderr
        assert router.ask("explain", "nobody", "--router").returncode == 1
        refused = router.ask("status", "--router", "--keepers", "a")
        assert refused.returncode == 2 and "--keepers" in refused.stderr
        assert router.terminate() == 0
        gone = router.ask("status", "--router")
        assert gone.returncode == 2 and "no router's socket" in gone.stderr


def test_a_stream_in_flight_ends_before_the_router_does(
    tmp_path: Path, workers: tuple[RemoteWorker, ...]
) -> None:
    with Router(tmp_path, "--worker", workers[0].url) as router:
        with router.post(stream=True, max_tokens=200) as answer:
            answer.read(10)
            router.signal(signal.SIGTERM)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert router.wait() == 0


def test_settings_are_read_anew_on_sighup(tmp_path: Path, workers: tuple[RemoteWorker, ...]) -> None:
    config = tmp_path / "router.toml"
    config.write_text(f'worker = "{workers[0].url}"\n')
    with Router(tmp_path, "--config", str(config)) as router:
        config.write_text(f'worker = "{workers[0].url},{workers[1].url}"\n')
        router.signal(signal.SIGHUP)
        router.wait_for(lambda: workers[1].url in router.ask("status", "--router").stdout, what="the other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs workers"),
        (["--worker", "gpu1:8000"], "no URL of a worker"),
        (["--worker", "http://u:p@gpu1"], "more than scheme, host and port"),
        (["--worker", "a=http://g:1", "b=http://g:1"], "two pools"),
        (["--worker", "http://g:1", "--policy", "best"], "is no policy"),
        (["--worker", "http://g:1", "--tls-cert", "x.pem"], "belong together"),
        (["--worker", "http://g:1", "--listen", "here"], "no IP address"),
        (["--worker", "http://g:1", "--feed", "0"], "outside 1 to 65535"),
        (["--worker", "http://g:1", "--worker-tls-ca", "x.pem"], "no worker is at an https URL"),
        (["--worker-dns", "http://g:1", "--worker-tls-ca", "x.pem"], "no worker is at an https URL"),
        (["--worker", "http://g:1", "--feed", "none", "--feed-tls-ca", "x.pem"], "but feed is none"),
        (
            ["--worker", "http://g:1", "--admin-socket", "/tmp/no/such/s"],
            "there is no directory /tmp/no/such",
        ),
        (["--worker", "http://g:1", "--probe", "2"], "write it like 2s"),
        (["--worker", "http://g:1", "--listen", "18150"], "write it like 127.0.0.1:18150"),
        (["--worker", "http://g:1", "--split", "110%=new"], "not above 0% and at most 100%"),
        (
            ["--worker", "http://g:1", "--tls-cert", "nowhere.pem", "--tls-key", "nowhere.pem"],
            "there is no file tls_cert nowhere.pem",
        ),
        (["--worker", "http://g:1", "--split", "10%=new"], "--split 10%=new: no worker"),
        (["--workers", "http://g:1"], "did you mean --worker"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = Router(tmp_path).ask("router", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_short_trust_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    for text, code in (("short\n", 2), ("0123456789abcde\n", 2), ("0123456789abcdef\n", 2)):
        secret.write_text(text)
        done = Router(tmp_path).ask(
            "router", "--worker", "http://g:1", "--trust-secret-file", str(secret), "--split", "1%=x"
        )
        assert done.returncode == code
        assert ("shorter than 16 bytes" in done.stderr) is (len(text) < 17)


def test_an_address_that_is_taken_is_said_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = Router(tmp_path).ask("router", "--worker", "http://g:1", "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use; choose" in done.stderr


def test_without_its_packages_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['httptools'] = None; "
        "from kvferry.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "router", "--worker", "http://127.0.0.1:1"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ASK_S, check=False)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "httptools" in found.stderr
    assert "pip install" in found.stderr


def test_sockets_of_routers_that_are_gone_are_no_routers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / "kvferry"
    directory.mkdir(mode=0o700)
    for number in range(3):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / f"router-{number}.sock"))
    with pytest.raises(MisconfiguredError, match="no router"):
        router_asked.router_socket(router_asked.ANY)
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(directory / "router-9.sock"))
        living.listen()
        assert router_asked.router_socket(router_asked.ANY) == directory / "router-9.sock"
