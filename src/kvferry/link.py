"""A connection that owes nobody anything: frames in and out on a loop, plain or TLS, within bounds.

    SHAKING ──handshake done──► OPEN ──closed here or there, broken, too much unsent──► CLOSED
       └────────────refused by either side──────────────────────────────────────────────────▲

Without TLS a link is OPEN from the start. Nothing here waits: a peer that trickles, floods, or never
reads costs the memory of one frame and of what it did not read, both bounded.
"""

import contextlib
import selectors
import socket
import ssl
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvferry.errors import KvferryError
from kvferry.frames import FrameBuffer, encode_frame
from kvferry.loop import Loop
from kvferry.tls import speaks_plainly

MAX_UNSENT_BYTES = 16 << 20
READ_BYTES = 1 << 14  # larger ones leave the allocator's heap in pieces that add up
SEND_BYTES = 1 << 18
"""At a time: what TLS encrypts is not to keep the loop from others."""


@dataclass(frozen=True, slots=True)
class Speech:
    """What is spoken on a link. max_hello_bytes: of a frame before the peer is trusted.

    wants_tls: the last words, where this end talks TLS, to one who came without.
    """

    max_hello_bytes: int
    max_frame_bytes: int
    wants_tls: msgspec.Struct | None = None

    def encode(self, message: msgspec.Struct) -> bytes:
        """A whole frame. Raises RefusedError when the message would be too large."""
        return encode_frame(message, limit=self.max_frame_bytes)


class LinkOwner(Protocol):
    """Whose connection it is. Raising KvferryError from ``payload`` is for ``broken`` to hear."""

    def opened(self, link: "Link") -> None:
        """The handshake of TLS is done, or none was needed: frames may go."""

    def payload(self, link: "Link", payload: bytes) -> None:
        """A whole frame came."""

    def held(self, more_bytes: int) -> None:
        """The link holds so much more memory, or less."""

    def drained(self, link: "Link") -> None:
        """All that was queued has gone: a moment to queue more."""

    def broken(self, link: "Link", error: KvferryError) -> None:
        """What came is no frame, no message, or not allowed. The link is still open."""

    def lost(self, link: "Link", cause: str, error: OSError | None) -> None:
        """It is closed. Called once. error: of the socket, where that ended it."""


class Link:
    """All on the loop's thread. The socket does not block, and is closed by this."""

    def __init__(self, sock: socket.socket, *, loop: Loop, owner: LinkOwner, speech: Speech) -> None:
        """sock: an ``ssl.SSLSocket`` has its handshake before it."""
        self._sock = sock
        self._loop = loop
        self._owner = owner
        self._speech = speech
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._shaking = self._tls is not None
        self._frames = FrameBuffer(limit=speech.max_hello_bytes)
        self._unsent = bytearray()
        self._read_wants_write = False
        self._closed = False
        self._held_bytes = 0
        self._ending = False
        self._events = 0

    def start(self) -> None:
        """Begin; ``opened`` may be called before this returns."""
        self._watch(selectors.EVENT_READ)
        if self._shaking:
            self._shake()
        else:
            self._owner.opened(self)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    @property
    def held_bytes(self) -> int:
        """Memory that the peer makes this process hold: half a frame, and what it does not read."""
        return self._held_bytes

    def trust(self) -> None:
        """The peer has shown who it is: whole frames from now on."""
        self._frames.limit = self._speech.max_frame_bytes

    @property
    def unsent_bytes(self) -> int:
        """What waits for the peer to read."""
        return len(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Queue. A peer that does not read is cut off, not waited for. RefusedError: too large."""
        if not self._closed:
            self.send_frame(self._speech.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """The same of a message that is a frame already, as one that goes to many."""
        if self._closed:
            return
        self._unsent += frame
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close("slow-reader")
            return
        self._account()
        if not self._shaking:
            self._watch(self._events | selectors.EVENT_WRITE)

    def flush(self) -> None:
        """Send what is queued, as much as the socket takes now."""
        if self._closed or self._shaking:
            return
        while self._unsent:
            try:
                # Copied: an error's traceback would hold on to a view, and the buffer could not change.
                sent = self._sock.send(bytes(memoryview(self._unsent)[:SEND_BYTES]))
            except (BlockingIOError, ssl.SSLWantWriteError):
                break
            except ssl.SSLWantReadError:
                self._watch(selectors.EVENT_READ)  # and on from there
                return
            except OSError as error:
                self._hear_out()
                self._lose("gone", error)
                return
            del self._unsent[:sent]
            if sent < SEND_BYTES:
                break
        self._account()
        if not self._unsent:
            self._owner.drained(self)
        writing = bool(self._unsent) or self._read_wants_write
        self._watch(selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))

    def end(self, last: msgspec.Struct, cause: str) -> None:
        """Say one thing more, as far as the peer reads, and close."""
        if not self._closed:
            self._unsent += self._speech.encode(last)
            self.flush()
            self.close(cause)

    def close(self, cause: str) -> None:
        """Idempotent."""
        self._lose(cause, None)

    def ready(self, events: int) -> None:
        """See ``loop.Watcher``."""
        if self._shaking:
            self._shake()
            return
        if events & selectors.EVENT_WRITE or (self._tls is not None and self._unsent):
            self.flush()
        if not self._closed and (events & selectors.EVENT_READ or self._read_wants_write):
            self._read()

    def crashed(self) -> None:
        """See ``loop.Watcher``."""
        self.close("defect")

    def _account(self) -> None:
        now = len(self._unsent) + self._frames.held_bytes
        if now != self._held_bytes:
            more, self._held_bytes = now - self._held_bytes, now
            self._owner.held(more)

    def _watch(self, events: int) -> None:
        if events != self._events and not self._closed:
            self._events = events
            self._loop.watch(self._sock, events, self)

    def _shake(self) -> None:
        if self._tls is None:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        except OSError as error:
            if self._tls.server_side and speaks_plainly(error):
                self._answer_plainly(self._tls)
            self._lose("tls", error)
        else:
            self._shaking = False
            self._owner.opened(self)
            self.flush()

    def _answer_plainly(self, sock: ssl.SSLSocket) -> None:
        """Who speaks no TLS can still read why it is turned away. What it sent is read first, or closing
        would take the answer back."""
        with contextlib.suppress(OSError):
            socket.socket.recv(sock, self._speech.max_hello_bytes)
        if self._speech.wants_tls is not None:
            with contextlib.suppress(OSError):
                socket.socket.send(sock, self._speech.encode(self._speech.wants_tls))

    def _read(self) -> None:
        self._read_wants_write = False
        while not self._closed:
            try:
                data = self._sock.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            except ssl.SSLWantWriteError:
                self._read_wants_write = True
                self._watch(self._events | selectors.EVENT_WRITE)
                return
            except OSError as error:
                self._lose("gone", error)
                return
            if not data:
                self._lose("gone", None)
                return
            self._take(data)
            if not self._decrypted():
                return

    def _hear_out(self) -> None:
        """The peer has hung up, and may have said why."""
        if not self._ending:
            self._ending = True
            self._read()

    def _decrypted(self) -> bool:
        """Whether TLS has more already, of which no selector tells: one record at most."""
        return self._tls is not None and not self._closed and self._tls.pending() > 0

    def _take(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
            self._account()
            for payload in payloads:
                if self._closed:
                    return
                self._owner.payload(self, payload)
        except KvferryError as error:
            if not self._closed:
                self._owner.broken(self, error)

    def _lose(self, cause: str, error: OSError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.unwatch(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()
        self._unsent.clear()
        self._frames.clear()
        self._account()
        self._owner.lost(self, cause, error)
