"""Hits of limited caches: equal to plain simulations block by block, and to published figures."""

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces import brute

from kvferry.traces.policies import Policy, hits, unbounded
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile

BLOCK_TOKENS = 4
PLAIN: dict[Policy, Callable[[Sequence[Sequence[int]], int], list[int]]] = {
    Policy.LRU: brute.lru,
    Policy.FIFO: brute.fifo,
    Policy.OPTIMUM: brute.optimum,
}
SMALL = Path(__file__).with_name("conversations.jsonl")
_BESIDE = Path(__file__).parents[3] / "shared/data"
_DATA = os.environ.get("KVFERRY_TEST_DATA") or (_BESIDE if _BESIDE.is_dir() else None)
MOONCAKE = None if _DATA is None else Path(_DATA) / "traces/mooncake_conversation_trace.jsonl"


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that continue, cut and branch from earlier ones."""
    prompts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 24))):
        base = prompts[draw(st.integers(0, len(prompts) - 1))]
        kept = base[: draw(st.integers(0, len(base)))]
        prompts.append(kept + draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=6)))
    return prompts[1:]


def log_of(prompts: Sequence[Sequence[int]], *, short: int = 0) -> ReuseLog:
    """``short``: tokens that every last block lacks."""
    log = ReuseLog(BLOCK_TOKENS)
    for keys in prompts:
        log.add(Request(None, len(keys) * BLOCK_TOKENS - short, None, array("q", keys).tobytes()))
    return log


def tokens(prompts: Sequence[Sequence[int]], found: Sequence[int], *, short: int) -> int:
    return sum(
        blocks * BLOCK_TOKENS - (short if blocks == len(keys) else 0)
        for keys, blocks in zip(prompts, found, strict=True)
    )


@pytest.mark.parametrize("policy", list(PLAIN))
@given(prompts=traces(), short=st.integers(0, BLOCK_TOKENS - 1))
@settings(max_examples=40, deadline=None)
def test_hits_are_those_of_a_simulation_block_by_block(
    policy: Policy, prompts: list[list[int]], short: int
) -> None:
    log = log_of(prompts, short=short)
    half = len(prompts) // 2
    capacities = range(1, log.distinct_blocks + 2)
    for capacity, found in zip(capacities, hits(log, policy, capacities), strict=True):
        plain = PLAIN[policy](prompts, capacity)
        assert found.tokens == tokens(prompts, plain, short=short)
        assert found.last_half_tokens == tokens(prompts[half:], plain[half:], short=short)


@given(prompts=traces())
@settings(max_examples=15, deadline=None)
def test_no_policy_beats_the_optimum_nor_the_optimum_a_cache_that_never_forgets(
    prompts: list[list[int]],
) -> None:
    log = log_of(prompts)
    capacities = range(1, log.distinct_blocks + 1)
    found = {policy: hits(log, policy, capacities) for policy in Policy}
    for place in range(len(capacities)):
        assert all(at[place].tokens <= found[Policy.OPTIMUM][place].tokens for at in found.values())
        assert found[Policy.OPTIMUM][place].tokens <= unbounded(log).tokens
    assert all(at[-1] == unbounded(log) for at in found.values())


def logged(path: Path) -> ReuseLog:
    source, malformed = TraceFile(path), Malformed()
    assert source.reader.block_tokens == 512
    log = ReuseLog(512)
    for request in source.requests(malformed):
        log.add(request)
    assert not malformed.lines
    return log


def test_a_trace_in_the_repository_gives_known_hit_rates() -> None:
    log = logged(SMALL)
    assert (len(log), log.distinct_blocks) == (240, 812)
    half = sum(log.input_tokens[len(log) // 2 :])

    def rates(policy: Policy) -> list[float]:
        found = hits(log, policy, (32, 64, 128, 256, 512))
        return [round(100 * at.last_half_tokens / half, 1) for at in found]

    assert rates(Policy.LRU) == [27.5, 37.2, 52.6, 66.5, 66.5]
    assert rates(Policy.FIFO) == [20.0, 29.1, 44.4, 54.1, 64.6]
    assert rates(Policy.OPTIMUM) == [47.1, 60.1, 66.5, 66.5, 66.5]
    cold = unbounded(log)
    assert round(100 * cold.last_half_tokens / half, 1) == 66.5
    assert round(100 * cold.tokens / sum(log.input_tokens), 1) == 64.8


@pytest.mark.skipif(
    MOONCAKE is None or not MOONCAKE.exists(),
    reason="KVFERRY_TEST_DATA names no folder with traces/mooncake_conversation_trace.jsonl",
)
def test_the_conversation_trace_gives_the_published_hit_rates() -> None:
    assert MOONCAKE is not None
    log = logged(MOONCAKE)
    assert len(log) == 12_031
    half = sum(log.input_tokens[len(log) // 2 :])
    kv_bytes = 2 * 80 * 8 * 128 * 2  # per token: 80 layers, 8 heads of 128, keys and values, bf16
    capacities = [(gib << 30) // (512 * kv_bytes) for gib in (512, 1024, 2048, 4096, 8192)]

    def rates(policy: Policy) -> list[float]:
        return [round(100 * found.last_half_tokens / half, 1) for found in hits(log, policy, capacities)]

    assert rates(Policy.LRU) == [7.3, 15.3, 25.0, 33.0, 37.8]
    assert rates(Policy.PRODUCTION) == [15.4, 20.3, 28.1, 34.2, 37.8]
    assert rates(Policy.OPTIMUM) == [32.0, 38.6, 39.8, 39.8, 39.8]
    cold = unbounded(log)
    assert round(100 * cold.last_half_tokens / half, 1) == 39.8
    assert round(100 * cold.tokens / sum(log.input_tokens), 1) == 37.4
