"""One keeper, as a node sees it: a connection that is kept up in the background.

               dialled, greeted                  silent for PATIENCE_S when doubted
    DOWN ────────────────────────► UP ───────────────────────────────────────────────► SILENT
     ▲  ▲                          │ ▲                                                   │ │
     │  └────────── lost ──────────┘ └─────────────────── anything heard ────────────────┘ │
     └───────────────────────────────── silent for GIVE_UP_S ──────────────────────────────┘

A keeper is doubted when a question of it went unanswered, and when nothing was heard for IDLE_S. It is SILENT
too when it is alive and answers no questions (``answering``). While it is not UP nothing is asked of it, so
no request pays for finding out that it is back.
"""

import enum
import logging
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvferry.addresses import Address
from kvferry.breaker import SILENCE, Breaker
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.frames import refusal_text
from kvferry.keeper.answering import Answering
from kvferry.keeper.framing import SPEECH, decode_from_keeper
from kvferry.keeper.tls import explained
from kvferry.keeper.wire import FromKeeper, Hello, Message, Ping, Pong, Welcome
from kvferry.link import Link
from kvferry.loop import Loop, Timer
from kvferry.tiers.valkey.resolve import connect

CONNECT_S = 2.0
GREETING_S = 2.0
"""From being connected to Welcome, the handshake of TLS included."""
IDLE_S = 5.0
PATIENCE_S = 1.0
GIVE_UP_S = 5.0
REFUSED_WAIT_S = 10.0
GOOD_S = 5.0
"""A connection that lasts so long was a good one; after others the next is tried later each time."""
MAX_DOUBLINGS = 16
MOMENT_S = 2.0
"""A keeper that was up so recently is still told what is its own: it may be restarting."""
MAX_QUEUED_PARTS = 16384
MAX_TOLD_BYTES = 2 << 20
"""Unsent, beyond which a keeper is not told more: it takes questions only."""
JOIN_S = 5.0

log = logging.getLogger("kvferry.keepers")


class State(enum.StrEnum):
    """See the diagram; REFUSED is DOWN by the keeper's own word."""

    DOWN = "down"
    UP = "up"
    SILENT = "silent"
    REFUSED = "refused"


class PeerListener(Protocol):
    """Who asks."""

    def message(self, peer: "Peer", message: FromKeeper) -> None:
        """It said something."""

    def greeted(self, peer: "Peer") -> None:
        """It said its name."""

    def lost(self, peer: "Peer") -> None:
        """The connection is gone, and every question on it with it."""


