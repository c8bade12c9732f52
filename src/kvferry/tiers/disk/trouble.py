"""What is logged of a disk in trouble: once per episode, with what to do about it."""

import enum
import errno
import math
from pathlib import Path

EPISODE_S = 600.0
"""Trouble that comes again within so long belongs to the episode before: it is not told again."""


class Trouble(enum.Enum):
    """Kinds, each with what follows and what a person can do."""

    FAILS = (
        "is left out until it works again: see the kernel's log (dmesg) and the health of the disk (smartctl)"
    )
    READ_ONLY = (
        "is left out: the file system is read-only, as after errors; see dmesg, check it, and remount it rw"
    )
    HANGS = "is left out until it answers again: see dmesg, and who else keeps that disk busy"
    GONE = (
        "is left out: its files were deleted or unmounted while it ran, and what it stores would be lost; "
        "put the directory back as it was, or restart to begin with an empty one"
    )
    FULL = "stores nothing for now, and reads go on: free some room there, or give it a smaller size"
    CRAMPED = "goes on with the segments that it has: free some room there, or give it a smaller size"
    UNREADABLE = "lost a part to a bad read: see dmesg and the health of the disk (smartctl) if it goes on"


_OF_ERRNO = {
    errno.EROFS: Trouble.READ_ONLY,
    errno.ETIMEDOUT: Trouble.HANGS,
    errno.ENOENT: Trouble.GONE,
    errno.ESTALE: Trouble.GONE,
}


def trouble_of(error: OSError) -> Trouble:
    """Of a disk that is left out because of it."""
    return _OF_ERRNO.get(error.errno or 0, Trouble.FAILS)


class Episodes:
    """Used under the tier's lock. Times are monotonic seconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: dict[Trouble, float] = {}
        self._out = False

    def met(self, trouble: Trouble, error: OSError, now: float) -> str | None:
        """The line to be logged, at the beginning of an episode."""
        before, self._last[trouble] = self._last.get(trouble, -math.inf), now
        if now - before < EPISODE_S:
            return None
        return f"disk tier in {self._directory} {trouble.value} ({error.strerror or error})"

    def left_out(self, error: OSError, now: float) -> str | None:
        """As ``met``, of a disk that is not used until ``back``."""
        line = self.met(trouble_of(error), error, now)
        self._out |= line is not None
        return line

    def back(self) -> str | None:
        """The line that ends what ``left_out`` began."""
        out, self._out = self._out, False
        return f"disk tier in {self._directory} works again" if out else None
