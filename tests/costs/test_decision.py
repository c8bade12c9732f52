"""Load or recompute."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.costs import (
    Decision,
    DecisionReason,
    Length,
    Limits,
    PrefillModel,
    Prospect,
    TierRate,
    TierRun,
    decide,
)
from kvferry.costs.decision import DEADLINE_CAP_S, STALL_SHARE
from kvferry.costs.lengths import PROBE_CHUNKS

MIB = 1 << 20
TIERS = ("memory", "valkey", "disk", "objects")
PREFILL = PrefillModel(0.01, 1e-3, 1e-8)
FAST = TierRate(bytes_per_s=2e9, latency_s=0.001, inflight_bytes=0, probe_due=False)
SLOW = TierRate(bytes_per_s=1e6, latency_s=0.001, inflight_bytes=0, probe_due=False)


def prospect(*runs: tuple[str, int], queued_s: float = 0.0, prompt_tokens: int = 6000) -> Prospect:
    return Prospect(
        prompt_tokens=prompt_tokens,
        computed_tokens=0,
        chunk_tokens=128,
        runs=[TierRun(tier, count, 3 * MIB) for tier, count in runs],
        queued_s=queued_s,
    )


def choose(found: Prospect, **rates: TierRate) -> Decision:
    return decide(found, prefill=PREFILL, rates=rates)


def test_a_fast_tier_is_loaded_whole() -> None:
    decision = choose(prospect(("valkey", 46)), valkey=FAST)
    assert (decision.load_chunks, decision.reason) == (46, DecisionReason.LOAD)
    assert decision.load_s == pytest.approx(0.001 + 46 * 3 * MIB / 2e9)
    assert decision.recompute_s == pytest.approx(PREFILL.seconds(46 * 128))


def test_a_slow_tier_is_recomputed() -> None:
    decision = choose(prospect(("valkey", 46)), valkey=SLOW)
    assert (decision.load_chunks, decision.reason) == (0, DecisionReason.RECOMPUTE)


def test_nothing_found_is_nothing_to_load() -> None:
    assert choose(prospect()).reason is DecisionReason.NOTHING_FOUND
    beyond = prospect(("valkey", 46), prompt_tokens=0)
    assert choose(beyond, valkey=FAST).reason is DecisionReason.NOTHING_FOUND


def test_chunks_past_the_prompt_are_not_loaded() -> None:
    assert choose(prospect(("valkey", 46), prompt_tokens=1000), valkey=FAST).load_chunks == 8


def test_the_head_is_loaded_when_only_the_tail_is_slow() -> None:
    decision = choose(prospect(("memory", 20), ("valkey", 26)), memory=FAST, valkey=SLOW)
    assert (decision.load_chunks, decision.reason) == (20, DecisionReason.PARTIAL)


@pytest.mark.parametrize("prefill", [None, PREFILL])
def test_with_nothing_measured_it_loads_under_the_cap(prefill: PrefillModel | None) -> None:
    decision = decide(prospect(("valkey", 46)), prefill=prefill, rates={})
    assert (decision.load_chunks, decision.reason) == (46, DecisionReason.UNMEASURED)
    assert decision.load_s is None
    assert decision.deadline_s <= DEADLINE_CAP_S
    if prefill is None:
        assert decision.deadline_s == DEADLINE_CAP_S


def test_without_a_prefill_estimate_a_measured_tier_is_used_under_the_cap() -> None:
    decision = decide(
        prospect(("valkey", 46)), prefill=None, rates={"valkey": SLOW}, limits=Limits(cap_s=10.0)
    )
    assert (decision.load_chunks, decision.reason) == (3, DecisionReason.PARTIAL_CAP)
    assert decision.load_s is not None and decision.load_s <= 10.0
    tight = decide(prospect(("valkey", 46)), prefill=None, rates={"valkey": SLOW}, limits=Limits(cap_s=1.0))
    assert (tight.load_chunks, tight.reason) == (0, DecisionReason.RECOMPUTE_CAP)


def test_a_load_behind_queued_work_is_free() -> None:
    slowish = TierRate(bytes_per_s=15e6, latency_s=0.0, inflight_bytes=0, probe_due=False)
    assert choose(prospect(("valkey", 46)), valkey=slowish).load_chunks == 0
    decision = choose(prospect(("valkey", 46), queued_s=9.7), valkey=slowish)
    assert decision.load_chunks == 46
    assert decision.load_s is not None and decision.load_s <= decision.deadline_s
    half = choose(prospect(("valkey", 46), queued_s=3.0), valkey=slowish)
    assert 0 < half.load_chunks < 46
    assert half.load_s is not None and half.load_s <= 3.0


def test_bytes_in_flight_can_turn_the_choice() -> None:
    busy = TierRate(bytes_per_s=2e9, latency_s=0.001, inflight_bytes=40 << 30, probe_due=False)
    assert choose(prospect(("valkey", 46)), valkey=busy).load_chunks == 0


def test_a_slow_tier_is_probed_with_a_few_chunks_when_due() -> None:
    due = TierRate(bytes_per_s=1e6, latency_s=0.001, inflight_bytes=0, probe_due=True)
    decision = choose(prospect(("valkey", 46)), valkey=due)
    assert (decision.load_chunks, decision.reason) == (PROBE_CHUNKS, DecisionReason.PROBE)
    assert decision.deadline_s < 2.0
    mixed = choose(prospect(("memory", 20), ("valkey", 26)), memory=FAST, valkey=due)
    assert (mixed.load_chunks, mixed.reason) == (20 + PROBE_CHUNKS, DecisionReason.PROBE)
    short = choose(prospect(("valkey", 2)), valkey=due)
    assert short.load_chunks == 2


rates = st.builds(
    TierRate,
    bytes_per_s=st.one_of(st.none(), st.floats(1e5, 1e11)),
    latency_s=st.floats(0, 1),
    inflight_bytes=st.integers(0, 1 << 34),
    probe_due=st.booleans(),
)
prospects = st.builds(
    Prospect,
    prompt_tokens=st.integers(1, 20_000),
    computed_tokens=st.integers(0, 4000),
    chunk_tokens=st.sampled_from([16, 128, 256]),
    runs=st.lists(
        st.builds(
            TierRun,
            tier=st.sampled_from(TIERS),
            chunks=st.integers(1, 60),
            chunk_bytes=st.integers(1, 32 * MIB),
        ),
        max_size=5,
    ),
    queued_s=st.floats(0, 20),
)
prefills = st.builds(PrefillModel, st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-6))
limits = st.builds(Limits, cap_s=st.floats(0.05, 30))


@settings(max_examples=300, deadline=None)
@given(
    prospects,
    st.one_of(st.none(), prefills),
    st.dictionaries(st.sampled_from(TIERS), rates),
    limits,
)
def test_every_decision_is_bounded(
    found: Prospect, prefill: PrefillModel | None, known: dict[str, TierRate], limit: Limits
) -> None:
    decision = decide(found, prefill=prefill, rates=known, limits=limit)
    total = found.useful_chunks
    assert total <= sum(run.chunks for run in found.runs)
    assert 0 <= decision.load_chunks <= total
    assert 0 < decision.deadline_s <= limit.cap_s
    assert 0 < decision.stall_s <= decision.deadline_s
    assert decision.stall_s >= STALL_SHARE * decision.deadline_s
    none = {DecisionReason.RECOMPUTE, DecisionReason.RECOMPUTE_CAP, DecisionReason.NOTHING_FOUND}
    assert (decision.load_chunks == 0) == (decision.reason in none)
    everything = {DecisionReason.LOAD, DecisionReason.UNMEASURED}
    assert decision.reason not in everything or decision.load_chunks == total
    if decision.reason is not DecisionReason.PROBE and decision.load_s is not None:
        assert decision.load_s <= limit.cap_s


@settings(max_examples=200, deadline=None)
@given(prospects, prefills, st.fixed_dictionaries(dict.fromkeys(TIERS, rates)))
def test_the_choice_is_as_good_as_trying_every_length(
    found: Prospect, prefill: PrefillModel, known: dict[str, TierRate]
) -> None:
    measured = {
        name: replace(rate, bytes_per_s=rate.bytes_per_s or 1e9, probe_due=False)
        for name, rate in known.items()
    }
    decision = decide(found, prefill=prefill, rates=measured, limits=Limits(cap_s=1e9))
    wanted = max(found.prompt_tokens - found.computed_tokens, 0)

    def first_token_s(count: int) -> float:
        sizes = itertools.chain.from_iterable(
            [(run.tier, run.chunk_bytes)] * run.chunks for run in found.runs
        )
        bytes_of: dict[str, int] = {}
        for tier, nbytes in itertools.islice(sizes, count):
            bytes_of[tier] = bytes_of.get(tier, 0) + nbytes
        load = max((measured[tier].seconds(nbytes) or 0.0 for tier, nbytes in bytes_of.items()), default=0.0)
        tokens = min(count * found.chunk_tokens, wanted)
        rest = prefill.seconds(wanted - tokens, found.computed_tokens + tokens)
        return max(load, found.queued_s) + rest

    best = min(first_token_s(count) for count in range(found.useful_chunks + 1))
    assert first_token_s(decision.load_chunks) <= best * 1.05 + 0.001


lengths = st.dictionaries(
    st.integers(1, 60),
    st.dictionaries(st.sampled_from(TIERS[1:]), st.integers(0, 200 * MIB)),
    max_size=8,
).map(lambda made: [Length(chunks, made[chunks]) for chunks in sorted(made)])


@settings(max_examples=300, deadline=None)
@given(
    found=prospects,
    listed=lengths,
    prefill=prefills,
    known=st.fixed_dictionaries(dict.fromkeys(TIERS[1:], rates)),
    limit=limits,
)
def test_only_a_listed_length_is_chosen_and_it_is_as_good_as_any_that_fits(
    *,
    found: Prospect,
    listed: list[Length],
    prefill: PrefillModel,
    known: dict[str, TierRate],
    limit: Limits,
) -> None:
    found = replace(found, runs=(), lengths=listed)
    measured = {name: replace(rate, bytes_per_s=rate.bytes_per_s or 1e9) for name, rate in known.items()}
    decision = decide(found, prefill=prefill, rates=measured, limits=limit)
    useful = [length for length in listed if length.chunks <= -(-found.wanted_tokens // found.chunk_tokens)]
    assert decision.load_chunks in (0, *(length.chunks for length in useful))
    assert found.useful_chunks == max((length.chunks for length in useful), default=0)
    if decision.reason in (DecisionReason.PROBE, DecisionReason.NOTHING_FOUND):
        return
    costs = {
        length.chunks: max(
            (measured[tier].seconds(nbytes) or 0.0 for tier, nbytes in length.tier_bytes.items()),
            default=None,
        )
        for length in useful
    }

    def seconds(chunks: int) -> float:
        tokens = min(chunks * found.chunk_tokens, found.wanted_tokens)
        rest = prefill.seconds(found.wanted_tokens - tokens, found.computed_tokens + tokens)
        return max(costs.get(chunks) or 0.0, found.queued_s) + rest

    fits = [0, *(chunks for chunks, cost in costs.items() if (cost or 0.0) <= limit.cap_s)]
    assert decision.load_chunks in fits
    if decision.reason is not DecisionReason.UNMEASURED:
        assert seconds(decision.load_chunks) <= min(map(seconds, fits)) * (1 + 1e-9) + 1e-12 or (
            costs.get(max(fits)) is None
        )


def test_a_prefix_that_goes_deeper_and_deeper_is_loaded_as_far_as_that_is_faster() -> None:
    """From memory, Valkey and the disk; the part in the bucket is recomputed, unless there is time for it."""
    deep = prospect(("memory", 10), ("valkey", 10), ("disk", 10), ("objects", 16))
    rates = {
        "valkey": replace(FAST, bytes_per_s=1e9),
        "disk": replace(FAST, bytes_per_s=2e8, latency_s=0.01),
        "objects": replace(FAST, bytes_per_s=1e7, latency_s=0.2),
    }
    decision = choose(deep, **rates)
    assert (decision.load_chunks, decision.reason) == (30, DecisionReason.PARTIAL)
    waiting = choose(replace(deep, queued_s=6.0), **rates)
    assert (waiting.load_chunks, waiting.reason) == (46, DecisionReason.LOAD)
    slow_disk = choose(deep, **{**rates, "disk": replace(SLOW, bytes_per_s=2e6)})
    assert slow_disk.load_chunks == 20


def test_a_trial_is_of_the_tier_that_deserves_it_and_of_no_other_that_is_slow() -> None:
    due = replace(SLOW, probe_due=True)
    idle = replace(FAST, probe_due=True)  # fast, and not used lately
    deep = prospect(("valkey", 20), ("disk", 2), ("objects", 24))
    decision = choose(deep, valkey=idle, disk=due, objects=SLOW)
    assert (decision.load_chunks, decision.tries) == (22, ("disk",))
    both = choose(deep, valkey=idle, disk=due, objects=due)
    assert (both.load_chunks, both.tries) == (20 + PROBE_CHUNKS, ("disk", "objects"))
    assert choose(deep, valkey=idle, disk=SLOW, objects=due).tries == ()
    again = choose(prospect(("disk", 2), ("memory", 1), ("disk", 9)), disk=due)
    assert (again.load_chunks, again.tries) == (PROBE_CHUNKS, ("disk",))


def test_of_listed_lengths_none_is_a_trial_that_needs_more_of_a_slow_tier() -> None:
    idle, due = replace(FAST, probe_due=True), replace(SLOW, probe_due=True)
    listed = [
        Length(8, {"valkey": 8 * MIB}),
        Length(16, {"valkey": 8 * MIB, "disk": 48 * MIB}),
        Length(24, {"valkey": 8 * MIB, "disk": 48 * MIB, "objects": 48 * MIB}),
    ]
    found = replace(prospect(), lengths=listed)
    assert choose(found, valkey=idle, disk=SLOW, objects=SLOW).load_chunks == 8
    tried = choose(found, valkey=FAST, disk=due, objects=SLOW)
    assert (tried.load_chunks, tried.reason, tried.tries) == (16, DecisionReason.PROBE, ("disk",))
    assert choose(found, valkey=FAST, disk=SLOW, objects=due).load_chunks == 8


def test_a_tier_thought_slow_is_tried_with_the_shortest_length_that_needs_it() -> None:
    due = TierRate(bytes_per_s=1e6, latency_s=0.001, inflight_bytes=0, probe_due=True)
    listed = [Length(8, {}), Length(24, {"valkey": 24 * MIB}), Length(40, {"valkey": 40 * MIB})]
    decision = choose(replace(prospect(), lengths=listed), valkey=due)
    assert (decision.load_chunks, decision.reason) == (24, DecisionReason.PROBE)
    assert choose(replace(prospect(), lengths=listed), valkey=SLOW).load_chunks == 8
