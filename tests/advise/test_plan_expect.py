"""What a plan expects, recomputed by hand: queues, loads, long gaps, purchases, traffic, ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.advise.plan_made import PRICES, question, shown

from kvferry.advise.expect import Keeps
from kvferry.advise.plan import make
from kvferry.advise.settings import context_of
from kvferry.advise.speed import HOST_BYTES_S, decode_step_s, prefill_s
from kvferry.advise.workload import Goal, Kind, Numbers, ReuseCurve
from kvferry.cli.plan_trace import from_document, read_trace


def test_a_tenth_on_top_of_the_p99_decides_where_it_must() -> None:
    assert context_of(11_500, 500, 0) == 16_384


def test_one_kind_of_request_waits_as_in_a_queue_with_a_fixed_service_time() -> None:
    plan = make(question(kind=Kind.ONE_SHOT))
    found = plan.expected[0]
    rate = plan.load.requests_s / plan.served.replicas
    service = found.times.prefill_s if found.times else 0
    assert found.times and found.ttft_s
    assert found.times.wait_s == pytest.approx(rate * service**2 / (2 * (1 - rate * service)))
    assert found.ttft_s == pytest.approx(service + found.times.wait_s)


def test_prefill_is_a_mean_of_what_finds_its_prefix_and_what_does_not() -> None:
    plan = make(question(kind=Kind.AGENT))
    load, compute = plan.load, plan.served.compute
    assert compute is not None
    for found in plan.expected:
        share = found.hit_rate / (1 - load.new_tokens / load.context_p50)
        warm = prefill_s(compute, load.new_tokens, load.context_p50 - load.new_tokens)
        expected = share * warm + (1 - share) * prefill_s(compute, load.context_p50)
        assert found.times and found.times.prefill_s == pytest.approx(expected)


def test_busy_is_prefill_and_decode_in_full_batches_and_its_inverse_the_most_requests() -> None:
    plan = make(question(kind=Kind.AGENT))
    served, load = plan.served, plan.load
    batch = served.in_flight(load.context_p50 + load.output_tokens)
    assert served.compute is not None and batch < 256
    step = decode_step_s(served.compute, batch, served.gpu_bytes(load.context_p50 + load.output_tokens / 2))
    for found in plan.expected:
        assert found.times and found.busy and found.most_requests_s
        each = found.times.prefill_s + load.output_tokens * step / batch
        assert found.busy == pytest.approx(load.requests_s / 2 * each)
        assert found.most_requests_s == pytest.approx(2 / each)


def test_answers_in_flight_obey_littles_law() -> None:
    plan = make(question(kind=Kind.AGENT))
    for found in plan.expected:
        assert found.times and found.stream_tokens_s
        tokens_s = plan.load.requests_s / 2 * plan.load.output_tokens
        assert found.times.batch == pytest.approx(max(1.0, tokens_s / found.stream_tokens_s), rel=1e-3)


def test_loads_from_the_tier_stretch_with_the_share_that_hosts_take_in() -> None:
    plan = make(question(kind=Kind.AGENT))
    found = plan.expected[2]
    far = found.hit_rate - plan.expected[1].hit_rate
    size = plan.served.copy_bytes(plan.load.context_p50)
    assert plan.intake == pytest.approx(
        plan.load.requests_s * far * size / (plan.served.hosts * HOST_BYTES_S)
    )
    assert 0 < plan.intake < 0.95
    assert found.times
    assert found.times.load_s == pytest.approx(plan.link.seconds(size * far) / (1 - plan.intake))


def test_a_fifth_of_the_reuse_is_lost_to_hosts_where_users_come_back_after_days() -> None:
    near, far = (make(question(kind=Kind.RAG, numbers=Numbers(resume_h=hours))) for hours in (0, 48))
    assert far.expected[1].hit_rate == pytest.approx(0.8 * near.expected[1].hit_rate)
    assert far.expected[2].hit_rate == pytest.approx(near.expected[2].hit_rate)
    assert "20% of the reuse is by users who come back after hours" in " ".join(shown(far)["assumptions"])
    told = make(question(kind=Kind.RAG, numbers=Numbers(resume_h=48, resume_share=0.5)))
    assert told.expected[1].hit_rate == pytest.approx(0.5 * near.expected[1].hit_rate)


def test_gpus_that_the_load_would_need_beyond_the_fleet_are_purchases_put_off() -> None:
    """The fleet's hours and those beyond it, each once: together, what the table says."""
    plan = make(question(gpu="a100", kind=Kind.AGENT))
    before, after = (found.busy or 0 for found in plan.expected[1:])
    assert before > 1 > after
    money, deal = plan.verdict.money, plan.verdict.deal
    assert money
    assert money.benefit_usd == pytest.approx((before - after) * 8 * 3.0 * 730)
    assert money.gpu_hours + deal.deferred_usd_month / 3.0 == pytest.approx((before - after) * 8 * 730)
    assert make(question(kind=Kind.CHAT)).verdict.deal.deferred_usd_month == 0


def test_another_zone_costs_every_byte_loaded_and_stored() -> None:
    plan = make(question(kind=Kind.AGENT))
    month = plan.load.requests_s * 730 * 3600
    moved = month * plan.served.copy_bytes(plan.load.context_p50) * (1 - plan.expected[1].hit_rate)
    assert plan.zone_usd_month == pytest.approx(moved / 1e9 * 0.02)
    free = make(question(kind=Kind.AGENT, prices=replace(PRICES, zone_usd_gb=0.0)))
    assert free.zone_usd_month == 0


