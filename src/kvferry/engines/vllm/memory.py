"""What a worker asks of the operating system: cores for its copying threads, huge pages for CPU KV."""

import contextlib
import ctypes
import logging
import os
import threading

_log = logging.getLogger("vllm.kvferry")

HUGE_PAGE_BYTES = 2 << 20
STEP_BYTES = 64 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_SAVER_NICENESS = 5


def copying_cores() -> frozenset[int]:
    """The cores that copying threads may use: the worker's own and those its parent process has.

    An engine pins its worker's threads to compute cores; a copy there would compete with the forward
    pass. The parent is not pinned, and whoever limits the whole engine limits it too.
    """
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return frozenset(cores)


def place_thread(cores: frozenset[int], *, background: bool) -> None:
    """Give the calling thread these cores; a background thread also yields to the engine's own work."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _log.debug("kvferry: copying thread keeps its cores: %s", error)
    if background:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SAVER_NICENESS)
        except OSError as error:
            _log.debug("kvferry: saving thread keeps its priority: %s", error)


class HugePages:
    """Turns a range of private memory into huge pages, in the background. Contents stay as they are."""

    def __init__(self, address: int, nbytes: int, *, cores: frozenset[int]) -> None:
        self._start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._stop = (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._cores = cores
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pages", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        place_thread(self._cores, background=True)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(self._start, self._stop, STEP_BYTES):
            length = min(STEP_BYTES, self._stop - at)
            for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE):
                if self._closing.is_set():
                    return
                if madvise(at, length, advice) != 0 and advice != _MADV_HUGEPAGE:
                    _log.debug("kvferry: madvise(%d): %s", advice, os.strerror(ctypes.get_errno()))

    def wait(self, timeout_s: float) -> bool:
        """Whether all of it is done within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop early; joins the thread. Must run before the memory is unmapped."""
        self._closing.set()
        self._thread.join()
