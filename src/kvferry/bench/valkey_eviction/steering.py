"""The ways to tell a server what may leave first: a policy of its own, and what is written to its keys.

A replay takes seconds for what took an hour, and the clock of Valkey's LRU ticks once a second. So nothing
here relies on the server's clock: ``RESTORE ... IDLETIME`` gives a key the last use it would have had in
real time, to the second as the server keeps it, and ``PXAT`` an expiry to the millisecond. What is sampled,
chosen and evicted then is the server's doing alone.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.tiers.valkey.lifetimes import PACE

LIFE_S = 30 * 86400.0
"""Of keys that have an expiry only to be ordered by it: long enough that none is ever reached."""


@dataclass(frozen=True, slots=True)
class Use:
    """A key is stored or used. at_s: since the trace's beginning.

    position: of its chunk in the prompt. rank: the same as far as the tier knows it: of what is stored the
        node says it, of what is used the tier counts what comes before it in the call.
    """

    at_s: float
    position: int
    rank: int
    stored: bool


@dataclass(frozen=True, slots=True)
class Beginning:
    """Of a replay. value: of every key; dump: the same as RESTORE takes it. end_s: of the trace.

    server_s, local_s: the same moment by the server's clock and by the monotonic one here.
    """

    value: bytes
    dump: bytes
    end_s: float
    server_s: float
    local_s: float


class Steering(Protocol):
    """One way: server options, and the command that stores or marks a key. Absent keys are not marked."""

    policy: str

    def begin(self, beginning: Beginning) -> None:
        """A replay begins."""

    def command(self, use: Use) -> tuple[bytes, ...]:
        """Words with ``KEY`` in place of the key."""
        ...

    def asks(self, at_s: float) -> bool:
        """Whether it wants to ``learn`` now."""
        ...

    def learn(self, expiries_ms: Sequence[int]) -> None:
        """When some of the keys expire, drawn at random."""


KEY = b"KEY"
ASK_S = 60.0


class Stamped:
    """Keys with the last use they would have in real time: for LRU policies, and for those that ignore it."""

    def __init__(self, policy: str, *, expiring: bool = False) -> None:
        self.policy = policy
        self._expiring = expiring
        self._ahead_s = self._zero_s = 0.0
        self._dump = b""

    def begin(self, beginning: Beginning) -> None:
        """See Steering."""
        self._ahead_s = beginning.server_s - beginning.local_s
        self._zero_s = beginning.server_s - beginning.end_s - 1.0
        self._dump = beginning.dump

    def asks(self, at_s: float) -> bool:
        """See Steering."""
        return False

    def learn(self, expiries_ms: Sequence[int]) -> None:
        """See Steering."""

    def command(self, use: Use) -> tuple[bytes, ...]:
        """See Steering. The server subtracts whole seconds from its own clock."""
        now_s = time.monotonic() + self._ahead_s
        idle_s = max(0, math.floor(now_s) - math.floor(self._zero_s + use.at_s))
        ttl_ms = b"%d" % (LIFE_S * 1000) if self._expiring else b"0"
        return (b"RESTORE", KEY, ttl_ms, self._dump, b"REPLACE", b"IDLETIME", b"%d" % idle_s)


class Expiring:
    """Priorities as expiries: what expires first leaves first.

    bucket_s: times are rounded down to it: within it, position alone orders what one prompt uses.
    step_s: how much earlier a chunk expires than the one before it.
    bonus_s: how much longer than a stored chunk one lasts that was used again.
    share: instead, the bonus is this share of how long a chunk lasts now (``tiers.valkey.lifetimes``).
    ranked: steps are by rank in place of position.
    """

    policy = "volatile-ttl"

    def __init__(
        self,
        *,
        bucket_s: float = 0.0,
        step_s: float = 0.001,
        bonus_s: float = 0.0,
        share: float = 0.0,
        ranked: bool = False,
    ) -> None:
        self._share = share
        self._ranked = ranked
        self._asked_s = 0.0
        self._bucket_s = bucket_s
        self._step_s = step_s
        self._bonus_s = bonus_s
        self._zero_s = 0.0
        self._value = b""

    def begin(self, beginning: Beginning) -> None:
        """See Steering."""
        self._zero_s = beginning.server_s + LIFE_S
        self._value = beginning.value

    def asks(self, at_s: float) -> bool:
        """See Steering."""
        if not self._share or at_s - self._asked_s < ASK_S:
            return False
        self._asked_s = at_s
        return True

    def learn(self, expiries_ms: Sequence[int]) -> None:
        """See Steering."""
        if expiries_ms:
            age_s = self._zero_s + self._asked_s - sum(expiries_ms) / len(expiries_ms) / 1000
            kept_s = max(0.0, 2 * age_s - self._bonus_s)
            self._bonus_s += PACE * (self._share * kept_s - self._bonus_s)

    def command(self, use: Use) -> tuple[bytes, ...]:
        """See Steering."""
        at_s = use.at_s if not self._bucket_s else use.at_s // self._bucket_s * self._bucket_s
        at_s -= (use.rank if self._ranked else use.position) * self._step_s
        if use.stored:
            at_s -= self._bonus_s
        expiry = b"%d" % int((self._zero_s + at_s) * 1000)
        if use.stored:
            return (b"SET", KEY, self._value, b"PXAT", expiry)
        return (b"PEXPIREAT", KEY, expiry)


class Counted:
    """The server's own counting of uses, which never forgets here: decay goes by the server's clock."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._value = b""

    def begin(self, beginning: Beginning) -> None:
        """See Steering."""
        self._value = beginning.value

    def asks(self, at_s: float) -> bool:
        """See Steering."""
        return False

    def learn(self, expiries_ms: Sequence[int]) -> None:
        """See Steering."""

    def command(self, use: Use) -> tuple[bytes, ...]:
        """See Steering."""
        return (b"SET", KEY, self._value) if use.stored else (b"TOUCH", KEY)


def encoded(words: Sequence[bytes], key: bytes) -> bytes:
    """The command in RESP, for that key."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        given = key if word is KEY else word
        parts.append(b"$%d\r\n%b\r\n" % (len(given), given))
    return b"".join(parts)
