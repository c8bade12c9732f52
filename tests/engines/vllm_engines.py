"""Starts real engines as processes of their own and talks to them."""

import atexit
import contextlib
import functools
import json
import mmap
import os
import select
import signal
import socket as socketlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.preloaded import Piped, Preloaded
from tests.engines.vllm_driver import MARK

from kvferry.testing.processes import NodeProgram

START_S = 400.0
ANSWER_S = 120.0
STOP_S = 60.0
ROOT = Path(__file__).parents[2]
PATIENT_NODE = (sys.executable, "-m", "tests.patience")  # how to run kvferry


def environment(**more: str) -> dict[str, str]:
    """For engines and nodes: the sources under test, no network, no colour."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return os.environ | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


@functools.cache
def _preloaded() -> Preloaded:
    made = Preloaded(environment(), ROOT)
    atexit.register(made.close)
    return made


def start_copy(
    arguments: Sequence[str], *, errors: int, environment: Mapping[str, str], directory: Path
) -> Piped:
    """What ``python ARGUMENTS`` would start, but that torch and vLLM are imported already."""
    return _preloaded().start(arguments, errors=errors, environment=environment, directory=directory)


def output(arguments: Sequence[str], directory: Path) -> str:
    """Of a copy that runs to its end without an error. directory: for what it says besides."""
    errors = directory / "errors.log"
    with errors.open("ab") as sink:
        copy, stdin, stdout = start_copy(
            arguments, errors=sink.fileno(), environment=environment(), directory=ROOT
        )
    stdin.close()
    with stdout:
        told = stdout.read().decode()
    assert copy.wait() == 0, f"{told}\n{errors.read_text()}"
    return told


def make_models(directory: Path, *names: str, module: str = "tests.engines.vllm_models") -> Path:
    """Of that module, in folders of their names."""
    output(["-m", module, str(directory), *names], directory)
    return directory


class EngineError(Exception):
    """vLLM refused a call; the engine lives."""


class Engine:
    """One engine process. ``ready`` waits for it, so that several can start side by side.

    start: ``start_new`` for one whose processes are to be as a user's are.
    """

    def __init__(
        self,
        name: str,
        *,
        directory: Path,
        cores: str,
        arguments: dict[str, Any],
        driver: str = "tests.engines.vllm_driver",
        start: Callable[..., Piped] = start_copy,
    ) -> None:
        self.log = directory / f"{name}.log"
        self._sink = self.log.open("ab")
        self._process, self._stdin, self._stdout = start(
            ["-m", driver, json.dumps(arguments)],
            errors=self._sink.fileno(),
            environment=environment(VLLM_CPU_OMP_THREADS_BIND=cores),
            directory=ROOT,
        )
        self._buffer = b""

    def ready(self) -> "Engine":
        """Wait for the start."""
        assert self._answer(START_S) == "ready"
        return self

    def ask(self, verb: str, **options: Any) -> Any:
        """One call of the driver."""
        self.begin(verb, **options)
        return self.end()

    def begin(self, verb: str, **options: Any) -> None:
        """The first half of a call: what breaks meanwhile breaks during it."""
        self._stdin.write(json.dumps({"do": verb, **options}).encode() + b"\n")
        self._stdin.flush()

    def end(self) -> Any:
        """The second half: wait for the answer."""
        found = self._answer(ANSWER_S)
        if isinstance(found, dict) and "error" in found:
            raise EngineError(found["error"])
        return found

    def answered(self) -> bool:
        """Whether ``end`` would return at once."""
        descriptor = self._stdout.fileno()
        while select.select([descriptor], [], [], 0)[0]:
            more = os.read(descriptor, 1 << 16)
            assert more, f"the engine ended; {self.log}:\n{self.text()[-3000:]}"
            self._buffer += more
        return any(MARK.encode() in line for line in self._buffer.split(b"\n")[:-1])

    def generate(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """One request's tokens, and how many of its prompt were not computed."""
        found: dict[str, Any] = self.ask("generate", prompt=prompt, **options)[0]
        return found

    def reset(self) -> None:
        """Reset the prefix cache; pinned blocks may take a moment to return."""
        give_up = time.monotonic() + ANSWER_S
        while not self.ask("reset"):
            assert time.monotonic() < give_up, "the prefix cache could not be reset"
            time.sleep(0.05)

    def digests(self) -> set[str]:
        """Of the blocks that hold anything, over all ranks."""
        return {digest for rank in self.ask("digests") for digest in rank["digests"]}

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def _answer(self, timeout_s: float) -> Any:
        give_up = time.monotonic() + timeout_s
        descriptor = self._stdout.fileno()
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                told, mark, answer = line.partition(MARK.encode())  # worker processes write there too
                if mark:
                    return json.JSONDecoder().raw_decode(answer.decode(errors="replace"))[0]
                self._sink.write(told + b"\n")
                self._sink.flush()
            left = give_up - time.monotonic()
            assert left > 0, f"no answer in {timeout_s:.0f} s; {self.log}:\n{self.text()[-3000:]}"
            if select.select([descriptor], [], [], left)[0]:
                more = os.read(descriptor, 1 << 16)
                assert more, f"the engine ended; {self.log}:\n{self.text()[-3000:]}"
                self._buffer += more

    def kill(self) -> None:
        """All of it at once, as the kernel would."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it and everything it started."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdout.close()
        self._sink.close()


class NodeProcess(NodeProgram):
    """A node at a fixed socket, which can be killed and started again."""

    def __init__(self, directory: Path, *, pool: str = "256MiB") -> None:
        super().__init__(
            PATIENT_NODE,
            socket=directory / "node.sock",
            directory=directory,
            pool=pool,
            env=environment(),
        )

    def chunks(self) -> int:
        """How many it has in host memory."""
        return int(self.statistics()["catalogue"]["chunks"])

    def spoil(self) -> None:
        """Change one byte in every page of its host memory: everything there is corrupt."""
        names = Path(f"/proc/{self.pid}/fd").iterdir()
        pools = [name for name in names if os.readlink(name).startswith("/memfd:kvferry")]
        assert len(pools) == 1, f"{len(pools)} pools"
        with pools[0].open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
            end = 0
            while True:
                try:
                    begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
                except OSError:  # nothing behind
                    return
                end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                for at in range(begin, end, mmap.PAGESIZE):
                    pool[at] ^= 0xFF


def arguments(model: Path, socket: Path, **more: Any) -> dict[str, Any]:
    """Of a patient engine that joins the node at ``socket``."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "disable_log_stats": False,
        "worker_extension_cls": "kvferry.demo.probe.KvProbe",
        "kv_transfer_config": {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "tests.engines.patient_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(socket)},
        },
        **more,
    }


