"""What this process holds of the system: threads, descriptors, child processes, shared memory."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 30.0
"""How long something that is ending (a thread joined elsewhere, a child being reaped) may take to be gone."""

_POLL_S = 0.02
# Opened once by the interpreter or the C library and kept.
_KEPT = ("/dev/null", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Census:
    """A snapshot. descriptors: what each points to. shared_memory: names under /dev/shm."""

    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]
    children: frozenset[int]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> "Census":
        """Taken now. Linux only."""
        return cls(frozenset(threading.enumerate()), _descriptors(), _children(), _shared_memory())

    def beyond(self, before: "Census") -> list[str]:
        """What this one has that ``before`` had not, in words.

        Of shared memory only what carries this project's name: other programs use /dev/shm too.
        """
        more = [f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()]
        more += [
            f"descriptor {fd} -> {target}"
            for fd, target in self.descriptors.items()
            if before.descriptors.get(fd) != target and not target.startswith(_KEPT)
        ]
        more += [f"child process {pid}" for pid in self.children - before.children]
        more += [
            f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory if "kvferry" in name
        ]
        return sorted(more)


def left_since(before: Census, *, settle_s: float | None = None) -> list[str]:
    """What is there beyond ``before``, after what is ending had time to end; empty when nothing is.

    settle_s: how long that may take, SETTLE_S if not given.
    """
    give_up = time.monotonic() + (SETTLE_S if settle_s is None else settle_s)
    while leaked := Census.now().beyond(before):
        if time.monotonic() >= give_up:
            return leaked
        gc.collect()
        time.sleep(_POLL_S)
    return []


@contextlib.contextmanager
def leaves_nothing(*, settle_s: float | None = None) -> Iterator[None]:
    """AssertionError, naming each, when the body leaves a thread, descriptor, child or shared memory behind.

    settle_s: as above. An exception of the body passes unchecked.
    """
    before = Census.now()
    yield
    leaked = left_since(before, settle_s=settle_s)
    if leaked:
        raise AssertionError("left behind: " + ", ".join(leaked))


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> frozenset[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(word) for word in (task / "children").read_text().split())
        except OSError:
            continue  # a thread that ended meanwhile
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return frozenset()
