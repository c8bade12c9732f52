"""The same trace written in another way gives the same requests, and what cannot be known is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.traces.test_formats import CHAT, hashed, lines, read

from kvferry.errors import MisconfiguredError
from kvferry.traces.patterns import conversations
from kvferry.traces.request import Request
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import TraceFile

DAY_S = 86_400.0


def seen(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(request.input_tokens, request.output_tokens, request.blocks) for request in requests]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_length": 1500.0},
        {"input_length": "1500"},
        {"hash_ids": [4.0, 5.0, 6.0]},
        {"output_length": 50.0},
    ],
)
def test_a_number_may_be_written_as_a_float_or_a_text(tmp_path: Path, fields: dict[str, Any]) -> None:
    usual = hashed(1500, [4, 5, 6]) | {"output_length": 50}
    _, expected, _ = read(lines(tmp_path / "a", *[usual] * 3))
    _, found, malformed = read(lines(tmp_path / "b", *[usual | fields] * 3))
    assert seen(found) == seen(expected)
    assert not malformed.lines


@pytest.mark.parametrize(
    ("times", "note"),
    [
        ([0, 5000], "times are milliseconds from the start"),
        ([1_790_000_000, 1_790_000_005], ""),
        ([1_790_000_000_000, 1_790_000_005_000], ""),
        ([1_790_000_000_000_000_000, 1_790_000_005_000_000_000], ""),
        (["2026-11-30T10:00:00Z", "2026-11-30T10:00:05Z"], ""),
    ],
)
def test_times_since_1970_and_dates_are_taken_as_such(tmp_path: Path, times: list[Any], note: str) -> None:
    records = [hashed(1500, [4, 5, 6]) | {"timestamp": time} for time in times]
    source, found, _ = read(lines(tmp_path / "a", *records))
    first, second = (request.time_s for request in found)
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(5)
    assert source.reader.note == note


def test_images_count_by_their_presence_not_by_their_bytes(tmp_path: Path) -> None:
    def asked(image: str) -> dict[str, Any]:
        pieces = [
            {"type": "text", "text": "what is this? " * 40},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        ]
        return {"model": "m", "messages": [{"role": "user", "content": pieces}]}

    source, (one, same, other), _ = read(
        lines(tmp_path / "a", asked("A" * 100_000), asked("A" * 100_000), asked("B" * 200_000))
    )
    assert one.input_tokens == other.input_tokens < 300
    assert one.parts == same.parts != other.parts
    assert "images and other data count as a few tokens each" in source.reader.note


def test_a_request_that_continues_a_stored_answer_shares_what_nobody_knows(tmp_path: Path) -> None:
    whole = {"model": "m", "input": "hello " * 100}
    source, (first, second), _ = read(lines(tmp_path / "a", whole, whole | {"previous_response_id": "r1"}))
    assert first.blocks
    assert second.blocks is None
    assert "previous_response_id" in source.reader.note


@pytest.mark.parametrize(
    "wrap",
    [
        lambda chat: {"log": json.dumps({"request": json.dumps(chat)})},
        lambda chat: {"jsonPayload": {"request": chat}},
        lambda chat: chat | {"messages": json.dumps(chat["messages"])},
    ],
)
def test_a_request_is_found_wherever_a_log_puts_it(tmp_path: Path, wrap: Any) -> None:
    chat = dict(CHAT)
    _, expected, _ = read(lines(tmp_path / "a", chat))
    _, found, _ = read(lines(tmp_path / "b", wrap(chat)))
    assert seen(found) == seen(expected)


def test_what_a_gateway_says_beside_the_request_is_usage_too(tmp_path: Path) -> None:
    record = {
        "startTime": "2026-11-30 10:00:00.5+00:00", "model": "m", "prompt_tokens": 100,
        "messages": [{"role": "user", "content": "x" * 994}], "completion_tokens": 7,
    }  # fmt: skip
    _, (found,), _ = read(lines(tmp_path / "a", record))
    assert (found.input_tokens, found.output_tokens) == (100, 7)
    assert found.time_s is not None


def test_half_a_pair_of_surrogates_spoils_no_line(tmp_path: Path) -> None:
    line = '{"model": "m", "messages": [{"role": "user", "content": "\\ud83d cut ' + "x" * 400 + '"}]}'
    _, found, malformed = read(lines(tmp_path / "a", line, line))
    assert len(found) == 2
    assert not malformed.lines


def test_a_batch_of_token_ids_is_that_many_prompts(tmp_path: Path) -> None:
    record = {"prompt_token_ids": [list(range(130)), list(range(70))], "output_toks": 9}
    _, found, _ = read(lines(tmp_path / "a", record))
    assert [(request.input_tokens, request.output_tokens) for request in found] == [(130, None), (70, None)]


STEM = "INFO {time} [request_logger.py:66] "
PROMPT = "Received request {name}: prompt: '" + "w" * 512 + "', params: x"


def test_a_vllm_request_whose_details_came_is_not_counted_again(tmp_path: Path) -> None:
    details = (
        f"DEBUG 11-29 19:10:43 [r.py:56] Request a details: prompt: '{'w' * 512}', prompt_token_ids: None, x"
    )
    again = "INFO 11-29 19:10:43 [r.py:66] Received request a: params: SamplingParams(n=1), x"
    source, found, malformed = read(lines(tmp_path / "a", details, again))
    assert (len(found), source.other_lines, malformed.lines) == (1, 1, 0)


def test_vllms_times_go_on_over_the_turn_of_the_year_and_in_colour(tmp_path: Path) -> None:
    stems = [STEM.format(time=time) for time in ("12-31 23:59:59", "01-01 00:00:01", "12-31 23:59:58")]
    plain = [stem + PROMPT.format(name=number) for number, stem in enumerate(stems)]
    _, found, _ = read(lines(tmp_path / "a", *plain))
    start, new, late = (request.time_s or 0.0 for request in found)
    assert (new - start, late - start) == (2, -1)
    painted = [line.replace("INFO", "\x1b[36mINFO\x1b[0m") for line in plain]
    assert [request.time_s for request in read(lines(tmp_path / "b", *painted))[1]] == [start, new, late]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_may_be_set_apart_otherwise(tmp_path: Path, separator: str) -> None:
    head, row = (
        separator.join(cells)
        for cells in (
            ["Timestamp", "Session ID", "Model", "Request tokens", "Response tokens"],
            ["5", "s1", "ChatGPT", "472.0", "18"],
        )
    )
    source, (found,), _ = read(lines(tmp_path / "a", head, row))
    assert source.reader.format == "burstgpt"
    assert (found.input_tokens, found.output_tokens, found.session) == (472, 18, "s1")


@pytest.mark.parametrize(
    ("start", "words"),
    [(b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PAR1", "Parquet"), (b"\xff\xfe{", "UTF-16")],
)
def test_what_is_no_text_is_named(tmp_path: Path, start: bytes, words: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(start + b"\0" * 100)
    with pytest.raises(MisconfiguredError, match=words):
        TraceFile(path)


def talked(tmp_path: Path, *prompts: list[str]) -> list[int]:
    """The conversation of each request: of a system prompt that all share, and what else was said."""
    system = {"role": "system", "content": "be brief. " * 60}
    said = [[{"role": "user", "content": text} for text in prompt] for prompt in prompts]
    records = [{"model": "m", "messages": [system, *messages]} for messages in said]
    source, found, _ = read(lines(tmp_path / "a", *records))
    log = ReuseLog(source.reader.block_tokens)
    for request in found:
        log.add(request)
    return list(conversations(log).of)


def test_messages_tell_conversations_apart_however_short_they_are(tmp_path: Path) -> None:
    prompts = [["hi"], ["yo"], ["hi", "a", "b"], ["yo", "c"], ["hi", "a", "b", "d" * 900, "e"], ["ho", "a"]]
    assert talked(tmp_path, *prompts) == [0, 1, 0, 1, 0, 2]


def test_an_edited_or_equal_prompt_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    assert talked(tmp_path, ["a"], ["a", "b"], ["a", "x", "y"], ["a", "b"], ["z", "b", "c"]) == [
        0,
        0,
        0,
        0,
        1,
    ]
