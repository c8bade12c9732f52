"""A driven process is ready when start returns, does what it is told, and is never left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvferry.errors import ClosedError, RefusedError, RetryError
from kvferry.testing.census import leaves_nothing
from kvferry.testing.holdings import wait_for_baseline
from kvferry.testing.processes import NodeProgram, Program

PYTHON = [sys.executable, "-I", "-S", "-c"]
READY = "import pathlib, sys, time; pathlib.Path('ready').touch(); print('hello', flush=True);"
SOURCES = str(Path(__file__).parents[2] / "src")
WAIT_S = 60.0


def program(directory: Path, code: str, *, start_s: float = WAIT_S) -> Program:
    """Runs in ``directory`` by a change of its own; ready when it made a file there."""
    flag = directory / "ready"
    flag.unlink(missing_ok=True)
    whole = f"import os; os.chdir({str(directory)!r}); {code}"
    return Program("some", [*PYTHON, whole], directory=directory, ready=flag.exists, start_s=start_s)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def eventually_gone(pid: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while alive(pid):
        assert time.monotonic() < give_up, f"{pid} lives on"
        time.sleep(0.01)


def test_start_returns_when_it_is_ready_and_leaving_ends_it(tmp_path: Path) -> None:
    with program(tmp_path, READY + "time.sleep(600)") as some:
        assert (tmp_path / "ready").exists()
        assert some.running
        pid = some.pid
        some.wait_for(lambda: "hello" in some.tail(), what="its first line")
    assert not alive(pid)
    assert not some.running
    assert some.exit_code == -signal.SIGKILL


def test_a_program_that_ends_at_start_says_so_with_the_end_of_its_log(tmp_path: Path) -> None:
    with leaves_nothing(), pytest.raises(RetryError, match=r"some ended(.|\n)*no such luck"):
        program(tmp_path, "import sys; sys.exit('no such luck')").start()


def test_a_program_that_is_never_ready_is_ended_and_its_log_shown(tmp_path: Path) -> None:
    some = program(tmp_path, "import time; print('thinking', flush=True); time.sleep(600)", start_s=3.0)
    with leaves_nothing(), pytest.raises(RetryError, match=r"ready did not happen(.|\n)*thinking"):
        some.start()
    assert not some.running


def test_a_paused_program_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    counts = "\nn = 0\nwhile True: n += 1; pathlib.Path('n').write_text(str(n)); time.sleep(0.001)"
    with program(tmp_path, READY + counts) as some:
        count = tmp_path / "n"
        some.wait_for(count.exists, what="the first count")
        some.pause()
        before = count.read_text()
        time.sleep(0.1)
        assert count.read_text() == before
        assert some.running
        some.resume()
        some.wait_for(lambda: count.read_text() not in ("", before), what="the next count")


def test_kill_takes_all_that_it_started_with_it(tmp_path: Path) -> None:
    code = READY + (
        "import subprocess; "
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with program(tmp_path, code) as some:
        some.wait_for(lambda: len(some.tail().split()) == 2, what="its child's pid")
        child = int(some.tail().split()[1])
        assert alive(child)
        assert some.kill() == -signal.SIGKILL
        eventually_gone(child)
        assert some.kill() == -signal.SIGKILL


def test_terminate_gives_it_time_and_returns_its_exit_code(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + READY
    with program(tmp_path, code + "time.sleep(600)") as some:
        assert some.terminate() == 7


def test_terminate_also_ends_a_paused_program_and_one_that_does_not_listen(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "time.sleep(600)"
    with program(tmp_path, code) as some:
        some.pause()
        assert some.terminate(grace_s=0.2) == -signal.SIGKILL


def test_it_can_be_started_again_and_keeps_one_log(tmp_path: Path) -> None:
    with program(tmp_path, READY + "time.sleep(600)") as some:
        first = some.pid
        some.restart()
        assert some.running
        assert some.pid != first
        some.wait_for(lambda: some.log.read_text().count("hello") == 2, what="the second greeting")


def test_an_end_of_its_own_is_seen(tmp_path: Path) -> None:
    with program(tmp_path, READY + "sys.stdout.flush(); os._exit(3)") as some:
        assert some.wait() == 3
        assert not some.running


def test_a_running_program_is_not_started_twice(tmp_path: Path) -> None:
    with (
        program(tmp_path, READY + "time.sleep(600)") as some,
        pytest.raises(RefusedError, match="runs already"),
    ):
        some.start()


def test_nothing_can_be_told_to_a_program_that_was_never_started(tmp_path: Path) -> None:
    some = program(tmp_path, READY)
    for order in (some.pause, some.resume, some.kill, some.terminate, some.wait):
        with pytest.raises(ClosedError, match="never started"):
            order()
    some.close()


def test_it_is_not_started_from_a_thread_whose_end_would_end_it(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def start() -> None:
        try:
            program(tmp_path, READY).start()
        except RefusedError as error:
            found.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


def test_when_the_driving_process_is_killed_nothing_is_left(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); {READY} time.sleep(600)"
    driver = (
        "import sys, time; from pathlib import Path; from kvferry.testing.processes import Program; "
        f"home = Path({str(tmp_path)!r}); command = [sys.executable, '-I', '-S', '-c', {code!r}]; "
        "some = Program('some', command, directory=home, ready=(home / 'ready').exists).start(); "
        "print(some.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", driver]
    env = {**os.environ, "PYTHONPATH": SOURCES}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    eventually_gone(pid)


def test_a_node_is_killed_and_comes_back_holding_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": SOURCES}
    command = [sys.executable, "-m", "kvferry"]
    with NodeProgram(command, socket=tmp_path / "n.sock", directory=tmp_path, env=env) as node:
        epoch = node.statistics()["epoch"]
        wait_for_baseline(node.holdings)
        node.restart()
        assert node.statistics()["epoch"] != epoch
        assert node.terminate() == 0
        assert not node.answers()
