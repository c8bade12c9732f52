"""The fault benchmark: bounds are those promised, what is over is marked, wrong answers never meet them."""

import json
import os
import time
from pathlib import Path

import pytest

from kvferry.bench import hook_times
from kvferry.bench.faults import report
from kvferry.bench.faults.kinds import KINDS, Moment
from kvferry.bench.faults.trial import Paid, Trial, failures_of


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
        usual=[Paid(lookup_lost_s=0.002)],
        after=[
            Paid(hooks={"get_transfer_results": 0.001}, lookup_s=0.02, load_s=0.03),
            Paid(
                lookup_lost_s=lost_s / 4, load_lost_s=lost_s / 2, hooks={"get_transfer_results": lost_s / 4}
            ),
        ],
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


def test_loads_that_worked_are_shown_and_count_as_no_loss() -> None:
    document = report.document([_trial(lost_s=0.009)], {})
    [row] = document["figures"]
    assert (row["usual_s"], row["lost_s"], row["spent_s"]) == (0.002, pytest.approx(0.009), 0.05)
    [trial] = document["trials"]
    assert trial["after_lost_s"] == pytest.approx([0.001, 0.009])
    assert trial["after_spent_s"] == [0.05, 0.0]


def _file(seconds: float) -> bytes:
    return hook_times.SECONDS.pack(seconds, *[0.0] * (len(hook_times.HOOKS) - 1))


def test_times_of_all_processes_add_up_and_half_written_files_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "1-1.seconds").write_bytes(_file(1.5))
    (tmp_path / "2-1.seconds").write_bytes(_file(0.25))
    (tmp_path / "3-1.seconds").write_bytes(b"")
    assert hook_times.total_seconds(tmp_path) == 1.75
    assert hook_times.seconds_by_hook(tmp_path)[hook_times.HOOKS[0]] == 1.75


def test_times_of_one_engine_are_told_by_its_process_group(tmp_path: Path) -> None:
    hook_times.file_of(tmp_path, object()).write_bytes(_file(1.5))
    assert hook_times.total_seconds(tmp_path, group=os.getpgid(0)) == 1.5
    assert hook_times.total_seconds(tmp_path, group=1) == 0.0


def test_a_method_counts_once_and_without_the_time_that_it_slept_on_purpose(tmp_path: Path) -> None:
    rested = [0.0]
    file = hook_times.file_of(tmp_path, object())
    stopwatch = hook_times.Stopwatch(file, rested_s=lambda: rested[0])

    def sleeps() -> None:
        begun = time.perf_counter()
        time.sleep(0.05)
        rested[0] += time.perf_counter() - begun

    inner = stopwatch.round(sleeps, 1)
    outer = stopwatch.round(inner, 0)
    begun = time.perf_counter()
    outer()
    took = time.perf_counter() - begun
    seconds = hook_times.SECONDS.unpack(file.read_bytes())
    assert seconds[1:] == (0.0,) * (len(hook_times.HOOKS) - 1)
    assert 0.0 <= seconds[0] <= took - rested[0]
