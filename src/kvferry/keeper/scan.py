"""Looks through all of Valkey, slowly: for what was used and nobody told of, and to drop what should go.

One thread on connections of its own. It asks for a page of keys, then rests for many times as long as the
answers took: however busy the server is, this takes a small share of it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvferry.addresses import Address
from kvferry.errors import KvferryError
from kvferry.identity.names import PartRef
from kvferry.keeper.sharers import Sharers
from kvferry.keeper.sightings import Sightings
from kvferry.keeper.statistics import ScanStatistics
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.valkey.keyspace import Keyspace, NoIdleTimesError, Shelf, StoredKey, parse_key

log = logging.getLogger("kvferry.keeper")

MAX_DROPS = 16
DROP_PAGE_KEYS = 500
DROP_SHARE = 0.5
MAX_TRIES = 3
LIVES = 3
MIN_LIFE_S = 120.0
SAY_S = 30.0
JOIN_S = 10.0
NOBODY = "no server of Valkey has answered yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSettings:
    """every_s: from the beginning of a pass to that of the next, at least. page_keys: asked for at a time.

    page_s: so often a page is asked for at most. share: of the time spent asking, at most. max_keys:
    remembered from one pass to the next. name: of this keeper. keepers: all that share the work, by name;
    empty: it is alone.
    """

    every_s: float = 300.0
    page_keys: int = 100
    page_s: float = 0.05
    share: float = 0.02
    max_keys: int = 1 << 18
    name: str = ""
    keepers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Drop:
    namespace: bytes | None
    older_than_s: float | None
    done: Callable[[Dropped], None]


class _StoppedError(Exception):
    """The scan closes."""


class Scanner:
    """found: hears of parts that were used between two passes, on the scan's thread."""

    def __init__(
        self,
        keyspace: Keyspace,
        *,
        settings: ScanSettings,
        found: Callable[[Sequence[PartRef]], None],
    ) -> None:
        self._keyspace = keyspace
        self._settings = settings
        self._found = found
        self._sightings = Sightings(max_keys=settings.max_keys)
        self._sharers = Sharers(settings.name, settings.keepers)
        self._say_at = 0.0
        self._counting: set[Address] = set()  # servers that count uses in place of idle times
        self._lock = threading.Condition()
        self._drops: deque[_Drop] = deque()
        self._closed = False
        self._shelf: Shelf | None = None
        self._statistics = ScanStatistics()
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper-scan", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @property
    def statistics(self) -> ScanStatistics:
        """So far."""
        return self._statistics

    def drop(
        self, *, namespace: bytes | None, older_than_s: float | None, done: Callable[[Dropped], None]
    ) -> None:
        """See ``contract.Droppable``; what Valkey holds is found until it is reached."""
        with self._lock:
            refused = self._closed or len(self._drops) >= MAX_DROPS
            if not refused:
                self._drops.append(_Drop(namespace, older_than_s, done))
                self._lock.notify_all()
        if refused:
            done(Dropped(0, 0, Outcome.REFUSED))

    def close(self) -> None:
        """End soon. Drops that are left end as LATE."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            shelf = self._shelf
        if shelf is not None:
            shelf.abort()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        for drop in self._drops:
            drop.done(Dropped(0, 0, Outcome.LATE))
        self._drops.clear()

    # ---- its thread

    def _run(self) -> None:
        next_pass = time.monotonic()
        while not self._closed:
            try:
                if self._rest(next_pass - time.monotonic()):
                    self._dropped()
                    continue
                next_pass = time.monotonic() + self._settings.every_s
                self._pass()
            except _StoppedError:
                return
            except Exception as error:
                log.error("a defect in the scan of Valkey; it goes on later", exc_info=error)
                self._note(error=f"defect: {error}")

    def _rest(self, seconds: float) -> bool:
        """Wait so long; True as soon as there is something to drop. Raises _StoppedError."""
        until = time.monotonic() + seconds
        with self._lock:
            while not self._closed and not self._drops and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._closed:
                raise _StoppedError
            return bool(self._drops)

    def _pass(self) -> None:
        began = time.monotonic()
        servers = self._keyspace.servers()
        error = "" if servers else NOBODY
        for server in servers:
            self._say_at = 0.0
            page = partial(self._scan_page, server)
            error = self._look_through(server, page, share=self._settings.share, say=self._here) or error
        self._sightings.end_pass()
        if not error:
            self._sharers.end_pass()
        passes = self._statistics.passes + 1
        self._note(passes=passes, last_pass_s=time.monotonic() - began, error=error)

    def _look_through(
        self,
        server: Address,
        page: Callable[[Shelf, list[StoredKey]], None],
        *,
        share: float,
        count: int = 0,
        namespace: bytes | None = None,
        say: Callable[[Shelf], None] | None = None,
    ) -> str:
        """Every key of one server. say: to it, before each page. Returns what went wrong, if anything did."""
        cursor, tries = b"0", 0
        count = count or self._settings.page_keys
        try:
            while True:
                asked = time.monotonic()
                try:
                    shelf = self._opened(server)
                    if say is not None:
                        say(shelf)
                    following, names = shelf.page(cursor, count=count, namespace=namespace)
                    self._sharers.saw(names)
                    page(shelf, [key for key in map(parse_key, names) if key is not None])
                except KvferryError as error:
                    self._close_shelf()
                    tries += 1
                    if tries >= MAX_TRIES or self._closed:
                        return f"{server}: {error}"
                else:
                    cursor, tries = following, 0
                    if cursor == b"0":
                        return ""
                self._pause(time.monotonic() - asked, share)
        finally:
            self._close_shelf()

    def _pause(self, took_s: float, share: float) -> None:
        rest_s = took_s * (1 / share - 1)
        if share >= DROP_SHARE:
            with self._lock:
                if not self._closed:
                    self._lock.wait(min(rest_s, 1.0))
            if self._closed:
                raise _StoppedError
        elif self._rest(max(rest_s, self._settings.page_s)):
            self._close_shelf()
            self._dropped()

    def _opened(self, server: Address) -> Shelf:
        """The connection that there is, or a new one."""
        shelf = self._shelf
        if shelf is None:
            shelf = self._keyspace.open(server)
            with self._lock:
                self._shelf = shelf
        return shelf

    def _close_shelf(self) -> None:
        with self._lock:
            shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()

    def _here(self, shelf: Shelf) -> None:
        """For the other keepers, longer than this pass and two more should take."""
        now, settings = time.monotonic(), self._settings
        if settings.keepers and now >= self._say_at:
            self._say_at = now + SAY_S
            life_s = LIVES * (settings.every_s + self._statistics.last_pass_s)
            shelf.is_here(settings.name, life_s=max(life_s, MIN_LIFE_S))

    def _scan_page(self, server: Address, shelf: Shelf, keys: list[StoredKey]) -> None:
        """Of each part its first stripe tells."""
        self._note(keys=self._statistics.keys + len(keys))
        names = [
            key.name
            for key in keys
            if key.stripe == 0 and self._sightings.wanted(key.name) and self._sharers.owns(key.part.chunk)
        ]
        used = self._used(server, shelf, names)
        found = [ref for ref in shelf.parts(used) if ref is not None]
        if server not in self._counting:
            for name in used:
                self._sightings.looked_into(name, time.monotonic())
        if found:
            self._note(found_parts=self._statistics.found_parts + len(found))
            self._found(found)

    def _used(self, server: Address, shelf: Shelf, names: list[bytes]) -> list[bytes]:
        """Those that were, since the pass before."""
        try:
            asked = time.monotonic()
            idle = zip(names, shelf.idle_s(names), strict=True)
            told = time.monotonic()
        except NoIdleTimesError:
            self._counts(server, counting=True)
            counts = zip(names, shelf.frequencies(names), strict=True)
            return [
                name for name, count in counts if count is not None and self._sightings.counted(name, count)
            ]
        if names:
            self._counts(server, counting=False)
        return [
            name
            for name, idle_s in idle
            if idle_s is not None and self._sightings.saw(name, asked - idle_s, told - idle_s)
        ]

    def _counts(self, server: Address, *, counting: bool) -> None:
        """Its policy may be another than before."""
        if counting != (server in self._counting):
            self._counting ^= {server}
            self._sightings.forget()

    def _note(self, **changes: object) -> None:
        self._statistics = replace(self._statistics, **changes)  # type: ignore[arg-type]

    # ---- drops

    def _dropped(self) -> None:
        """Everything that waits to be dropped."""
        while True:
            with self._lock:
                if not self._drops:
                    return
                drop = self._drops.popleft()
            self._drop(drop)

    def _drop(self, drop: _Drop) -> None:
        parts = nbytes = 0

        def page(shelf: Shelf, keys: list[StoredKey]) -> None:
            nonlocal parts, nbytes
            if drop.older_than_s is not None:
                idle = zip(keys, shelf.idle_s([key.name for key in keys]), strict=True)
                keys = [key for key, idle_s in idle if idle_s is not None and idle_s >= drop.older_than_s]
            refs = [
                ref for ref in shelf.parts([key.name for key in keys if key.stripe == 0]) if ref is not None
            ]
            shelf.unlink([key.name for key in keys])
            parts += len(refs)
            nbytes += sum(ref.nbytes for ref in refs)

        outcome = Outcome.LATE
        try:
            failures = [
                self._look_through(
                    server, page, share=DROP_SHARE, count=DROP_PAGE_KEYS, namespace=drop.namespace
                )
                for server in self._keyspace.servers()
            ] or [NOBODY]
            for failure in filter(None, failures):
                log.warning("a drop in Valkey did not reach everything: %s", failure)
            outcome = Outcome.FAILED if any(failures) else Outcome.OK
        finally:
            drop.done(Dropped(parts, nbytes, outcome))
