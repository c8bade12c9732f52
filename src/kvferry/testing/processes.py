"""Starts a command, waits until it is ready, stops, kills and restarts it, and always reaps it.

with Program("node", command, directory=tmp_path, ready=socket.exists) as node:
    node.pause()
    node.resume()
    node.kill()
    node.start()
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvferry.client.admin import AdminClient
from kvferry.demo.processes import STOP_GRACE_S, Child, wait_until
from kvferry.errors import ClosedError, KvferryError, RefusedError, RetryError
from kvferry.testing.holdings import Holdings

START_S = 60.0
WAIT_S = 60.0
_POLL_S = 0.01


class Program:
    """One command that can be started again and again. Its log is ``NAME.log`` in ``directory``.

    ready: asked until it says yes. It leads a process group: whatever it started ends with it, and all of
    it ends when this process does, however that ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        ready: Callable[[], bool] = lambda: True,
        env: Mapping[str, str] | None = None,
        cores: frozenset[int] = frozenset(),
        start_s: float = START_S,
    ) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._command = tuple(command)
        self._ready = ready
        self._env = env
        self._cores = cores
        self._start_s = start_s
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended. A paused one runs."""
        return self._child is not None and not self._child.exited()

    @property
    def pid(self) -> int:
        """Its process id. ClosedError before the first start."""
        return self._started().pid

    @property
    def exit_code(self) -> int | None:
        """Of the last run, once it was reaped; negative for a signal."""
        return self._child.exit_code if self._child is not None else None

    def tail(self, lines: int = 12) -> str:
        """The end of its log."""
        return self._child.tail(lines) if self._child is not None else ""

    def start(self) -> Self:
        """Start it and wait until it is ready. It does not run yet.

        RetryError, with the end of its log, when it ends or is not ready in time; nothing of it is left.
        RefusedError outside the main thread: the kernel would end it together with the thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RefusedError(f"{self.name} must be started from the main thread")
        if self.running:
            raise RefusedError(f"{self.name} runs already (pid {self.pid}): kill or terminate it first")
        self.close()
        self._child = Child(self.name, self._command, log=self.log, env=self._env, cores=self._cores)
        try:
            self.wait_for(self._ready, what=f"{self.name} to be ready", timeout_s=self._start_s)
        except BaseException:
            self.close()
            raise
        return self

    def wait_for(self, done: Callable[[], bool], *, what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for something it does. RetryError, with the end of its log, when it ends or time is up."""
        child = self._started()
        try:
            wait_until(done, what=what, timeout_s=timeout_s, children=[child], poll_s=_POLL_S)
        except RetryError as error:
            tail = child.tail()
            if tail and tail not in str(error):
                raise RetryError(f"{error}\n{tail}") from error
            raise

    def pause(self) -> None:
        """SIGSTOP; returns once it stands still. Processes that it started go on."""
        child = self._started()
        child.send_signal(signal.SIGSTOP)
        self.wait_for(lambda: _state(child.pid) == "T", what=f"{self.name} to stand still")

    def resume(self) -> None:
        """SIGCONT. Harmless when it runs or has ended."""
        self._started().send_signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Any other signal."""
        self._started().send_signal(number)

    def kill(self) -> int:
        """SIGKILL, as a crash, for it and all that it started. Its exit code. Harmless when it has ended."""
        child = self._started()
        child.kill_at_once()
        return self._reaped(child)

    def terminate(self, *, grace_s: float = STOP_GRACE_S) -> int:
        """SIGTERM, and SIGKILL when it takes longer than ``grace_s``. Its exit code."""
        child = self._started()
        child.stop(grace_s=grace_s)
        return self._reaped(child)

    def restart(self) -> None:
        """Kill it if it runs, and start it again."""
        self.kill()
        self.start()

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait until it ends by itself. Its exit code. RetryError when it does not."""
        child = self._started()
        wait_until(child.exited, what=f"the end of {self.name}", timeout_s=timeout_s, poll_s=_POLL_S)
        return self.kill()  # reaps it, and ends what it left behind

    def close(self) -> None:
        """Kill it if it runs and reap it. Idempotent."""
        if self._child is not None:
            self._child.kill_at_once()

    def _started(self) -> Child:
        if self._child is None:
            raise ClosedError(f"{self.name} was never started")
        return self._child

    def _reaped(self, child: Child) -> int:
        code = child.exit_code
        if code is None:
            raise ClosedError(f"{self.name} was not reaped")
        return code


class NodeProgram(Program):
    """``kvferry node`` at a socket, with memory alone unless ``options`` say otherwise."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        socket: Path,
        directory: Path,
        pool: str = "64MiB",
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "node",
    ) -> None:
        """command: how to run kvferry, as ``[sys.executable, "-m", "kvferry"]``."""
        self.socket = socket
        whole = [*command, "node", "--socket", str(socket), "--pool", pool, "--metrics-port", "0", *options]
        super().__init__(name, whole, directory=directory, ready=self.answers, env=env or os.environ)

    def answers(self) -> bool:
        """Whether a client gets its statistics."""
        with contextlib.suppress(KvferryError, OSError):
            return bool(self.statistics())
        return False

    def statistics(self) -> dict[str, Any]:
        """What ``kvferry status --json`` prints."""
        with AdminClient(self.socket) as admin:
            return admin.status()

    def holdings(self) -> Holdings:
        """What it has given out and must get back."""
        return Holdings.of(self.statistics())


def _state(pid: int) -> str:
    """One letter of proc(5); X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "X"
