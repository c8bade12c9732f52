"""What is said of a trace: growth, sharing, working set and gaps, and the command that prints it."""

import html
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.test_policies import BLOCK_TOKENS, log_of, traces

from kvferry.cli.main import main
from kvferry.cli.table import COLUMNS
from kvferry.traces import findings, patterns
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy, unbounded
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog


def timed(*prompts: tuple[float, list[int], str | None]) -> ReuseLog:
    log = ReuseLog(BLOCK_TOKENS)
    for time_s, keys, session in prompts:
        log.add(Request(time_s, len(keys) * BLOCK_TOKENS, 2, array("q", keys).tobytes(), session))
    return log


def test_a_prompt_that_has_all_of_an_earlier_one_continues_it() -> None:
    log = log_of([[1, 2, 3], [9, 9], [1, 2, 3, 4, 5], [1, 2, 7], [1, 2, 3, 4, 5, 6]])
    found = patterns.conversations(log)
    assert list(found.of) == [0, 1, 0, 2, 0]
    assert list(found.turns) == [3, 1, 1]
    assert list(found.growth_tokens) == [2 * BLOCK_TOKENS, BLOCK_TOKENS]


def test_a_cut_last_block_does_not_hide_that_a_prompt_continues() -> None:
    found = patterns.conversations(log_of([[1, 2, 30], [1, 2, 31, 4]], short=1))
    assert found.conversations == 1


