"""Every format is recognised and read; what gives no request is counted, nothing is dropped in silence."""

import gzip
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import MisconfiguredError
from kvferry.traces import blocks
from kvferry.traces.request import MAX_TOKENS, MalformedError, Request
from kvferry.traces.source import Malformed, TraceFile
from kvferry.traces.times import seconds

CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "u" * 400}],
}
PARTS_BYTES = len("\nsystem:") + 600 + len("\nuser:") + 400
AGENTS = {
    "id": "trace",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 3]},
        {
            "t": 4.0,
            "type": "subagent",
            "requests": [{"t": 2.0, "in": 128, "out": 1, "hash_ids_rle": [[7, 2]]}],
        },
        {"t": 5.0, "type": "n", "in": 330, "out": 9, "hash_ids_rle": [[1, 3], [9, 2]]},
    ],
}


def read(path: Path, **chosen: int) -> tuple[TraceFile, list[Request], Malformed]:
    source, malformed = TraceFile(path, **chosen), Malformed()
    return source, list(source.requests(malformed)), malformed


def lines(path: Path, *records: object) -> Path:
    text = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def hashed(tokens: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"timestamp": 3000, "input_length": tokens, "output_length": 7, "hash_ids": ids, **more}


def test_mooncake_counts_milliseconds_and_its_block_size_follows_from_its_lines(tmp_path: Path) -> None:
    source, found, _ = read(lines(tmp_path / "a", hashed(1500, [4, 5, 6]), hashed(512, [4])))
    assert (source.reader.format, source.reader.block_tokens) == ("mooncake", 512)
    assert found[0] == Request(3.0, 1500, 7, array("q", [4, 5, 6]).tobytes())


def test_bailian_counts_seconds_and_its_chats_are_sessions(tmp_path: Path) -> None:
    def turn(chat: int, parent: int) -> dict[str, object]:
        return hashed(
            40, [1, 2, chat], timestamp=61.5, chat_id=chat, parent_chat_id=parent, type="text", turn=1
        )

    source, found, _ = read(lines(tmp_path / "a", turn(5, -1), turn(6, -1), turn(7, 5), turn(8, 7)))
    assert (source.reader.format, source.reader.block_tokens) == ("qwen-bailian", 16)
    assert found[0].time_s == 61.5
    assert [request.session for request in found] == ["5", "6", "5", "5"]


def test_block_sizes_that_the_lines_do_not_tell_are_asked_for(tmp_path: Path) -> None:
    path = lines(tmp_path / "a", hashed(3, [1]))
    with pytest.raises(MisconfiguredError, match="--block-tokens"):
        TraceFile(path)
    assert read(path, block_tokens=4)[1]


def test_agents_are_read_in_the_order_of_time_with_identifiers_of_their_session(tmp_path: Path) -> None:
    source, found, malformed = read(lines(tmp_path / "a", AGENTS, AGENTS))
    assert source.reader.format == "kv-cache-tester"
    assert [request.time_s for request in found] == [0.0, 5.0, 6.0] * 2
    assert found[1].blocks is not None
    assert found[0].blocks is not None
    assert found[1].blocks.startswith(found[0].blocks)
    assert found[0].blocks != found[3].blocks
    assert not malformed.lines


def test_a_session_may_be_a_file_of_its_own_over_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(json.dumps(AGENTS, indent=1))
    assert len(read(path)[1]) == 3
    path.write_text(json.dumps([AGENTS, AGENTS], indent=1))
    assert len(read(path)[1]) == 6


