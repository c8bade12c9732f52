"""Whatever is lost or said twice on the way, a router that follows again knows what the node knows."""

import secrets
from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.feed.test_pure import chunks, gone, held
from tests.feed.view import View
from tests.runs import runs

from kvferry import __version__
from kvferry.feed.framing import decode_to_router
from kvferry.feed.log import Log
from kvferry.feed.picture import Picture
from kvferry.feed.wire import (
    PROTOCOL,
    AnyEvent,
    Cleared,
    EngineDown,
    EngineUp,
    Events,
    Known,
    KnownEnd,
    Level,
    Space,
    ToRouter,
    Welcome,
)
from kvferry.frames import LENGTH
from kvferry.router.feed.stream import GapError, Stream

CHUNKS = chunks(24)
LEVELS = st.sampled_from([Level.MEMORY, Level.VALKEY, Level.ENGINE])


class Node:
    """The node's side of one stream, with a log so short that much of it is lost."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(40) + 1
        self.picture = Picture(max_shared_chunks=8)
        self.log = Log(max_bytes=6000)

    def publish(self, event: AnyEvent) -> None:
        told = self.picture.apply(event)
        if told:
            self.log.append(told)


class Connection:
    """What the node says on one connection, as the server does."""

    def __init__(self, node: Node, stream: Stream) -> None:
        hello = stream.hello("")
        resumes = hello.epoch == node.epoch and node.log.has(hello.next)
        self.node = node
        self.next = hello.next if resumes else node.log.next
        self._slices: Iterator[tuple[AnyEvent, ...]] | None = None if resumes else node.picture.slices()
        self._welcome: Welcome | None = Welcome(
            protocol=PROTOCOL,
            version=__version__,
            node="n",
            epoch=node.epoch,
            next=self.next,
            snapshot=not resumes,
        )

    def say(self) -> ToRouter | None:
        """The next message; None: nothing more now. EOFError: it cuts off who is too slow."""
        if self._welcome is not None:
            welcome, self._welcome = self._welcome, None
            return welcome
        if self.next < self.node.log.oldest:
            raise EOFError
        if self._slices is not None:
            few = next(self._slices, None)
            if few is None:
                self._slices = None
                return KnownEnd()
            return Known(few)
        if self.next == self.node.log.next:
            return None
        frame, self.next = self.node.log.frame(self.next)
        return decode_to_router(frame[LENGTH.size :])


class FeedMachine(RuleBasedStateMachine):
    """One node that restarts, one router, and a connection that loses what it likes."""

    @initialize()
    def begin(self) -> None:
        self.node, self.stream, self.view = Node(), Stream(), View()
        self.connection: Connection | None = None
        self.past: list[Events] = []  # that this connection has said

    # ---- what happens at the node

    @rule(level=LEVELS, engine=st.integers(1, 2), some=st.lists(st.sampled_from(CHUNKS), max_size=6))
    def stored(self, level: Level, engine: int, some: list[bytes]) -> None:
        self.node.publish(held(some, level, engine=engine if level is Level.ENGINE else 0))

    @rule(level=LEVELS, engine=st.integers(1, 2), some=st.lists(st.sampled_from(CHUNKS), max_size=6))
    def evicted(self, level: Level, engine: int, some: list[bytes]) -> None:
        self.node.publish(gone(some, level, engine=engine if level is Level.ENGINE else 0))

    @rule(engine=st.integers(1, 2), up=st.booleans())
    def engine(self, engine: int, up: bool) -> None:
        self.node.publish(EngineUp(engine, "e", 1) if up else EngineDown(engine))

    @rule(space=st.integers(1, 2))
    def space(self, space: int) -> None:
        self.node.publish(Space(space, bytes(16), "m", 128, 100))

    @rule(level=st.sampled_from([Level.MEMORY, Level.VALKEY]))
    def cleared(self, level: Level) -> None:
        self.node.publish(Cleared(level, 0))

    @rule()
    def restarted(self) -> None:
        self.node, self.connection = Node(), None

    # ---- and on the way

    @rule()
    def cut(self) -> None:
        self.connection = None

    @rule(times=st.integers(1, 6))
    def heard(self, times: int) -> None:
        for _ in range(times):
            self._hear()

    @rule()
    def lost(self) -> None:
        """A message that never arrives, with none of a snapshot: TCP loses nothing, a defect may."""
        if self.connection is not None and self.stream.whole and self.connection._welcome is None:
            try:
                self.connection.say()
            except EOFError:
                self.connection = None

    @rule(at=st.integers(0, 20))
    def replayed(self, at: int) -> None:
        if self.connection is not None and self.past and self.stream.whole:
            self._take(self.past[at % len(self.past)])

    def _hear(self) -> bool:
        """Whether there was something."""
        if self.connection is None:
            self.connection = Connection(self.node, self.stream)
            self.past.clear()
        try:
            said = self.connection.say()
        except EOFError:
            self.connection = None
            return True
        if said is None:
            return False
        if isinstance(said, Events):
            self.past.append(said)
        self._take(said)
        return True

    def _take(self, said: ToRouter) -> None:
        try:
            taken = self.stream.take(said)
        except GapError:
            self.connection = None
            return
        if taken.reset:
            self.view.reset()
        for event in taken.events:
            self.view.apply("", event)

    @rule()
    def settles(self) -> None:
        """Left in peace for a moment, it knows all."""
        self.node.publish(held([secrets.token_bytes(32)]))  # without something new a gap does not show
        for _ in range(1000):
            if not self._hear():
                break
        known = View()
        for few in self.node.picture.slices():
            for event in few:
                known.apply("", event)
        assert self.view.said() == known.said()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.settles()


FeedMachine.TestCase.settings = settings(max_examples=runs(60), stateful_step_count=40, deadline=None)
TestFeed = FeedMachine.TestCase
