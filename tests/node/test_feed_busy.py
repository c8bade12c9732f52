"""What is told to a feed faster than it can tell others, and in which portions it looks at it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

from tests.feed.test_pure import SPACE, chunks

from kvferry.addresses import Address
from kvferry.feed.settings import FeedSettings
from kvferry.feed.wire import Level
from kvferry.node import feedserver
from kvferry.node.feedserver import FeedServer
from kvferry.testing.expectations import WAIT_S, eventually

LOOPBACK = FeedSettings(listen=Address("127.0.0.1", 0))


def _known(server: FeedServer) -> int:
    """Chunks that Valkey has, by its statistics."""
    said = server.statistics(dropped_events=0, prefetches=0, prefetches_declined=0)
    return said.known_chunks["valkey"]


def test_who_was_told_that_it_is_behind_hears_when_it_is_not(stack: ExitStack) -> None:
    """What waits then would wait until something else happens."""
    server = FeedServer(LOOPBACK, node="here", epoch=7, behind="")
    stack.callback(server.close)
    told, gate = threading.Event(), threading.Event()
    server.start(prefetch=lambda message: None, joined=told.set)
    server._loop.post(partial(gate.wait, WAIT_S))
    try:
        while not server.busy:
            server.publish([SPACE])
        assert not told.is_set()
    finally:
        gate.set()
    assert told.wait(WAIT_S)
    assert not server.busy


def test_much_that_was_seen_is_looked_at_a_little_at_a_time(stack: ExitStack) -> None:
    """Whoever answers what it is about needs the interpreter at the same moment."""
    rests: list[int] = []
    server = FeedServer(
        LOOPBACK, node="here", epoch=7, behind="v", rest=lambda seconds: rests.append(seen[0])
    )
    stack.callback(server.close)
    server.start(prefetch=lambda message: None, joined=lambda: None)
    server.space(1, (4096, 4096), ())
    seen, some = [0], chunks(1000)

    def sightings() -> Iterator[tuple[int, bytes, int, bool]]:
        for chunk in some:
            for part in range(2):
                seen[0] += 1
                yield 1, chunk, part, True

    server.saw(Level.VALKEY, sightings)
    eventually(lambda: _known(server) == 1000, "all of it")
    assert [after - before for before, after in pairwise([0, *rests])] == [feedserver.SEEN_AT_ONCE] * 7
