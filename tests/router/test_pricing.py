"""What a request costs at a worker."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.costs import PrefillModel
from kvferry.feed.wire import Level
from kvferry.router.explain import Cost
from kvferry.router.knowledge import Held
from kvferry.router.knowledge.nodes import TierSpeed
from kvferry.router.pricing import cost, decode_s, shared_level, tier_s

PREFILL = PrefillModel(0.01, 1e-4, 1e-9)
TIERS = {Level.MEMORY: TierSpeed(0.001, 1e10), Level.VALKEY: TierSpeed(0.005, 1e9)}


def price(tokens: int, held: Held = Held(0, 0, 0), **given: float) -> Cost:  # noqa: B008
    options = {"factor": 1.0, "wait_s": 0.0, "decode_s": 0.0, "work_share": 0.0, "bytes_per_token": 1e4}
    options.update(given)
    return cost(tokens, held, tiers=TIERS, prefill=PREFILL, **options)


def test_nothing_held_is_computed() -> None:
    assert price(5000).total_s == pytest.approx(PREFILL.seconds(5000))


def test_what_the_engine_has_costs_nothing_but_one_token_is_computed() -> None:
    assert price(5000, Held(4000, 4000, 4000)).total_s == pytest.approx(PREFILL.seconds(1000, 4000))
    assert price(5000, Held(5000, 5000, 5000)).total_s == pytest.approx(PREFILL.seconds(1, 4999))


def test_the_nearer_the_prefix_the_cheaper() -> None:
    engine = price(5000, Held(4000, 4000, 4000))
    memory = price(5000, Held(0, 4000, 4000))
    shared = price(5000, Held(0, 0, 4000))
    assert engine.total_s < memory.total_s < shared.total_s < price(5000).total_s
    assert shared.load_s == pytest.approx(0.005 + 4000 * 1e4 / 1e9)


def test_what_is_quicker_to_compute_is_not_loaded() -> None:
    slow = price(5000, Held(0, 0, 4000), bytes_per_token=1e7)
    assert (slow.cached_tokens, slow.load_s) == (0, 0.0)
    assert slow.total_s == price(5000).total_s
    part = cost(
        5000, Held(0, 2000, 4000), bytes_per_token=1e6, tiers={**TIERS, Level.VALKEY: TierSpeed(0.005, 1e8)},
        prefill=PREFILL, factor=1.0, wait_s=0.0, decode_s=0.0, work_share=0.0,
    )  # fmt: skip
    assert part.cached_tokens == 2000


def test_a_load_is_hidden_behind_the_queue() -> None:
    waits = price(5000, Held(0, 0, 4000), wait_s=1.0)
    assert waits.total_s == pytest.approx(1.0 + PREFILL.seconds(1000, 4000))
    assert waits.ttft_s == waits.total_s


def test_a_slow_worker_computes_slowly_and_loads_as_fast() -> None:
    quick, slow = price(5000, Held(0, 0, 4000)), price(5000, Held(0, 0, 4000), factor=3.0)
    assert slow.load_s == quick.load_s
    assert slow.prefill_s == pytest.approx(3 * quick.prefill_s)


def test_every_stream_and_every_token_to_come_counts() -> None:
    assert decode_s(1e-3, streams=0, max_tokens=100) == 0
    assert decode_s(1e-3, streams=4, max_tokens=100) == pytest.approx(
        2 * decode_s(1e-3, streams=2, max_tokens=100)
    )
    assert decode_s(1e-3, streams=4, max_tokens=10**9) == decode_s(1e-3, streams=4, max_tokens=512)


def test_tiers_that_nobody_measured_are_assumed() -> None:
    assert tier_s({}, Level.VALKEY, 0) == 0
    assert 0 < tier_s({}, Level.VALKEY, 1e6) < tier_s({}, Level.OBJECTS, 1e6)
    assert tier_s({Level.VALKEY: TierSpeed(1.0, 0.0)}, Level.VALKEY, 1e6) == tier_s({}, Level.VALKEY, 1e6)
    assert shared_level({Level.DISK: TierSpeed(0, 1)}) is Level.DISK
    assert shared_level({}) is Level.VALKEY


@settings(max_examples=runs(100), deadline=None)
@given(
    tokens=st.integers(0, 100_000),
    parts=st.tuples(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 100_000)),
    wait=st.floats(0, 100),
    share=st.floats(0, 1),
)
def test_holding_more_never_costs_more_and_the_parts_add_up(
    tokens: int, parts: tuple[int, int, int], wait: float, share: float
) -> None:
    engine, memory, shared = sorted(parts)
    found = price(tokens, Held(engine, memory, shared), wait_s=wait, work_share=share)
    assert (
        found.total_s
        <= price(tokens, Held(engine, engine, engine), wait_s=wait, work_share=share).total_s + 1e-9
    )
    assert found.total_s == pytest.approx(found.ttft_s + found.decode_s + found.work_s)
    assert found.total_s >= 0
    assert 0 <= found.cached_tokens <= max(tokens - 1, 0)


def test_in_a_busy_pool_computing_counts_for_those_who_wait_behind() -> None:
    idle, busy = price(5000), price(5000, work_share=0.5)
    assert busy.work_s == pytest.approx(0.5 * busy.prefill_s)
    assert busy.total_s - idle.total_s == pytest.approx(busy.work_s)
    assert busy.ttft_s == idle.ttft_s
