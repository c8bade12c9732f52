"""Child processes that cannot outlive the one that started them.

Each child leads a process group of its own, so that a terminal's Ctrl-C reaches only us and a stop
reaches everything the child started. The kernel tells a child when its parent dies (Linux). Children
must be started from the main thread: the kernel's parent-death signal follows the starting *thread*.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from kvferry.errors import ClosedError, RetryError

STOP_GRACE_S = 10.0
POLL_S = 0.05
LOG_TAIL_LINES = 12
EXIT_INTERRUPTED = 130  # of a command that ends with ``StoppedError``


class StoppedError(ClosedError):
    """The person, or the system, asked the whole run to stop."""


_BOUND = str(Path(__file__).with_name("bound.py"))


def _bound(command: Sequence[str], cores: frozenset[int]) -> list[str]:
    """The command line that ends with us."""
    pinned = ",".join(str(core) for core in sorted(cores)) or "-"
    return [sys.executable, "-I", "-S", _BOUND, str(os.getpid()), pinned, *command]


class Child:
    """One running command, its log file, and how to end it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        """Start ``command``. Raises OSError when it cannot be executed."""
        self.name = name
        self.log = log
        self.command = tuple(command)
        with log.open("ab") as sink:
            self._popen = subprocess.Popen(
                _bound(command, cores),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id; also its process group's."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code once it was stopped or reaped; negative for a signal."""
        return self._popen.returncode

    def exited(self) -> bool:
        """Whether the process has ended. Does not reap it: its group id stays ours."""
        if self._popen.returncode is not None:
            return True
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return ended is not None

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, if it still runs."""
        if not self.exited():
            os.kill(self.pid, number)

    def kill_at_once(self) -> None:
        """SIGKILL the process as a crash would, and clear away what it leaves in its group."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM; also wakes a process that was stopped, which could not end otherwise."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, wait, then SIGKILL for the process and whatever is left in its group. Idempotent."""
        if self._popen.returncode is not None:
            return
        self.ask_to_stop()
        deadline = time.monotonic() + grace_s
        while not self.exited() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill_at_once()

    def _signal_group(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:  # not reaped: the group id cannot belong to anyone else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class Children:
    """Every process of one run. Leaving the context stops them all, newest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cores: frozenset[int] = frozenset(),
    ) -> Child:
        """Start a command whose log is ``NAME.log`` in the run directory."""
        log = self.directory / f"{name}.log"
        child = Child(name, command, log=log, env=env, cores=cores)
        self._running.append(child)
        return child

    def stop(self, child: Child) -> None:
        """Stop one of them."""
        child.stop()
        if child in self._running:
            self._running.remove(child)

    def stop_all(self) -> None:
        """Ask all to stop at once, then wait for each: the grace periods run side by side."""
        for child in reversed(self._running):
            child.ask_to_stop()
        deadline = time.monotonic() + STOP_GRACE_S
        while self._running:
            child = self._running[-1]
            child.stop(grace_s=max(0.0, deadline - time.monotonic()))
            self._running.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with _deaf_to_signals():
            self.stop_all()


def wait_until(
    ready: Callable[[], bool],
    *,
    what: str,
    timeout_s: float,
    children: Sequence[Child] = (),
    poll_s: float = POLL_S,
) -> float:
    """Poll until ``ready()``; returns the seconds it took.

    Raises RetryError when time is up, or at once when one of ``children`` has ended; the message
    carries the end of its log.
    """
    begun = time.monotonic()
    while True:
        if ready():
            return time.monotonic() - begun
        for child in children:
            if child.exited():
                raise RetryError(f"{child.name} ended while waiting for {what}; {child.log}:\n{child.tail()}")
        if time.monotonic() - begun > timeout_s:
            logs = ", ".join(str(child.log) for child in children)
            raise RetryError(
                f"{what} did not happen within {timeout_s:.0f} s" + (f"; see {logs}" if logs else "")
            )
        time.sleep(poll_s)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP become StoppedError in the main thread, so that contexts unwind."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedError(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """While stopping, a second Ctrl-C must not leave half of the processes behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
