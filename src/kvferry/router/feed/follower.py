"""One node's feed, followed: connected again and again, and told to what the router knows.

            connected, greeted
    ABSENT ────────────────────► FOLLOWED ──lost──► AWAY ──GRACE_S──► ABSENT (``lost`` is told)
       ▲                            ▲                │
       │ nobody there               └── back ────────┘
    REFUSED: it is there, and says why it does not let this router in

A host without a node is no error: plain engines have none. It is asked again, ever more rarely. After a gap
the connection is made anew, for a snapshot. Whatever a peer does costs one frame's memory and this task.
"""

import asyncio
import enum
import logging
import math
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.addresses import Address
from kvferry.errors import ClosedError, KvferryError, RefusedError
from kvferry.feed.access import ENDS, FeedAccess
from kvferry.feed.framing import decode_to_router, encode
from kvferry.feed.wire import (
    MAX_CHUNKS,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    AnyEvent,
    Gone,
    Held,
    Ping,
    Pong,
    Prefetch,
)
from kvferry.frames import FrameBuffer, refusal_text
from kvferry.identity.names import DIGEST_BYTES
from kvferry.router.feed.stream import GapError, Stream
from kvferry.router.feed.tasks import end
from kvferry.tls import explained

CONNECT_S = 3.0
SILENT_S = 15.0
"""A node says something every 5 s: one that does not is gone, or stopped."""
GRACE_S = 5.0
"""A connection that is back so soon goes on where it was; then what the node told counts no more."""
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 60.0
KNOWN_WAIT_S = 5.0
"""The longest wait for a node that was there since this router started."""
REFUSED_WAIT_S = 30.0
STEADY_S = 10.0  # a feed that held for so long is well
READ_BYTES = 1 << 16
MAX_UNSENT_BYTES = 256 << 10
"""Of Prefetch: beyond it none is sent."""
PIECE_BYTES = 1024 * DIGEST_BYTES
"""So much of an event is told at a time: others have the loop between."""

log = logging.getLogger("kvferry.router.feed")


class Knowledge(Protocol):
    """Who is told what nodes hold. node: the feed's address, as text."""

    def apply(self, node: str, event: AnyEvent) -> None:
        """It happened there."""

    def reset(self, node: str) -> None:
        """What was told of this node counts no more; what follows tells all of it anew."""

    def met(self, node: str, *, behind: str) -> None:
        """Told after each reset: what is behind it, as its ``Welcome`` says."""

    def lost(self, node: str) -> None:
        """It is not followed any more: what was told ages from now on."""


class State(enum.StrEnum):
    """See the diagram."""

    ABSENT = "absent"
    FOLLOWED = "followed"
    AWAY = "away"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FollowerStatistics:
    """Since start. node, behind: as its ``Welcome`` says. error: why it is not followed, in one line."""

    address: str
    state: str
    node: str
    version: str
    behind: str
    events: int
    gaps: int
    snapshots: int
    replayed: int
    connects: int
    prefetches: int
    error: str


