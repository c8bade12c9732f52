"""What this server has stored, and what LMCache has locked: for its accounting and its own eviction."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

MAX_KEYS = 1 << 20
"""Objects accounted for. Beyond, the oldest are forgotten: Valkey's own eviction looks after them."""
LOCK_S = 120.0
"""A lock not returned for so long is void: its request is gone."""
Key = TypeVar("Key", bound=Hashable)


class Change(NamedTuple, Generic[Key]):
    """keys and the bytes that each adds to or takes from the account."""

    keys: list[Key]
    sizes: list[int]


class Holdings(Generic[Key]):
    """Objects this server stored and has not seen gone, with their bytes. Used by any thread."""

    def __init__(self, limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._nbytes: OrderedDict[Key, int] = OrderedDict()

    def stored(self, keys: Sequence[Key], sizes: Sequence[int]) -> tuple[Change[Key], Change[Key]]:
        """What was added, an object stored again with 0 bytes; and what was forgotten for lack of room."""
        added: Change[Key] = Change(list(keys), [])
        forgotten: Change[Key] = Change([], [])
        with self._lock:
            for key, nbytes in zip(keys, sizes, strict=True):
                added.sizes.append(0 if key in self._nbytes else nbytes)
                self._nbytes[key] = nbytes
                self._nbytes.move_to_end(key)
            while len(self._nbytes) > self._limit:
                key, nbytes = self._nbytes.popitem(last=False)
                forgotten.keys.append(key)
                forgotten.sizes.append(nbytes)
        return added, forgotten

    def gone(self, keys: Sequence[Key]) -> Change[Key]:
        """Those of ``keys`` that were accounted for, and are no longer."""
        change: Change[Key] = Change([], [])
        with self._lock:
            for key in keys:
                nbytes = self._nbytes.pop(key, None)
                if nbytes is not None:
                    change.keys.append(key)
                    change.sizes.append(nbytes)
        return change

    def nbytes(self, key: Key) -> int | None:
        """Size of an object that is accounted for."""
        with self._lock:
            return self._nbytes.get(key)


class Locks(Generic[Key]):
    """How often each object is locked. Used by any thread. Times are monotonic seconds."""

    def __init__(self, limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, tuple[int, float]] = OrderedDict()  # least recently locked first

    def lock(self, keys: Sequence[Key], now: float) -> None:
        """Once more for each of ``keys``."""
        with self._lock:
            for key in keys:
                count, _ = self._held.get(key, (0, 0.0))
                self._held[key] = (count + 1, now + LOCK_S)
                self._held.move_to_end(key)
            while self._held:
                _, (_, until) = oldest = next(iter(self._held.items()))
                if until > now and len(self._held) <= self._limit:
                    break
                del self._held[oldest[0]]

    def unlock(self, keys: Sequence[Key]) -> None:
        """Once less for each; what is not locked stays so."""
        with self._lock:
            for key in keys:
                count, until = self._held.get(key, (0, 0.0))
                if count > 1:
                    self._held[key] = (count - 1, until)
                else:
                    self._held.pop(key, None)

    def locked(self, key: Key, now: float) -> bool:
        """Whether somebody is about to load it."""
        with self._lock:
            count, until = self._held.get(key, (0, 0.0))
        return count > 0 and now < until
