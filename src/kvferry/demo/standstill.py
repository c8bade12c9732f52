"""A start that stands still: how it is noticed, and what is written down of it before it is ended.

An engine that starts beside one that serves may get no CPU (``docs/decisions/standing-starts.md``); the same
command started again comes up. What a supervisor does by a liveness probe, a fleet of ours does by this.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.demo.processes import POLL_S, Child

STILL_S = 60.0
"""A start says something every few seconds, on a busy machine within 45 s."""
STILL_CPU_S = 2.0
"""All of its processes in that time; one that only waits for its turn gets more."""
LOOK_S = 5.0
DUMP_S = 30.0  # for the stacks to be written
_PROC = Path("/proc")
_CPU_FIELDS = slice(11, 13)  # of ``stat``, behind the name: user and system time in ticks
_GROUP_FIELD = 2


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    log_bytes: int
    cpu_s: float


class Watch:
    """On one child that is starting. Asked again and again; the clock is monotonic seconds."""

    def __init__(self, child: Child, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.child = child
        self._clock = clock
        self._next = 0.0
        self._mark = self._look()

    def stands_still(self) -> bool:
        """Whether its log did not grow for STILL_S, in which all of its processes did next to nothing."""
        if self._clock() < self._next:
            return False
        now = self._look()
        if now.log_bytes != self._mark.log_bytes or abs(now.cpu_s - self._mark.cpu_s) > STILL_CPU_S:
            self._mark = now
        return now.at - self._mark.at >= STILL_S

    def _look(self) -> _Mark:
        self._next = self._clock() + LOOK_S
        size = 0
        with contextlib.suppress(OSError):
            size = self.child.log.stat().st_size
        return _Mark(self._clock(), size, sum(_cpu_s(process) for process in _group(self.child.pid)))


def note_and_end(child: Child) -> None:
    """Append to its log where every thread is, by the kernel and by Python; then end all of it.

    Python tells its stacks on SIGABRT to processes that were started with ``PYTHONFAULTHANDLER``.
    """
    with child.log.open("a", encoding="utf-8") as log:
        log.write("\n--- it stands still; where its threads are:\n")
        log.writelines(f"{line}\n" for line in whereabouts(child.pid))
    for process in _group(child.pid):
        with contextlib.suppress(OSError):
            os.kill(int(process.name), signal.SIGABRT)
    deadline = time.monotonic() + DUMP_S
    while any(_fields(process)[:1] != ["Z"] for process in _group(child.pid)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    child.kill_at_once()


def whereabouts(group: int) -> Iterator[str]:
    """A line for every process of a process group and every thread: state, CPU, and what it waits in."""
    for process in _group(group):
        command = _read(process / "cmdline").replace("\0", " ").strip()
        yield f"process {process.name}, {_cpu_s(process):.1f} s of CPU: {command[:160]}"
        for thread in sorted(process.glob("task/*")):
            state = _fields(thread)[:1] or ["?"]
            waits = _read(thread / "wchan").strip("0\n") or "-"
            call = _read(thread / "syscall").split()[:3]
            yield f"  {thread.name} {_read(thread / 'comm').strip()}: {state[0]}, {waits}, {' '.join(call)}"


def _group(group: int) -> list[Path]:
    found: list[Path] = []
    for process in _PROC.glob("[0-9]*"):
        fields = _fields(process)
        if len(fields) > _GROUP_FIELD and fields[_GROUP_FIELD] == str(group):
            found.append(process)
    return found


def _cpu_s(process: Path) -> float:
    return sum(int(ticks) for ticks in _fields(process)[_CPU_FIELDS]) / os.sysconf("SC_CLK_TCK")


def _fields(place: Path) -> list[str]:
    """Of its ``stat``, from the state on; empty when it is gone."""
    return _read(place / "stat").rpartition(")")[2].split()


def _read(path: Path) -> str:
    """Empty when it is gone, or not for us."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