def test_chunks_are_one_stream_of_blocks_named_by_what_they_hold(tmp_path: Path) -> None:
    lines(tmp_path / "1_sys_prompt.jsonl", *({"sys_prompt_id": n, "token_length": 100} for n in (1, 2)))
    lines(tmp_path / "2_passages.jsonl", {"passage_id": 9, "token_length": 70})

    def prompt(*system: int) -> dict[str, object]:
        return hashed(180, [], timestamp="82", session_id="s") | {
            "hash_ids": {"sys_prompt": list(system), "passages_ids": [9], "history": []}
        }

    path = lines(tmp_path / "0_trace.jsonl", prompt(1), prompt(1), prompt(2), prompt(3))
    source, found, malformed = read(path)
    assert (source.reader.format, found[0].time_s, found[0].session) == ("ragpulse", 82.0, "s")
    assert [len(request.blocks or b"") // 8 for request in found] == [2, 2, 2]
    assert found[0].blocks == found[1].blocks != found[2].blocks
    assert dict(malformed.reasons) == {"a chunk has no length in the files beside the trace": 1}


@pytest.mark.parametrize(
    "record",
    [
        CHAT,
        {
            "request": CHAT,
            "response": {"usage": {"completion_tokens": 3}},
            "timestamp": "2026-01-01T00:00:00Z",
        },
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"request": {"body": json.dumps(CHAT)}, "session_id": 5},
    ],
)
def test_a_request_is_found_in_its_log_record(tmp_path: Path, record: dict[str, object]) -> None:
    source, found, malformed = read(lines(tmp_path / "a", record))
    assert source.reader.format == "openai"
    assert found[0].input_tokens == round(PARTS_BYTES / 4)
    assert [part.name for part in found[0].parts] == ["system message 0", "user message 1"]
    assert len(found[0].blocks or b"") == 8 * (PARTS_BYTES // 256)
    assert not malformed.lines
    if "response" in record:
        assert (found[0].output_tokens, found[0].time_s) == (3, 1767225600.0)
    assert found[0].session == ("5" if "session_id" in record else None)


def test_text_becomes_tokens_as_usage_says(tmp_path: Path) -> None:
    record = {"request": CHAT, "response": {"usage": {"prompt_tokens": PARTS_BYTES // 2}}}
    source, found, _ = read(lines(tmp_path / "a", record))
    assert found[0].input_tokens == PARTS_BYTES // 2
    assert "as usage says" in source.reader.note


def test_models_share_nothing(tmp_path: Path) -> None:
    _, found, _ = read(lines(tmp_path / "a", CHAT, CHAT | {"model": "other"}))
    assert found[0].blocks != found[1].blocks


def test_token_ids_are_exact(tmp_path: Path) -> None:
    record = {"input_tok_ids": list(range(130)), "output_toks": 9, "arrival_time_ns": 2_000_000_000}
    source, found, _ = read(lines(tmp_path / "a", record))
    assert source.reader.format == "token-ids"
    assert (found[0].time_s, found[0].input_tokens, found[0].output_tokens) == (2.0, 130, 9)
    assert len(found[0].blocks or b"") == 2 * 8


@pytest.mark.parametrize(
    "head",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "\ufeffTimestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    ],
)
def test_lengths_alone_identify_nothing(tmp_path: Path, head: str) -> None:
    row = "2023-11-16 18:17:03.9799600,4808,10" if "Context" in head else "5,ChatGPT,4808,10,4818,log"
    source, found, malformed = read(lines(tmp_path / "a", head, row, row.replace("4808", "many")))
    assert (found[0].input_tokens, found[0].output_tokens, found[0].blocks) == (4808, 10, None)
    assert (source.other_lines, malformed.lines) == (1, 1)


def test_a_vllm_log_gives_prompts_where_it_has_them(tmp_path: Path) -> None:
    ids = list(range(64))
    stem = "(APIServer pid=7) INFO 11-29 19:10:43 [request_logger.py:66] "
    source, found, malformed = read(
        lines(
            tmp_path / "a",
            stem + "vLLM API server version 0.32.0",
            stem
            + f"Received request a: prompt: 'it\\'s', params: SamplingParams(), prompt_token_ids: {ids}, x",
            stem + f"Request b details: prompt: '{'w' * 512}', prompt_token_ids: None, x",
            stem + "Received request c: params: SamplingParams(n=1), lora_request: None.",
        )
    )
    assert source.reader.format == "vllm-log"
    assert [request.input_tokens for request in found] == [64, 128]
    assert found[0].blocks == blocks.of_tokens(ids, 64)
    assert source.other_lines == 1
    assert malformed.lines == 1
    assert "VLLM_LOGGING_LEVEL=DEBUG" in next(iter(malformed.reasons))


def test_a_packed_file_gives_what_it_gives_unpacked(tmp_path: Path) -> None:
    plain = lines(tmp_path / "a", hashed(1500, [4, 5, 6]), CHAT)
    packed = tmp_path / "b"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed)[1] == read(plain)[1]


def test_what_a_packed_file_holds_up_to_its_early_end_is_read(tmp_path: Path) -> None:
    packed = gzip.compress(
        b"".join(json.dumps(hashed(1500, [n, 5, 6])).encode() + b"\n" for n in range(4000))
    )
    path = tmp_path / "b"
    path.write_bytes(packed[:-2000])
    source, found, malformed = read(path)
    assert source.cut
    assert 1000 < len(found) < 4000
    assert not malformed.lines
    path.write_bytes(packed[:12])
    with pytest.raises(MisconfiguredError, match="damaged"):
        read(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("\ufeff" + json.dumps(CHAT) + "\n")
    assert len(read(path)[1]) == 1
    path.write_text("\ufeff" + json.dumps([AGENTS], indent=1))
    assert len(read(path)[1]) == 3


def test_a_log_whose_lines_begin_with_a_bracket_is_no_json_list(tmp_path: Path) -> None:
    line = "[2026-11-29 19:10:43] INFO 11-29 19:10:43 Received request a: prompt: 'hello', params: x"
    source, found, _ = read(lines(tmp_path / "a", line, line))
    assert (source.reader.format, len(found)) == ("vllm-log", 2)


def test_empty_files_and_directories_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(MisconfiguredError, match="is empty"):
        TraceFile(tmp_path / "a")
    with pytest.raises(MisconfiguredError, match="is a directory"):
        TraceFile(tmp_path)
    with pytest.raises(MisconfiguredError, match="No such file") as found:
        TraceFile(tmp_path / "b")
    assert "Errno" not in str(found.value)


@pytest.mark.parametrize("prompts", [["one prompt", "another"], [[1, 2, 3], [4, 5]]])
def test_a_list_of_prompts_is_that_many_requests(tmp_path: Path, prompts: list[object]) -> None:
    record = {"request": {"model": "m", "prompt": prompts}, "response": {"usage": {"completion_tokens": 9}}}
    _, found, _ = read(lines(tmp_path / "a", record))
    assert [request.output_tokens for request in found] == [None, None]
    (single,) = read(lines(tmp_path / "a", {"model": "m", "prompt": prompts[1]}))[1]
    assert found[1] == single


def test_a_time_and_a_session_of_0_are_there(tmp_path: Path) -> None:
    inner = CHAT | {"created": 99, "user": "inner"}
    (found,) = read(lines(tmp_path / "a", {"timestamp": 0, "session_id": 0, "request": inner}))[1]
    assert (found.time_s, found.session) == (0.0, "0")


def test_local_identifiers_of_two_files_are_different_blocks(tmp_path: Path) -> None:
    one, other = (read(lines(tmp_path / name, AGENTS))[1][0] for name in "ab")
    assert one.blocks != other.blocks


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_tokens": 0},
        {"input_tokens": 10**20},
        {"output_tokens": -1},
        {"output_tokens": MAX_TOKENS + 1},
        {"time_s": float("inf")},
        {"time_s": float("nan")},
        {"time_s": -1e308},
    ],
)
def test_a_request_has_bounds(wrong: dict[str, float]) -> None:
    right: dict[str, Any] = {"time_s": 0.0, "input_tokens": 1, "output_tokens": None, "blocks": None}
    Request(**right)
    with pytest.raises(MalformedError):
        Request(**right | wrong)


def test_a_pipe_is_refused_as_it_would_lose_its_beginning(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MisconfiguredError, match="no file"):
        TraceFile(tmp_path / "pipe")


def test_what_is_no_request_is_counted_by_reason_and_place(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a",
        hashed(1500, [4, 5, 6]),
        "{",
        "[1]",
        hashed(0, []),
        "",
        hashed(3, [1, 2]),
        hashed(512, [4]),
    )
    _, found, malformed = read(path)
    assert len(found) == 2
    assert malformed.lines == 4
    assert malformed.reasons["not JSON"] == 1
    assert malformed.places["not JSON"] == ["a:2"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello\n", b"\xff\xfe\x00", b"{}\n", b"[", b"[1, 2]"])
def test_a_file_of_no_known_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(MisconfiguredError, match=str(path)):
        TraceFile(path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (3, 3.0),
        ("82", 82.0),
        (1_767_225_600_000, 1_767_225_600.0),
        ("2026-01-01T01:00:00+01:00", 1_767_225_600.0),
    ],
)
def test_times_are_read_as_written(written: object, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["soon", True, float("inf"), [], 10**400])
def test_no_time_is_malformed(written: object) -> None:
    with pytest.raises(MalformedError):
        seconds(written)
