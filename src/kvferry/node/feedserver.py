"""The feed of a node: what it knows of itself as events, to the routers that follow it. A thread of its own.

    hello ──known epoch, its next is in the log──► FOLLOWING: frames from the log as fast as it reads them
      └──else──► SNAPSHOT: what is known, in slices ──all said──► FOLLOWING, from where the snapshot began
    FOLLOWING ──what it lacks has left the log──► cut off; it comes back, and gets a snapshot

A follower costs what its socket has not taken, ``HIGH_WATER_BYTES`` and a frame: the log is shared. So a slow
one waits for nobody and nobody for it. The node's own thread only hands over what has happened.
"""

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.errors import RefusedError
from kvferry.feed.framing import SPEECH, decode_from_router, hello_mismatch
from kvferry.feed.log import Log
from kvferry.feed.parts import Parts, Sighting
from kvferry.feed.picture import Picture
from kvferry.feed.settings import LABELS, FeedSettings
from kvferry.feed.wire import (
    PROTOCOL,
    AnyEvent,
    Hello,
    Known,
    KnownEnd,
    Level,
    Ping,
    Pong,
    Prefetch,
    Refusal,
    Welcome,
)
from kvferry.link import Link
from kvferry.listening import Guest, Listener
from kvferry.loop import Loop
from kvferry.tls import server_contexts

MAX_FOLLOWERS = 64
HIGH_WATER_BYTES = 256 << 10
PING_S = 5.0
"""So often each follower hears something at least."""
JOIN_S = 10.0
MAX_HANDED = 8
MAX_SIGHTINGS = 4096
"""Batches of each that wait for the feed's thread."""
SEEN_AT_ONCE = 256
REST_S = 0.0002
"""After so many: the node's thread, which answers what this is about, takes the interpreter meanwhile."""

log = logging.getLogger("kvferry.node.feed")


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """Of a node's feed. followers: now. known_chunks: by level. refused: connections, by cause.

    dropped_events: of requests, while the feed's thread was far behind. prefetches: that routers asked for.
    """

    address: str
    followers: int
    events: int
    snapshots: int
    known_chunks: dict[str, int]
    refused: dict[str, int]
    dropped_events: int
    prefetches: int
    prefetches_declined: int
    defects: int


class Follower(Guest):
    """One router. Everything here runs on the feed's thread."""

    def __init__(
        self, sock: socket.socket, peer: str, *, number: int, listener: Listener, server: "FeedServer"
    ) -> None:
        self._server = server
        self._slices: Iterator[tuple[AnyEvent, ...]] | None = None
        self._next = 0
        self._pumping = False
        super().__init__(sock, peer, number=number, listener=listener)

    def greeted(self, payload: bytes) -> None:
        """See ``listening.Guest``."""
        mismatch = hello_mismatch(payload)
        if mismatch is not None:
            self.refuse(mismatch, "version")
            return
        hello = decode_from_router(payload)
        if not isinstance(hello, Hello):
            raise RefusedError(f"the first message must be Hello, not {type(hello).__name__}")
        if not hmac.compare_digest(hello.token.encode(), self._server.token.encode()):
            self.refuse(_token_complaint(shown=bool(hello.token), wanted=bool(self._server.token)), "token")
        elif self.accept():
            self._welcome(hello)

    def _welcome(self, hello: Hello) -> None:
        server = self._server
        resumes = hello.epoch == server.epoch and server.log.has(hello.next)
        self._next = hello.next if resumes else server.log.next
        if not resumes:
            self._slices = server.picture.slices()
            server.snapshots += 1
        self.link.send(
            Welcome(
                protocol=PROTOCOL,
                version=__version__,
                node=server.node,
                epoch=server.epoch,
                next=self._next,
                snapshot=not resumes,
                behind=server.behind,
            )
        )
        server.joined()
        self.pump()

    def said(self, payload: bytes) -> None:
        """See ``listening.Guest``."""
        message = decode_from_router(payload)
        match message:
            case Prefetch():
                self._server.prefetch(message)
            case Ping():
                self.link.send(Pong())
            case Hello():
                raise RefusedError("a second Hello")
            case _:
                pass

    def gone(self) -> None:
        """See ``listening.Guest``."""
        self._slices = None

    def refusal(self, message: str) -> Refusal:
        """See ``listening.Guest``."""
        return Refusal(message=message, version=__version__)

    def drained(self, link: Link) -> None:
        """See ``link.LinkOwner``."""
        if self.accepted:
            self.pump()

    def pump(self) -> None:
        """Queue what it lacks, as far as it reads."""
        if self._pumping:
            return
        self._pumping = True
        try:
            self._pump()
        finally:
            self._pumping = False

    def _pump(self) -> None:
        events = self._server.log
        if not self.link.closed and self._next < events.oldest:
            self.refuse("events were lost on the way to this router, which reads too slowly", "slow-reader")
        while not self.link.closed and self.link.unsent_bytes < HIGH_WATER_BYTES:
            if self._slices is not None:
                known = next(self._slices, None)
                if known is None:
                    self._slices = None
                self.link.send(KnownEnd() if known is None else Known(known))
            elif self._next < events.next:
                frame, self._next = events.frame(self._next)
                self.link.send_frame(frame)
            else:
                break
            self.link.flush()


