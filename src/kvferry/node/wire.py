"""The messages between a node and its clients (``framing`` puts them on a socket).

Fields are bounded and unknown ones refused. The first message of a client is ``Hello``; ``Hello`` and
``Refusal`` keep their shape in every protocol version, so that two versions can always tell each other
what is wrong. Chunk digests travel concatenated (``DIGEST_BYTES`` each), checksums of a part likewise
(``CHECKSUM_BYTES`` per stripe).
"""

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.frames import FRAME_LIMIT_BYTES
from kvferry.identity.names import DIGEST_BYTES, MAX_PART_BYTES, MAX_PARTS, NAMESPACE_BYTES

PROTOCOL = 3
MAX_FRAME_BYTES = FRAME_LIMIT_BYTES
MAX_HELLO_BYTES = 16 << 10  # of the first frame: nobody knows yet whose it is
MAX_TOKEN = 4096
MAX_CHUNKS = 65536
MAX_BATCH = 4096  # places or chunk numbers in one frame
MAX_TEXT = 512
MAX_REQUEST_ID = 512
CHECKSUM_BYTES = 16

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
Namespace = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Digests = Annotated[bytes, Meta(max_length=DIGEST_BYTES * MAX_CHUNKS)]
Checksums = Annotated[bytes, Meta(max_length=CHECKSUM_BYTES * 4096)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
ChunkNumber = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]
PartNumber = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
PartSize = Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Age = Annotated[float, Meta(ge=0, le=1e9)]


class Role(enum.StrEnum):
    """What a connection is for. Only engines (scheduler, worker) are handed the pool's memory."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


class Tier(enum.IntEnum):
    """Where a chunk was found, the quickest first. What keepers have is staged through Valkey."""

    MEMORY = 0
    VALKEY = 1
    DISK = 2
    OBJECTS = 3


class Reason(enum.StrEnum):
    """Why an answer or a load ends where it ends. Everything but ABSENT and COMPLETE is not a miss."""

    COMPLETE = "complete"  # everything that was asked for
    ABSENT = "absent"  # no tier has the next chunk
    EVICTED = "evicted"  # was in host memory, evicted since, and no other tier has it
    CHEAPER = "cheaper-to-recompute"
    POOL_FULL = "pool-full"
    TIER_DOWN = "tier-down"
    DEADLINE = "deadline"  # a lookup, fetch or load took longer than its deadline
    STALLED = "stalled"  # nothing arrived for the stall timeout
    CORRUPT = "corrupt"
    FAILED = "failed"  # tier error
    GONE = "gone"  # present at lookup, gone at load
    LIMIT = "limit"  # a bound on outstanding loads or on window was reached
    EXPIRED = "expired"  # the lease of the load ended
    ENDED = "ended"  # the load was ended, or is unknown
    NODE_DOWN = "node-down"  # client side: no connection to a node
    BREAKER = "breaker-open"  # client side: the node did not answer recently
    TIMEOUT = "timeout"  # client side: no answer within the bounded wait
    EPOCH = "node-restarted"  # the handle is of an earlier node process
    REFUSED = "refused"  # the node declined (version, token, namespace)
    CLOSED = "closed"


class ReserveOutcome(enum.StrEnum):
    """What became of one reservation."""

    RESERVED = "reserved"
    EXISTS = "exists"  # stored already, nothing to do
    BUSY = "busy"  # someone else is filling it
    FULL = "full"  # no room that may be evicted
    TOO_LARGE = "too-large"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part that lies ready in the pool. chunk: its number in the prompt."""

    chunk: ChunkNumber
    part: PartNumber
    offset: Count
    checksums: Checksums


class ReservedPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One reservation's outcome; offset counts only when it is RESERVED."""

    outcome: ReserveOutcome
    offset: Count


class Filled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reserved slot that now holds its part."""

    digest: Digest
    checksums: Checksums


class Prefill(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Coefficients of the engine's prefill time: base_s + a n + b n (n + 2 context), n = new tokens."""

    base_s: Seconds
    per_token_s: Seconds
    per_token2_s: Seconds


