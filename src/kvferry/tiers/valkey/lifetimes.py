"""How long values last at a server that evicts what expires first (docs/decisions/valkey-eviction.md). Pure.

A value has an expiry that is far away, so that no value reaches it at a server which is full: it is what the
server ranks values by. One that was asked for again ranks as used now; one just stored ranks as if used
``bonus_ms`` ago, and leaves so much sooner:

    stored ──LIFE_MS - bonus_ms──►        used again ──LIFE_MS──►

Each chunk of a prompt expires ``STEP_MS`` before the one in front: a prefix loses its tail first.

The bonus is a share of how long values last there at present. That is known without looking at any key: the
server says how far away the expiries are on average.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LIFE_MS = 30 * 86_400_000
MAX_BONUS_MS = LIFE_MS // 2
REUSED_SHARE = 0.7
PACE = 0.3
STEP_MS = 200
MAX_RANK = 1 << 14
_LIMITED = "volatile-"
_KEEPS_NOTHING_IN_ORDER = ("allkeys-random", "allkeys-lfu", "volatile-random", "volatile-lfu")


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """kept_ms: for how long values that nobody uses are kept, as far as is known.

    rank, below: how many chunks come before it, in the prompt or at least in the call.
    """

    bonus_ms: int = 0
    kept_ms: int = 0

    def used_ms(self, rank: int) -> int:
        """Until the expiry of a value that is used again."""
        return LIFE_MS - STEP_MS * min(rank, MAX_RANK)

    def stored_ms(self, rank: int) -> int:
        """Until the expiry of a value that is new."""
        return self.used_ms(rank) - self.bonus_ms

    def learned(self, mean_ttl_ms: int) -> "Lifetimes":
        """After the server said how far away expiries are on average.

        Values rank by their last use from now back to the oldest use kept, about evenly: the oldest is twice
        as old as the mean, of which new values bring the present bonus. Those there now were stored with
        earlier ones, so that it moves by steps: at once it would swing.
        """
        kept_ms = max(0, 2 * (LIFE_MS - mean_ttl_ms) - self.bonus_ms)
        step_ms = PACE * (REUSED_SHARE * kept_ms - self.bonus_ms)
        return Lifetimes(min(self.bonus_ms + round(step_ms), MAX_BONUS_MS), kept_ms)


def after_info(known: Lifetimes | None, facts: Mapping[str, str]) -> Lifetimes | None:
    """The lifetimes to write from now on; None where the server does not rank by them: nothing expires.

    facts: of ``INFO``, by name. known: what held before.
    """
    policy = facts.get("maxmemory_policy")
    if policy is None:
        return known
    if not policy.startswith(_LIMITED):
        return None
    known = known or Lifetimes()
    mean_ttl_ms = _keyspace(facts).get("avg_ttl", 0)
    return known.learned(mean_ttl_ms) if mean_ttl_ms else known


def warning(facts: Mapping[str, str]) -> str:
    """What the server's owner should change; empty if nothing."""
    policy = facts.get("maxmemory_policy", "")
    if facts.get("maxmemory") == "0":
        return "maxmemory is not set: the server grows until the host runs out; set it, with volatile-ttl"
    if policy == "noeviction":
        return "maxmemory-policy noeviction: stores are refused once memory is full; use volatile-ttl"
    if policy in _KEEPS_NOTHING_IN_ORDER:
        return f"maxmemory-policy {policy} loses parts of prefixes that are in use: use volatile-ttl"
    space = _keyspace(facts)
    lasting = space.get("keys", 0) - space.get("expires", 0)
    if policy.startswith(_LIMITED) and lasting > 0:
        return (
            f"maxmemory-policy {policy} never evicts what has no expiry, and {lasting:,} values have none: "
            "empty the server once, and keep other data elsewhere"
        )
    return ""


def _keyspace(facts: Mapping[str, str]) -> dict[str, int]:
    """Of ``db0:keys=5,expires=5,avg_ttl=2592000000``."""
    pairs = (pair.partition("=")[::2] for pair in facts.get("db0", "").split(","))
    return {name: int(number) for name, number in pairs if number.isascii() and number.isdecimal()}
