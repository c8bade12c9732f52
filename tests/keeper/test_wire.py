"""What is sent arrives, and nothing else is taken for a message."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.keeper.fleet import NAMESPACE, some_refs

from kvferry.errors import RefusedError
from kvferry.frames import LENGTH
from kvferry.identity.names import DIGEST_BYTES, MAX_PART_BYTES, MAX_PARTS, PartKey, PartRef
from kvferry.keeper import wire
from kvferry.keeper.framing import decode_from_keeper, decode_to_keeper, encode, hello_mismatch
from kvferry.tiers.contract import Outcome

REFS = st.builds(
    PartRef,
    st.builds(
        PartKey,
        st.sampled_from([NAMESPACE, b"n" * 16]),
        st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES),
        st.integers(0, MAX_PARTS - 1),
    ),
    st.integers(1, MAX_PART_BYTES),
)


def _payload(message: wire.Message) -> bytes:
    return encode(message)[LENGTH.size :]


@given(st.lists(REFS, max_size=40))
def test_references_come_back_as_they_were(refs: list[PartRef]) -> None:
    places: list[int] = []
    for parts, some in wire.Parts.split(refs):
        sent = decode_to_keeper(_payload(wire.Used(parts=parts)))
        assert isinstance(sent, wire.Used)
        assert sent.parts.refs() == [refs[at] for at in some]
        places += some
    assert sorted(places) == list(range(len(refs)))
    assert [parts for parts, _ in wire.Parts.split(refs)] == wire.Parts.of(refs)


def test_more_references_than_a_frame_takes_go_in_several() -> None:
    refs = some_refs(1) * (2 * wire.MAX_REFS + 1)
    found = wire.Parts.of(refs)
    assert [len(parts) for parts in found] == [wire.MAX_REFS, wire.MAX_REFS, 1]
    assert all(len(encode(wire.Stage(1, parts, 5.0))) <= wire.MAX_FRAME_BYTES for parts in found)


def test_every_outcome_has_a_code() -> None:
    assert sorted(wire.OUTCOMES, key=lambda outcome: outcome.value) == sorted(
        Outcome, key=lambda outcome: outcome.value
    )


PARTS = [NAMESPACE, b"d" * 64, [0, 1], [10, 20]]


@pytest.mark.parametrize(
    ("decode", "fields"),
    [
        (decode_to_keeper, {"type": "Used", "parts": [NAMESPACE, b"d" * 63, [0, 1], [10, 20]]}),
        (decode_to_keeper, {"type": "Used", "parts": [NAMESPACE, b"d" * 64, [0], [10, 20]]}),
        (decode_to_keeper, {"type": "Used", "parts": [NAMESPACE, b"d" * 64, [0, 1], [10, 0]]}),
        (decode_to_keeper, {"type": "Used", "parts": [NAMESPACE, b"d" * 64, [0, 4096], [10, 1]]}),
        (decode_to_keeper, {"type": "Used", "parts": PARTS, "more": 1}),
        (decode_to_keeper, {"type": "Stored", "parts": PARTS, "positions": [1], "likely": b"\0\0"}),
        (decode_to_keeper, {"type": "Stored", "parts": PARTS, "positions": [1, 2], "likely": b"\0"}),
        (decode_to_keeper, {"type": "Locate", "ticket": 1, "parts": PARTS, "deadline_s": -1.0}),
        (decode_to_keeper, {"type": "Locate", "ticket": -1, "parts": PARTS, "deadline_s": 1.0}),
        (decode_to_keeper, {"type": "Locate", "ticket": 1, "parts": PARTS, "deadline_s": float("nan")}),
        (decode_to_keeper, {"type": "Drop", "ticket": 1, "tier": "memory"}),
        (decode_to_keeper, {"type": "Hello", "protocol": 1, "version": "1", "key_ids": b"abc"}),
        (decode_to_keeper, {"type": "Welcome", "protocol": 1, "version": "1"}),
        (decode_from_keeper, {"type": "Located", "ticket": 1, "where": b"\4"}),
        (decode_from_keeper, {"type": "Staged", "ticket": 1, "indexes": [0, 1], "outcomes": b"\0"}),
        (decode_from_keeper, {"type": "Staged", "ticket": 1, "indexes": [0], "outcomes": b"\7"}),
        (decode_from_keeper, {"type": "Staged", "ticket": 1, "indexes": [-1], "outcomes": b"\0"}),
        (decode_from_keeper, {"type": "Staged", "ticket": 1, "indexes": [16384], "outcomes": b"\0"}),
    ],
)
def test_what_does_not_fit_together_is_refused(
    decode: Callable[[bytes], wire.Message], fields: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError):
        decode(msgspec.msgpack.encode(fields))


def test_another_protocol_is_told_whatever_else_it_says() -> None:
    hello = msgspec.msgpack.encode({"type": "Hello", "protocol": 99, "version": "9.9", "new": [1]})
    assert "9.9" in (hello_mismatch(hello) or "")
    assert hello_mismatch(_payload(wire.Hello(protocol=wire.PROTOCOL, version="9.9"))) is None


def test_a_hello_does_not_show_its_token() -> None:
    assert "secret" not in repr(wire.Hello(protocol=1, version="1", token="a-secret-token"))
