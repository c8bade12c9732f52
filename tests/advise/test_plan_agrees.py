"""A plan's numbers agree with each other: those given, the table, the money, the verdict, the flags."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.advise.plan_made import question, shown

from kvferry.advise.plan import make
from kvferry.advise.price import No
from kvferry.advise.settings import sglang_rank_bytes
from kvferry.advise.verdict import FOLLOWS, Not
from kvferry.advise.workload import Kind, Numbers, complete
from kvferry.errors import MisconfiguredError
from kvferry.models.concurrency import Budget, requests_in_flight
from kvferry.models.precision import kv_dtype
from kvferry.models.reserve import EngineRules
from kvferry.models.sizes import Sizing

AGENT = Numbers(
    context_p50=43_600, context_p99=110_000, new_tokens=2300, output_tokens=333, turns=33, requests_s=1
)


@pytest.mark.parametrize("numbers", [AGENT, replace(AGENT, gap_s=0), replace(AGENT, turns=None)])
def test_conversations_of_several_turns_need_a_gap_or_how_many_go_on(numbers: Numbers) -> None:
    with pytest.raises(MisconfiguredError, match="missing: --gap or --conversations"):
        make(question(numbers=numbers))


def test_the_same_numbers_give_the_same_plan_whichever_two_of_three_were_said() -> None:
    said = (
        replace(AGENT, gap_s=120),
        replace(AGENT, conversations=120),
        replace(AGENT, requests_s=None, conversations=120, gap_s=120),
        replace(AGENT, conversations=120, gap_s=120),
    )
    plans = [make(question(gpus=16, numbers=numbers)) for numbers in said]
    assert {plan.expected[0].hit_rate for plan in plans} == {plans[0].expected[0].hit_rate}
    assert all(plan.verdict.shared for plan in plans)
    assert plans[0].tier.planned_bytes == pytest.approx(2212e9, rel=0.001)


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAG, Kind.AGENT, Kind.OWN])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "conversations": st.floats(1, 1e4),
            "requests_s": st.floats(0.01, 100),
            "gap_s": st.floats(1, 1e5),
        },
    )
)
def test_conversations_are_always_requests_a_second_times_the_gap(kind: Kind, said: dict[str, float]) -> None:
    base = AGENT if kind is Kind.OWN else Numbers()
    numbers = replace(base, **{"requests_s": None, **said})
    try:
        load = complete(numbers, kind=kind, replicas=2)
    except MisconfiguredError:
        assert len(said) in (0, 1, 3)
        return
    # Given ones are kept to the letter, so that they may differ a little.
    assert load.conversations == pytest.approx(load.requests_s * load.gap_s, rel=0.06)
    assert load.curve.enough_tokens >= load.grown_tokens
    for name, value in said.items():
        assert getattr(load, name) == value


CONTRADICTIONS: list[tuple[Kind, dict[str, Any], str]] = [
    (Kind.AGENT, {"conversations": 10, "requests_s": 100, "gap_s": 60}, "give two of them"),
    (Kind.CHAT, {"reuse": 1}, "at least one of a request's 4,096 tokens is new"),
    (Kind.CHAT, {"reuse": 0.99, "new_tokens": 250}, "leaves 41 new of 4,096 tokens"),
    (Kind.CHAT, {"reuse": 0, "turns": 5}, "a second turn reads the first one again"),
    (Kind.CHAT, {"resume_share": 0.5}, "--resume-share says nothing without --resume-hours"),
    (Kind.CHAT, {"gap_s": 36_000, "resume_h": 2}, "--resume-hours 2 is less than --gap"),
    (Kind.RAG, {"output_tokens": 200_000}, "and 200,000 of an answer are more than the 131,072"),
    (Kind.RAG, {"context_p50": 60_000, "context_p99": 131_072}, "are more than the 131,072"),
]


@pytest.mark.parametrize(("kind", "said", "why"), CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(kind: Kind, said: dict[str, Any], why: str) -> None:
    with pytest.raises(MisconfiguredError, match=why):
        make(question(kind=kind, numbers=Numbers(**said)))


@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAG, Kind.AGENT])
def test_a_reuse_that_was_given_decides_over_a_presets_turns_and_new_tokens(kind: Kind, reuse: float) -> None:
    load = make(question(kind=kind, numbers=Numbers(reuse=reuse))).load
    assert load.reuse == reuse
    assert load.return_hit >= reuse - 1e-9
    assert (load.turns == 1) == (reuse == 0)
    if not reuse:
        assert load.new_tokens == load.context_p50


def test_single_requests_that_share_a_tenth_have_the_rest_new() -> None:
    load = make(question(kind=Kind.ONE_SHOT)).load
    assert load.new_tokens == pytest.approx(load.context_p50 * (1 - load.reuse))


@pytest.mark.parametrize("kind", [Kind.AGENT, Kind.CHAT, Kind.RAG])
def test_a_presets_load_on_given_gpus_does_not_hang_on_ranks_or_the_kvs_dtype(kind: Kind) -> None:
    asked = question(kind=kind, gpus=16)
    loads = [
        make(replace(asked, **changed)).load.requests_s
        for changed in ({}, {"tensor": 4}, {"tensor": 8}, {"kv": "bf16"}, {"tensor": 8, "kv": "bf16"})
    ]
    assert len(set(loads)) == 1


def test_a_gap_of_hours_is_a_long_gap() -> None:
    plan = make(question("llama-3.1-8b", "l40s", kind=Kind.CHAT, gpus=4, numbers=Numbers(gap_s=3.6e6)))
    assert (plan.load.resume_h, plan.load.resume_share) == (1000, 1)
    assert plan.verdict.deal.long_gaps and No.FITS not in plan.verdict.reasons
    short = make(question("llama-3.1-8b", "l40s", kind=Kind.CHAT, gpus=4))
    assert No.FITS in short.verdict.reasons


@pytest.mark.parametrize("others", [{"gpus": 16}, {"gpus": 16, "gpu": "a100"}, {"gpus": 32}, {"tensor": 8}])
def test_the_money_counts_the_hours_that_the_table_saves(others: dict[str, Any]) -> None:
    plan = make(question(kind=Kind.AGENT, **others))
    money, own, tier = plan.verdict.money, plan.expected[1], plan.expected[2]
    assert money and own.times and tier.times and own.busy and tier.busy
    saved = own.times.prefill_s - tier.times.prefill_s
    hours = saved * plan.served.tensor * plan.load.requests_s * 730
    put_off = plan.verdict.deal.deferred_usd_month / 3.0
    assert money.gpu_hours + put_off == pytest.approx(hours)
    assert hours == pytest.approx((own.busy - tier.busy) * plan.served.gpus * 730)
    if own.busy < 1:
        assert put_off == pytest.approx(0, abs=1e-6)


def test_requests_in_flight_are_counted_with_the_batched_tokens_that_are_set() -> None:
    """Windows keep the tokens of a step beside them."""
    asked = question(
        "gemma-3-27b", "h200", kind=Kind.AGENT, gpus=16, tensor=8, kv="bf16", weights_dtype="fp8"
    )
    plan = make(asked)
    rules = EngineRules(batched_tokens=plan.settings.batched_tokens)
    sizing = Sizing(asked.model, kv_dtype("bf16"), 8, 1, rules)
    budget = Budget(141_000_000_000, 0.92, asked.weights.nbytes, 8, 3_000_000_000)
    for tokens, most in ((43_933, 81), (plan.settings.max_model_len, 51)):
        assert plan.served.in_flight(tokens) == requests_in_flight(budget, sizing, tokens) == most


def test_sglang_keeps_latents_on_every_rank_and_gets_what_holds_more_than_gpus_or_nothing() -> None:
    asked = question("deepseek-v3", "h200", kind=Kind.AGENT, gpus=16, weights_dtype="fp8")
    few, many = (make(replace(asked, host_bytes=size)) for size in (200 * 10**9, 10**12))
    assert few.settings.offload_bytes == many.settings.offload_bytes == 120 * 10**9
    assert few.settings.sglang_wants == 120 * 10**9
    assert "--hicache-size" not in shown(few)["flags"]["sglang"]["arguments"]
    assert "960 GB per replica" in " ".join(shown(few)["layers"][4]["why"])
    arguments = shown(many)["flags"]["sglang"]["arguments"]
    assert arguments[arguments.index("--hicache-size") + 1] == "120"
    assert "SGLang keeps" not in " ".join(shown(many)["layers"][4]["why"])


@pytest.mark.parametrize("model", ["llama-3.3-70b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_what_sglang_is_given_holds_more_than_its_gpus_do(model: str) -> None:
    asked = question(model, "h200", kind=Kind.RAG, tensor=8, weights_dtype="fp8",
                     numbers=Numbers(conversations=2000))  # fmt: skip
    for host in (10**10, 10**11, 10**12, 10**13):
        plan = make(replace(asked, host_bytes=host))
        size = plan.settings.sglang_rank_bytes
        assert size * 8 <= host
        if not plan.settings.pool and size:
            grown = plan.load.grown_tokens
            assert size / plan.served.rank_bytes(grown) * grown > plan.served.gpu_tokens(grown)
        assert sglang_rank_bytes(plan.served, plan.load, 0, pool=False) == (0, 0)


def test_heads_that_ranks_repeat_take_as_much_more_of_a_host_in_vllms_own_offloading() -> None:
    asked = question("qwen3-235b-a22b", "h200", kind=Kind.RAG, weights_dtype="fp8")
    four, eight = (make(replace(asked, tensor=ranks)).served for ranks in (4, 8))
    assert four.offloaded_bytes(1e5) == four.copy_bytes(1e5)
    assert eight.offloaded_bytes(1e5) == 2 * eight.copy_bytes(1e5)
    assert eight.host_tokens(1e5) == pytest.approx(eight.pool_tokens(1e5) / 2)
    latent = make(question("deepseek-v3", "h200", kind=Kind.RAG, weights_dtype="fp8")).served
    assert latent.offloaded_bytes(1e5) == latent.copy_bytes(1e5) == latent.rank_bytes(1e5)


def test_host_memory_that_holds_no_more_than_the_gpus_is_no_tier_and_is_not_said_to_be_unneeded() -> None:
    asked = question("llama-3.1-8b", "l40s", kind=Kind.CHAT, gpus=4, numbers=Numbers(conversations=1200))
    for host in (0, 10**9):
        plan = make(replace(asked, host_bytes=host))
        assert plan.settings.offload_bytes == 0
        said = " ".join(shown(plan)["layers"][4]["why"])
        assert "GPUs hold it all" not in said and "--host-memory" in said


def test_a_fleet_that_is_too_small_with_the_tier_is_not_told_to_buy_one() -> None:
    plan = make(question(kind=Kind.AGENT, gpus=16, prefill_tokens_s=500))
    assert (plan.expected[2].busy or 0) > 1
    assert not plan.verdict.shared
    assert {No.NO_PREFILL, Not.TOO_SMALL} & set(plan.verdict.reasons)


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAG, Kind.AGENT, Kind.ONE_SHOT])
@pytest.mark.parametrize("reuse", [None, 0.0])
@pytest.mark.parametrize("gpus", [4, 16])
def test_of_one_cause_only_the_cause_is_said(kind: Kind, reuse: float | None, gpus: int) -> None:
    reasons = make(question(kind=kind, gpus=gpus, numbers=Numbers(reuse=reuse))).verdict.reasons
    for reason in reasons:
        assert not set(FOLLOWS.get(reason, ())) & set(reasons)
    if reuse == 0:
        assert Not.NOTHING_RETURNS in reasons


def test_the_decode_step_that_is_explained_is_the_one_in_the_table() -> None:
    plan = make(question("deepseek-v3", "h200", kind=Kind.AGENT, gpus=16, weights_dtype="fp8"))
    line = next(text for text in shown(plan)["explanation"] if text.startswith("decode step"))
    whole, active, kv = (float(text.replace(",", "")) for text in re.findall(r"([0-9,]{6,}) B", line))
    times = plan.expected[1].times
    assert times
    step = min(whole, active * times.batch) / 8 / (0.74 * 4.8e12) + times.batch * kv / (0.9 * 4.8e12)
    assert times.step_s == pytest.approx(step, rel=1e-6)


def test_no_number_of_a_workload_is_explained_in_powers_of_ten() -> None:
    lines = shown(make(question(kind=Kind.AGENT)))["explanation"]
    assert "context_p50 = 43,600 (preset agent)" in lines
    assert not [text for text in lines[:14] if re.search(r"= [0-9.,]+e[+-]", text)]


def test_a_measured_rate_without_an_estimate_to_correct_is_refused() -> None:
    asked = question(kind=Kind.RAG, prefill_tokens_s=5000.0)
    with pytest.raises(MisconfiguredError, match="--gpus-file"):
        make(replace(asked, gpu=replace(asked.gpu, bf16_tflops=0.0), tensor=4))
    with pytest.raises(MisconfiguredError, match="are more than"):
        make(question("llama-3.1-8b", kind=Kind.CHAT, active_parameters=1e14))
