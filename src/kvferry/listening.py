"""A listening socket of a process and who connects to it: admission and bounds; what is said is the room's.

    stranger ──a good hello──► guest ──closed here or there──► forgotten
        └──no hello in time, a bad one, crowded out──► refused

On one loop. Connections cost what they are: bounded in number, in memory each and all together.
"""

import errno
import logging
import selectors
import socket
import ssl
from collections import Counter
from collections.abc import Callable

import msgspec

from kvferry.addresses import Address
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError
from kvferry.link import Link, Speech
from kvferry.loop import Loop, Timer

MAX_CONNECTIONS = 1024
MAX_STRANGERS = 64
"""Connections without a hello yet: one more, and the oldest makes room. A peer says hello at once."""
MAX_HELD_BYTES = 256 << 20
"""Of all connections together, half-received and unsent: beyond it, the one that holds most is cut off."""
HELLO_TIMEOUT_S = 5.0
"""From accepting to hello, the handshake of TLS included."""
BACKLOG = 128
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds and probes: after so long the connection of a host that is gone ends."""

log = logging.getLogger("kvferry.listening")


class Guest:
    """One connection. A room's own class says what its hello, its messages and its last words are."""

    def __init__(self, sock: socket.socket, peer: str, *, number: int, listener: "Listener") -> None:
        """peer: its address, for people."""
        self.number = number
        self.peer = peer
        self.listener = listener
        self.accepted = False
        self.link = Link(sock, loop=listener.loop, owner=self, speech=listener.speech)
        self._timer: Timer = listener.loop.at(listener.loop.clock() + HELLO_TIMEOUT_S, self._hello_late)

    # ---- the room's

    def greeted(self, payload: bytes) -> None:
        """The first frame: call ``accept`` or ``refuse``. Raises RefusedError."""
        raise NotImplementedError

    def said(self, payload: bytes) -> None:
        """A later one. Raises KvferryError, which ends the connection."""
        raise NotImplementedError

    def gone(self) -> None:
        """It has closed."""

    def refusal(self, message: str) -> msgspec.Struct:
        """The last words to a peer that is turned away."""
        raise NotImplementedError

    # ---- of the link

    def opened(self, link: Link) -> None:
        """See ``link.LinkOwner``."""

    def payload(self, link: Link, payload: bytes) -> None:
        """See ``link.LinkOwner``."""
        if self.accepted:
            self.said(payload)
        else:
            self.greeted(payload)

    def held(self, more_bytes: int) -> None:
        """See ``link.LinkOwner``."""
        self.listener.hold(more_bytes)

    def drained(self, link: Link) -> None:
        """See ``link.LinkOwner``."""

    def broken(self, link: Link, error: KvferryError) -> None:
        """See ``link.LinkOwner``."""
        self.refuse(str(error), "refused" if isinstance(error, RefusedError) else "broken-rule")

    def lost(self, link: Link, cause: str, error: OSError | None) -> None:
        """See ``link.LinkOwner``."""
        if cause == "tls" and error is not None:
            log.info("no TLS with %s: %s", self.peer, getattr(error, "reason", None) or error)
        self._timer.cancel()
        self.gone()
        self.listener.forget(self, cause)

    def refuse(self, message: str, cause: str) -> None:
        """Tell the peer why, in one line, and close."""
        self.link.end(self.refusal(message), cause)

    def accept(self) -> bool:
        """Its hello was good: whether there is room for it; else it has been refused."""
        if self.listener.full:
            self.listener.too_many(self)
            return False
        self.accepted = True
        self.link.trust()
        self._timer.cancel()
        self.listener.accepted(self)
        return True

    def _hello_late(self) -> None:
        self.refuse(f"no hello within {HELLO_TIMEOUT_S:.0f} s", "no-hello")


