"""Every test must leave the process as it found it: no thread, descriptor, child or shared memory more."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# How long something that is ending (a joined-elsewhere thread, a reaped child) may take to be gone.
SETTLE_S = 3.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start an engine run last: the quick ones should report first."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(word) for word in (task / "children").read_text().split())
        except OSError:
            continue  # a thread that ended meanwhile
    return found


def _shared_memory() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


class _Census:
    """What the process holds now."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.descriptors = _descriptors()
        self.children = _children()
        self.shared_memory = _shared_memory()

    def beyond(self, before: "_Census") -> list[str]:
        """What this census has that ``before`` had not, in words."""
        more = [f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()]
        more += [
            f"descriptor {fd} -> {target}"
            for fd, target in self.descriptors.items()
            if before.descriptors.get(fd) != target and not target.startswith(("/dev/null", "/dev/urandom"))
        ]
        more += [f"child process {pid}" for pid in self.children - before.children]
        more += [
            f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory if "kvferry" in name
        ]
        return more


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, descriptor, child process or shared-memory file behind."""
    before = _Census()
    yield
    if request.node.get_closest_marker("engine"):
        return  # an engine inside the process keeps its own threads; those tests check what is ours
    leaked = _Census().beyond(before)
    give_up = time.monotonic() + SETTLE_S
    while leaked and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.02)
        leaked = _Census().beyond(before)
    if leaked:
        pytest.fail("left behind: " + ", ".join(leaked))
