"""Part of the traffic to another pool, or a copy of it, and what both pools made of theirs. Pure.

A conversation stays where it began: a pool that gets single turns of it would be measured with cold caches.
Times count from when a request had come, so that a pool that lets requests wait is not the quicker one.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from kvferry.errors import MisconfiguredError
from kvferry.router.contract import Asked, Ended, Flight, Usage

KEPT = 4096  # samples of each kind, the newest
MAX_CONVERSATIONS = 65536  # told apart in counts
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,4})?)%=([A-Za-z][A-Za-z0-9_-]{0,31})")
_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True)
class Share:
    """So much of the conversations, 0 to 1, for that pool."""

    part: float
    pool: str

    def has(self, asked: Asked, purpose: str) -> bool:
        """Whether this request is in it: the same for all of a conversation, at every router."""
        drawn = blake2b(f"{purpose}\0{conversation(asked)}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "big") < self.part * _WHOLE

    def __str__(self) -> str:
        return f"{self.part * 100:g}%={self.pool}"


def parse_share(text: object) -> Share:
    """``10%=poolB``. Raises MisconfiguredError."""
    match = _SHARE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise MisconfiguredError(f"{text!r} is no share of a pool; write it like 10%=poolB")
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise MisconfiguredError(f"{text!r} is not above 0% and at most 100%; write it like 10%=poolB")
    return Share(percent / 100, match[2])


def conversation(asked: Asked) -> str:
    """What all turns of it have in common, at every router: its session, else how it opens; by user.

    A request with neither is one of its own.
    """
    if asked.session:
        return f"session {asked.salt} {asked.session}"
    if asked.opening:
        return f"opening {asked.salt} {asked.opening}"
    return f"request {asked.request_id}"


@dataclass(slots=True)
class Measured:
    """What one pool made of its requests, split or mirrored. ended: by how. Lists: the newest samples.

    ttft_s: of streams. tokens_per_s: of streams, after the first token. total_s: of answers that were whole.
    """

    ended: Counter[str] = field(default_factory=Counter)
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tokens_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    total_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    cached_tokens: int = 0
    prompt_tokens: int = 0
    skipped: int = 0  # copies that were not made: too many in flight
    conversations: set[int] = field(default_factory=set)

    @property
    def judged(self) -> int:
        """Requests that show whether the pool works: clients' refusals and departures do not."""
        return self.ended[Ended.DONE.value] + self.ended[Ended.FAILED.value]

    def saw(self, asked: Asked) -> None:
        """One more of this conversation."""
        if len(self.conversations) < MAX_CONVERSATIONS:
            self.conversations.add(hash(conversation(asked)))


@dataclass(frozen=True, slots=True)
class MeasuredSnapshot:
    """See ``Measured``."""

    kind: str
    pool: str
    ended: Mapping[str, int]
    ttft_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    total_s: tuple[float, ...]
    cached_tokens: int
    prompt_tokens: int
    skipped: int


class MeasuredFlight:
    """A ``contract.Flight`` that also measures. came: when the request had come."""

    __slots__ = ("_came", "_first", "_flight", "_last", "_pieces", "_stream", "_told")

    def __init__(self, flight: Flight, told: Measured, *, came: float, stream: bool) -> None:
        self._flight = flight
        self._told = told
        self._came = came
        self._stream = stream
        self._first = self._last = 0.0
        self._pieces = 0

    @property
    def worker(self) -> str:
        """See ``Flight``."""
        return self._flight.worker

    def sent(self) -> None:
        """See ``Flight``."""
        self._flight.sent()

    def first_byte(self, now: float) -> None:
        """See ``Flight``."""
        self._first = self._last = now
        self._flight.first_byte(now)

    def token(self, now: float) -> None:
        """See ``Flight``."""
        self._last = now
        self._pieces += 1
        self._flight.token(now)

    def end(self, how: Ended, now: float, usage: Usage | None = None) -> None:
        """See ``Flight``."""
        self._flight.end(how, now, usage)
        told = self._told
        told.ended[how.value] += 1
        if how is not Ended.DONE:
            return
        told.total_s.append(now - self._came)
        if usage is not None and usage.cached_tokens is not None:
            told.prompt_tokens += usage.prompt_tokens
            told.cached_tokens += usage.cached_tokens
        if not self._stream or not self._first:
            return
        told.ttft_s.append(self._first - self._came)
        tokens = usage.completion_tokens if usage is not None else self._pieces
        if tokens > 1 and self._last > self._first:
            told.tokens_per_s.append((tokens - 1) / (self._last - self._first))


class Pilots:
    """split, mirror: None for none."""

    def __init__(self, split: Share | None = None, mirror: Share | None = None) -> None:
        self.split = split
        self.mirror = mirror
        self._measured: dict[tuple[str, str], Measured] = {}

    def change(self, split: Share | None, mirror: Share | None) -> None:
        """Of one that is another now, the samples begin anew: they would be of two pilots."""
        changed = {"split"} if split != self.split else set()
        changed |= {"original", "mirror"} if mirror != self.mirror else set()
        self.split, self.mirror = split, mirror
        self._measured = {key: told for key, told in self._measured.items() if key[0] not in changed}

    @property
    def active(self) -> bool:
        """Whether there is one."""
        return self.split is not None or self.mirror is not None

    def pool(self, asked: Asked, default: str) -> str:
        """Where it belongs."""
        return self.split.pool if self.split is not None and self.split.has(asked, "split") else default

    def mirrored(self, asked: Asked) -> bool:
        """Whether a copy of it goes to the other pool; of requests with a prompt alone."""
        return self.mirror is not None and bool(asked.keys) and self.mirror.has(asked, "mirror")

    def of(self, kind: str, pool: str) -> Measured:
        """kind: ``split`` for what clients get, ``original`` of what is mirrored, ``mirror`` of copies."""
        key = (kind, pool)
        found = self._measured.get(key)
        if found is None:
            found = self._measured[key] = Measured()
        return found

    @property
    def measured(self) -> Mapping[tuple[str, str], Measured]:
        """By kind and pool."""
        return self._measured

    def statistics(self) -> tuple[MeasuredSnapshot, ...]:
        """A snapshot."""
        return tuple(
            MeasuredSnapshot(
                kind,
                pool,
                dict(told.ended),
                tuple(told.ttft_s),
                tuple(told.tokens_per_s),
                tuple(told.total_s),
                told.cached_tokens,
                told.prompt_tokens,
                told.skipped,
            )
            for (kind, pool), told in self._measured.items()
        )
