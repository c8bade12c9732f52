"""Makes an arena's memory ready in the background: faulted in, and in huge pages where the kernel can.

Population never changes contents, so it runs while the arena is in use. What the kernel refuses is
counted and left as it is: small pages, or pages that are faulted in on first use.
"""

import errno
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvferry.errors import ClosedError, MisconfiguredError
from kvferry.pool import pages
from kvferry.pool.arena import ArenaMapping

# A step holds the process's memory lock: whoever faults or maps meanwhile, the node's loop above all, waits
# until it ends. One huge page at a time costs no more in total than 64 MiB at once, which stalled lookups.
STEP_BYTES = pages.HUGE_BYTES
DUTY = 0.5  # share of one core at most
MAX_COLLAPSE_REFUSALS = 4


@dataclass(frozen=True, slots=True)
class PreparationStatistics:
    """populated_bytes: faulted in. huge_bytes: of those, in huge pages. refused: cause -> steps.

    done: whether the thread has nothing left to do.
    """

    populated_bytes: int
    huge_bytes: int
    refused: dict[str, int]
    done: bool


class PrepareThread:
    """Populates and collapses ``arena`` in steps, from its start on, on one background thread."""

    def __init__(self, arena: ArenaMapping, *, step_bytes: int = STEP_BYTES, duty: float = DUTY) -> None:
        """step_bytes: a multiple of 2 MiB. duty: share of the time it may be busy, up to 1."""
        if step_bytes <= 0 or step_bytes % pages.HUGE_BYTES or not 0 < duty <= 1:
            raise MisconfiguredError(f"steps of {step_bytes} bytes at duty {duty}: use 2 MiB, 0 to 1")
        self._arena = arena
        self._step_bytes = step_bytes
        self._duty = duty
        self._populated_bytes = 0
        self._huge_bytes = 0
        self._refused: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvferry-prepare", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def statistics(self) -> PreparationStatistics:
        """A snapshot."""
        started = self._thread.ident is not None
        return PreparationStatistics(
            populated_bytes=self._populated_bytes,
            huge_bytes=self._huge_bytes,
            refused=dict(self._refused),
            done=started and not self._thread.is_alive(),
        )

    def join(self, timeout_s: float) -> bool:
        """Wait until all is prepared; False when it takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop after the step in progress (a fraction of a second) and join. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            hold = self._arena.view(0, self._arena.nbytes)  # keeps the memory mapped while we advise on it
        except ClosedError:
            return
        try:
            code = pages.advise(self._arena.address, self._arena.nbytes, pages.MADV_HUGEPAGE)
            self._refused_by("hugepage", code)
            for offset in range(0, self._arena.nbytes, self._step_bytes):
                started = time.monotonic()
                if self._stop.is_set() or not self._step(offset):
                    return
                busy = time.monotonic() - started
                self._stop.wait(busy * (1 / self._duty - 1))
        finally:
            hold.release()

    def _step(self, offset: int) -> bool:
        """Prepare one step; False when there is no use in going on."""
        address = self._arena.address + offset
        nbytes = min(self._step_bytes, self._arena.nbytes - offset)
        if code := pages.advise(address, nbytes, pages.MADV_POPULATE_WRITE):
            self._refused_by("populate", code)
            return code != errno.EINVAL  # EINVAL: a kernel before 5.14
        self._populated_bytes += nbytes
        if self._refused["collapse"] < MAX_COLLAPSE_REFUSALS or self._huge_bytes:
            code = pages.advise(address, nbytes, pages.MADV_COLLAPSE)
            self._refused_by("collapse", code)
            self._huge_bytes += 0 if code else nbytes
        return True

    def _refused_by(self, call: str, code: int) -> None:
        if code:
            self._refused[call] += 1
            self._refused[f"{call}: {errno.errorcode.get(code, str(code))}"] += 1
