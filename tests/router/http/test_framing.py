"""Where bodies end, for any body cut in any way; and what heads of any bytes come to."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import CorruptError
from kvferry.router.http.framing import (
    GOES_ON,
    MAX_CHUNK_LINE_BYTES,
    Body,
    Chunked,
    Sized,
    UntilClosed,
)  # fmt: skip
from kvferry.router.http.head import BadHeadError, read_answer, read_request
from kvferry.router.http.usage import Tail

CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
CUTS = st.lists(st.integers(0, 400), max_size=12)
AFTER = st.binary(max_size=20)
TRAILERS = st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"])
REQUEST = b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nX-A: b\r\n\r\n"

STREAMED = [
    b'data: {"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0},',
    b'"output_tokens":1}}\n\n',
]


def framed(chunks: Sequence[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailer + b"\r\n"


def followed(body: Body, data: bytes, cuts: Sequence[int]) -> tuple[int, bytes]:
    """The end in all of data, and the content. Fed in pieces."""
    content: list[bytes] = []
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(places):
        found = body.feed(data[begin:end], content)
        if found != GOES_ON:
            return begin + found, b"".join(content)
    return GOES_ON, b"".join(content)


@given(chunks=CHUNKS, cuts=CUTS, after=AFTER, trailer=TRAILERS)
def test_a_chunked_body_ends_where_it_ends_however_it_is_cut(
    chunks: list[bytes], cuts: list[int], after: bytes, trailer: bytes
) -> None:
    whole = framed(chunks, trailer)
    assert followed(Chunked(), whole + after, cuts) == (len(whole), b"".join(chunks))


@given(chunks=CHUNKS, cuts=CUTS, short=st.integers(1, 400))
def test_a_chunked_body_that_is_not_whole_goes_on(chunks: list[bytes], cuts: list[int], short: int) -> None:
    whole = framed(chunks)
    end, content = followed(Chunked(), whole[: max(0, len(whole) - short)], cuts)
    assert end == GOES_ON
    assert b"".join(chunks).startswith(content)


@given(length=st.integers(0, 300), data=st.binary(max_size=300), cuts=CUTS)
def test_a_body_of_a_length_takes_so_much_and_no_more(length: int, data: bytes, cuts: list[int]) -> None:
    body = Sized(length)
    if not length:
        assert body.feed(data, []) == 0
    elif data:
        end, content = followed(body, data, cuts)
        assert content == data[:length]
        assert end == (length if len(data) >= length else GOES_ON)


def test_a_body_without_a_length_never_ends_by_itself() -> None:
    assert UntilClosed().feed(b"x" * 100) == GOES_ON


@given(chunks=CHUNKS, at=st.integers(0, 400), byte=st.integers(0, 255), cuts=CUTS)
def test_a_damaged_body_is_refused_or_another_one_and_nothing_else(
    chunks: list[bytes], at: int, byte: int, cuts: list[int]
) -> None:
    whole = bytearray(framed(chunks))
    whole[at % len(whole)] = byte
    try:
        end, _ = followed(Chunked(), bytes(whole), cuts)
    except CorruptError:
        return
    assert end <= len(whole)


def test_one_s_own_chunk_fits_in_between_chunks_alone() -> None:
    body = Chunked()
    places = set()
    for place, byte in enumerate(framed([b"ab", b"c"])):
        if body.between_pieces:
            places.add(place - len(body.unsure))  # as far as others have it
        body.feed(bytes([byte]))
    assert places == {0, 7, 13}


@given(chunks=CHUNKS, cuts=CUTS, at=st.integers(0, 400), byte=st.integers(0, 255), trailer=TRAILERS)
def test_nothing_is_held_but_a_line_that_has_not_ended_and_nothing_else_is_told(
    chunks: list[bytes], cuts: list[int], at: int, byte: int, trailer: bytes
) -> None:
    whole = bytearray(framed(chunks, trailer))
    whole[at % len(whole)] = byte
    data = bytes(whole)
    body = Chunked()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(places):
        try:
            if body.feed(data[begin:end]) != GOES_ON:
                return
        except CorruptError:
            return
        told = data[: end - len(body.unsure)]
        assert told + body.unsure == data[:end]
        assert b"\n" not in body.unsure and len(body.unsure) <= MAX_CHUNK_LINE_BYTES
        assert Chunked().feed(told) == GOES_ON


@given(at=st.integers(0, 400), more=st.binary(max_size=4), gone=st.integers(0, 4))
def test_a_damaged_head_is_refused_or_read_as_one_request(at: int, more: bytes, gone: int) -> None:
    at %= len(REQUEST)
    data = REQUEST[:at] + more + REQUEST[at + gone :]
    for read in (read_request, read_answer):
        try:
            head = read(data)
        except (BadHeadError, CorruptError):
            continue
        assert head.body is not None
        for name, value in head.fields:
            assert not set(b"\r\n\0") & {*name, *value}


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}'], (5, None, 2)),
        ([b'{"usage": {"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'], (5, 4, 0)),
        ([b'data: {"usage":null}\n\n', *STREAMED, b"data: [DONE]\n\n", b"0\r\n\r\n"], (9, 0, 1)),
        ([b'{"usage":{"prompt_tokens":5,"completion_tok', b'ens":2}}'], (5, None, 2)),
        ([b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":6}}}'], (5, None, 0)),
        ([b'{"usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":2}}'], (9, 4, 2)),
        ([b'{"usage":{"input_tokens":5,"cache_read_input_tokens":-4,"output_tokens":2}}'], (5, None, 2)),
        ([b'{"usage":{"prompt_tokens":-5}}'], None),
        ([b'{"usage":{"prompt_tokens":"5"}}'], None),
        ([b'{"usage":'], None),
        ([b""], None),
    ],
)  # fmt: skip
def test_usage_is_read_from_the_end_of_an_answer(
    pieces: list[bytes], expected: tuple[int, int | None, int] | None
) -> None:
    tail = Tail()
    for piece in [b"x" * 100_000, *pieces]:
        tail.add(piece)
    usage = tail.usage()
    found = usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    assert found == expected
