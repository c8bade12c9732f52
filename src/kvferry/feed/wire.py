"""The messages between a node and the routers that follow it (``feed.framing`` puts them on a socket).

    router ──Hello──► node          epoch and next: where the router left off; 0, 0: it knows nothing
    router ◄─Welcome── node         snapshot: what was known before counts no more
    router ◄─Known ... KnownEnd──   only then: the state as events, without numbers
    router ◄─Events ...──           numbered without gaps
    router ──Prefetch ...──►        bring these chunks into host memory: a request for them is on its way

Chunk digests are keyed (``identity.chunks``): they tell nothing of a prompt to who lacks the key.
Fields are bounded and unknown ones refused, as between nodes and engines.
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.identity.names import DIGEST_BYTES, NAMESPACE_BYTES

PROTOCOL = 1
MAX_FRAME_BYTES = 4 << 20
MAX_HELLO_BYTES = 16 << 10
MAX_EVENTS = 4096  # in one frame
MAX_CHUNKS = 65536
MAX_TEXT = 512
MAX_TOKEN = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Digests = Annotated[bytes, Meta(max_length=DIGEST_BYTES * MAX_CHUNKS)]
Namespace = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class Level(enum.IntEnum):
    """Where a chunk is, the quickest first. ENGINE: in one engine's own cache; MEMORY: for all of a host.

    VALKEY and below are shared by all hosts whose ``Welcome.behind`` is the same: what one node says of them,
    all have. Behind a disk that a node has in Valkey's place is that node alone.

    Of ENGINE a node tells nothing: it does not see what an engine evicts. Followers derive it from ``Prompt``
    and ``Result`` (what an engine has computed or loaded it holds), and let it age by the engine's
    ``cache_tokens``. Where its own KV events are followed (``router.feed``), they say Held and Gone instead.
    """

    ENGINE = 0
    MEMORY = 1
    VALKEY = 2
    DISK = 3
    OBJECTS = 4


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all events. space, engine: numbers that ``Space`` and ``EngineUp`` gave in this epoch."""


class Space(Event, frozen=True):
    """A namespace. label: the model's name as the engine has it. chunk_bytes: all parts of one chunk."""

    space: Count
    namespace: Namespace
    label: Text
    chunk_tokens: Count
    chunk_bytes: Count


class EngineUp(Event, frozen=True):
    """An engine's scheduler is connected. cache_tokens: how many its own cache holds; 0: it does not say."""

    engine: Count
    name: Text
    space: Count
    cache_tokens: Count = 0


class EngineDown(Event, frozen=True):
    """It is gone, and what it held itself with it."""

    engine: Count


class Prompt(Event, frozen=True):
    """A request has come: its chunks from the prompt's start on, and how much the engine had itself.

    request_id: the engine's, in which the router's own is to be found. Again when the engine asks again, as
    after a preemption. A request that takes no part (a pooling one, say) has none.
    """

    engine: Count
    space: Count
    request_id: Text
    digests: Digests
    prompt_tokens: Count
    engine_tokens: Count


class Result(Event, frozen=True):
    """What became of a request's prefill, as its engine reported it. reason: why no more was loaded."""

    engine: Count
    request_id: Text
    prompt_tokens: Count
    engine_tokens: Count
    loaded_tokens: Count
    failed_tokens: Count
    reason: Text


class Held(Event, frozen=True):
    """These chunks are whole and can be used there. engine: counts only at the level ENGINE, else 0.

    Whole: all parts of which a boundary needs those of every chunk before it are there. Of a model that has
    others too (windows, states), whether a prefix can end there is not told.
    """

    level: Level
    engine: Count
    space: Count
    digests: Digests


class Gone(Event, frozen=True):
    """These are there no more, or no longer whole."""

    level: Level
    engine: Count
    space: Count
    digests: Digests


class Cleared(Event, frozen=True):
    """Nothing is there any more, of any namespace."""

    level: Level
    engine: Count


class Rate(Event, frozen=True):
    """How fast a level is at that node, all the way into its memory. bytes_per_s: 0 while unknown."""

    level: Level
    latency_s: Seconds
    bytes_per_s: float


class Speed(Event, frozen=True):
    """An engine's prefill time: base_s + per_token_s n + per_token2_s n (n + 2 context), n = new tokens."""

    engine: Count
    base_s: Seconds
    per_token_s: Seconds
    per_token2_s: Seconds


AnyEvent = Space | EngineUp | EngineDown | Prompt | Result | Held | Gone | Cleared | Rate | Speed


class Hello(Message, frozen=True):
    """First message of a router. epoch, next: of the stream it followed last, and the number it lacks."""

    protocol: int
    version: Text
    token: Annotated[str, Meta(max_length=MAX_TOKEN)] = ""
    epoch: Count = 0
    next: Count = 0

    def __repr__(self) -> str:
        """Without the token."""
        return f"Hello(epoch {self.epoch}, next {self.next}, {self.version!r})"


class Prefetch(Message, frozen=True):
    """A request for these chunks is about to reach an engine of this host. Nothing is answered.

    chunks: of a prompt, in order. A node that is busy does nothing.
    """

    namespace: Namespace
    chunks: Digests


class Ping(Message, frozen=True):
    """Are you there?"""


class Welcome(Message, frozen=True):
    """Accepted. node: its name, for people. epoch: of this node process; next: the first number to come.

    behind: names the Valkey behind it, without secrets, or the disk in its place; empty: it has neither.
    """

    protocol: int
    version: Text
    node: Text
    epoch: Count
    next: Count
    snapshot: bool
    behind: Text = ""


class Refusal(Message, frozen=True):
    """The node declines this connection and closes it. message: for people, one line."""

    message: str
    protocol: int = PROTOCOL
    version: str = ""


class Known(Message, frozen=True):
    """A piece of the snapshot."""

    events: Annotated[tuple[AnyEvent, ...], Meta(max_length=MAX_EVENTS)]


class KnownEnd(Message, frozen=True):
    """The snapshot is whole; numbered events follow."""


class Events(Message, frozen=True):
    """first: the number of the first of them; they are consecutive."""

    first: Count
    events: Annotated[tuple[AnyEvent, ...], Meta(max_length=MAX_EVENTS)]


class Pong(Message, frozen=True):
    """Answer to Ping, either way."""


FromRouter = Hello | Prefetch | Ping | Pong
ToRouter = Welcome | Refusal | Known | KnownEnd | Events | Ping | Pong