class FeedServer:
    """Its thread has the picture, the log and all followers; others only hand things over."""

    def __init__(
        self,
        settings: FeedSettings,
        *,
        node: str,
        epoch: int,
        behind: str,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """node: its name, for people. behind: see ``Welcome``. Raises MisconfiguredError."""
        self._rest = rest
        self.node = node
        self.epoch = epoch
        self.behind = behind
        self.token = settings.token.reveal() if settings.token is not None else ""
        self.picture = Picture()
        self.log = Log()
        self.snapshots = 0
        self.prefetch: Callable[[Prefetch], None] = lambda message: None
        self.joined: Callable[[], None] = lambda: None
        self._parts = {level: Parts(level) for level in Level if level >= Level.VALKEY}
        self._sightings: deque[tuple[Level, Callable[[], Iterable[Sighting]]]] = deque(maxlen=MAX_SIGHTINGS)
        self._looking = False
        self._handed = self._taken = 0
        self._closed = False
        tls = None if settings.tls is None else server_contexts(settings.tls, LABELS)
        with contextlib.ExitStack() as undo:
            self._loop = Loop(after_turn=lambda: None, clock=clock)
            undo.callback(self._loop.close)
            self._listener = Listener(
                settings.listen,
                loop=self._loop,
                speech=SPEECH,
                guest=partial(Follower, server=self),
                name="node's feed",
                setting="--feed-listen",
                tls=tls,
                max_guests=MAX_FOLLOWERS,
            )
            undo.pop_all()
        self.address: Address = self._listener.address
        self._thread = threading.Thread(target=self._loop.run, name="kvferry-feed", daemon=True)

    @property
    def followed(self) -> bool:
        """Whether anybody follows now; from any thread."""
        return bool(self._listener.guests)

    def start(self, *, prefetch: Callable[[Prefetch], None], joined: Callable[[], None]) -> None:
        """Serve, on a thread of its own. prefetch: a router asks for chunks. joined: one has come, and what
        was held back while nobody followed is wanted. Both are called on that thread."""
        self.prefetch, self.joined = prefetch, joined
        self._loop.at(self._loop.clock() + PING_S, self._ping)
        self._thread.start()

    def close(self) -> None:
        """Hang up and join the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._loop.post(self._end)
            self._thread.join(JOIN_S)
        else:
            self._end()
        self._loop.close()

    # ---- from any thread

    @property
    def busy(self) -> bool:
        """Whether it is behind: who can should hand over later. For the one who calls ``publish``."""
        return self._handed - self._taken > MAX_HANDED

    def publish(self, events: Sequence[AnyEvent]) -> None:
        """Tell these, in order, after what was told before. One thread calls this."""
        self._handed += 1
        self._loop.post(partial(self._take, events))

    def space(self, space: int, part_bytes: tuple[int, ...], trailing: tuple[int, ...]) -> None:
        """What the chunks of a space consist of: before anything is seen of its parts."""
        self._loop.post(partial(self._space, space, part_bytes, trailing))

    def saw(self, level: Level, sightings: Callable[[], Iterable[Sighting]]) -> None:
        """Parts were found there, or not. sightings: asked for them on the feed's thread.

        When that is far behind the oldest are left out: a tier's content is never known for certain.
        """
        self._sightings.append((level, sightings))
        if not self._looking:
            self._looking = True
            self._loop.post(self._look)

    def statistics(self, *, dropped_events: int, prefetches: int, prefetches_declined: int) -> FeedStatistics:
        """A snapshot; approximate while things go on."""
        known = {
            level.name.lower(): self.picture.count(level) for level in Level if level is not Level.ENGINE
        }
        return FeedStatistics(
            address=str(self.address),
            followers=len(self._listener.guests),
            events=self.log.next - 1,
            snapshots=self.snapshots,
            known_chunks=known,
            refused=dict(self._listener.refused),
            dropped_events=dropped_events,
            prefetches=prefetches,
            prefetches_declined=prefetches_declined,
            defects=self._loop.defects,
        )

    # ---- on its own thread

    def _space(self, space: int, part_bytes: tuple[int, ...], trailing: tuple[int, ...]) -> None:
        for parts in self._parts.values():
            parts.space(space, part_bytes, trailing)

    def _take(self, events: Sequence[AnyEvent]) -> None:
        self._taken += 1
        if self._handed - self._taken == MAX_HANDED:  # who was told that it is behind may wait for this
            self.joined()
        self._publish(events)

    def _look(self) -> None:
        self._looking = False  # before the look: what is seen from here on calls again
        looked_at = 0
        while self._sightings:
            level, sightings = self._sightings.popleft()
            found = iter(sightings())
            while some := list(islice(found, SEEN_AT_ONCE)):
                self._publish(self._parts[level].seen(some))
                looked_at += len(some)
                if looked_at >= SEEN_AT_ONCE:
                    looked_at = 0
                    self._rest(REST_S)

    def _publish(self, events: Sequence[AnyEvent]) -> None:
        new = [told for event in events for told in self.picture.apply(event)]
        if not new:
            return
        self.log.append(new)
        for guest in list(self._listener.guests.values()):
            if isinstance(guest, Follower):
                guest.pump()

    def _ping(self) -> None:
        for guest in list(self._listener.guests.values()):
            guest.link.send(Ping())
        self._loop.at(self._loop.clock() + PING_S, self._ping)

    def _end(self) -> None:
        self._listener.close()
        self._loop.stop()


def _token_complaint(*, shown: bool, wanted: bool) -> str:
    """Which of the two ends lacks the token or has another one; never the token."""
    if not wanted:
        return "the router shows a token, but this feed has none; start the node with --feed-token-file"
    what = "the token does not match the feed's" if shown else "this feed wants a token, none was shown"
    return f"{what}; give the router the same one with --feed-token-file or KVFERRY_FEED_TOKEN"
