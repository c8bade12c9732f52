"""Which events count: each once, in order, and none after a gap."""

import asyncio

import msgspec
import pytest
from tests.feed.test_pure import chunks, held
from tests.feed.view import View

from kvferry.addresses import Address
from kvferry.errors import RefusedError
from kvferry.feed.access import FeedAccess
from kvferry.feed.wire import PROTOCOL, Events, Known, KnownEnd, Ping, Refusal, Welcome
from kvferry.router.feed.follower import FIRST_WAIT_S, KNOWN_WAIT_S, STEADY_S, Follower
from kvferry.router.feed.stream import GapError, Stream

EVENTS = tuple(held(chunks(1, str(n))) for n in range(6))


def welcome(*, epoch: int = 7, following: int = 5, snapshot: bool = True) -> Welcome:
    return Welcome(
        protocol=PROTOCOL, version="1", node="n", epoch=epoch, next=following, snapshot=snapshot, behind="v"
    )


@pytest.fixture
def stream() -> Stream:
    """One that lacks event 5."""
    made = Stream()
    made.hello("")
    assert made.take(welcome()).reset
    assert not made.whole
    assert made.take(Known(EVENTS[:1])).events == EVENTS[:1]
    made.take(KnownEnd())
    assert made.whole
    return made


def test_events_that_were_seen_are_left_out(stream: Stream) -> None:
    assert stream.take(Events(5, EVENTS[:3])).events == EVENTS[:3]
    assert stream.take(Events(5, EVENTS[:3])).events == ()
    assert stream.take(Events(3, EVENTS[:2])).events == ()
    assert stream.take(Events(6, EVENTS[1:5])).events == EVENTS[3:5]
    assert (stream.next, stream.replayed) == (10, 7)


def test_after_a_gap_nothing_counts_and_all_is_asked_for(stream: Stream) -> None:
    with pytest.raises(GapError, match="events 5 to 6 are missing"):
        stream.take(Events(7, EVENTS))
    assert not stream.whole
    assert (stream.hello("").epoch, stream.hello("").next) == (0, 0)


def test_a_stream_goes_on_where_it_was_and_nowhere_else(stream: Stream) -> None:
    stream.take(Events(5, EVENTS[:2]))
    assert (stream.hello("t").epoch, stream.hello("t").next) == (7, 7)
    assert not stream.take(welcome(following=7, snapshot=False)).reset
    for elsewhere in (welcome(following=8, snapshot=False), welcome(epoch=8, following=7, snapshot=False)):
        stream.epoch, stream.next = 7, 7
        stream.hello("")
        with pytest.raises(GapError):
            stream.take(elsewhere)


def test_a_feed_of_another_protocol_is_refused_with_both_versions(stream: Stream) -> None:
    stream.hello("")
    other = msgspec.structs.replace(
        welcome(following=5, snapshot=False), protocol=PROTOCOL + 1, version="9.9"
    )
    with pytest.raises(RefusedError, match=rf"\(9.9\) speaks protocol {PROTOCOL + 1}"):
        stream.take(other)
    with pytest.raises(RefusedError, match="answered hello"):
        stream.take(Events(5, EVENTS))


def test_a_snapshot_that_broke_off_is_asked_for_again(stream: Stream) -> None:
    stream.hello("")
    stream.take(welcome(epoch=8))
    assert (stream.hello("").epoch, stream.hello("").next) == (0, 0)


def test_what_makes_no_sense_is_refused(stream: Stream) -> None:
    for message in (welcome(), Known(EVENTS)):
        with pytest.raises(RefusedError):
            stream.take(message)
    stream.hello("")
    for message in (Ping(), KnownEnd(), Events(5, EVENTS)):
        with pytest.raises(RefusedError, match="answered hello with"):
            stream.take(message)
    with pytest.raises(RefusedError, match="no room"):
        stream.take(Refusal(message="no room"))
    stream.take(welcome())
    with pytest.raises(RefusedError, match="within a snapshot"):
        stream.take(Events(5, EVENTS))


def test_a_feed_that_breaks_as_soon_as_it_is_followed_is_asked_ever_less_often() -> None:
    now = [0.0]

    async def main() -> list[float]:
        follower = Follower(Address("127.0.0.1", 1), View(), FeedAccess(), None)
        waits = []
        asyncio.get_running_loop().time = lambda: now[0]  # type: ignore[method-assign]
        for held_s in [0.0] * 8 + [STEADY_S]:
            follower._followed()
            now[0] += held_s
            waits.append(follower._wait_s())
        return waits

    waits = asyncio.run(main())
    assert waits[7] >= KNOWN_WAIT_S / 2
    assert waits[0] <= FIRST_WAIT_S
    assert waits[8] <= FIRST_WAIT_S  # it held: what ended it is something new
