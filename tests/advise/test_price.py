"""What a shared cache is worth: sums that add up, a break-even that is one, reasons against it."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.advise.price import BENEFITS, HOURS, Deal, No, Part, answer, explain, parts
from kvferry.cli.main import main
from kvferry.cli.quantities import mean_tokens, parse_number
from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import find_model
from kvferry.models.precision import kv_dtype
from kvferry.models.sizes import Sizing

DEAL = Deal(
    gpus=8,
    gpu_usd_hour=3.0,
    requests_s=2.0,
    prompt_tokens=20_000,
    prefill_tokens_s=9000,
    hit_rate=0.85,
    own_hit_rate=0.4,
    bytes_per_token=327_680,
    ram_gib=100,
    ram_usd_gib=5.0,
    replicas=8,
)
FLAGS = [
    "--gpus=8",
    "--gpu-usd-hour=3",
    "--requests-s=2",
    "--prompt-tokens=20,000",
    "--prefill-tokens-s=9000",
    "--hit-rate=0.85",
    "--own-hit-rate=0.4",
    "--kv-bytes-per-token=327680",
    "--ram-gib=100",
    "--ram-usd=5",
    "--replicas=8",
]

amounts = st.floats(0, 1e5)
positive = st.floats(1e-3, 1e5)
rates = st.floats(0, 1)
deals = st.builds(
    lambda low, high, deal: replace(deal, own_hit_rate=min(low, high), hit_rate=max(low, high)),
    rates,
    rates,
    st.builds(
        Deal,
        gpus=positive,
        gpu_usd_hour=positive,
        requests_s=positive,
        prompt_tokens=positive,
        prefill_tokens_s=positive,
        hit_rate=st.just(0.0),
        own_hit_rate=st.just(0.0),
        bytes_per_token=st.floats(0, 1e6),
        ram_gib=amounts,
        ram_usd_gib=amounts,
        objects_gib=amounts,
        objects_usd_gib=amounts,
        objects_read_share=rates,
        read_usd_million=amounts,
        write_usd_million=amounts,
        far_share=rates,
        zone_usd_gb=st.floats(0, 1),
        throughput_gain=st.floats(0, 3),
        other_usd_month=amounts,
    ),
)


def test_the_hours_saved_are_those_of_the_prompt_tokens_not_read_again() -> None:
    found = answer(DEAL)
    tokens = 2.0 * 730 * 3600 * 20_000 * 0.45
    assert found.gpu_hours == pytest.approx(tokens / 9000 / 3600)
    assert found.usd[Part.REREAD] == pytest.approx(found.gpu_hours * 3)
    assert found.usd[Part.RAM] == 500
    assert found.net_usd == pytest.approx(found.gpu_hours * 3 - 500)
    assert found.reasons == ()


def test_bytes_that_cross_zones_and_object_requests_cost_what_they_are_counted_at() -> None:
    deal = replace(
        DEAL,
        far_share=0.5,
        zone_usd_gb=0.02,
        objects_gib=1000,
        objects_usd_gib=0.023,
        objects_read_share=0.1,
        read_usd_million=0.4,
        write_usd_million=5,
    )
    usd = parts(deal)
    loaded, stored = (deal.tokens_month * share * deal.bytes_per_token for share in (0.45, 0.15))
    assert usd[Part.ZONES] == pytest.approx((loaded + stored) / 1e9 * 0.01)
    requests = loaded * 0.1 / deal.object_bytes * 0.4e-6 + stored / deal.object_bytes * 5e-6
    assert usd[Part.REQUESTS] == pytest.approx(requests)
    assert usd[Part.OBJECTS] == pytest.approx(23)


def test_what_a_fleet_could_not_compute_anyway_is_no_saving() -> None:
    short = replace(DEAL, gpus=1)
    assert short.prefill_hours(0.4) > short.fleet_hours
    assert answer(short).gpu_hours == pytest.approx(short.fleet_hours - short.prefill_hours(0.85))


@given(deals)
def test_no_part_is_negative_and_no_more_hours_are_saved_than_there_are(deal: Deal) -> None:
    found = answer(deal)
    assert all(amount >= 0 for amount in found.usd.values())
    assert found.gpu_hours <= deal.gpus * HOURS * (1 + 1e-9)
    assert found.benefit_usd == pytest.approx(sum(found.usd[part] for part in BENEFITS))
    assert (No.COSTS_MORE in found.reasons) == (found.net_usd <= 0)


@example(replace(DEAL, own_hit_rate=0.0, hit_rate=5e-324))  # as few hits added as there can be
@given(deals)
def test_at_the_break_even_rate_it_costs_nothing_and_below_it_costs(deal: Deal) -> None:
    deal = replace(deal, throughput_gain=0.0)
    found = answer(deal)
    most = answer(replace(deal, hit_rate=1.0))
    slack = 1e-9 * max(1.0, most.cost_usd, most.benefit_usd)
    if found.break_even is None:
        assert most.net_usd < 0
        return
    at = answer(replace(deal, hit_rate=found.break_even))
    assert at.net_usd >= -slack
    if found.break_even > deal.own_hit_rate:
        just_below = max(deal.own_hit_rate, found.break_even - sys.float_info.epsilon)
        assert answer(replace(deal, hit_rate=just_below)).net_usd <= slack
        middle = (found.break_even + deal.own_hit_rate) / 2
        assert answer(replace(deal, hit_rate=middle)).net_usd <= slack


def test_what_is_put_off_by_a_hit_rate_is_not_counted_without_its_hits() -> None:
    even = answer(replace(DEAL, ram_gib=1000, deferred_usd_month=4000)).break_even
    assert even is not None
    assert even > DEAL.own_hit_rate + 0.1
    least = answer(replace(DEAL, ram_gib=1000)).break_even
    assert least is not None
    assert even < least


def test_throughput_is_gained_on_what_is_done_besides_reading_prompts() -> None:
    without = 2.0 * 730 * 3600 * 20_000 * 0.6 / 9000 / 3600
    usd = parts(replace(DEAL, throughput_gain=0.2))
    assert usd[Part.THROUGHPUT] == pytest.approx((8 * 730 - without) * 0.2 / 1.2 * 3)


def test_five_points_more_are_not_fewer_than_five() -> None:
    assert No.LOW_REUSE not in answer(replace(DEAL, own_hit_rate=0.4, hit_rate=0.45)).reasons


@given(deals, st.floats(1.01, 3))
def test_dearer_memory_never_helps_and_dearer_gpus_never_hurt(deal: Deal, factor: float) -> None:
    net = answer(deal).net_usd
    slack = 1e-9 * max(1.0, answer(deal).cost_usd, answer(deal).benefit_usd) * factor
    assert answer(replace(deal, ram_usd_gib=deal.ram_usd_gib * factor)).net_usd <= net + slack
    assert answer(replace(deal, gpu_usd_hour=deal.gpu_usd_hour * factor)).net_usd >= net - slack


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replicas": 1}, No.SINGLE),
        ({"working_set_gib": 100, "host_gib": 200}, No.FITS),
        ({"hit_rate": 0.44}, No.LOW_REUSE),
        ({"gpus": 0.5}, No.NO_PREFILL),
        ({"ram_gib": 1e6}, No.COSTS_MORE),
    ],
)
def test_it_says_when_not_to_buy(changes: dict[str, float], reason: No) -> None:
    assert reason in answer(replace(DEAL, **changes)).reasons


def test_a_working_set_that_fits_counts_where_users_come_back_after_hours() -> None:
    assert No.FITS not in answer(replace(DEAL, working_set_gib=100, host_gib=200, long_gaps=True)).reasons


def test_what_the_answer_hangs_on_is_moved_by_a_quarter_the_widest_first() -> None:
    found = answer(DEAL)
    assert {"gpu_usd_hour", "requests_s", "hit_rate", "ram_gib", "gpus"} <= set(found.sensitivity)
    for name, pair in found.sensitivity.items():
        for moved, factor in zip(pair, (0.75, 1.25), strict=True):
            assert moved.value == pytest.approx(
                min(1.0 if "rate" in name else 1e99, getattr(DEAL, name) * factor)
            )
            assert moved.net_usd == pytest.approx(answer(replace(DEAL, **{name: moved.value})).net_usd)
    swings = [abs(high.net_usd - low.net_usd) for low, high in found.sensitivity.values()]
    assert swings == sorted(swings, reverse=True)


def test_every_number_of_the_answer_is_in_the_formula() -> None:
    lines = "\n".join(explain(DEAL))
    for amount in answer(DEAL).usd.values():
        assert f"${amount:,.0f}" in lines


@pytest.mark.parametrize(
    "changes", [{"hit_rate": 0.3}, {"hit_rate": 1.1}, {"own_hit_rate": -0.1}, {"gpus": 0}, {"gpus": math.nan}]
)
def test_a_deal_that_cannot_be_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(MisconfiguredError):
        replace(DEAL, **changes)


def test_the_command_prints_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["price", *FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = answer(
        replace(
            DEAL,
            disk_usd_gib=0.08,
            objects_usd_gib=0.023,
            read_usd_million=0.4,
            write_usd_million=5,
            zone_usd_gb=0.02,
        )
    )
    assert found["net_usd_per_month"] == pytest.approx(expected.net_usd)
    assert found["break_even_hit_rate"] == pytest.approx(expected.break_even)
    assert found["buy"] is True
    assert set(found["inputs"]) == set(asdict(DEAL))


def test_the_command_prints_a_table_of_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["price", *FLAGS, "--replicas=1", "--explain"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "single engine process" in text
    assert "net = " in text


def test_model_and_gpu_stand_for_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    named = [flag for flag in FLAGS if not flag.startswith(("--kv-bytes-per-token", "--gpu-usd"))]
    assert main(["price", *named, "--model=llama-3.3-70b", "--gpu=h100", "--json"]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    assert inputs["bytes_per_token"] == 327_680
    assert inputs["gpu_usd_hour"] > 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "missing: --requests-s"),
        ((*FLAGS, "--hit-rate=85"), "--hit-rate '85': give a number from 0 to 1"),
        ((*FLAGS, "--ram-gib=lots"), "--ram-gib 'lots'"),
        ((*FLAGS, "--ram-gib=nan"), "--ram-gib 'nan'"),
        ((*FLAGS, "--hit-rate=0.3"), "no lower than the first"),
        ((*FLAGS, "--gpus=0"), "gpus is 0"),
        ((*FLAGS, "--replicas=0"), "outside 1 to"),
        (
            (*FLAGS, "--gpu-usd-hour=2,10"),
            "--gpu-usd-hour '2,10': give a number from 0 to 1,000,000 (a comma",
        ),
        ((*FLAGS, "--requests-s=1,5"), "decimals take a point, like 1.5"),
        ((*FLAGS, "--hit-rate=0,900"), "decimals take a point"),
        ((*FLAGS, "--prompt-tokens=1,5K"), "decimals take a point"),
        ((*FLAGS, "--ram-gib=1_000"), "--ram-gib '1_000'"),
        ((*FLAGS, "--host-gib=200"), "--host-gib would change nothing without --working-set-gib"),
        ((*FLAGS, "--working-set-gib=200"), "--working-set-gib would change nothing without --host-gib"),
        ((*FLAGS, "--long-gaps"), "--long-gaps would change nothing without --working-set-gib"),
        ((*FLAGS, "--objects-read-share=0.2", "--read-usd=1"), "them out"),
        ((*FLAGS, "--disk-usd=0.2"), "--disk-usd would change nothing without --disk-gib"),
        ((*FLAGS, "--zone-usd=0.2"), "--zone-usd would change nothing without --far-share"),
        ((*FLAGS, "--gpus-file=/nowhere"), "--gpus-file would change nothing without --gpu"),
        ((*FLAGS, "--gpu=h100", "--gpus-file=/nowhere"), "cannot read /nowhere"),
        ((*FLAGS, "--gpu=h1000"), "'h1000' is not known"),
        ((*FLAGS, "--model=llama-3.1-8b"), "--model and --kv-bytes-per-token both"),
        ((*FLAGS, "--kv-dtype=fp8"), "--kv-dtype says nothing without --model"),
    ],
)
def test_bad_input_is_named(words: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["price", *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234", 1234), ("12,345,678.5", 12_345_678.5), ("1234", 1234), ("0.5", 0.5), (".5", 0.5), ("2e6", 2e6),
     (" 7 ", 7), ("1,234e1", 12_340)],
)  # fmt: skip
def test_a_number_is_read_as_it_is_written(text: str, number: float) -> None:
    assert parse_number("--n", text, highest=1e9) == number


@pytest.mark.parametrize(
    "text", ["1,5", "2,10", "0,500", "12,34", "1,2345", "1,234,5", ",5", "1.234,5", "1,,234", "", "1e", "inf",
             "nan", "1_0", "0x10", "\u0661", "--1", "-1"]
)  # fmt: skip
def test_what_could_be_another_number_is_refused(text: str) -> None:
    with pytest.raises(MisconfiguredError, match="--n"):
        parse_number("--n", text, highest=1e9)
    with pytest.raises(MisconfiguredError):
        mean_tokens(text)


@given(st.floats(0, 1e12))
def test_a_number_reads_back_however_it_was_printed(number: float) -> None:
    for text in (repr(number), f"{number:,.3f}", f"{number:e}"):
        assert parse_number("--n", text, highest=1e13) == pytest.approx(number, abs=1e-3, rel=1e-6)


def test_the_bytes_of_a_token_are_said_to_be_those_of_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    named = [flag for flag in FLAGS if not flag.startswith("--kv-bytes-per-token")]
    said = {}
    for model in ("llama-3.3-70b", "gemma-3-27b"):
        assert main(["price", *named, f"--model={model}"]) == 0
        said[model] = " ".join(capsys.readouterr().out.split())
    assert "KV a token is 327,680 B of bf16, one copy, at any length" in said["llama-3.3-70b"]
    assert "in prompts of up to 1,024 tokens; windows make it less in longer ones" in said["gemma-3-27b"]
    own = Sizing(find_model("gemma-3-27b"), kv_dtype("bf16")).request(20_000).kv / 20_000
    assert f"{own:,.0f} B at 20,000" in said["gemma-3-27b"]
    assert main(["price", *FLAGS]) == 0
    assert "KV" not in capsys.readouterr().out


def test_a_million_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["price", *FLAGS, "--prompt-tokens=1,000,000", "--gpus=2e6", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "2,000,000 GPUs" in text
    assert "e+0" not in text
