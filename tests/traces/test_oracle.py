"""Hits equal those of kvcache-simulator where it judges a capacity: it wants the cache full by half time."""

import random
from array import array

import pytest

from kvferry.traces.policies import Policy, hits, unbounded
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog

plan = pytest.importorskip("kvcache_sim.plan", reason="kvcache-simulator is in locks/dev.txt")
policies = pytest.importorskip("kvcache_sim.policies")
trace = pytest.importorskip("kvcache_sim.trace")

BLOCK_TOKENS = 4
NAMES = {Policy.LRU: "lru", Policy.FIFO: "fifo", Policy.OPTIMUM: "optimal"}


def prompts_of(seed: int) -> list[tuple[list[int], int]]:
    """(identifiers, tokens) of prompts that continue, cut and branch from earlier ones."""
    rng = random.Random(seed)
    past: list[list[int]] = [[]]
    for _ in range(rng.randint(2, 50)):
        base = rng.choice(past)
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.6 else base
        added = [rng.randint(0, rng.choice([3, 20])) for _ in range(rng.randint(0, 8))]
        past.append([*kept, *added] or [1])
    return [(keys, (len(keys) - 1) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS)) for keys in past[1:]]


@pytest.mark.parametrize("seed", range(40))
def test_hits_are_those_of_kvcache_simulator(seed: int) -> None:
    prompts = prompts_of(seed)
    log = ReuseLog(BLOCK_TOKENS)
    ids: list[int] = []
    tokens: list[int] = []
    starts = [0]
    for keys, size in prompts:
        log.add(Request(None, size, None, array("q", keys).tobytes()))
        ids += keys
        tokens += [min(BLOCK_TOKENS, size - place * BLOCK_TOKENS) for place in range(len(keys))]
        starts.append(len(ids))
    theirs = plan.build_execution_plan(
        trace.TraceData(
            ids, tokens, starts, BLOCK_TOKENS, len(prompts), len(set(ids)), sum(tokens), 1.0, 0, 0
        )
    )
    assert theirs.unique_blocks == log.distinct_blocks
    assert policies.simulate_ceiling(theirs).hitTokens == unbounded(log).last_half_tokens
    capacities = range(1, log.distinct_blocks + 1)
    compared = 0
    for policy, name in NAMES.items():
        for capacity, ours in zip(capacities, hits(log, policy, capacities), strict=True):
            found = policies.simulate_policy(theirs, name, capacity)
            if found.measurementMode == "fixed_window":
                assert found.hitTokens == ours.last_half_tokens
                compared += 1
    assert compared
