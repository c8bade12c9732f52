"""What a feed knows, numbers and forgets: without sockets."""

from hashlib import sha256

import pytest
from tests.feed.view import View, cut

from kvferry.errors import BrokenError, RefusedError
from kvferry.feed.framing import decode_from_router, decode_to_router, encode, hello_mismatch, split
from kvferry.feed.log import Log
from kvferry.feed.parts import Parts
from kvferry.feed.picture import SLICE_DIGESTS, Picture
from kvferry.feed.wire import (
    MAX_EVENTS,
    MAX_TEXT,
    PROTOCOL,
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Events,
    Gone,
    Held,
    Hello,
    Known,
    Level,
    Prompt,
    Rate,
    Result,
    Space,
    Speed,
)
from kvferry.frames import LENGTH

SPACE = Space(1, bytes(16), "model", 128, 1 << 20)
ENGINE = EngineUp(1, "engine", 1, 4096)


def chunks(count: int, seed: str = "") -> list[bytes]:
    return [sha256(f"{seed}{number}".encode()).digest() for number in range(count)]


def held(some: list[bytes], level: Level = Level.MEMORY, *, engine: int = 0, space: int = 1) -> Held:
    return Held(level, engine, space, b"".join(some))


def gone(some: list[bytes], level: Level = Level.MEMORY, *, engine: int = 0, space: int = 1) -> Gone:
    return Gone(level, engine, space, b"".join(some))


def seen(picture: Picture) -> View:
    """By who takes a snapshot now."""
    view = View()
    for few in picture.slices():
        for event in few:
            view.apply("", event)
    return view


def numbered(frame: bytes) -> Events:
    message = decode_to_router(frame[LENGTH.size :])
    assert isinstance(message, Events)
    return message


# ---- the picture


def test_what_was_said_before_is_not_said_again() -> None:
    picture = Picture()
    a, b, c = chunks(3)
    assert picture.apply(held([a, b])) == [held([a, b])]
    assert picture.apply(held([b, c])) == [held([c])]
    assert picture.apply(held([a])) == []
    assert picture.apply(gone([a, b])) == [gone([a, b])]
    assert picture.apply(gone([a])) == []
    assert picture.apply(SPACE) == [SPACE]
    assert picture.apply(SPACE) == []
    assert picture.apply(EngineDown(9)) == []


