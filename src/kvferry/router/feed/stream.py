"""Which events of a node's feed count, whatever came before and whatever was lost. Pure.

    NOTHING ──Welcome with a snapshot──► SNAPSHOT ──KnownEnd──► FOLLOWING ──Events──► FOLLOWING
       ▲                                                         │   ▲
       │                                       connection lost   │   │ Welcome without one: it goes on
       │                                                         └───┘
       └── a number was skipped, a snapshot broke off, another epoch, ``forget``

Events that were seen before are left out; those after a gap are not applied: the stream begins anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvferry import __version__
from kvferry.errors import RefusedError
from kvferry.feed.wire import (
    PROTOCOL,
    AnyEvent,
    Events,
    Hello,
    Known,
    KnownEnd,
    Ping,
    Pong,
    Prefetch,
    Refusal,
    ToRouter,
    Welcome,
)


class GapError(RefusedError):
    """Events were lost: what is known of this node is no longer certain."""


class Taken(NamedTuple):
    """reset: what was known of the node before counts no more; then these, in order."""

    reset: bool = False
    events: Sequence[AnyEvent] = ()


NOTHING = Taken()


class Stream:
    """epoch, next: where it is; 0, 0: it knows nothing."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next = 0
        self.node = ""
        self.behind = ""
        self.version = ""
        self.replayed = 0
        self._greeted = False
        self._in_snapshot = False

    @property
    def whole(self) -> bool:
        """Whether all is known that the node told up to ``next``."""
        return self.epoch != 0 and not self._in_snapshot

    def hello(self, token: str) -> Hello:
        """The first words on a new connection."""
        if self._in_snapshot:
            self.forget()
        self._greeted = False
        return Hello(protocol=PROTOCOL, version=__version__, token=token, epoch=self.epoch, next=self.next)

    def forget(self) -> None:
        """Ask for everything next time."""
        self.epoch = self.next = 0
        self._in_snapshot = False

    def take(self, message: ToRouter) -> Taken:
        """What a message means. Raises GapError, and RefusedError for what makes no sense."""
        match message:
            case Welcome():
                return self._welcome(message)
            case Refusal(message=text):
                raise RefusedError(text)
            case _ if not self._greeted:
                raise RefusedError(f"the feed answered hello with {type(message).__name__}")
            case Known(events=events):
                if not self._in_snapshot:
                    raise RefusedError("a snapshot that was not announced")
                return Taken(events=events)
            case KnownEnd():
                self._in_snapshot = False
            case Events(first=first, events=events):
                return self._events(first, events)
            case Ping() | Pong() | Prefetch():
                pass
        return NOTHING

    def _welcome(self, message: Welcome) -> Taken:
        if self._greeted:
            raise RefusedError("a second Welcome")
        if message.protocol != PROTOCOL:
            raise RefusedError(
                f"the node ({message.version}) speaks protocol {message.protocol} of the feed, this router "
                f"({__version__}) {PROTOCOL}: give them the same version"
            )
        self._greeted = True
        self.node, self.behind, self.version = message.node, message.behind, message.version
        if not message.snapshot:
            if (message.epoch, message.next) != (self.epoch, self.next):
                self.forget()
                raise GapError(f"the feed goes on at {message.next} of another stream or place")
            return NOTHING
        self.epoch, self.next, self._in_snapshot = message.epoch, message.next, True
        return Taken(reset=True)

    def _events(self, first: int, events: Sequence[AnyEvent]) -> Taken:
        if self._in_snapshot:
            raise RefusedError("events within a snapshot")
        if first > self.next:
            gap = GapError(f"events {self.next} to {first - 1} are missing")
            self.forget()
            raise gap
        seen = min(self.next - first, len(events))
        self.replayed += seen
        self.next += len(events) - seen
        return Taken(events=events[seen:])
