"""Tier rates: learnt from concurrent transfers, adaptive, and given another chance after a bad spell."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.costs import Prospect, RateEstimate, TierRun, decide
from kvferry.costs.decision import Limits
from kvferry.costs.prefill import PrefillModel
from kvferry.costs.rates import FIRST_PROBE_S, MAX_PROBE_S, MIN_SILENCE_S

MIB = 1 << 20


def move(
    rate: RateEstimate, now: float, *, parts: int, nbytes: int, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Transfer ``parts`` at once over a shared link; returns when the last one ended."""
    tickets = [rate.begin(nbytes, now) for _ in range(parts)]
    for index, ticket in enumerate(tickets):
        rate.end(ticket, now + latency_s + (index + 1) * nbytes / bytes_per_s)
    return now + latency_s + parts * nbytes / bytes_per_s


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e7, 2e10),
    st.floats(0.0, 0.05),
    st.integers(2, 64),
    st.sampled_from([MIB, 5 * MIB // 2, 10 * MIB]),
)
def test_bandwidth_and_latency_are_learnt_from_transfers_that_share_the_tier(
    bytes_per_s: float, latency_s: float, parts: int, nbytes: int
) -> None:
    rate = RateEstimate()
    now = 0.0
    for _ in range(10):
        now = move(rate, now, parts=parts, nbytes=nbytes, bytes_per_s=bytes_per_s, latency_s=latency_s)
    learnt = rate.rate(now)
    assert learnt.inflight_bytes == 0
    predicted = learnt.seconds(parts * nbytes)
    assert predicted == pytest.approx(latency_s + parts * nbytes / bytes_per_s, rel=0.05)


def test_bytes_in_flight_delay_what_comes_after_them() -> None:
    rate = RateEstimate()
    now = move(rate, 0.0, parts=8, nbytes=MIB, bytes_per_s=100 * MIB)
    idle = rate.rate(now).seconds(MIB)
    ticket = rate.begin(50 * MIB, now)
    busy = rate.rate(now).seconds(MIB)
    assert idle is not None and busy is not None
    assert busy - idle == pytest.approx(0.5, rel=0.05)
    rate.forget(ticket)
    assert rate.rate(now).seconds(MIB) == idle


def test_nothing_is_predicted_before_the_first_transfer() -> None:
    rate = RateEstimate()
    assert rate.rate(5.0).seconds(MIB) is None
    assert not rate.rate(5.0).probe_due
    rate.forget(rate.begin(MIB, 5.0))
    assert rate.rate(9.0).bytes_per_s is None


def test_one_stuck_transfer_is_not_a_slow_tier() -> None:
    rate = RateEstimate()
    now = 0.0
    for _ in range(10):
        now = move(rate, now, parts=8, nbytes=MIB, bytes_per_s=1000 * MIB)
    before = rate.rate(now).seconds(64 * MIB)
    rate.end(rate.begin(MIB, now), now + 30)
    after = rate.rate(now).seconds(64 * MIB)
    assert before is not None and after is not None
    assert after < 2 * before


def test_a_tier_that_became_slow_is_noticed_within_a_load() -> None:
    rate = RateEstimate()
    now = 0.0
    for _ in range(10):
        now = move(rate, now, parts=32, nbytes=MIB, bytes_per_s=2000 * MIB)
    now = move(rate, now, parts=48, nbytes=MIB, bytes_per_s=100 * MIB)
    predicted = rate.rate(now).seconds(100 * MIB)
    assert predicted is not None and predicted > 0.4


def test_a_tier_that_recovered_is_noticed_within_a_probe() -> None:
    rate = RateEstimate()
    now = 0.0
    for _ in range(10):
        now = move(rate, now, parts=8, nbytes=MIB, bytes_per_s=MIB)
    slow = rate.rate(now).seconds(100 * MIB)
    assert slow is not None and slow > 80
    now = move(rate, now, parts=4, nbytes=MIB, bytes_per_s=1000 * MIB)
    fast = rate.rate(now).seconds(100 * MIB)
    assert fast is not None and fast < 5


def test_probes_become_due_ever_more_rarely_while_the_tier_stays_bad() -> None:
    rate = RateEstimate()
    now = move(rate, 0.0, parts=4, nbytes=MIB, bytes_per_s=MIB)
    gaps = []
    for _ in range(10):
        start = now
        while not rate.rate(now).probe_due:
            now += 0.25
        gaps.append(now - start)
        rate.probing(now)
        now = move(rate, now, parts=4, nbytes=MIB, bytes_per_s=MIB)
    assert gaps[0] == FIRST_PROBE_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_PROBE_S
    now = move(rate, now, parts=4, nbytes=MIB, bytes_per_s=1000 * MIB)
    assert rate.rate(now + FIRST_PROBE_S).probe_due


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_arbitrary_timings_never_give_a_negative_rate(seed: int) -> None:
    randomness = random.Random(seed)
    rate = RateEstimate()
    now, flying = 0.0, []
    for _ in range(200):
        now += randomness.expovariate(100)
        if flying and randomness.random() < 0.5:
            ticket = flying.pop(randomness.randrange(len(flying)))
            if randomness.random() < 0.2:
                rate.forget(ticket)
            else:
                rate.end(ticket, now)
        else:
            flying.append(rate.begin(randomness.randrange(0, 40 * MIB), now))
        learnt = rate.rate(now)
        assert learnt.inflight_bytes == sum(ticket.nbytes for ticket in flying)
        assert learnt.latency_s >= 0 and (learnt.bytes_per_s is None or learnt.bytes_per_s > 0)


@settings(max_examples=60, deadline=None)
@given(
    known=st.booleans(),
    chunks=st.integers(1, 64),
    waited_s=st.floats(MIN_SILENCE_S, 60.0),
    recompute_s=st.floats(0.01, 1e5),
    outage_s=st.floats(0.0, 300.0),
    asked_every_s=st.floats(0.3, 5.0),
)
def test_a_tier_that_lets_one_wait_in_silence_is_waited_for_by_trials_only_and_is_back_within_a_minute(
    *, known: bool, chunks: int, waited_s: float, recompute_s: float, outage_s: float, asked_every_s: float
) -> None:
    """Whatever is known of it, and however much it would save."""
    rate = RateEstimate()
    now = move(rate, 0.0, parts=8, nbytes=MIB, bytes_per_s=500 * MIB) if known else 0.0
    prospect = Prospect(128 * chunks, 0, 128, [TierRun("disk", chunks, MIB)])
    prefill = PrefillModel(0.0, recompute_s / (128 * chunks), 0.0)
    rate_before = rate.rate(now).bytes_per_s

    def asked(*, works: bool) -> int:
        """One request: how much it waits for."""
        nonlocal now
        found = decide(
            prospect, prefill=prefill, rates={"disk": rate.rate(now)}, limits=Limits(cap_s=waited_s)
        )
        for _ in found.tries:
            rate.probing(now)
        if found.load_chunks:
            ticket = rate.begin(found.load_chunks * MIB, now)
            now += 0.001 if works else waited_s
            (rate.end if works else rate.timed_out)(ticket, now)
        now += asked_every_s
        return found.load_chunks

    assert known or asked(works=False) == chunks
    rate.timed_out(rate.begin(MIB, now), now + waited_s)
    now += waited_s
    waits, until = 0, now + outage_s
    while now < until:
        loaded = asked(works=False)
        assert loaded <= min(chunks, 4)
        waits += loaded > 0
    assert waits <= 7 + outage_s / MAX_PROBE_S, "1, 2, 4, ... 32 s, then one a minute"
    healed = now
    while not asked(works=True):
        assert now <= healed + MAX_PROBE_S + asked_every_s
    again = rate.rate(now).bytes_per_s
    assert again is not None and (rate_before is None or again >= rate_before / 2)
    assert rate.rate(now).inflight_bytes == 0


def test_a_slow_tier_is_no_silent_one() -> None:
    """Bytes of other transfers come, so that one that waits behind them tells of slowness at most."""
    rate = RateEstimate()
    now = move(rate, 0.0, parts=8, nbytes=MIB, bytes_per_s=100 * MIB)
    before = rate.rate(now).seconds(MIB)
    ticket = rate.begin(MIB, now)
    other = rate.begin(MIB, now)
    rate.end(other, now + 0.5)
    rate.timed_out(ticket, now + 1.0)
    after = rate.rate(now + 1.0).seconds(MIB)
    assert before is not None and after is not None
    assert before < after < 8 * before
    hasty = rate.begin(MIB, now + 2.0)
    rate.timed_out(hasty, now + 2.0 + MIN_SILENCE_S / 2)
    assert rate.rate(now + 3.0).seconds(MIB) == after
