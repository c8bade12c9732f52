"""What can go wrong on one direction of a connection, decided from byte counts and times alone.

No socket here: ``proxy`` reads, asks, waits and writes.
"""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import RefusedError

BURST_S = 0.02
"""How much time a rate limit may catch up: a machine that is busy elsewhere must not lower the rate."""


class Ending(Enum):
    """How a connection ends, as its two ends see it."""

    CLOSE = "close"  # both are told, in order
    RESET = "reset"  # both get a TCP reset
    VANISH = "vanish"  # the sender is gone and the receiver is not told: half open
    STALL = "stall"  # nobody is told; nothing more passes this way until ``Proxy.release``


@dataclass(frozen=True, slots=True)
class Cut:
    """``after_bytes`` bytes pass, then the connection ends as ``how`` says."""

    after_bytes: int
    how: Ending = Ending.CLOSE


@dataclass(frozen=True, slots=True)
class Corrupt:
    """``after_bytes`` bytes pass; each of the ``nbytes`` that follow arrives as another byte."""

    after_bytes: int
    nbytes: int = 1


@dataclass(frozen=True, slots=True)
class Insert:
    """``after_bytes`` bytes pass, then ``nbytes`` random ones that nobody sent, then the rest."""

    after_bytes: int
    nbytes: int = 16


Fault = Cut | Corrupt | Insert


class Armed:
    """A fault that waits for its byte. fired: how many times it has happened."""

    def __init__(self, fault: Fault) -> None:
        if fault.after_bytes < 0:
            raise RefusedError(f"a fault at byte {fault.after_bytes}: count from 0")
        self.fault = fault
        self.fired = 0


class Trigger:
    """Counts bytes towards one occurrence of a fault. Random bytes are a function of ``seed``."""

    def __init__(self, armed: Armed, *, seed: int) -> None:
        self._armed = armed
        self._random = random.Random(seed)
        self._left = armed.fault.after_bytes
        self._spoil = armed.fault.nbytes if isinstance(armed.fault, Corrupt) else 0
        self.over = False

    def feed(self, data: bytes) -> list[bytes | Ending]:
        """What arrives instead of ``data``. Nothing passes after an ending."""
        fault = self._armed.fault
        clean, rest = data[: self._left], data[self._left :]
        self._left -= len(clean)
        found: list[bytes | Ending] = [clean] if clean else []
        # A cut happens with the last byte that may pass; the others need a byte to happen to.
        if self._left or (not rest and not isinstance(fault, Cut)):
            return found
        if isinstance(fault, Cut):
            self._fire()
            return [*found, fault.how, rest] if rest and fault.how is Ending.STALL else [*found, fault.how]
        if isinstance(fault, Insert):
            self._fire()
            return [*found, self._random.randbytes(fault.nbytes), rest]
        spoiled = bytes(byte ^ self._random.randrange(1, 256) for byte in rest[: self._spoil])
        self._spoil -= len(spoiled)
        if not self._spoil:
            self._fire()
        kept = rest[len(spoiled) :]
        return [*found, spoiled, kept] if kept else [*found, spoiled]

    def _fire(self) -> None:
        self.over = True
        self._armed.fired += 1


class Way:
    """One direction of every connection through a proxy. Attributes may be changed at any time.

    latency_s: added to every byte. rate_bytes_s: shared by all connections; None for no limit.
    black_hole: bytes are taken and kept until it ends. close_delay_s: how much later an end of the stream
    is passed on. passed_bytes: forwarded since the start.
    """

    def __init__(self, *, seed: int) -> None:
        self.latency_s = 0.0
        self.rate_bytes_s: float | None = None
        self.black_hole = False
        self.close_delay_s = 0.0
        self.passed_bytes = 0
        self._seed = seed
        self._lock = threading.Lock()
        self._once: Trigger | None = None
        self._always: Armed | None = None
        self._free_at = 0.0

    def once(self, fault: Fault) -> Armed:
        """Let it happen one time, counting all connections' bytes from now on. Replaces the one before."""
        armed = Armed(fault)
        with self._lock:
            self._once = Trigger(armed, seed=self._next_seed())
        return armed

    def always(self, fault: Fault) -> Armed:
        """Let it happen to every connection made from now on, counted from its first byte."""
        armed = Armed(fault)
        with self._lock:
            self._always = armed
        return armed

    def heal(self) -> None:
        """As at the start: all passes at once. What was held back follows."""
        with self._lock:
            self._once = self._always = None
        self.latency_s = self.close_delay_s = 0.0
        self.rate_bytes_s = None
        self.black_hole = False

    # -- for the proxy -----------------------------------------------------------------------------

    def trigger(self) -> Trigger | None:
        """Of a new connection."""
        with self._lock:
            return Trigger(self._always, seed=self._next_seed()) if self._always else None

    def pieces(self, data: bytes, own: Trigger | None) -> Iterator[bytes | Ending]:
        """What becomes of these bytes. own: the connection's trigger."""
        for piece in own.feed(data) if own and not own.over else [data]:
            found = [piece] if isinstance(piece, Ending) else self._feed_once(piece)
            for part in found:
                yield part
                if isinstance(part, Ending) and part is not Ending.STALL:
                    return

    def _feed_once(self, data: bytes) -> list[bytes | Ending]:
        with self._lock:
            if self._once is None:
                return [data]
            found = self._once.feed(data)
            if self._once.over:
                self._once = None
            return found

    def reserve(self, nbytes: int, *, now: float) -> float:
        """When ``nbytes`` more may pass, seconds of the monotonic clock."""
        rate = self.rate_bytes_s
        if not rate:
            return now
        starts_at = max(now - BURST_S, self._free_at)
        self._free_at = starts_at + nbytes / rate
        return starts_at

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def soonest(*times: float | None) -> float | None:
    """Seconds from now until the first of these, at least 0; None when there is none."""
    known = [at for at in times if at is not None]
    return max(0.0, min(known) - time.monotonic()) if known else None