def test_one_shot_prompts_of_one_system_prompt_are_no_conversation() -> None:
    system = list(range(10))
    hashed = log_of([[*system, 100 + number] for number in range(100)], short=1)
    assert patterns.conversations(hashed).conversations == 100
    full_only = ReuseLog(BLOCK_TOKENS)  # as logs of text and tokens are: what fills no block has no key
    for number in range(100):
        own = 1 + 5 * number % 7
        keys = [*system, *[100 + number] * (own // BLOCK_TOKENS)]
        size = 10 * BLOCK_TOKENS + own
        full_only.add(Request(None, size, None, array("q", keys).tobytes()))
    assert patterns.conversations(full_only).conversations >= 99


def test_equal_prompts_are_no_turns() -> None:
    assert patterns.conversations(log_of([[1, 2], [1, 2], [1, 2]])).conversations == 3


def test_a_short_tail_without_a_key_does_not_hide_that_a_prompt_continues() -> None:
    log = ReuseLog(BLOCK_TOKENS)
    for keys, tail in (([1, 2], 3), ([1, 2, 3], 1), ([1, 2, 3, 4], 2)):
        log.add(Request(None, len(keys) * BLOCK_TOKENS + tail, None, array("q", keys).tobytes()))
    assert list(patterns.conversations(log).turns) == [3]


def test_requests_without_content_leave_the_working_set_alone() -> None:
    log = log_of([[1, 2]])
    log.add(Request(None, 40, None, None))
    assert [part.new_tokens for part in patterns.slices(log, by_time=False)] == [2 * BLOCK_TOKENS, 0]


def test_slices_are_no_more_than_requests() -> None:
    assert len(patterns.slices(log_of([[1], [2], [3]]), by_time=False)) == 3
    assert len(patterns.slices(timed((0, [1], None), (9, [2], None)), by_time=True)) == 2


def test_quantiles_are_the_nearest_rank() -> None:
    assert findings.quantiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert findings.quantiles([7]) == {"p50": 7, "p90": 7, "p99": 7, "max": 7}


def test_times_of_different_clocks_are_not_compared() -> None:
    log = timed((50, [1], "a"), (0, [1], "b"), (3, [1], "b"))
    found = findings.gaps(log, clock=Clock.SESSION)
    assert found is not None
    assert (found["reused_tokens"], found["left_out_tokens"], found["longest_s"]) == (4, 4, 3)
    log = ReuseLog(BLOCK_TOKENS)
    for file, time_s in ((1, 5.0), (1, 6.0), (2, 0.0)):
        log.add(Request(time_s, BLOCK_TOKENS, None, bytes(8)), clock=file)
    found = findings.gaps(log)
    assert found is not None
    assert (found["reused_tokens"], found["left_out_tokens"]) == (BLOCK_TOKENS, BLOCK_TOKENS)


def test_gaps_that_go_back_are_counted_apart() -> None:
    found = findings.gaps(timed((50, [1], None), (40, [1], None), (60, [1], None)))
    assert found is not None
    assert (found["reused_tokens"], found["backwards_tokens"]) == (BLOCK_TOKENS, BLOCK_TOKENS)


def test_what_a_session_left_itself_is_not_credited_to_others() -> None:
    log = timed((0, [1, 2], "a"), (1, [1, 2], "b"), (2, [1, 2, 3], "b"), (3, [1, 2, 3], None))
    assert patterns.sharing(log, log.session) == patterns.Sharing(2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS)


@given(prompts=traces())
@settings(max_examples=40, deadline=None)
def test_slices_add_up_to_the_trace(prompts: list[list[int]]) -> None:
    log = log_of(prompts)
    parts = patterns.slices(log, by_time=False)
    assert sum(part.requests for part in parts) == len(log)
    assert sum(part.input_tokens for part in parts) == sum(log.input_tokens)
    assert sum(part.new_tokens for part in parts) == log.distinct_blocks * BLOCK_TOKENS
    assert sum(part.hit_tokens for part in parts) == unbounded(log).tokens
    for part in parts:
        assert part.new_tokens <= part.touched_tokens <= part.input_tokens


@given(prompts=traces(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_slice_is_in_use_of_what_its_prompts_hold(prompts: list[list[int]], data: st.DataObject) -> None:
    times = sorted(data.draw(st.lists(st.integers(0, 30), min_size=len(prompts), max_size=len(prompts))))
    log = timed(*((time, keys, None) for time, keys in zip(times, prompts, strict=True)))
    at = 0
    for part in patterns.slices(log, by_time=True):
        used = {
            tuple(keys[:end]) for keys in prompts[at : at + part.requests] for end in range(1, len(keys) + 1)
        }
        assert part.touched_tokens == len(used) * BLOCK_TOKENS
        at += part.requests


def test_gaps_are_those_since_the_last_use_of_each_token() -> None:
    found = findings.gaps(timed((0, [1, 2], None), (50, [1, 3], None), (60, [1, 2], None)))
    assert found is not None
    shares = {row["gap_s"]: row["share"] for row in found["within"]}
    assert found["longest_s"] == 60
    assert (shares[1], shares[10], shares[60]) == (0, 1 / 3, 1)


def test_a_trace_without_times_has_no_gaps() -> None:
    assert findings.gaps(log_of([[1], [1]])) is None


@given(prompts=traces())
@settings(max_examples=40, deadline=None)
def test_the_document_is_json_and_its_rates_are_shares(prompts: list[list[int]]) -> None:
    log = log_of(prompts)
    found = findings.document(
        log, capacities=findings.default_capacities(log), policies=list(Policy), clock=Clock.TRACE
    )
    assert json.loads(json.dumps(found, allow_nan=False))
    for row in found["reuse"]["by_capacity"]:
        assert all(
            0 <= row[policy][window] <= 1 for policy in Policy for window in ("whole_trace", "last_half")
        )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = []
    for turn in range(60):
        ids = [0, 1, *(100 * (turn % 7) + block for block in range(turn // 7 + 1))]
        record = {
            "timestamp": turn * 1000,
            "input_length": 512 * len(ids),
            "output_length": 30,
            "hash_ids": ids,
        }
        lines.append(json.dumps(record))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*lines, "{broken", ""]))
    return path


@pytest.fixture
def analyze(trace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*flags: str) -> str:
        assert main(["analyze", str(trace), *flags]) == 0
        return capsys.readouterr().out

    return run


def test_the_tables_fit_and_name_their_windows(analyze: Callable[..., str], trace: Path) -> None:
    text = analyze("--kv-bytes-per-token", "131072")
    assert max(len(line) for line in text.splitlines() if str(trace) not in line) <= COLUMNS
    for words in (
        "last half of the requests",
        "from an empty cache",
        "trace.jsonl:61",
        "not JSON",
        "LRU",
        "KV BYTES",
    ):
        assert words in text


def test_programs_get_the_same_figures(analyze: Callable[..., str]) -> None:
    found = json.loads(analyze("--json", "--kv-bytes-per-token", "131072", "--capacities", "1GiB,2GiB"))
    assert found["malformed"]["lines"] == 1
    assert found["traffic"]["requests"] == 60
    assert [row["blocks"] for row in found["reuse"]["by_capacity"]] == [16, 32]
    assert math.isclose(found["traffic"]["input_to_output"], found["traffic"]["input_tokens"] / 1800)
    assert math.isclose(found["traffic"]["input_mean"], found["traffic"]["input_tokens"] / 60)
    assert found["traffic"]["output_mean"] == 30
    assert found["notes"] == []


def test_averages_rates_and_starts_are_as_people_write_them(analyze: Callable[..., str]) -> None:
    text = analyze("--explain")
    mean = json.loads(analyze("--json"))["traffic"]["input_mean"]
    assert f"per request {mean:,.0f} on average, p50" in text
    assert f"= {mean:,.1f}\n" in text
    assert "1 a second on average" in text
    assert "0.0 ms" not in text


def test_the_bytes_of_a_token_come_with_the_lengths_that_they_hold_for(analyze: Callable[..., str]) -> None:
    assert "B of bf16, one copy, at any length" in analyze("--model", "llama-3.1-8b")
    windows = " ".join(analyze("--model", "gemma-3-27b", "--kv-dtype", "fp8").split())
    assert "in prompts of up to 1,024 tokens; windows make it less in longer ones" in windows
    assert "vLLM leaves windows in 16 bits" in windows
    assert "fp8_ds_mla" in analyze("--model", "deepseek-v3.2", "--kv-dtype", "fp8")


@pytest.mark.parametrize(
    ("flags", "value", "hint"),
    [
        (["--capacities", "1GiB"], "--capacities", "--kv-bytes-per-token"),
        (["--capacities", "1KiB", "--kv-bytes-per-token", "131072"], "1KiB", "give more"),
        (["--kv-bytes-per-token", "many"], "'many'", "whole number"),
        (["--kv-bytes-per-token", "9", "--model", "llama-3.1-8b"], "both say", "give one"),
        (["--kv-dtype", "fp8"], "--kv-dtype", "without --model"),
        (["--block-tokens", "0"], "0", "1 to"),
        (["--capacities", "", "--kv-bytes-per-token", "9"], "''", "512GiB"),
        (["--capacities", "much", "--kv-bytes-per-token", "9"], "--capacities", "much"),
    ],
)
def test_a_mistake_is_named_with_a_way_out(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], value: str, hint: str
) -> None:
    assert main(["analyze", str(trace), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert value in line
    assert hint in line


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "/nonexistent/trace"]) == 2
    assert "/nonexistent/trace" in capsys.readouterr().err


def test_a_file_given_twice_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = trace.with_name("link")
    other.symlink_to(trace)
    assert main(["analyze", str(trace), str(other)]) == 2
    assert "twice" in capsys.readouterr().err


@pytest.mark.parametrize(("origin_s", "span_s"), [(0, None), (1_767_225_600, 14.0)])
def test_files_have_a_common_time_only_by_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], origin_s: int, span_s: float | None
) -> None:
    for name, start in (("a", origin_s), ("b", origin_s + 10)):
        rows = [{"prompt": "word " * 500, "created": start + second} for second in range(5)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["analyze", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["traffic"]["span_s"] == span_s
    assert (found["reuse"]["gaps"]["left_out_tokens"] == 0) == (span_s is not None)


def test_tokens_without_content_are_named_where_they_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, lengths = tmp_path / "a", tmp_path / "b"
    content.write_text(json.dumps({"prompt": "word " * 500}) + "\n")
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,100,1\n")
    assert main(["analyze", str(content), str(lengths)]) == 0
    assert "1 requests do not say what they share" in capsys.readouterr().out


def test_the_page_stands_alone_with_a_line_per_policy(analyze: Callable[..., str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = analyze("--html", str(page))
    written = page.read_text()
    assert "http" not in written
    assert "<script" not in written
    for policy in Policy:
        assert f'<path class="{policy.value}"' in written
    drawing = written[written.index("<svg") : written.rindex("</svg>") + 6]
    for svg in drawing.split("</svg>")[:-1]:
        ET.fromstring(svg[svg.index("<svg") :] + "</svg>")
    assert html.escape(text.rstrip()) in written


def test_a_page_that_cannot_be_written_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace), "--html", "/nonexistent/page.html"]) == 2
    assert "/nonexistent/page.html" in capsys.readouterr().err