class Peer:
    """All on the loop's thread, but for the counters, which any may read."""

    def __init__(
        self,
        address: Address,
        *,
        loop: Loop,
        hello: Callable[[], Hello],
        tls: Callable[[], ssl.SSLContext] | None,
        listener: PeerListener,
        ticket: Callable[[], int],
    ) -> None:
        """ticket: a new one, for a question of its own."""
        self.address = address
        self.name = str(address)
        self.version = ""
        self.error = ""
        self.connects = 0
        self.dropped_parts = 0
        self.queued_parts = 0
        self._loop = loop
        self._hello = hello
        self._tls = tls
        self._listener = listener
        self._breaker = Breaker()
        self.answering = Answering(loop, ask=self.ask, ticket=ticket)
        self._link: Link | None = None
        self._greeted = False
        self._refused = False
        self._dialling: threading.Thread | None = None
        self._queue: deque[tuple[Message, int]] = deque()
        self._heard_at = 0.0
        self._lost_at = loop.clock()  # to be connected soon, for all that is known
        self._doubted = False
        self._silent_at = 0.0
        self._timer: Timer | None = None
        self._greeting: Timer | None = None
        self._proof: Timer | None = None
        self._greeted_at = 0.0
        self._short = 0  # connections in a row that did not last
        self._closed = False

    @property
    def state(self) -> State:
        """Now; of any thread."""
        if self._greeted:
            return State.UP if self.is_up else State.SILENT
        return State.REFUSED if self._refused else State.DOWN

    @property
    def is_up(self) -> bool:
        """Whether to ask it."""
        return self._greeted and not self._breaker.is_open and not self.answering.fails

    @property
    def counts(self) -> bool:
        """Whether it is told of its share."""
        return self.is_up or (not self._refused and self._loop.clock() < self._lost_at + MOMENT_S)

    def start(self) -> None:
        """Connect, in the background."""
        self._dial()

    def ask(self, message: Message) -> None:
        """Send it. A keeper that does not read is lost."""
        if self._link is not None:
            self._link.send(message)

    def tell(self, message: Message, parts: int) -> None:
        """Send it, or keep it for a moment; or count it as dropped."""
        if self.is_up and self._link is not None:
            if self._link.held_bytes < MAX_TOLD_BYTES:
                self._link.send(message)
            else:
                self.dropped_parts += parts
        elif self.counts and self.queued_parts + parts <= MAX_QUEUED_PARTS:
            if not self._queue:
                self._loop.at(self._lost_at + MOMENT_S, self._forget_queue)
            self._queue.append((message, parts))
            self.queued_parts += parts
        else:
            self.dropped_parts += parts

    def doubt(self) -> None:
        """Something did not come that should have: it has PATIENCE_S to say that it lives."""
        if self.is_up and not self._doubted and self._link is not None:
            self._doubted = True
            self._link.send(Ping())
            self._loop.at(self._loop.clock() + PATIENCE_S, partial(self._unanswered, self._link))

    def close(self) -> None:
        """Hang up. ``join`` follows, on another thread."""
        self._closed = True
        self._stop_timers()
        if self._link is not None:
            self._link.close("closed")

    def join(self) -> None:
        """Wait for what connects; the loop has ended."""
        thread = self._dialling
        if thread is not None:
            thread.join(JOIN_S)

    # ---- of the link

    def opened(self, link: Link) -> None:
        """See ``link.LinkOwner``."""
        link.send(self._hello())

    def payload(self, link: Link, payload: bytes) -> None:
        """See ``link.LinkOwner``."""
        refusal = refusal_text(payload)
        if refusal is not None:
            self._refused = not self._greeted
            self._complain(f"{self.address}: {refusal}")
            link.close("refused")
            return
        message = decode_from_keeper(payload)
        if not self._greeted:
            self._welcome(link, message)
            return
        self._heard()
        if not isinstance(message, Pong):
            self._listener.message(self, message)

    def held(self, more_bytes: int) -> None:
        """See ``link.LinkOwner``."""

    def drained(self, link: Link) -> None:
        """See ``link.LinkOwner``."""

    def broken(self, link: Link, error: KvferryError) -> None:
        """See ``link.LinkOwner``."""
        self._complain(f"{self.address}: {error}{self._hint()}")
        link.close("broken")

    def lost(self, link: Link, cause: str, error: OSError | None) -> None:
        """See ``link.LinkOwner``."""
        if error is not None:
            self._complain(explained(error, self.address) + self._hint())
        elif cause == "gone":
            self._complain(f"{self.address}: the connection was closed{self._hint()}")
        was_up, self._greeted, self._link = self._greeted, False, None
        self._doubted = False
        self._stop_timers()
        now = self._loop.clock()
        if was_up:
            self._lost_at = now
            self._short = self._short + 1 if now < self._greeted_at + GOOD_S else 0
            self._listener.lost(self)
        self._failed(now)

    # ---- connecting

    def _dial(self) -> None:
        if self._dialling is None and not self._closed:
            name = f"kvferry-dial-{self.address}"
            thread = threading.Thread(target=self._dialled, name=name, daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # the host has no thread for it now
                self._undialled(error)
            else:
                self._dialling = thread

    def _dialled(self) -> None:
        """On a thread of its own: names take as long as the resolver does."""
        found: socket.socket | Exception
        try:
            found = connect(self.address, time.monotonic() + CONNECT_S)
        except Exception as error:  # noqa: BLE001 (top of the thread; without an answer nobody dials again)
            found = error
        self._loop.post(partial(self._connected, found))

    def _undialled(self, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else ""
        self._complain(f"{self.address}: cannot connect: {why or str(error) or type(error).__name__}")
        self._failed(self._loop.clock())

    def _connected(self, found: socket.socket | Exception) -> None:
        self._dialling = None
        if isinstance(found, Exception):
            self._undialled(found)
            return
        if self._closed:
            found.close()
            return
        try:
            found.settimeout(0.0)
            sock = self._wrapped(found)
        except (OSError, ValueError, MisconfiguredError) as error:
            found.close()
            self._complain(f"{self.address}: {error}")
            self._failed(self._loop.clock())
            return
        self._link = Link(sock, loop=self._loop, owner=self, speech=SPEECH)
        self._greeting = self._loop.at(self._loop.clock() + GREETING_S, partial(self._late, self._link))
        self._link.start()

    def _wrapped(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        return self._tls().wrap_socket(sock, server_hostname=self.address.host, do_handshake_on_connect=False)

    def _late(self, link: Link) -> None:
        self._complain(f"{self.address}: accepts connections but does not answer")
        link.close("silent")

    def _welcome(self, link: Link, message: FromKeeper) -> None:
        if not isinstance(message, Welcome):
            raise RefusedError(f"the keeper answered hello with {type(message).__name__}")
        if self._greeting is not None:
            self._greeting.cancel()
        link.trust()
        self._greeted, self._refused = True, False
        self.name = message.name or str(self.address)
        self.version = message.version
        self.connects += 1
        self._greeted_at = self._loop.clock()
        self._breaker.succeeded()
        self.answering.answered()
        self._said_well()
        self._heard()
        self._stop_timers()
        self._proof = self._loop.at(self._greeted_at + GOOD_S, self._proven)
        self._timer = self._loop.at(self._greeted_at + IDLE_S, self._idle)
        self._listener.greeted(self)
        while self._queue:
            told, parts = self._queue.popleft()
            self.queued_parts -= parts
            link.send(told)

    # ---- silence

    def _heard(self) -> None:
        self._heard_at = self._loop.clock()
        self._doubted = False
        if self._breaker.is_open:
            self._breaker.succeeded()
            self._said_well()
            self._wait_for(self._heard_at + IDLE_S, self._idle)

    def _idle(self) -> None:
        """Ask who was quiet for long, so that no request has to find out."""
        now = self._loop.clock()
        if now >= self._heard_at + IDLE_S:
            self.doubt()
            self._wait_for(now + IDLE_S, self._idle)
        else:
            self._wait_for(self._heard_at + IDLE_S, self._idle)

    def _unanswered(self, link: Link) -> None:
        if not self._doubted or link is not self._link:
            return
        self._doubted = False
        now = self._loop.clock()
        self._silent_at = now
        self._complain(f"{self.address}: does not answer")
        self._failed(now)

    def _failed(self, now: float) -> None:
        """Not up, or an attempt did not help: again later."""
        if self._closed:
            return
        if self._refused and self._link is None:
            self._wait_for(now + REFUSED_WAIT_S, self._probe)
            return
        if not self._breaker.failed(SILENCE, now):
            self._breaker.probe_failed(now)
        if self._link is None:
            for _ in range(min(self._short, MAX_DOUBLINGS)):
                self._breaker.probe_failed(now)
        again = self._breaker.next_probe_at() or now
        self._wait_for(again + random.uniform(0.0, 0.25) * (again - now), self._probe)

    def _probe(self) -> None:
        now = self._loop.clock()
        if self._link is None:
            self._dial()
        elif self._greeted and now >= self._silent_at + GIVE_UP_S:
            self._link.close("silent")
        elif self._greeted:
            self._link.send(Ping())
            self._failed(now)

    def _wait_for(self, when: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.at(when, call)

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._greeting, self._proof):
            if timer is not None:
                timer.cancel()

    def _forget_queue(self) -> None:
        """The moment is over: others have its share now, and a scan finds what nobody was told."""
        if not self._greeted and not self.counts:
            self.dropped_parts += self.queued_parts
            self.queued_parts = 0
            self._queue.clear()

    def _hint(self) -> str:
        if self._greeted or self._tls is not None:
            return ""
        return "; is that a keeper, and does it want TLS (keeper_tls_ca)?"

    def _proven(self) -> None:
        self._short = 0
        self._well()

    def _said_well(self) -> None:
        """Whose connections do not last says that each time: not before this one is a good one."""
        if not self._short:
            self._well()

    def _well(self) -> None:
        if self.error:
            log.warning("keeper %s answers again", self.address)
        self.error = ""

    def _complain(self, error: str) -> None:
        """Once, until it is up again."""
        if error != self.error and not self._closed:
            self.error = error
            log.warning("keeper %s; what it keeps is not found meanwhile", error)