class Server:
    """An OpenAI-compatible server of one model with two data-parallel ranks."""

    def __init__(self, model: Path, *, directory: Path, socket: Path, cores: str) -> None:
        self.log = directory / "server.log"
        self._sink = self.log.open("ab")
        self._port = _free_port()
        config = arguments(model, socket)["kv_transfer_config"]
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--skip-tokenizer-init", "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--data-parallel-size", "2"]
        command += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(config)]
        with open(os.devnull) as nothing:
            self._process = _preloaded().copy(
                command,
                streams=(nothing.fileno(), self._sink.fileno(), self._sink.fileno()),
                environment=environment(VLLM_CPU_OMP_THREADS_BIND=cores),
                directory=ROOT,
            )

    def ready(self) -> "Server":
        """Wait until it answers /health."""
        give_up = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, f"the server ended:\n{self.log.read_text()[-3000:]}"
            url = f"http://127.0.0.1:{self._port}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return self
            assert time.monotonic() < give_up, f"the server did not start:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.25)

    def cached(self, prompt: list[int], *, rank: int) -> int:
        """Ask a data-parallel rank; how many prompt tokens it did not compute."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "detokenize": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            data=json.dumps({**body, "return_token_ids": True, "ignore_eos": True}).encode(),
            headers={"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            usage = json.load(answer)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def close(self) -> None:
        """End it and everything it started."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._sink.close()


def _free_port() -> int:
    with socketlib.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
