"""The thread on which all requests of a tier run, as tasks of one event loop; nothing there may block."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger("kvferry.tiers.objects")

_T = TypeVar("_T")


class Engine:
    """Starts at once. ``close`` ends every task at its next await."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvferry-objects-requests", daemon=True)
        self._thread.start()

    def call(self, what: Callable[..., object], *arguments: object) -> bool:
        """Have it called on the thread, soon. False once the engine is closed."""
        with self._lock:
            if self._closed:
                return False
            self.loop.call_soon_threadsafe(what, *arguments)
            return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task. On the engine's thread. Nothing begins any more once the engine is closed."""
        if self._closed:
            work.close()
            return
        task = self.loop.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Begin a task from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel every task, let them end, join the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("a task of the objects tier failed")

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()