def test_a_snapshot_says_all_that_lasts_and_in_slices() -> None:
    picture, view = Picture(), View()
    some = chunks(5 * SLICE_DIGESTS)
    events: list[AnyEvent] = [
        SPACE,
        ENGINE,
        Rate(Level.VALKEY, 0.001, 1e9),
        Speed(1, 0.1, 1e-5, 1e-9),
        held(some),
        held(some[:10], Level.VALKEY),
        held(some[:5], Level.ENGINE, engine=1),
        Prompt(1, 1, "r", b"", 5, 0),
        gone(some[:3]),
    ]
    for event in events:
        for told in picture.apply(event):
            view.apply("", told)
    assert seen(picture).said() == view.said()
    sizes = [len(event.digests) // 32 for few in picture.slices() for event in few if isinstance(event, Held)]
    assert max(sizes) <= 2 * SLICE_DIGESTS
    assert len(sizes) > 3


def test_an_engine_that_is_gone_takes_what_it_held_with_it() -> None:
    picture = Picture()
    for event in (ENGINE, Speed(1, 0.1, 0.1, 0.1), held(chunks(3), Level.ENGINE, engine=1), held(chunks(2))):
        picture.apply(event)
    assert picture.apply(EngineDown(1)) == [EngineDown(1)]
    view = seen(picture)
    assert (view.engines, view.speeds, view.at(Level.ENGINE)) == ({}, {}, set())
    assert view.at(Level.MEMORY) == set(chunks(2))


def test_cleared_takes_a_level_of_all_spaces() -> None:
    picture = Picture()
    for event in (held(chunks(3)), held(chunks(3), space=2), held(chunks(3), Level.VALKEY)):
        picture.apply(event)
    picture.apply(Cleared(Level.MEMORY, 0))
    assert seen(picture).at(Level.MEMORY) == set()
    assert seen(picture).at(Level.VALKEY) == set(chunks(3))


def test_of_shared_levels_so_many_are_known_and_who_follows_knows_the_same() -> None:
    picture, view = Picture(max_shared_chunks=100), View()
    for at in range(0, 1000, 50):
        for told in picture.apply(held(chunks(1000)[at : at + 50], Level.VALKEY)):
            view.apply("", told)
        assert picture.count(Level.VALKEY) <= 100
    assert view.at(Level.VALKEY) == picture.chunks(Level.VALKEY, 1)
    assert len(view.at(Level.VALKEY)) == 100
    assert picture.apply(held(chunks(1000)))  # memory is bounded by its pool
    assert picture.count(Level.MEMORY) == 1000


# ---- the log


def test_events_are_numbered_without_gaps_and_old_ones_make_room() -> None:
    log = Log(max_bytes=10_000)
    found: dict[int, AnyEvent] = {}
    for number in range(100):
        log.append([held(chunks(1, str(number))), gone(chunks(1, str(number)))])
    at = log.oldest
    while at < log.next:
        frame, after = log.frame(at)
        message = numbered(frame)
        assert message.first == at
        found.update(enumerate(message.events, at))
        at = after
    assert list(found) == list(range(log.oldest, 201))
    assert found[200] == gone(chunks(1, "99"))
    assert 1 < log.oldest < 200
    assert log.has(log.oldest)
    assert log.has(201)  # nothing is lacking
    assert not log.has(log.oldest - 1)
    assert not log.has(202)


def test_a_router_may_go_on_in_the_middle_of_what_was_told_together() -> None:
    log = Log()
    log.append([held(chunks(1, str(n))) for n in range(10)])
    frame, after = log.frame(4)
    assert after == 11
    assert list(numbered(frame).events) == [held(chunks(1, str(n))) for n in range(3, 10)]
    with pytest.raises(BrokenError):
        log.frame(11)


def test_no_frame_is_larger_than_a_router_takes() -> None:
    log = Log(max_bytes=1 << 30)
    log.append([held(chunks(4096, str(n))) for n in range(30)])
    at, frames = 1, 0
    while at < log.next:
        frame, at = log.frame(at)
        numbered(frame)
        frames += 1
    assert frames == 4  # of 8 events each


def test_long_texts_make_no_frame_too_large_either() -> None:
    """A request's id is its client's, who may like it long."""
    log = Log(max_bytes=1 << 30)
    log.append([Result(1, "\U0001f6a2" * MAX_TEXT, 0, 0, 0, 0, "\U0001f6a2" * MAX_TEXT)] * MAX_EVENTS)
    at = 1
    while at < log.next:
        frame, at = log.frame(at)
        numbered(frame)


# ---- parts


def test_a_chunk_is_held_once_all_parts_that_count_are_there_and_gone_with_the_first() -> None:
    parts = Parts(Level.VALKEY)
    parts.space(1, (10, 10, 0, 5), (0, 0, 0, 2))  # the third does not exist, the fourth only ends a prefix
    a, b = chunks(2)
    assert parts.seen([(1, a, 0, True), (1, b, 0, True)]) == []
    assert parts.seen([(1, a, 3, True)]) == []
    assert parts.seen([(1, a, 1, True)]) == [held([a], Level.VALKEY)]
    assert parts.seen([(1, a, 0, False), (1, b, 1, True)]) == [
        gone([a], Level.VALKEY),
        held([b], Level.VALKEY),
    ]
    assert parts.seen([(1, a, 1, True)]) == []
    assert parts.seen([(1, a, 0, True)]) == [held([a], Level.VALKEY)]
    assert parts.seen([(7, a, 0, True)]) == []  # of a space that nobody declared


def test_of_one_part_that_counts_nothing_is_remembered() -> None:
    parts = Parts(Level.VALKEY, max_chunks=1)
    parts.space(1, (10,), ())
    some = chunks(10)
    assert parts.seen([(1, chunk, 0, True) for chunk in some]) == [held(some, Level.VALKEY)]
    assert parts.seen([(1, chunk, 0, False) for chunk in some]) == [gone(some, Level.VALKEY)]


def test_parts_that_wait_for_others_are_bounded() -> None:
    parts = Parts(Level.VALKEY, max_chunks=10)
    parts.space(1, (10, 10), ())
    some = chunks(100)
    parts.seen([(1, chunk, 0, True) for chunk in some])
    assert parts.seen([(1, chunk, 1, True) for chunk in some[90:]]) == [held(some[90:], Level.VALKEY)]
    assert parts.seen([(1, chunk, 1, True) for chunk in some[:90]]) == []


# ---- the wire


def test_messages_survive_the_wire_and_others_are_refused() -> None:
    known = Known((SPACE, ENGINE, held(chunks(3)), Cleared(Level.VALKEY, 0), Speed(1, 0.5, 0.1, 0.0)))
    assert decode_to_router(encode(known)[LENGTH.size :]) == known
    hello = Hello(protocol=PROTOCOL, version="1", token="secret", epoch=5, next=7)
    assert decode_from_router(encode(hello)[LENGTH.size :]) == hello
    assert "secret" not in repr(hello)
    for payload in (b"", b"\xc1", encode(known)[LENGTH.size :], encode(hello)[LENGTH.size : -1]):
        with pytest.raises(RefusedError, match="malformed message from the router"):
            decode_from_router(payload)
    with pytest.raises(RefusedError, match="malformed message from the node"):
        decode_to_router(encode(hello)[LENGTH.size :])
    mismatch = hello_mismatch(encode(Hello(protocol=PROTOCOL + 1, version="9"))[LENGTH.size :])
    assert mismatch is not None
    assert f"protocol {PROTOCOL + 1}" in mismatch
    assert hello_mismatch(encode(hello)[LENGTH.size :]) is None


def test_what_is_left_over_behind_digests_is_none() -> None:
    assert split(b"".join(chunks(2)) + b"rest") == cut(b"".join(chunks(2)))
    assert split(b"") == []