# ---- client to node ------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every connection."""

    protocol: int
    version: Text
    role: Role
    engine: Text = ""
    rank: Count = 0
    pid: Count = 0
    token: Annotated[str, Meta(max_length=MAX_TOKEN)] = ""

    def __repr__(self) -> str:
        """Without the token."""
        return f"Hello({self.role.value} {self.engine!r} rank {self.rank}, pid {self.pid}, {self.version!r})"


class Attach(Message, frozen=True):
    """Declare a namespace. part_bytes: by part number; 0 for a part that does not exist.

    trailing: by part number, which chunks a boundary needs of it: 0 for all before it, n for the last n.
    Empty: all 0. cache_tokens: how many the engine's own cache holds; 0: it does not say.
    """

    namespace: Namespace
    part_bytes: Annotated[tuple[PartSize, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    chunk_tokens: Annotated[int, Meta(gt=0, le=1 << 20)]
    domain: Text
    label: Text = ""
    trailing: Annotated[tuple[Count, ...], Meta(max_length=MAX_PARTS)] = ()
    cache_tokens: Count = 0


class Lookup(Message, frozen=True):
    """How far does this prefix reach? chunks: all of the prompt's; loading starts at first_chunk.

    ticket: comes back in the answer.
    prefill: all zero when the engine has measured nothing, or wants whatever is there: nothing is weighed
    against recomputing then, and only the deadline cap bounds the load.
    queued_s: GPU seconds of requests waiting behind this one. max_wait_s: answer within this time.
    deadline_cap_s: 0 takes the node's setting. engine_tokens: what the engine has in its own cache.
    """

    ticket: Count
    request_id: RequestId
    namespace: Namespace
    chunks: Digests
    first_chunk: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    prompt_tokens: Count
    prefill: Prefill
    queued_s: Seconds = 0.0
    max_wait_s: Seconds = 0.05
    deadline_cap_s: Seconds = 0.0
    engine_tokens: Count = 0


class Came(Message, frozen=True):
    """A request has come for which nothing is looked up: the engine has it all itself, or may load nothing.

    For those who follow the node, where there are any (``Welcome.feed``). chunks: all of the prompt's.
    """

    request_id: RequestId
    namespace: Namespace
    chunks: Digests
    prompt_tokens: Count
    engine_tokens: Count


class Match(Message, frozen=True):
    """How many of these chunks, the whole prompt's, could be loaded now? Nothing is pinned or fetched."""

    ticket: Count
    namespace: Namespace
    chunks: Digests
    max_wait_s: Seconds = 0.05


class Join(Message, frozen=True):
    """A worker wants the parts of one load that were not ready in the answer."""

    load_id: Count
    epoch: Count
    part: PartNumber


class Copied(Message, frozen=True):
    """These chunks' parts were copied and verified: their pins may go."""

    load_id: Count
    part: PartNumber
    chunks: Annotated[tuple[ChunkNumber, ...], Meta(max_length=MAX_BATCH)]


class Corrupt(Message, frozen=True):
    """A part's bytes did not match its checksums after the copy."""

    load_id: Count
    part: PartNumber
    chunk: ChunkNumber


class EndLoad(Message, frozen=True):
    """The load is over for every rank; frees what is left of it."""

    load_id: Count


class Reserve(Message, frozen=True):
    """Ask for slots. prefix: digests before the wanted ones, for recency. chunks: the wanted ones."""

    ticket: Count
    namespace: Namespace
    part: PartNumber
    prefix: Digests
    chunks: Digests


class Commit(Message, frozen=True):
    """Publish filled slots."""

    namespace: Namespace
    part: PartNumber
    filled: Annotated[tuple[Filled, ...], Meta(max_length=MAX_BATCH)]


class Abandon(Message, frozen=True):
    """Give reserved slots back unfilled."""

    namespace: Namespace
    part: PartNumber
    chunks: Digests


class Report(Message, frozen=True):
    """The engine's side of a request's story, for explain. Times in seconds."""

    request_id: RequestId
    prompt_tokens: Count = 0
    engine_tokens: Count = 0  # reused from the engine's own cache
    loaded_tokens: Count = 0
    failed_tokens: Count = 0
    stored_chunks: Count = 0
    loaded_bytes: Count = 0
    lookup_s: Seconds = 0.0
    load_s: Seconds = 0.0
    reason: Text = ""
    note: Text = ""


class StatusQuery(Message, frozen=True):
    """Ask for the node's status."""


class ExplainQuery(Message, frozen=True):
    """Ask for what is known of a request: its id, a prefix of it, or the id an API response shows."""

    request_id: RequestId


class DropQuery(Message, frozen=True):
    """Forget what memory, or the tier behind it, holds. namespace: empty means all.

    older_than_s: only what was neither stored nor used since; 0: whatever its age.
    chunks: of these only, all of the namespace; whatever their age.
    """

    tier: Annotated[str, Meta(pattern="^(memory|valkey|disk)$")]
    namespace: Annotated[bytes, Meta(max_length=NAMESPACE_BYTES)] = b""
    older_than_s: Age = 0.0
    chunks: Digests = b""


class PromptQuery(Message, frozen=True):
    """Which chunks did a request ask for? request_id: as in ``ExplainQuery``, of one request only."""

    request_id: RequestId


class FetchQuery(Message, frozen=True):
    """Bring parts into memory that the tier behind it has. parts: a number for each of the chunks.

    mark: what was stored or used since is not evicted for them; 0: since now. Each answer has one.
    """

    namespace: Namespace
    chunks: Digests
    parts: Annotated[tuple[PartNumber, ...], Meta(min_length=1, max_length=MAX_BATCH)]
    within_s: Seconds = 30.0
    mark: Count = 0


class Ping(Message, frozen=True):
    """Is the node alive? Sent by a client whose last call went unanswered."""


# ---- node to client ------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Accepted. epoch: names this node process. feed: whether it tells others what is asked of it."""

    protocol: int
    version: Text
    epoch: Count
    pid: Count
    pool_bytes: Count
    feed: bool = False


class Refusal(Message, frozen=True):
    """The node declines this connection and closes it. message: for people, one line."""

    message: str
    protocol: int = PROTOCOL
    version: str = ""


class Attached(Message, frozen=True):
    """The namespace is known, or refused when error is not empty.

    An engine's first one carries the pool's memory as a descriptor (SCM_RIGHTS).
    """

    namespace: Namespace
    error: str = ""


class Answer(Message, frozen=True):
    """count chunks from first_chunk on are being loaded. ready: those in the pool now, pinned.

    Of a part with n trailing chunks only the last n of them are (``Attach.trailing``).
    tiers: one byte per counted chunk (``Tier``). load_id is 0 when count is 0.
    deadline_s, stall_s: from the moment of the answer.
    """

    ticket: Count
    request_id: str
    epoch: Count
    load_id: Count
    first_chunk: Count
    count: Count
    tiers: bytes
    ready: tuple[Place, ...]
    deadline_s: float
    stall_s: float
    reason: Reason


class Matched(Message, frozen=True):
    """Answer to Match. reason: why it is not more, COMPLETE when it is all."""

    ticket: Count
    count: Count
    reason: Reason


class PartsReady(Message, frozen=True):
    """Parts that have arrived, in chunk order, for a worker that joined. None: they come by a detour."""

    load_id: Count
    places: tuple[Place, ...]


class LoadEnded(Message, frozen=True):
    """Nothing more will arrive for this part; chunk: the first one that will not come."""

    load_id: Count
    part: PartNumber
    chunk: Count
    reason: Reason


class Reserved(Message, frozen=True):
    """Answer to Reserve: one place per wanted chunk, in the order asked."""

    ticket: Count
    places: tuple[ReservedPlace, ...]


class Document(Message, frozen=True):
    """Answer to an admin query: a JSON document, or an error."""

    json: bytes = b""
    error: str = ""


class Pong(Message, frozen=True):
    """Answer to Ping."""


_Loading = Lookup | Came | Match | Join | Copied | Corrupt | EndLoad
_Storing = Reserve | Commit | Abandon
_Asking = StatusQuery | ExplainQuery | DropQuery | PromptQuery | FetchQuery
FromClient = Hello | Attach | _Loading | _Storing | Report | _Asking | Ping
FromNode = (
    Welcome | Refusal | Attached | Answer | Matched | PartsReady | LoadEnded | Reserved | Document | Pong
)
