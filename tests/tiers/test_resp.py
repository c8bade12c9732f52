"""Replies: whole whatever the pieces they arrive in, bounded whatever the other side sends."""

import contextlib
import itertools
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.tiers.valkey.resp import (
    MAX_LINE_BYTES,
    ErrorKind,
    ProtocolError,
    Reader,
    Reply,
    ServerError,
    command,
)
from kvferry.tiers.valkey.stream import DroppedError, Stream, Until


def encode(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, ServerError):
        return b"-%b\r\n" % str(reply).encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


def read(wire: bytes, cuts: list[int], count: int) -> list[Reply]:
    """Read ``count`` replies from ``wire`` sent in pieces."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours, stall_s=5.0)

    def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            send_all()

    def send_all() -> None:
        places = [0, *sorted({cut % (len(wire) + 1) for cut in cuts}), len(wire)]
        for start, end in itertools.pairwise(places):
            theirs.sendall(wire[start:end])
        theirs.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        reader = Reader(stream)
        return [reader.reply(Until(time.monotonic() + 10)) for _ in range(count)]
    finally:
        stream.close()
        sender.join()
        theirs.close()


leaves = st.none() | st.integers(-(2**62), 2**62) | st.binary(max_size=300)
replies = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(wanted=st.lists(replies, max_size=6), cuts=st.lists(st.integers(0, 10_000), max_size=5))
def test_replies_are_whole_however_they_are_cut(wanted: list[Reply], cuts: list[int]) -> None:
    assert read(b"".join(map(encode, wanted)), cuts, len(wanted)) == wanted


def test_an_error_is_a_reply_and_the_stream_goes_on() -> None:
    found = read(b"-OOM command not allowed\r\n:1\r\n-MOVED 7 h:1\r\n$1\r\nx\r\n", [], 4)
    assert isinstance(found[0], ServerError)
    assert found[0].kind is ErrorKind.OUT_OF_MEMORY
    assert isinstance(found[2], ServerError)
    assert found[2].kind is ErrorKind.MOVED
    assert (found[1], found[3]) == (1, b"x")


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$99999999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 20,
        b":12x\r\n",
        b"$3\r\nabcde",
        b"+" + b"x" * (MAX_LINE_BYTES + 10),
        b"*60\r\n" + (b"$%d\r\n%b\r\n" % (1 << 20, bytes(1 << 20))) * 17,
    ],
)
def test_what_is_no_reply_or_too_large_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(wire, [], 1)


def test_an_end_inside_a_reply_is_a_lost_connection() -> None:
    with pytest.raises(DroppedError):
        read(b"$10\r\nabc", [], 1)


def test_a_command_is_an_array_of_bulk_strings() -> None:
    assert command(b"GET", b"k") == b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
