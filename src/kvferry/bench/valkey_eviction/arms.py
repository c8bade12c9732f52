"""The arms, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.bench.valkey_eviction.steering import Counted, Expiring, Stamped, Steering
from kvferry.tiers.valkey.lifetimes import REUSED_SHARE, STEP_MS


@dataclass(frozen=True, slots=True)
class Arm:
    """line: what it does, for people. repairs: a pool writes back what the shelf turns out to lack."""

    line: str
    steering: Callable[[], Steering]
    refreshes: bool = True
    repairs: bool = False
    sampled: bool = True


ARMS = {
    "noeviction": Arm("noeviction", lambda: Stamped("noeviction"), sampled=False),
    "random": Arm("allkeys-random", lambda: Stamped("allkeys-random"), sampled=False),
    "lru-reads": Arm("allkeys-lru, reads alone", lambda: Stamped("allkeys-lru"), refreshes=False),
    "lru": Arm("allkeys-lru, what pools serve refreshed", lambda: Stamped("allkeys-lru")),
    "lru-repaired": Arm("the same, lost chunks rewritten", lambda: Stamped("allkeys-lru"), repairs=True),
    "volatile-lru": Arm("volatile-lru, refreshed", lambda: Stamped("volatile-lru", expiring=True)),
    "lfu": Arm("allkeys-lfu without decay", lambda: Counted("allkeys-lfu")),
    "ttl": Arm("volatile-ttl: recency, tail first", Expiring),
    "ttl-repaired": Arm("the same, lost chunks rewritten", Expiring, repairs=True),
    "ttl-bucket": Arm("volatile-ttl: recency in steps of 30 s", lambda: Expiring(bucket_s=30)),
    "ttl-depth": Arm("volatile-ttl: 1 s less a chunk", lambda: Expiring(step_s=1.0)),
    "kvferry": Arm(
        "volatile-ttl as the tier writes it",
        lambda: Expiring(share=REUSED_SHARE, step_s=STEP_MS / 1000, ranked=True),
    ),
    "ttl-kept": Arm("volatile-ttl: reused 70% longer kept", lambda: Expiring(share=0.7)),
    "ttl-kept-depth": Arm("the same, 0.3 s less a chunk", lambda: Expiring(share=0.7, step_s=0.3)),
    "ttl-reused-60": Arm("volatile-ttl: reused 60 s more", lambda: Expiring(bonus_s=60)),
    "ttl-reused-300": Arm("volatile-ttl: reused 300 s more", lambda: Expiring(bonus_s=300)),
    "ttl-reused-1000": Arm("volatile-ttl: reused 1,000 s more", lambda: Expiring(bonus_s=1000)),
}
