"""Any line of any format is a request or is counted as malformed, and its findings can be printed."""

import contextlib
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.test_formats import AGENTS, CHAT, hashed, lines

from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.policies import Policy
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile

EXAMPLES: list[bytes] = [
    json.dumps(hashed(1500, [4, 5, 6])).encode(),
    json.dumps(AGENTS).encode(),
    json.dumps(CHAT).encode(),
    json.dumps({"input_tok_ids": [1, 2]}).encode(),
    b"TIMESTAMP,ContextTokens,GeneratedTokens",
    b"INFO 11-29 19:10:43 Received request a: prompt: 'a', params: x",
    b'{"timestamp": "1", "input_length": 300, "output_length": 3, "hash_ids": {"sys_prompt": [1]}}',
]
DEEP = b"[" * 20_000
HOSTILE = [
    DEEP,
    b'{"prompt": ' + DEEP,
    b'{"messages": [], "model": ' + b"[" * 900 + b"]" * 900 + b"}",
    json.dumps({"request": DEEP.decode()}).encode(),
    b'{"input_length": 1' + b"0" * 20 + b', "hash_ids": [1]}',
    b'{"input_length": 9, "output_length": -1, "hash_ids": [1]}',
    b'{"input_length": 9, "hash_ids": [1' + b"0" * 5000 + b"]}",
    b'{"input_length": 9, "hash_ids": [1], "timestamp": "inf"}',
    b'{"input_length": 9, "hash_ids": [1], "timestamp": -1e308}',
    b'{"input_length": 9, "hash_ids": {"s": [1]}}',
    b'{"block_size": 64, "requests": [{"in": 9' + b"0" * 12 + b', "hash_ids_rle": [[0, 4000000000]]}]}',
    b'{"block_size": 64, "requests": [{"in": 9, "t": 1e308, "hash_ids": [1]}]}',
    b'{"input_tok_ids": [1], "arrival_time_ns": 1' + b"0" * 400 + b"}",
    b'{"input_tok_ids": [1], "output_toks": 1' + b"0" * 20 + b"}",
    b'{"prompt": "a", "created": 1' + b"0" * 20 + b"}",
    b"2023-11-16 18:17:03,1" + b"0" * 20 + b",10",
    b"2023-11-16 18:17:03,10,-10",
    b"inf,10,10",
    b"0001-01-01T00:00:00+23:59,10,10",
    b"Received request a: prompt_token_ids: [,], params: x",
    b"Received request a: prompt_token_ids: [1" + b"0" * 30 + b"], params: x",
]


@pytest.mark.parametrize("opening", EXAMPLES, ids=range(len(EXAMPLES)))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_line_is_a_request_or_malformed(
    tmp_path_factory: pytest.TempPathFactory, opening: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines(folder / "1_sys_prompt.jsonl", {"sys_prompt_id": 1, "token_length": 100})
    path = folder / f"opening-{hash(opening)}"
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "in",
                        "t",
                        "requests",
                        "hash_ids",
                        "hash_ids_rle",
                        "messages",
                        "prompt",
                        "input",
                        "role",
                        "content",
                        "timestamp",
                        "input_length",
                        "body",
                        "block_size",
                        "input_tok_ids",
                        "usage",
                        "tools",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
    cut = data.draw(st.integers(0, len(opening)))
    line = data.draw(st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()))
    attempts = [line, opening[:cut] + line, opening[:cut], data.draw(st.sampled_from(HOSTILE))]
    written = [attempt.replace(b"\n", b" ") for attempt in attempts if attempt.strip()]
    judged(path, opening, written)


@pytest.mark.parametrize("opening", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_hostile_line_is_a_request_or_malformed(tmp_path: Path, opening: bytes) -> None:
    lines(tmp_path / "1_sys_prompt.jsonl", {"sys_prompt_id": 1, "token_length": 100})
    path = tmp_path / "a"
    judged(path, opening, HOSTILE)


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_first_line_makes_a_reader_or_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(line)
    with contextlib.suppress(MisconfiguredError):
        list(TraceFile(path).requests(Malformed()))


def judged(path: Path, opening: bytes, others: Sequence[bytes]) -> None:
    """Every line is accounted for, and what it gave can be analysed and printed."""
    path.write_bytes(opening)  # the format is known from this alone
    source, malformed = TraceFile(path), Malformed()
    path.write_bytes(b"\n".join([opening, *others]))
    log = ReuseLog(source.reader.block_tokens)
    for request in source.requests(malformed):
        log.add(request)
    filled = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    gave = filled - malformed.lines - source.other_lines
    assert 0 <= gave <= len(log)
    if source.reader.format not in ("kv-cache-tester", "openai"):  # there a line may hold several
        assert gave == len(log)
    found = findings.document(log, capacities=[1], policies=list(Policy), clock=source.reader.clock)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("packed", [False, True])
def test_how_much_of_a_file_was_read_grows_to_all_of_it(tmp_path: Path, packed: bool) -> None:
    lines = b"".join(
        b'{"timestamp": %d, "block_size": 512, "input_length": 512, "hash_ids": [%d]}\n' % (at, at)
        for at in range(60_000)
    )
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(lines) if packed else lines)
    source = TraceFile(path)
    shares = [source.share_read for _ in source.requests(Malformed())]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 1
    assert shares[-1] == pytest.approx(1, abs=0.2)
    assert source.share_read == 0  # nothing is being read
