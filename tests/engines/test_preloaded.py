"""A copy of the preloaded process does what a new interpreter would do."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.preloaded import Piped, start_new
from tests.engines.vllm_engines import environment, start_copy

pytestmark = pytest.mark.engine

LIMIT_S = 120.0
STARTS = [start_new, start_copy]
TELL = """
import json, os, signal, sys
print(json.dumps({
    "words": sys.argv, "directory": os.getcwd(), "value": os.environ.get("SOME_VALUE"),
    "group": os.getpgrp() == os.getpid(), "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    "own": [name for name in sys.modules if name.startswith("kvferry")],
    "threads": len(os.listdir("/proc/self/task")), "read": sys.stdin.read(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
}))
print("an error", file=sys.stderr)
"""
ENDS = {
    "print(1)": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('words')": 1,
    "raise ValueError": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import atexit, os; atexit.register(lambda: os._exit(7))": 7,
}
SPAWN = """
import multiprocessing, os, time
context = multiprocessing.get_context("spawn")
child = context.Process(target=os.kill, args=(0, 0))
child.start()
child.join()
print(child.exitcode, flush=True)
child = context.Process(target=time.sleep, args=(600,))
child.start()
print(child.pid, os.getpgid(child.pid) == os.getpid(), child.is_alive(), flush=True)
child.terminate()
child.join()
print(child.exitcode, flush=True)
child = context.Process(target=time.sleep, args=(600,))
child.start()
print(child.pid, flush=True)
child.join()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Piped]:
    """Starts it with words and a value in its environment, in the test's directory."""

    def started(how: Callable[..., Piped], code: str, *words: str, **values: str) -> Piped:
        with (tmp_path / "errors").open("ab") as errors:
            return how(
                ["-c", code, *words],
                errors=errors.fileno(),
                environment=environment(**values),
                directory=tmp_path,
            )

    return started


def _told(piped: Piped, given: bytes = b"") -> bytes:
    """All that it prints until it ends; it is given that to read."""
    with piped.stdin as stdin:
        stdin.write(given)
    with piped.stdout as stdout:
        told = stdout.read()
    piped.process.wait(LIMIT_S)
    return told


def test_it_has_what_was_asked_for(start: Callable[..., Piped], tmp_path: Path) -> None:
    told = [json.loads(_told(start(how, TELL, "a", "b", SOME_VALUE="x"), b"read")) for how in STARTS]
    assert told[0] == told[1]
    assert (tmp_path / "errors").read_text() == "an error\n" * 2


@pytest.mark.parametrize("code", ENDS)
def test_its_end_is_told(start: Callable[..., Piped], code: str) -> None:
    for how in STARTS:
        piped = start(how, code)
        _told(piped)
        assert piped.process.wait(LIMIT_S) == ENDS[code]


def test_what_it_spawns_is_its_own_to_wait_for_and_dies_with_its_group(start: Callable[..., Piped]) -> None:
    for how in STARTS:
        piped = start(how, SPAWN)
        lines = [piped.stdout.readline().split() for _ in range(4)]
        assert lines[0] == [b"0"]
        assert lines[1][1:] == [b"True", b"True"]
        assert lines[2] == [b"-15"]
        os.killpg(piped.process.pid, signal.SIGKILL)
        assert _told(piped) == b""  # nobody has the pipe any more
        assert piped.process.wait(LIMIT_S) == -signal.SIGKILL
