"""What is wrong with a keeper's tiers now, since when, and how often it was.

    well ──seen──► in trouble ──not seen for QUIET_S──► well

What comes and goes within that time is one episode: it is told and counted once.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from kvferry.errors import KvferryError
from kvferry.keeper.statistics import KeeperStatistics
from kvferry.tiers.contract import TierStatistics

QUIET_S = 30.0
LOOK_S = 2.0
JOIN_S = 10.0
UNREACHABLE, FAILING, DEGRADED, DENIED = "unreachable", "failing", "degraded", "denied"
ADVICE = "kvferry flags valkey --keeper prints the line that permits what a keeper needs"
# They say so in the log themselves, with the address.
_TELL_THEMSELVES = frozenset(
    {
        ("valkey", UNREACHABLE),
        ("valkey", DENIED),
        ("objects", UNREACHABLE),
        ("disk", FAILING),
        ("disk", DEGRADED),
    }
)

log = logging.getLogger("kvferry.keeper")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Of one tier now. word: for people and metrics. since: UTC. seconds: so long."""

    tier: str
    word: str
    reason: str
    since: str
    seconds: float


@dataclass(slots=True)
class _Episode:
    reason: str
    began: float
    since: str
    seen: float


class Troubles:
    """Any thread may look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._episodes: dict[tuple[str, str], _Episode] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def look(self, keeper: KeeperStatistics) -> tuple[Trouble, ...]:
        """What is wrong now."""
        now = self._clock()
        found = {(tier.name, word): reason for tier in keeper.tiers for word, reason in _wrong(tier)}
        scan_error = keeper.scan.error if keeper.scan is not None else ""
        if "NOPERM" in scan_error:
            found.setdefault(("valkey", DENIED), f"{scan_error}; {ADVICE}")
        with self._lock:
            for place, reason in found.items():
                self._see(place, reason, now)
            ended = [place for place, one in self._episodes.items() if one.seen + QUIET_S < now]
            for place in ended:
                del self._episodes[place]
                self._tell(place, logging.INFO, "%s is not %s any more", *place)
            return tuple(
                Trouble(tier, word, one.reason, one.since, now - one.began)
                for (tier, word), one in self._episodes.items()
                if one.seen >= now
            )

    @property
    def episodes(self) -> dict[str, dict[str, int]]:
        """How often, by tier and word, since start."""
        with self._lock:
            counts = dict(self._counts)
        tiers = dict.fromkeys(tier for tier, _ in counts)
        return {tier: {word: n for (of, word), n in counts.items() if of == tier} for tier in tiers}

    def _see(self, place: tuple[str, str], reason: str, now: float) -> None:
        one = self._episodes.get(place)
        if one is None:
            since = datetime.now(UTC).strftime("%F %T UTC")
            one = self._episodes[place] = _Episode(reason, now, since, now)
            self._counts[place] += 1
            self._tell(place, logging.WARNING, "%s is %s: %s", *place, reason)
        one.reason, one.seen = reason, max(one.seen, now)

    def _tell(self, place: tuple[str, str], level: int, text: str, *words: str) -> None:
        if place not in _TELL_THEMSELVES:
            log.log(level, text, *words)


class Watch:
    """Looks every LOOK_S, so that what nobody asks about is told and counted too."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-keeper-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._ending.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self._look()
            except KvferryError:
                return  # it is closed
            except Exception:
                log.exception("a defect in the look at the tiers")
                return


def _wrong(tier: TierStatistics) -> list[tuple[str, str]]:
    """Words and reasons."""
    detail = tier.detail
    reason = detail.get("breaker_open") or detail.get("warning", "no reason known")
    wrong: list[tuple[str, str]] = []
    if tier.state == "down":
        wrong.append((FAILING if tier.name == "disk" else UNREACHABLE, reason))
    elif tier.state != "up":
        wrong.append((DEGRADED, reason))
    if denied := detail.get("denied"):
        wrong.append((DENIED, f"{denied}; {ADVICE}"))
    return wrong