class Listener:
    """The listening socket and all connections; used on the loop's thread."""

    def __init__(
        self,
        listen: Address,
        *,
        loop: Loop,
        speech: Speech,
        guest: Callable[..., Guest],
        name: str,
        setting: str = "--listen",
        tls: Callable[[], ssl.SSLContext] | None = None,
        max_guests: int | None = None,
    ) -> None:
        """guest: makes one, called as the class is. name, setting: what listens and where that is set.

        tls: makes a context for the next connection. max_guests: None: MAX_CONNECTIONS.
        Raises MisconfiguredError when the address cannot be had.
        """
        self.loop = loop
        self.speech = speech
        self.guests: dict[int, Guest] = {}  # those that said a good hello
        self.refused: Counter[str] = Counter()
        self._guest = guest
        self._name = name
        self._tls = tls
        self._max_guests = max_guests
        self._strangers: dict[int, Guest] = {}  # oldest first
        self._held_bytes = 0
        self._numbers = 0
        self._closed = False
        self._sock = _listening(listen, setting)
        host, port = self._sock.getsockname()[:2]
        self.address = Address(host, port)
        self.loop.watch(self._sock, selectors.EVENT_READ, self)

    @property
    def full(self) -> bool:
        """Whether there is no room for one more."""
        return len(self.guests) >= self._most

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.loop.unwatch(self._sock)
        self._sock.close()
        for guest in [*self.guests.values(), *self._strangers.values()]:
            guest.link.close("gone")

    def ready(self, events: int) -> None:
        """Accept one connection per call; the loop calls again while more wait."""
        del events
        try:
            sock, peer = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.refused["descriptors"] += 1
                self._pause()
            return
        self._numbers += 1
        shown = str(Address(*peer[:2]))
        try:
            sock = self._prepared(sock)
        except OSError:
            sock.close()
            self.refused["gone"] += 1
            return
        guest = self._guest(sock, shown, number=self._numbers, listener=self)
        self._strangers[guest.number] = guest
        guest.link.start()
        if self.full:
            self.too_many(guest)
        elif len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers.values()))
            oldest.refuse(f"{MAX_STRANGERS} later connections wait to say hello", "crowded-out")

    def crashed(self) -> None:
        """See ``loop.Watcher``. A failed accept costs that connection alone."""

    def too_many(self, guest: Guest) -> None:
        """There is no room for this one."""
        guest.refuse(f"this {self._name} has {self._most} connections already", "too-many")

    def hold(self, more_bytes: int) -> None:
        """A connection holds so much more memory, or less. Cuts off who holds most when it is too much."""
        self._held_bytes += more_bytes
        if more_bytes > 0 and self._held_bytes > MAX_HELD_BYTES:
            self.loop.post(self._shed)

    def accepted(self, guest: Guest) -> None:
        """A connection has said a good hello."""
        self.guests[guest.number] = self._strangers.pop(guest.number)

    def forget(self, guest: Guest, cause: str) -> None:
        """A connection has closed."""
        self.guests.pop(guest.number, None)
        self._strangers.pop(guest.number, None)
        if not guest.accepted or cause != "gone":
            self.refused[cause] += 1

    def _prepared(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(0.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._tls is None:
            return sock
        return self._tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _shed(self) -> None:
        if self._held_bytes > MAX_HELD_BYTES and self.guests:
            max(self.guests.values(), key=lambda guest: guest.link.held_bytes).link.close("holds-most")

    def _pause(self) -> None:
        """Out of descriptors: a pending connection would wake the loop for ever. Look again later."""
        self.loop.unwatch(self._sock)
        self.loop.at(self.loop.clock() + 1.0, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self.loop.watch(self._sock, selectors.EVENT_READ, self)

    @property
    def _most(self) -> int:
        return MAX_CONNECTIONS if self._max_guests is None else self._max_guests


def _listening(listen: Address, setting: str) -> socket.socket:
    """Raises MisconfiguredError."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
        sock.listen(BACKLOG)
        sock.settimeout(0.0)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise MisconfiguredError(
                f"{listen.host} is no address of this machine; choose another {setting}"
            ) from error
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise MisconfiguredError(f"{listen} {why}; choose another {setting}") from error
    return sock
