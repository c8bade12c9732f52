"""Children end with whoever started them, whatever state they are in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.demo.processes import Child, Children, StoppedError, stop_on_signals, wait_until
from kvferry.errors import RetryError

WAIT_S = 60.0
SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('deaf', flush=True)\n"
    "time.sleep(600)",
]
FAMILY = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)",
]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _gone(pid: int) -> None:
    wait_until(lambda: not _alive(pid), what=f"the end of {pid}", timeout_s=WAIT_S)


def _text(child: Child) -> str:
    wait_until(lambda: bool(child.tail()), what="its first line", timeout_s=WAIT_S)
    return child.tail().split()[0]


def test_leaving_the_context_ends_every_child(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        pids = [children.start(f"sleeper{number}", SLEEPER).pid for number in range(3)]
        assert all(_alive(pid) for pid in pids)
    for pid in pids:
        assert not _alive(pid)


def test_an_exception_inside_ends_every_child(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Children(tmp_path) as children:
        pid = children.start("sleeper", SLEEPER).pid
        raise RuntimeError("something else broke")
    assert not _alive(pid)


def test_a_stopped_child_can_be_ended(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("sleeper", SLEEPER)
        child.send_signal(signal.SIGSTOP)
    assert not _alive(child.pid)


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = Child("deaf", DEAF, log=tmp_path / "deaf.log")
    assert _text(child) == "deaf"
    child.stop(grace_s=0.2)
    assert child.exit_code == -signal.SIGKILL


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        grandchild = int(_text(children.start("family", FAMILY)))
        assert _alive(grandchild)
    _gone(grandchild)


def test_a_kill_leaves_nothing_of_the_group(tmp_path: Path) -> None:
    child = Child("family", FAMILY, log=tmp_path / "family.log")
    grandchild = int(_text(child))
    child.kill_at_once()
    assert child.exit_code == -signal.SIGKILL
    _gone(grandchild)


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    child = Child("sleeper", SLEEPER, log=tmp_path / "sleeper.log")
    child.stop()
    child.stop()
    assert child.exited()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("prelude", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path, prelude: str, stopped: bool) -> None:
    """Also one whose whole group is stopped, as a slow engine's is."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvferry.demo.processes import Children\n"
        f"source = 'import signal, time; {prelude}print(1, flush=True); time.sleep(600)'\n"
        "command = [sys.executable, '-I', '-S', '-c', source]\n"
        "child = Children(Path(sys.argv[1])).start('sleeper', command)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            # It must have become the command: before that, the kernel has not been asked yet.
            log = tmp_path / "sleeper.log"
            wait_until(lambda: log.read_text() != "", what="the command", timeout_s=WAIT_S)
            if stopped:
                os.killpg(pid, signal.SIGSTOP)
        finally:
            parent.kill()
    _gone(pid)


def test_a_command_that_ends_leaves_no_guard_in_its_session(tmp_path: Path) -> None:
    child = Child("short", [sys.executable, "-I", "-S", "-c", "pass"], log=tmp_path / "short.log")
    wait_until(child.exited, what="its end", timeout_s=WAIT_S)
    # What has ended and is not reaped is a member of the session still.
    wait_until(lambda: _members(child.pid) == [child.pid], what="the guard's end", timeout_s=WAIT_S)
    child.stop()


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # no process, or it ended while we looked
        if len(fields) > 3 and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def test_a_signal_unwinds_the_contexts() -> None:
    with pytest.raises(StoppedError, match="SIGTERM"), stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WAIT_S)


def test_waiting_fails_at_once_when_the_process_is_gone_and_shows_its_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("short", [sys.executable, "-I", "-S", "-c", "print('no such model')"])
        with pytest.raises(RetryError, match="no such model"):
            wait_until(lambda: False, what="readiness", timeout_s=WAIT_S * 6, children=[child])


def test_waiting_is_bounded() -> None:
    with pytest.raises(RetryError, match="did not happen"):
        wait_until(lambda: False, what="the impossible", timeout_s=0.1)


def test_a_child_runs_on_the_cores_it_was_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    program = "import os; print(sorted(os.sched_getaffinity(0))[0], len(os.sched_getaffinity(0)), flush=True)"
    child = Child("pinned", [sys.executable, "-c", program], log=tmp_path / "log", cores=frozenset({core}))
    wait_until(lambda: bool(child.tail()), what="its line", timeout_s=WAIT_S)
    assert child.tail() == f"{core} 1"
    child.stop()
