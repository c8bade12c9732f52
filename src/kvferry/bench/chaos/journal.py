"""What engines tell the driver: one line of JSON per operation, appended to a file.

A file, because an engine that is killed cannot flush, and one that is stopped must not block anyone. A
line is written by one call; what a kill cut short is skipped.
"""

import enum
import os
from pathlib import Path

import msgspec

MAX_READ_BYTES = 4 << 20


class Kind(enum.StrEnum):
    """Operations, and what else an engine has to say."""

    LOOKUP = "lookup"
    LOAD = "load"
    RESERVE = "reserve"
    STORE = "store"
    CALL = "call"  # the slowest of a request's calls that must not wait
    WRONG = "wrong"  # bytes that passed every check and are not what they should be
    IDLE = "idle"  # paused, as it was told
    DEFECT = "defect"  # something that may not happen, in words


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """began: monotonic seconds. took_s and bound_s: of the answer; a bound of 0 where none is promised.

    lost_s: seconds of took_s in which the engine's process did not get to run. tier: the farthest tier
    that anything came from. chunks: loaded or stored. note: for people.
    """

    kind: Kind
    outcome: str = ""
    began: float = 0.0
    took_s: float = 0.0
    bound_s: float = 0.0
    lost_s: float = 0.0
    tier: str = ""
    chunks: int = 0
    pid: int = 0
    note: str = ""

    @property
    def late_s(self) -> float:
        """Seconds past its bound; 0 when in time or when nothing was promised."""
        return max(0.0, self.took_s - self.bound_s) if self.bound_s else 0.0


class JournalWriter:
    """Used by several threads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, b"\n")  # ends what a killed predecessor left unfinished

    def write(self, operation: Operation) -> None:
        """Append it."""
        os.write(self._fd, msgspec.json.encode(operation) + b"\n")

    def close(self) -> None:
        """Once."""
        os.close(self._fd)


class JournalReader:
    """Follows a file that grows, and may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.torn = 0

    def read(self) -> list[Operation]:
        """What has come since the last call, a bounded amount."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[Operation] = []
        for line in lines:
            if line:
                try:
                    found.append(msgspec.json.decode(line, type=Operation))
                except msgspec.MsgspecError:
                    self.torn += 1
        return found
