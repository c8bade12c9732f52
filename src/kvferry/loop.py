"""One thread that owns all of a process's state: sockets, timers, and calls posted by other threads.

Nothing in it blocks but the wait itself, whose timeout is computed from the next timer, so that an idle
node sleeps. Callbacks of tiers run on the tiers' threads and only ``post``.
"""

import contextlib
import heapq
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

MAX_POSTED_PER_TURN = 4096
MAX_DEFECTS_LOGGED = 10
MIN_TIMERS = 1024
"""Fewer are never looked through for cancelled ones."""

log = logging.getLogger("kvferry.loop")


class Watcher(Protocol):
    """Something with a socket."""

    def ready(self, events: int) -> None:
        """The socket is readable or writable (``selectors.EVENT_*``)."""

    def crashed(self) -> None:
        """``ready`` raised: a defect. Give up whatever this socket was for."""


class Timer:
    """A call at a time. ``cancel`` is cheap; a cancelled timer is dropped when its time comes, or before."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It will not be called any more. Idempotent."""
        self.call = None


class Loop:
    """Single-threaded but for ``post`` and ``stop``. ``after_turn`` runs once per wake-up, at its end."""

    def __init__(
        self, *, after_turn: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.defects = 0
        self._after_turn = after_turn
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_number = 0
        self._many_timers = MIN_TIMERS
        self._stopping = False
        self._awake = True  # while true, the loop looks at _posted before it sleeps

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the loop's thread, soon. Callable from any thread; never blocks."""
        self._posted.append(call)
        if not self._awake:
            self._signal()

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Run ``call`` at monotonic time ``when`` (loop thread only)."""
        timer = Timer(call)
        self._timer_number += 1
        if len(self._timers) >= self._many_timers:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._many_timers = max(MIN_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, self._timer_number, timer))
        return timer

    def watch(self, sock: socket.socket, events: int, watcher: Watcher) -> None:
        """Call ``watcher.ready`` when the socket is; replaces what was watched on it before."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, watcher)
        else:
            self._selector.register(sock, events, watcher)

    def unwatch(self, sock: socket.socket) -> None:
        """No more calls for this socket. Idempotent."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def stop(self) -> None:
        """``run`` returns after the current turn. Callable from any thread and from signal handlers."""
        self._stopping = True
        self._signal()

    def run(self) -> None:
        """Until ``stop``."""
        while not self._stopping:
            self.turn()

    def turn(self, most_s: float | None = None) -> None:
        """One wake-up: sleep until something is due, for ``most_s`` at most, and do all that is due."""
        self._awake = False  # before the look at what is posted: a post from here on must wake the selector
        timeout_s = self._timeout()
        if most_s is not None:
            timeout_s = most_s if timeout_s is None else min(timeout_s, most_s)
        ready = self._selector.select(timeout_s)
        self._awake = True
        for key, events in ready:
            if key.data is None:
                self._drain_signal()
            else:
                self._ready(key.data, events)
        self._run_posted()
        self._run_timers()
        self._guard(self._after_turn)

    def close(self) -> None:
        """After ``run`` has returned: run what is still posted, free the descriptors."""
        while self._posted:
            self._guard(self._posted.popleft())
        self._selector.close()
        os.close(self._wake)
        self._wake = -1

    def _signal(self) -> None:
        if self._wake < 0:
            return
        with contextlib.suppress(BlockingIOError):  # the counter is full: about to wake anyway
            os.eventfd_write(self._wake, 1)

    def _drain_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _timeout(self) -> float | None:
        if self._posted or self._stopping:
            return 0.0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - self.clock())

    def _run_posted(self) -> None:
        for _ in range(min(len(self._posted), MAX_POSTED_PER_TURN)):
            self._guard(self._posted.popleft())

    def _run_timers(self) -> None:
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                call, timer.call = timer.call, None
                self._guard(call)

    def _ready(self, watcher: Watcher, events: int) -> None:
        try:
            watcher.ready(events)
        except Exception as error:  # noqa: BLE001 (top of the driver)
            self._defect(error)
            self._guard(watcher.crashed)

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (top of the driver)
            self._defect(error)

    def _defect(self, error: Exception) -> None:
        self.defects += 1
        if self.defects <= MAX_DEFECTS_LOGGED:
            log.error("a defect in the loop; it goes on", exc_info=error)
