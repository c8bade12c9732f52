"""What the tier's threads read and write at this moment, and whether that takes too long. Pure but for the
clock; used under the tier's lock."""

import enum
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvferry.tiers.disk.settings import DiskSettings

SLOW_BYTES_PER_S = 16 << 20


class Hand(enum.Enum):
    """Which of the tier's threads moves something."""

    READER = "reader"
    WRITER = "writer"
    JANITOR = "janitor"


@dataclass(slots=True)
class Move:
    """ready: when a slow disk would be; infinite: it is known to hang."""

    hand: Hand
    ready: float


class Moving:
    """One move at most per thread."""

    def __init__(self, settings: DiskSettings) -> None:
        self._settings = settings
        self._moves: dict[int, Move] = {}  # by thread

    def __bool__(self) -> bool:
        return bool(self._moves)

    def begin(self, nbytes: int, hand: Hand) -> None:
        """By this thread."""
        self._moves[threading.get_ident()] = Move(hand, time.monotonic() + nbytes / SLOW_BYTES_PER_S)

    def end(self) -> None:
        """By this thread."""
        self._moves.pop(threading.get_ident(), None)

    def stalled(self, now: float) -> bool:
        """Whether one has become slower than any of a disk that is well."""
        slow = [move for move in self._moves.values() if now - move.ready > self._settings.stall_s]
        for move in slow:
            move.ready = math.inf  # told once
        return bool(slow)

    def hangs(self) -> bool:
        """Whether all that read, or all that write, are known to wait in vain: a disk of which a block can
        be read and written is of no use then."""
        waiting = Counter(move.hand for move in self._moves.values() if move.ready == math.inf)
        settings = self._settings
        return waiting[Hand.READER] >= settings.readers or waiting[Hand.WRITER] >= settings.writers
