"""Locks that a fork's child finds free, around books that are whole: they are held while a process forks."""

import os
import threading
import weakref
from typing import Any

_registry = threading.Lock()
_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
_held: list[Any] = []


def fork_safe_lock() -> "threading.RLock":
    """A lock for what calls in a fork's child may look at. Holders keep it for moments only."""
    lock = threading.RLock()
    with _registry:
        _locks.add(lock)
    return lock


def _hold() -> None:
    _registry.acquire()
    for lock in sorted(_locks, key=id):  # two threads that fork take them in the same order
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()
    _registry.release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
