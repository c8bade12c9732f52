"""Plans: published sizes, the three recipes, when the answer is no, and what must be monotone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.advise.plan_made import GROWING, PRICES, growing, question, shown
from tests.runs import runs

from kvferry.advise.expect import Keeps, Routing
from kvferry.advise.plan import Plan, make
from kvferry.advise.price import No
from kvferry.advise.settings import context_of
from kvferry.advise.shared import Shard, size_shared
from kvferry.advise.verdict import MEASURE, Not
from kvferry.advise.workload import PRESETS, Kind, Numbers, ReuseCurve, complete
from kvferry.errors import MisconfiguredError


def test_100_conversations_that_grow_to_28k_tokens_on_a_70b_take_900_gb_and_1_3_times_that_is_planned() -> (
    None
):
    tier = growing().tier
    assert tier.peak_bytes == pytest.approx(900e9, rel=0.03)
    assert tier.planned_bytes == pytest.approx(1.3 * tier.peak_bytes)


def test_three_shards_hold_that_and_read_7_4_gb_a_second_of_a_ceiling_of_11_25() -> None:
    tier = growing().tier
    assert (tier.by_capacity, tier.shards) == (3, 3)
    assert tier.sustained_bytes_s == pytest.approx(7.4e9, rel=0.001)
    assert tier.shards * tier.shard.ceiling_bytes_s == pytest.approx(11.25e9)


def test_a_return_of_20k_tokens_is_6_6_gb() -> None:
    assert growing().served.copy_bytes(20_000) == pytest.approx(6.6e9, rel=0.01)


def test_the_published_fleet_serves_about_a_quarter_more_with_the_tier() -> None:
    """Published: 3,692 and 4,631 requests in 20 minutes. Direction and size, not a promise."""
    without, tier = (growing().expected[place].most_requests_s for place in (1, 2))
    assert without and tier
    assert tier / without == pytest.approx(4631 / 3692, abs=0.15)


def test_an_agents_preset_has_the_reuse_and_the_ratio_of_the_published_traces() -> None:
    load = make(question(kind=Kind.AGENT)).load
    assert load.reuse == pytest.approx(0.942, abs=0.01)
    assert load.context_p50 / load.output_tokens == pytest.approx(131, abs=1)
    assert load.first_tokens + 29 * (load.new_tokens + load.output_tokens) == pytest.approx(80_000, rel=0.03)


def chosen(plan: Plan) -> tuple[Any, ...]:
    found = plan.settings
    return (found.tensor, found.max_model_len, found.utilization, found.kv_dtype, found.batched_tokens)


def test_the_chat_recipe_comes_out() -> None:
    plan = make(question("llama-3.1-8b", kind=Kind.CHAT))
    assert chosen(plan) == (1, 16_384, 0.92, "fp8", 2048)
    assert (plan.settings.offload_bytes, plan.settings.shared) == (0, False)
    assert "affinity routing" in shown(plan)["layers"][2]["set"]


def test_the_rag_recipe_comes_out() -> None:
    plan = make(question(kind=Kind.RAG))
    assert chosen(plan) == (4, 131_072, 0.92, "fp8", 16_384)
    assert (plan.settings.offload_bytes, plan.settings.offload_block_tokens) == (200_000_000_000, 64)
    assert not plan.settings.shared


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_recipe_of_coding_agents_comes_out(gpu: str) -> None:
    plan = make(question(gpu=gpu, kind=Kind.AGENT))
    assert chosen(plan) == (4, 131_072, 0.92, "fp8", 16_384)
    assert (plan.settings.offload_bytes, plan.settings.offload_block_tokens) == (200_000_000_000, 64)
    assert plan.settings.shared and plan.settings.cache_aware and plan.settings.split
    assert plan.verdict.reasons == ()


REASONS: dict[No | Not, dict[str, Any]] = {
    No.SINGLE: {"gpus": 4, "kind": Kind.AGENT},
    No.FITS: {"kind": Kind.RAG},
    No.LOW_REUSE: {"kind": Kind.AGENT, "numbers": Numbers(reuse=0.04)},
    No.NO_PREFILL: {"kind": Kind.AGENT, "numbers": Numbers(new_tokens=20_000, requests_s=4)},
    No.COSTS_MORE: {"kind": Kind.AGENT, "prices": replace(PRICES, ram_usd_gib=500.0)},
    Not.NOTHING_RETURNS: {"kind": Kind.ONE_SHOT},
    Not.NETWORK: {"kind": Kind.AGENT, "numbers": Numbers(requests_s=20)},
    Not.SLOWER: {
        "model": "llama-3.1-8b",
        "kind": Kind.CHAT,
        "numbers": Numbers(conversations=2000, gap_s=3000),
        "host_bytes": 10**10,
    },
    Not.TOO_SMALL: {"kind": Kind.AGENT, "numbers": Numbers(output_tokens=4000)},
    Not.SEVERAL_HOSTS: {"kind": Kind.AGENT, "tensor": 4, "gpus_per_host": 2},
    Not.COMPRESSED: {},
}


@pytest.mark.parametrize("reason", [reason for reason in REASONS if REASONS[reason]])
def test_no_shared_tier_is_advised_for_each_reason_and_what_would_change_it_is_said(reason: No | Not) -> None:
    plan = make(question(**REASONS[reason]))
    assert reason in plan.verdict.reasons
    assert not plan.settings.shared
    said = {why["reason"]: why for why in shown(plan)["why_not"]}
    assert said[reason.name.lower()]["what_would_change_it"] == MEASURE[reason]


def test_every_reason_has_a_measurement_and_a_case() -> None:
    assert set(MEASURE) == {*No, *Not} == set(REASONS)


def test_attention_that_compresses_gets_no_shared_tier() -> None:
    asked = question("deepseek-v3", kind=Kind.CHAT, weights_dtype="fp8", gpu="h200")
    other = question.__globals__["find_model"]("deepseek-v4-flash")
    assert Not.COMPRESSED in make(replace(asked, model=other)).verdict.reasons


def test_where_turns_go_anywhere_a_pool_of_the_host_finds_what_private_memory_does_not() -> None:
    asked = question(kind=Kind.RAG, gpus=16)
    sticky, spread = (make(replace(asked, routing=way)) for way in Routing)
    assert (sticky.settings.pool, spread.settings.pool) == (False, True)
    assert spread.expected[0].hit_rate == pytest.approx(sticky.expected[0].hit_rate / 4, rel=0.3)
    assert sticky.expected[1].hit_rate > spread.expected[1].hit_rate > 2 * spread.expected[0].hit_rate
    arguments = shown(spread)["flags"]["node"]["arguments"]
    assert arguments == ["--pool", "400GB"]


def test_users_who_come_back_after_hours_need_what_hosts_have_forgotten() -> None:
    near = make(question(kind=Kind.RAG))
    far = make(question(kind=Kind.RAG, numbers=Numbers(resume_h=48)))
    assert No.FITS in near.verdict.reasons
    assert No.FITS not in far.verdict.reasons
    assert far.tier.disk_bytes == pytest.approx(far.tier.bucket_bytes)
    started = far.load.requests_s / far.load.turns * 86_400
    assert far.tier.disk_bytes == pytest.approx(started * far.served.copy_bytes(far.load.grown_tokens))


def test_a_shared_tier_at_the_size_that_pays_best_is_taken_from_a_trace() -> None:
    curve = ReuseCurve(((1e6, 0.1), (4e6, 0.6), (400e6, 0.62)))
    numbers = Numbers(
        context_p50=30_000,
        context_p99=60_000,
        output_tokens=300,
        new_tokens=500,
        turns=20,
        requests_s=1,
        gap_s=60,
    )
    plan = make(question(kind=Kind.OWN, measured=(numbers, curve, "trace x"), host_bytes=10**10))
    assert plan.tier.peak_bytes == pytest.approx(plan.served.copy_bytes(plan.load.grown_tokens) * 4e6
                                                 / plan.load.grown_tokens)  # fmt: skip
    assert plan.load.origin["context_p50"] == "trace x"


def test_measured_prefill_takes_the_place_of_the_estimate() -> None:
    plan = make(question(kind=Kind.RAG, prefill_tokens_s=1000.0))
    assert plan.returns[0].computed_s == pytest.approx(60_000 / 1000 / 4)


def test_a_preset_is_cut_to_what_the_model_allows_and_what_was_said_is_not() -> None:
    plan = make(question("qwen3-32b", kind=Kind.AGENT))
    assert plan.load.context_p99 + plan.load.output_tokens <= plan.served.model.max_context
    assert "cut to the model's 40,960" in plan.load.origin["context_p50"]
    with pytest.raises(MisconfiguredError, match=r"more than the 40,960"):
        make(question("qwen3-32b", kind=Kind.AGENT, numbers=Numbers(context_p50=50_000, context_p99=60_000)))


def test_without_active_parameters_of_a_mixture_sizes_are_told_and_speed_is_not() -> None:
    plan = make(question("kimi-k2.7-code", "b200", kind=Kind.CHAT, weights_dtype="fp8"))
    assert plan.returns == ()
    assert plan.expected[0].ttft_s is None
    assert plan.verdict.money is None
    known = make(
        question("kimi-k2.7-code", "b200", kind=Kind.CHAT, weights_dtype="fp8", active_parameters=32e9)
    )
    assert known.expected[0].ttft_s


def test_windows_keep_16_bits_beside_fp8() -> None:
    plan = make(question("gemma-3-27b", kind=Kind.CHAT))
    assert plan.settings.skip_windows
    fp8, native = (make(question("gemma-3-27b", kind=Kind.CHAT, kv=kv)).served for kv in ("fp8", "bf16"))
    window = native.copy_bytes(1024) - 1024 * native.parts[0].full_token_bytes
    full = 8192 * native.parts[0].full_token_bytes // 2
    assert fp8.copy_bytes(8192) == pytest.approx(full + window, rel=0.01)


@pytest.mark.parametrize(
    ("p99", "output", "length"),
    [
        (12_000, 300, 16_384),
        (110_000, 400, 131_072),
        (10_000, 100, 12_288),
        (20_000, 0, 24_576),
        (5, 5, 2048),
    ],
)
def test_the_context_is_the_p99_and_a_tenth_up_to_the_next_half_power_of_two(
    p99: int, output: int, length: int
) -> None:
    assert context_of(p99, output, 0) == length
    assert context_of(p99, output, 4096) == min(length, 4096)


@given(st.floats(1, 1e6), st.floats(0, 1e5))
def test_a_context_always_has_room_for_the_longest_request(p99: float, output: float) -> None:
    length = context_of(p99, output, 0)
    assert length >= p99 + output
    assert length <= max(2048, 1.1 * 1.5 * (p99 + output) + 1)


@given(
    st.floats(0, 1e12),
    st.floats(0, 1e4),
    st.floats(0, 1e12),
    st.floats(0, 100),
    st.floats(0, 1000),
    st.floats(0, 2),
)
def test_more_of_anything_never_takes_fewer_shards(
    conversation: float, count: float, read: float, started: float, hours: float, more: float
) -> None:
    def size(**changed: float) -> Any:
        base = {"conversation_bytes": conversation, "conversations": count, "read_bytes_s": read,
                "started_s": started, "resume_h": hours}  # fmt: skip
        return size_shared(**{**base, **changed}, shard=Shard())

    small = size()
    assert small.shards >= max(small.by_capacity, small.by_bandwidth) and small.shards != 2
    assert size(conversations=count * (1 + more)).shards >= small.shards
    assert size(read_bytes_s=read * (1 + more)).shards >= small.shards
    assert size(resume_h=hours + more).bucket_bytes >= small.bucket_bytes


loads = st.builds(
    lambda p50, ratio, new, out, turns, people, gap: Numbers(
        context_p50=p50,
        context_p99=min(100_000, p50 * ratio),
        new_tokens=max(1, p50 * new),
        output_tokens=out,
        turns=turns,
        conversations=people,
        gap_s=gap,
    ),
    st.floats(100, 50_000),
    st.floats(1, 4),
    st.floats(0.001, 1),
    st.floats(1, 2000),
    st.integers(1, 100),
    st.floats(1, 1000),
    st.floats(1, 3600),
)
models = st.sampled_from(
    ["llama-3.1-8b", "llama-3.3-70b", "gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b-a3b"]
)


def planned(model: str, numbers: Numbers, **others: Any) -> Plan:
    try:
        return make(question(model, numbers=numbers, weights_dtype="fp8", **others))
    except MisconfiguredError:
        reject()


@pytest.mark.long
@settings(deadline=None, max_examples=runs(15))
@given(models, loads)
def test_every_plan_is_in_bounds_and_its_document_has_no_surprise(model: str, numbers: Numbers) -> None:
    plan = planned(model, numbers)
    first, second, third = (found.hit_rate for found in plan.expected)
    assert 0 <= first <= second <= third <= 1
    assert plan.load.curve.most == pytest.approx(third, abs=0.05)
    assert (
        plan.load.first_tokens <= plan.load.grown_tokens <= max(plan.load.context_p99, plan.load.first_tokens)
    )
    assert plan.verdict.shared == plan.settings.shared
    rates = [found.most_requests_s or 0 for found in plan.expected]
    assert rates == sorted(rates)
    for way in plan.returns:
        assert way.gpu_s <= way.host_s and way.gpu_s <= way.shared_s
        assert way.gpu_s <= way.computed_s
    document = shown(plan)
    assert document["expected"][2]["kv_in"] == Keeps.SHARED.value
    assert all(line.strip() for line in document["explanation"])


@pytest.mark.long
@settings(deadline=None, max_examples=runs(15))
@given(models, loads, st.integers(2, 5))
def test_more_gpus_hold_and_serve_no_less(model: str, numbers: Numbers, times: int) -> None:
    few = planned(model, numbers, tensor=4, gpus=8)
    many = planned(model, numbers, tensor=4, gpus=8 * times)
    length = few.load.context_p50
    assert (
        many.served.in_flight(length) * many.served.replicas
        >= few.served.in_flight(length) * few.served.replicas
    )
    assert many.expected[0].hit_rate >= few.expected[0].hit_rate
    assert (many.expected[0].busy or 0) <= (few.expected[0].busy or 0) * (1 + 1e-9)


@pytest.mark.long
@settings(deadline=None, max_examples=runs(15))
@given(models, loads, st.floats(1, 3))
def test_longer_contexts_take_no_fewer_bytes_and_leave_no_more_room(
    model: str, numbers: Numbers, times: float
) -> None:
    served = planned(model, numbers, tensor=4).served
    tokens = numbers.context_p50 or 0
    assert served.copy_bytes(tokens * times) >= served.copy_bytes(tokens)
    assert served.in_flight(tokens * times) <= served.in_flight(tokens)


@pytest.mark.long
@settings(deadline=None, max_examples=runs(15))
@given(models, loads, st.floats(1, 10))
def test_host_memory_and_affinity_never_hurt(model: str, numbers: Numbers, times: float) -> None:
    plan = planned(model, numbers, tensor=4, gpus=16)
    larger = planned(model, numbers, tensor=4, gpus=16, host_bytes=round(200e9 * times))
    assert larger.expected[1].hit_rate >= plan.expected[1].hit_rate
    spread = planned(model, numbers, tensor=4, gpus=16, routing=Routing.ROUND_ROBIN)
    assert spread.expected[0].hit_rate <= plan.expected[0].hit_rate + 1e-12


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 1)), min_size=1, max_size=9),
    st.floats(0, 2e9),
    st.floats(0, 1e9),
)
def test_reuse_never_falls_with_capacity(
    pairs: list[tuple[float, float]], tokens: float, more: float
) -> None:
    sizes = sorted({size for size, _ in pairs})
    shares = sorted(share for _, share in pairs)[: len(sizes)]
    curve = ReuseCurve(tuple(zip(sizes, shares, strict=True)))
    assert 0 <= curve.at(tokens) <= curve.at(tokens + more) + 1e-12
    assert curve.at(curve.enough_tokens) >= 0.97 * curve.most - 1e-12


@pytest.mark.parametrize("kind", PRESETS)
def test_a_preset_is_as_busy_per_replica_whatever_the_fleet(kind: Kind) -> None:
    one, four = (complete(Numbers(), kind=kind, replicas=count) for count in (1, 4))
    assert four.requests_s == pytest.approx(4 * one.requests_s)
    assert four.conversations == pytest.approx(4 * one.conversations)
    assert four.reuse == one.reuse


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (Numbers(), "missing: --context-p50, --output-tokens"),
        (Numbers(context_p50=1000), "missing: --output-tokens"),
        (Numbers(context_p50=1000, output_tokens=10), "missing: --requests-s"),
        (replace(GROWING, new_tokens=30_000), "--new-tokens 30000 is more"),
        (replace(GROWING, context_p99=10_000), "--context-p99 10000 is less"),
    ],
)
def test_numbers_that_are_missing_or_contradict_are_named(numbers: Numbers, why: str) -> None:
    with pytest.raises(MisconfiguredError, match=why.replace("(", r"\(")):
        complete(numbers, kind=Kind.OWN, replicas=1)