class Follower:
    """All on the event loop that ``start`` is called on."""

    def __init__(
        self,
        address: Address,
        knowledge: Knowledge,
        access: FeedAccess,
        contexts: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        """contexts: of ``access``, made once for all followers."""
        self.address = address
        self.name = str(address)
        self.state = State.ABSENT
        self.stream = Stream()
        self.error = ""
        self._knowledge = knowledge
        self._access = access
        self._contexts = contexts
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._followed_at = math.inf
        self._known = False  # to the knowledge: reset was called since ``lost`` was
        self._ever = False
        self._lost_at: asyncio.TimerHandle | None = None
        self._events = self._gaps = self._snapshots = self._connects = self._prefetches = 0

    def start(self) -> None:
        """Follow, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"feed-{self.name}")

    async def close(self) -> None:
        """Hang up; the node is told to be lost. Idempotent."""
        task, self._task = self._task, None
        await end(task)
        self._lose()

    def prefetch(self, namespace: bytes, digests: bytes) -> bool:
        """Tell the node that these chunks will be wanted there. Whether it was told."""
        writer = self._writer
        if writer is None or self.state is not State.FOLLOWED or not digests:
            return False
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            return False
        writer.write(encode(Prefetch(namespace=namespace, chunks=digests[: MAX_CHUNKS * DIGEST_BYTES])))
        self._prefetches += 1
        return True

    def statistics(self) -> FollowerStatistics:
        """A snapshot."""
        return FollowerStatistics(
            address=self.name,
            state=self.state.value,
            node=self.stream.node,
            version=self.stream.version,
            behind=self.stream.behind,
            events=self._events,
            gaps=self._gaps,
            snapshots=self._snapshots,
            replayed=self.stream.replayed,
            connects=self._connects,
            prefetches=self._prefetches,
            error=self.error,
        )

    # ---- connecting

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except GapError as error:
                self._gaps += 1
                log.info("%s: %s; all is asked for anew", self.name, error)
            except ClosedError as error:  # nobody there, or hung up
                self._complain(str(error), State.AWAY if self._known else State.ABSENT)
            except KvferryError as error:
                self._complain(f"{self.name}: {error}", State.REFUSED)
            except Exception as error:
                log.exception("a defect in what follows %s; it goes on", self.name)
                self._complain(f"{self.name}: {error}", State.REFUSED)
                self.stream.forget()
            finally:
                self._hang_up()
            await asyncio.sleep(self._wait_s())

    async def _follow(self) -> None:
        """Until the connection ends, which raises."""
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self.address.host,
                    self.address.port,
                    ssl=None if self._contexts is None else self._contexts(),
                    server_hostname=None if self._contexts is None else self.address.host,
                    limit=READ_BYTES,
                )
        except TimeoutError as error:
            raise ClosedError(f"{self.name}: nobody answers within {CONNECT_S:.0f} s") from error
        except OSError as error:
            raise ClosedError(explained(error, self.address, ENDS)) from error
        self._writer = writer
        writer.write(encode(self.stream.hello(self._access.token)))
        frames = FrameBuffer(limit=MAX_FRAME_BYTES)
        while True:
            for payload in frames.feed(await self._read(reader)):
                await self._heard(payload)
            if self.state is not State.FOLLOWED and frames.held_bytes > MAX_HELLO_BYTES:
                raise RefusedError(f"says more than {MAX_HELLO_BYTES} bytes before Welcome")

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(SILENT_S if self.state is State.FOLLOWED else CONNECT_S):
                data = await reader.read(READ_BYTES)
        except TimeoutError as error:
            raise ClosedError(f"{self.name}: accepts connections but says nothing") from error
        except OSError as error:
            raise ClosedError(explained(error, self.address, ENDS)) from error
        if not data:
            raise ClosedError(f"{self.name}: the connection was closed")
        return data

    async def _heard(self, payload: bytes) -> None:
        refusal = refusal_text(payload)
        if refusal is not None:
            raise ClosedError(refusal) if self.state is State.FOLLOWED else _Refused(refusal)
        message = decode_to_router(payload)
        if isinstance(message, Ping) and self._writer is not None:
            self._writer.write(encode(Pong()))
        taken = self.stream.take(message)
        if self.state is not State.FOLLOWED:
            self._followed()
        if taken.reset:
            self._snapshots += 1
            self._known = True
            self._knowledge.reset(self.name)
            self._knowledge.met(self.name, behind=self.stream.behind)
        for event in taken.events:
            self._events += 1
            for piece in _pieces(event):
                self._knowledge.apply(self.name, piece)
                if isinstance(event, Held | Gone):
                    await asyncio.sleep(0)

    def _followed(self) -> None:
        self.state = State.FOLLOWED
        self._connects += 1
        self._followed_at = asyncio.get_running_loop().time()
        self._ever = True
        if self.error:
            log.info("%s is followed again", self.name)
        self.error = ""
        if self._lost_at is not None:
            self._lost_at.cancel()
            self._lost_at = None

    # ---- losing

    def _hang_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
        if self.state is State.FOLLOWED:
            self.state = State.AWAY
        if self._known and self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().call_later(GRACE_S, self._lose)

    def _lose(self) -> None:
        if self._lost_at is not None:
            self._lost_at.cancel()
            self._lost_at = None
        if self.state is not State.REFUSED:
            self.state = State.ABSENT
        self.stream.forget()
        if self._known:
            self._known = False
            self._knowledge.lost(self.name)

    def _wait_s(self) -> float:
        """Longer each time that it did not hold for a while, and never the same for two routers."""
        if asyncio.get_running_loop().time() - self._followed_at >= STEADY_S:
            self._failures = 0
        self._followed_at = math.inf
        self._failures += 1
        if self.state is State.REFUSED:
            longest = REFUSED_WAIT_S
        else:
            longest = KNOWN_WAIT_S if self._ever else LONGEST_WAIT_S
        wait_s = min(longest, FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 16))
        return random.uniform(wait_s / 2, wait_s)

    def _complain(self, error: str, state: State) -> None:
        """Once each; that nobody is there is normal, unless somebody was."""
        self.state = state
        if error != self.error:
            self.error = error
            log.log(logging.WARNING if self._ever or state is State.REFUSED else logging.DEBUG, "%s", error)


class _Refused(KvferryError):
    """The node does not let this router in."""


def _pieces(event: AnyEvent) -> Sequence[AnyEvent]:
    """An event about many chunks as several about fewer."""
    if not isinstance(event, Held | Gone) or len(event.digests) <= PIECE_BYTES:
        return (event,)
    kind = type(event)
    return [
        kind(event.level, event.engine, event.space, event.digests[at : at + PIECE_BYTES])
        for at in range(0, len(event.digests), PIECE_BYTES)
    ]