def test_as_many_ranks_are_taken_as_hold_four_of_the_longest() -> None:
    plan = make(question("qwen3-32b", kind=Kind.CHAT))
    alone = make(question("qwen3-32b", kind=Kind.CHAT, tensor=1)).served
    longest = plan.load.context_p99 + plan.load.output_tokens
    assert 1 <= alone.in_flight(longest) < 4
    assert plan.served.tensor == 2 and plan.served.in_flight(longest) >= 4


def test_sglang_waits_for_pages_where_throughput_counts_and_its_memory_is_given_per_rank() -> None:
    hurried = make(question(kind=Kind.AGENT, goal=Goal.LATENCY))
    for plan, policy in ((hurried, "best_effort"), (make(question(kind=Kind.AGENT)), "wait_complete")):
        assert plan.settings.shared
        arguments = shown(plan)["flags"]["sglang"]["arguments"]
        assert arguments[arguments.index("--hicache-storage-prefetch-policy") + 1] == policy
        assert arguments[arguments.index("--hicache-size") + 1] == str(
            plan.settings.offload_bytes // 4 // 10**9
        )


def test_a_trace_says_how_long_a_conversation_is_kept_after_a_turn_and_when_it_is_dropped() -> None:
    """Dropped after 60 s, within which 96% lie: half of the turns are the last of two."""
    gaps = {"within": [{"gap_s": 1, "share": 0.5}, {"gap_s": 60, "share": 0.96}], "longest_s": 99}
    found = {
        "block_tokens": 50,
        "traffic": {
            "requests": 10,
            "span_s": 10,
            "input_tokens": 1000,
            "last_half": {"first_request": 5, "input_tokens": 500},
            "input_quantiles": {"p50": 90, "p99": 200},
            "output_quantiles": {"p50": 5},
        },
        "reuse": {
            "hit_rate": {"last_half": 0.3},
            "conversations": {"number": 5, "growth_tokens": {"p50": 25}},
            "by_capacity": [
                {"tokens": 100, "lru": {"last_half": 0.3}},
                {"tokens": 200, "lru": {"last_half": 0.2}},
            ],
            "gaps": gaps,
        },
    }
    numbers, curve, _ = from_document(found, name="x")
    mean = 1 * (1 + 0.5) / 2 + 59 * (0.5 + 0.04) / 2
    assert numbers.gap_s == pytest.approx(mean / 2 + 60 / 2)
    assert replace(numbers, gap_s=None) == Numbers(90, 200, 100, 20, 5, 2, None, None, 1, 0.3, 0)
    assert curve is not None and curve.points == ((100, 0.3), (200, 0.3))
    gaps["within"] = [{"gap_s": 1, "share": 0.5}]
    gaps["longest_s"] = 7200
    assert from_document(json.loads(json.dumps(found)), name="x")[0].resume_h == 2


def test_a_fall_of_the_hit_rate_from_90_to_60_percent_is_four_times_the_prefill() -> None:
    high, low = (
        make(question(kind=Kind.RAG, numbers=Numbers(reuse=reuse))).expected[2].computed_tokens_s
        for reuse in (0.9, 0.6)
    )
    assert low / high == pytest.approx(4)


def test_sessions_with_clocks_of_their_own_say_what_is_shared_and_not_how_much_at_a_time(
    tmp_path: Path,
) -> None:
    """Replayed one after another they need next to no memory, which says nothing of a fleet."""
    session = {
        "id": "s",
        "block_size": 64,
        "requests": [
            {"t": 20.0 * turn, "in": 64 * (20 + 4 * turn), "out": 50, "hash_ids": list(range(20 + 4 * turn))}
            for turn in range(12)
        ],
    }
    file = tmp_path / "agents.jsonl"
    file.write_text("\n".join(json.dumps({**session, "id": f"s{number}"}) for number in range(30)))
    numbers, curve, _ = read_trace(file)
    assert curve is None
    assert numbers.reuse is not None and numbers.reuse > 0.8
    assert numbers.requests_s is None
    measured = (replace(numbers, requests_s=40), None, "trace x")
    plan = make(question(measured=measured, gpus=16))
    assert plan.tier.peak_bytes > 40 * 10 * plan.served.copy_bytes(plan.load.context_p50)
    assert "clocks of their own" in " ".join(shown(plan)["assumptions"])


def test_a_trace_that_does_not_say_what_is_shared_is_said_to_say_nothing_about_it() -> None:
    numbers = Numbers(context_p50=1000, context_p99=4000, output_tokens=100, requests_s=2)
    plan = make(question(measured=(numbers, None, "trace x")))
    assert plan.load.reuse == 0
    assert "does not say which prompts share" in " ".join(shown(plan)["assumptions"])
    told = make(question(measured=(numbers, None, "trace x"), numbers=Numbers(reuse=0.5, gap_s=60)))
    assert told.load.reuse == 0.5 and told.load.turns > 1


def test_at_twice_the_requests_of_a_trace_the_same_reuse_takes_twice_the_memory() -> None:
    numbers = Numbers(
        context_p50=1000, context_p99=4000, output_tokens=100, new_tokens=100, turns=9, requests_s=2, gap_s=60
    )
    curve = ReuseCurve(((1e6, 0.2), (5e6, 0.8)))
    once, twice = (
        make(question(measured=(numbers, curve, "trace x"), numbers=said)).load
        for said in (Numbers(), Numbers(requests_s=4))
    )
    assert once.curve == curve
    assert twice.curve.points == ((2e6, 0.2), (1e7, 0.8))
    assert twice.origin["reuse"] == "trace x, its capacities x 2 as its requests"


def test_rows_are_named_by_where_kv_is_kept() -> None:
    plan = make(question(kind=Kind.AGENT))
    assert [found.keeps for found in plan.expected] == list(Keeps)
