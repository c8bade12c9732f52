"""The fault benchmark: bounds are those promised, what is over is marked, wrong answers never meet them."""

import json
from pathlib import Path

import pytest

from kvferry.bench import hook_times
from kvferry.bench.faults import report
from kvferry.bench.faults.kinds import KINDS, Moment
from kvferry.bench.faults.trial import Lost, Trial, failures_of


def _trial(*, ttft_s: float = 3.0, lost_s: float = 0.001, problems: tuple[str, ...] = ()) -> Trial:
    return Trial(
        "node stopped",
        Moment.DURING.value,
        cold_s=2.0,
        deadline_s=1.0,
        ttft_s=ttft_s,
        wanted_blocks=12,
        loaded_blocks=3,
        reasons={"stalled": 1},
        after=[Lost(0.0, 0.0, 0.001), Lost(lost_s, 0.0, 0.0)],
        back_s=1.5,
        problems=list(problems),
    )


@pytest.mark.parametrize(
    ("trial", "met", "marked"),
    [
        (_trial(ttft_s=3.5), True, 0),
        (_trial(ttft_s=3.51), False, 1),
        (_trial(lost_s=0.011), False, 1),
        (_trial(problems=("the answer differs",)), False, 0),
    ],
)
def test_a_row_meets_cold_and_deadline_and_half_a_second_and_ten_milliseconds(
    trial: Trial, met: bool, marked: int
) -> None:
    [row] = report.rows([trial])
    assert row.met is met
    assert report.terminal([trial]).count("!") == marked
    assert report.document([trial], {})["figures"][0]["met"] is met


def test_the_worst_later_request_of_each_trial_counts_and_trials_by_their_median() -> None:
    [row] = report.rows([_trial(lost_s=lost) for lost in (0.002, 0.005, 0.009)])
    assert (row.n, row.lost_s, row.back_s) == (3, 0.005, 1.5)


def test_what_is_wrong_is_named_and_everything_is_in_the_document() -> None:
    trials = [_trial(), _trial(problems=("the answer differs",))]
    assert report.problems(trials) == ["node stopped, during: the answer differs"]
    found = json.loads(json.dumps(report.document(trials, {"seed": 1})))
    assert found["trials"][1]["bound_s"] == 3.5
    assert "WRONG" in report.terminal(trials)


def test_failures_are_read_off_an_engines_page_by_reason() -> None:
    page = (
        'vllm:kvferry_failures_total{engine="0",model_name="m",reason="stalled"} 2.0\n'
        'vllm:kvferry_failures_created{engine="0",model_name="m",reason="stalled"} 1.7e9\n'
        'vllm:kvferry_failures_total{engine="1",model_name="m",reason="stalled"} 1.0\n'
        'vllm:kvferry_failures_total{engine="0",model_name="m",reason="corrupt"} 4.0\n'
    )
    assert failures_of(page) == {"stalled": 3, "corrupt": 4}


def test_every_fault_that_must_be_tried_is_tried() -> None:
    assert [kind.name for kind in KINDS] == [
        "node killed",
        "node stopped",
        "node restarted",
        "Valkey stopped",
        "Valkey refused",
        "Valkey full",
        "Valkey corrupted",
        "engine killed",
    ]


def test_times_of_all_processes_add_up_and_half_written_files_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.seconds").write_bytes(hook_times.SECONDS.pack(1.5))
    (tmp_path / "2.seconds").write_bytes(hook_times.SECONDS.pack(0.25))
    (tmp_path / "3.seconds").write_bytes(b"")
    assert hook_times.total_seconds(tmp_path) == 1.75
