"""The pool's memory: one sealed memfd, mapped at 2 MiB alignment by the node and by every engine process.

There is no name in /dev/shm, so nothing is left behind whoever dies, and the seals keep anyone who holds
the descriptor from resizing it. Core dumps leave it out, of the node as of engines: it holds users' prompts.
``view`` gives writable memory without copying. ``close`` drops the mapping's own hold; the pages are unmapped
when the last view given out is gone, so a view never dangles.
"""

import contextlib
import ctypes
import fcntl
import os
import weakref

from kvferry.errors import ClosedError, MisconfiguredError, RefusedError
from kvferry.pool import pages
from kvferry.pool.memory import available_bytes

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RESERVE_BYTES = 256 << 20  # left to the rest of the machine


class ArenaMapping:
    """An arena mapped into this process. Views may outlive it; the descriptor stays the caller's."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map ``nbytes`` bytes of ``fd``; used through ``attach`` and ``Arena.create``."""
        self.nbytes = nbytes
        self.address = pages.map_shared(fd, nbytes)
        pages.advise(self.address, nbytes, pages.MADV_DONTDUMP)  # where the kernel has none, nothing is lost
        whole = (ctypes.c_char * nbytes).from_address(self.address)
        # Every view keeps `whole` alive, so its end is the moment when no view is left.
        self._unmap = weakref.finalize(whole, pages.unmap, self.address, nbytes)
        self._unmap.atexit = False
        self._memory: memoryview | None = memoryview(whole).cast("B")

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> "ArenaMapping":
        """Map an arena received from the node. ``fd`` may be closed afterwards.

        Raises RefusedError when it is not a sealed memfd of exactly that size.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            actual = os.fstat(fd).st_size
        except OSError as error:
            raise RefusedError(f"descriptor {fd} is not a pool: {error}") from error
        if seals & SEALS != SEALS or actual != nbytes or nbytes % pages.HUGE_BYTES:
            raise RefusedError(
                f"pool of {actual} bytes with seals {seals:#x}: expected {nbytes} bytes and seals {SEALS:#x}"
            )
        return cls(fd, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes [offset, offset + nbytes). Raises ClosedError after close, RefusedError outside."""
        memory = self._memory
        if memory is None:
            raise ClosedError("the pool's mapping is closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise RefusedError(f"bytes {offset}+{nbytes} are outside the pool of {self.nbytes} bytes")
        return memory[offset : offset + nbytes]

    @property
    def closed(self) -> bool:
        return self._memory is None

    @property
    def mapped(self) -> bool:
        """Whether the pages are still mapped; after ``close``, whether a view is still in use."""
        return self._unmap.alive

    def close(self) -> None:
        """Give out no more views; unmap now, or when the last view is gone. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()


class Arena(ArenaMapping):
    """The node's own mapping, with the descriptor to hand to clients."""

    def __init__(self, fd: int, nbytes: int) -> None:
        super().__init__(fd, nbytes)
        self.fd = fd

    @classmethod
    def create(cls, nbytes: int, *, name: str = "kvferry-pool") -> "Arena":
        """Make an arena of ``nbytes`` bytes, rounded up to 2 MiB. Its pages are not touched yet.

        Raises MisconfiguredError, before anything is allocated, when the machine or the control group
        does not have that much memory available.
        """
        if nbytes <= 0:
            raise MisconfiguredError(f"pool of {nbytes} bytes: must be positive")
        nbytes = -(-nbytes // pages.HUGE_BYTES) * pages.HUGE_BYTES
        available = available_bytes()
        if available is not None and nbytes > available - RESERVE_BYTES:
            raise MisconfiguredError(
                f"pool of {nbytes >> 20} MiB is more than the memory available here ({available >> 20} MiB, "
                f"of which {RESERVE_BYTES >> 20} MiB are left free); make the pool smaller"
            )
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise MisconfiguredError(f"no shared memory for the pool: {error}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            except OSError as error:
                raise MisconfiguredError(f"pool of {nbytes} bytes cannot be set up: {error}") from error
            arena = cls(fd, nbytes)
            undo.pop_all()
        return arena

    def close(self) -> None:
        """Also closes the descriptor. The memory returns when no process maps it any more."""
        if not self.closed:
            os.close(self.fd)
        super().close()
