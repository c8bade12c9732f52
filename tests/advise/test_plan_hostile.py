"""Whatever is given to ``kvferry plan``, it prints a plan, or one line that says what is wrong."""

import contextlib
import copy
import io
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.cli.main import main
from kvferry.cli.plan_trace import from_document
from kvferry.cli.table import COLUMNS
from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog

NUMBERS = [
    "0",
    "1",
    "0.5",
    "1e-9",
    "1e9",
    "1000000",
    "inf",
    "nan",
    "-1",
    "",
    "x",
    "64K",
    "1M",
    "9" * 20,
    "4096",
]
FLAGS = {
    flag: values
    for flags, values in (
        ("--context-p50 --context-p99 --new-tokens --output-tokens --turns --conversations", NUMBERS),
        ("--requests-s --reuse --resume-hours --resume-share --utilization --shard-gbit", NUMBERS),
        ("--active-parameters --prefill-tokens-s --gpu-usd-hour --ram-usd --zone-usd", NUMBERS),
        ("--host-memory --weights --overhead --gpu-memory", ["0", "1", "79GB", "10TB", "x"]),
        ("--gpus --tp --gpus-per-host", ["0", "1", "2", "3", "8", "64", "1024", "x"]),
        ("--gap", ["0", "0.001s", "5min", "100h", "x"]),
        ("--weights-dtype", ["fp8", "fp4", "bf16"]),
        ("--routing", ["affinity", "round-robin"]),
        ("--kv-dtype", ["fp8", "bf16"]),
    )
    for flag in flags.split()
}
MODELS = [
    *("llama-3.1-8b", "llama-3.3-70b", "gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3"),
    *("kimi-k2.7-code", "nemotron-h-56b", "mistral-7b-v0.1", "llama-4-scout"),
]


def printed(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *arguments])
    return code, out.getvalue(), err.getvalue()


def check(*arguments: str) -> None:
    code, out, err = printed(*arguments, "--json")
    if code:
        assert code == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        return
    json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    code, out, _ = printed(*arguments, "--explain")
    assert code == 0
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert " inf" not in out and " nan" not in out


given_flags = st.dictionaries(st.sampled_from(sorted(FLAGS)), st.integers(0, 99), max_size=5).map(
    lambda chosen: [f"{flag}={FLAGS[flag][place % len(FLAGS[flag])]}" for flag, place in chosen.items()]
)


@pytest.mark.long
@settings(deadline=None, max_examples=runs(60))
@given(
    st.sampled_from(MODELS),
    st.sampled_from(["h100", "a100", "h200", "b200", "mi300x", "l4", "a10"]),
    st.sampled_from(["chat", "rag", "agent", "one-shot", ""]),
    given_flags,
)
def test_any_arguments_give_a_plan_or_one_line(model: str, gpu: str, kind: str, flags: list[str]) -> None:
    check(model, f"--gpu={gpu}", *([f"--workload={kind}"] if kind else []), *flags)


def analysis() -> dict[str, Any]:
    log = ReuseLog(16)
    for number in range(60):
        keys = array("q", range(number % 7, number % 7 + 3 + number // 7)).tobytes()
        log.add(Request(float(number), 16 * (3 + number // 7), 9, keys, str(number % 7)))
    found = findings.document(
        log, capacities=findings.default_capacities(log), policies=[Policy.LRU], clock=Clock.TRACE
    )
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


ANALYSIS = analysis()


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    )
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = [place for place in places(ANALYSIS) if "slices" not in place]
WRONG = [None, 0, -1, 1e308, float("inf"), float("nan"), "x", [], {}, True, 10**30, 0.5, 1]


@pytest.mark.long
@settings(deadline=None, max_examples=runs(100))
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(WRONG)), min_size=1, max_size=3))
def test_an_analysis_that_was_tampered_with_is_refused_or_gives_numbers_in_bounds(
    changes: list[tuple[tuple[Any, ...], Any]],
) -> None:
    found = copy.deepcopy(ANALYSIS)
    for place, wrong in changes:
        inner = found
        with contextlib.suppress(KeyError, TypeError, IndexError):
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
    try:
        numbers, curve, _ = from_document(found, name="x")
    except MisconfiguredError:
        return
    known = [getattr(numbers, name) for name in type(numbers).__slots__]
    assert all(value is None or 0 <= value <= 1e15 for value in known)
    assert curve is None or all(tokens > 0 and 0 <= share <= 1 for tokens, share in curve.points)


def test_an_analysis_as_it_was_written_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "analysis.json"
    file.write_text(json.dumps(ANALYSIS))
    check("llama-3.1-8b", "--gpu=h100", f"--trace={file}")
    numbers, curve, _ = from_document(ANALYSIS, name="x")
    assert numbers.requests_s == pytest.approx(60 / 59)
    assert curve is not None and curve.most == ANALYSIS["reuse"]["by_capacity"][-1]["lru"]["last_half"]
