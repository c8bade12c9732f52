"""What a request costs at a worker, in seconds, part by part. Pure.

    cost = max(wait, load) + prefill of what remains + decode pressure + share of the work

- wait: prefill that is ahead of it there. A load is hidden behind it, since it takes no GPU time.
- load: the prefix from host memory and the shared tier; only as far as that is quicker than computing.
- decode pressure: every further stream makes each token of the others, and theirs its own, a little later.
- share of the work: computing holds up whoever comes next. The busier the pool, the more that counts.
"""

from collections.abc import Mapping

from kvferry.costs import PrefillModel
from kvferry.feed.wire import Level
from kvferry.router.explain import Cost
from kvferry.router.knowledge import Held
from kvferry.router.knowledge.nodes import TierSpeed

DECODE_SHARE = 0.25  # of a later token's delay, against the same delay of the first
ASSUMED_ANSWER_TOKENS = 128
MOST_ANSWER_TOKENS = 512

# Until a node says how fast its tiers are.
ASSUMED = {
    Level.MEMORY: TierSpeed(0.001, 4e9),
    Level.VALKEY: TierSpeed(0.003, 1e9),
    Level.DISK: TierSpeed(0.010, 5e8),
    Level.OBJECTS: TierSpeed(0.060, 2e8),
}
_SHARED = (Level.VALKEY, Level.DISK, Level.OBJECTS)


def tier_s(tiers: Mapping[Level, TierSpeed], level: Level, nbytes: float) -> float:
    """Time for a load of so many bytes; 0 for none."""
    if nbytes <= 0:
        return 0.0
    speed = tiers.get(level)
    if speed is None or speed.bytes_per_s <= 0:
        speed = ASSUMED[level]
    return speed.latency_s + nbytes / speed.bytes_per_s


def shared_level(tiers: Mapping[Level, TierSpeed]) -> Level:
    """The shared tier that loads are taken to come from: the quickest that is measured."""
    return next((level for level in _SHARED if level in tiers), Level.VALKEY)


def cost(
    prompt_tokens: int,
    held: Held,
    *,
    bytes_per_token: float,
    tiers: Mapping[Level, TierSpeed],
    prefill: PrefillModel,
    factor: float,
    wait_s: float,
    decode_s: float,
    work_share: float,
) -> Cost:
    """At one worker. wait_s: with the factor applied."""
    engine, memory, shared = held
    base, linear, square = prefill.base_s, prefill.per_token_s, prefill.per_token2_s
    last = max(prompt_tokens - 1, 0)  # an engine computes one token at least

    def compute(cached: int) -> float:
        new = prompt_tokens - cached
        return factor * (base + new * (linear + square * (new + 2 * cached)))

    cached = min(engine, last)
    load, rest = 0.0, compute(cached)
    if shared > engine:
        from_memory = tier_s(tiers, Level.MEMORY, (memory - engine) * bytes_per_token)
        found = min(memory, last)
        if found > cached and max(from_memory, wait_s) + (then := compute(found)) < max(load, wait_s) + rest:
            cached, load, rest = found, from_memory, then
        if shared > memory:
            level = shared_level(tiers)
            from_all = max(from_memory, tier_s(tiers, level, (shared - memory) * bytes_per_token))
            found = min(shared, last)
            if found > cached and max(from_all, wait_s) + (then := compute(found)) < max(load, wait_s) + rest:
                cached, load, rest = found, from_all, then
    work = work_share * rest
    total = (max(wait_s, load)) + rest + decode_s + work
    return Cost(total, wait_s, load, rest, decode_s, work, factor, engine, memory, shared, cached)


def decode_s(slope_s: float, *, streams: int, max_tokens: int) -> float:
    """What the streams there and a new one cost each other."""
    tokens = min(max_tokens or ASSUMED_ANSWER_TOKENS, MOST_ANSWER_TOKENS)
    return DECODE_SHARE * 2 * slope_s * streams * tokens
