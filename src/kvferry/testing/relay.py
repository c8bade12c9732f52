"""One connection through the proxy: two lanes, each of which reads, holds back, spoils and passes on.

Driven by ``proxy`` from one thread; sockets are non-blocking and nothing here waits.
"""

import contextlib
import fcntl
import selectors
import socket
import struct
import termios
from collections import deque
from enum import Enum

from kvferry.testing.faults import Ending, Trigger, Way

CHUNK_BYTES = 64 << 10
MAX_QUEUED_BYTES = 16 << 20
HELD_POLL_S = 0.005
DRAIN_S = 2.0
_LINGER_RESET = struct.pack("ii", 1, 0)


class Side(Enum):
    """An end of a connection through the proxy."""

    CLIENT = "client"
    SERVER = "server"


class Lane:
    """One direction of one connection: reads from ``source``, writes to ``sink`` when it is time."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        self.source = source
        self.sink = sink
        self.way = way
        self.ended = False  # nothing more will be read
        self.done = False  # and all was passed on
        self.swallow = False  # the other side is gone and this one was not told
        self.stalled = False
        self.blocked = False
        self.next_at: float | None = None
        self._trigger: Trigger | None = way.trigger()
        self._queue: deque[tuple[float, bytes | Ending | None]] = deque()  # None: the end of the stream
        self._queued = 0
        self._send_at: float | None = None
        self._drained_by: float | None = None

    @property
    def held(self) -> bool:
        """Whether nothing passes now."""
        return self.stalled or self.way.black_hole

    @property
    def reads(self) -> bool:
        """Whether it takes bytes."""
        return not self.ended and not self.held and self._queued < MAX_QUEUED_BYTES

    def read(self, now: float) -> None:
        """Take what is there. OSError when the source broke."""
        data = self.source.recv(CHUNK_BYTES)
        due = now + self.way.latency_s
        if not data:
            self.ended = True
            if not self.swallow:
                self._queue.append((due + self.way.close_delay_s, None))
            return
        if self.swallow:
            return
        for piece in self.way.pieces(data, self._trigger):
            self._queue.append((due, piece))
            if isinstance(piece, Ending):
                self.ended = piece is not Ending.STALL
            else:
                self._queued += len(piece)

    def write(self, now: float) -> Ending | None:
        """Pass on what is due; an ending when it is its turn. OSError when the sink broke."""
        self.blocked, self.next_at = False, None
        while self._queue and not self.held:
            due, piece = self._queue[0]
            if due > now:
                self.next_at = due
                return None
            if not isinstance(piece, bytes):
                if piece is Ending.RESET and not self._drained(now):
                    self.next_at = now + HELD_POLL_S
                    return None
                self._queue.popleft()
                if piece is None:
                    self.done = True
                    self.sink.shutdown(socket.SHUT_WR)
                return piece
            if self._send_at is None:
                self._send_at = self.way.reserve(len(piece), now=now)
            if self._send_at > now:
                self.next_at = self._send_at
                return None
            if not self._send(due, piece):
                return None
        if self._queue:
            self.next_at = now + HELD_POLL_S
        return None

    def _send(self, due: float, piece: bytes) -> bool:
        """Whether all of it went."""
        try:
            count = self.sink.send(piece)
        except BlockingIOError:
            count = 0
        self.way.passed_bytes += count
        self._queued -= count
        if count < len(piece):
            self._queue[0] = (due, piece[count:])
            self.blocked = True
            return False
        self._queue.popleft()
        self._send_at = None
        return True

    def _drained(self, now: float) -> bool:
        """Whether the receiver's kernel has all that was to pass: a reset throws away what is on its way."""
        if self._drained_by is None:
            self._drained_by = now + DRAIN_S
        left = struct.unpack("i", fcntl.ioctl(self.sink, termios.TIOCOUTQ, b"\0" * 4))[0]
        return left == 0 or now > self._drained_by


class Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket, requests: Way, replies: Way) -> None:
        self.client = client
        self.server = server
        self.connecting = True
        self.closed = False
        self.lanes = (Lane(client, server, requests), Lane(server, client, replies))

    def sockets(self) -> list[tuple[socket.socket, int]]:
        """Those still open, each with the events it waits for."""
        if self.closed:
            return []
        if self.connecting:
            return [(self.server, selectors.EVENT_WRITE), (self.client, 0)]
        requests, replies = self.lanes
        return [
            (sock, (inward.reads and selectors.EVENT_READ) | (outward.blocked and selectors.EVENT_WRITE))
            for sock, inward, outward in ((self.client, requests, replies), (self.server, replies, requests))
            if sock.fileno() >= 0
        ]

    def ready(self, sock: socket.socket, events: int, *, now: float) -> None:
        """Handle what the selector saw."""
        if self.closed:
            return
        if self.connecting:
            self.connecting = False
            if self.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.end(Ending.RESET)
            return
        lane = self.lanes[sock is self.server]
        if events & selectors.EVENT_READ and lane.reads:
            try:
                lane.read(now)
            except BlockingIOError:
                pass
            except OSError:
                self.end(Ending.RESET)  # either side broke: so does the other

    def advance(self, now: float) -> None:
        """Pass on what is due both ways."""
        for lane in self.lanes:
            if self.closed or self.connecting or lane.done or lane.sink.fileno() < 0:
                continue
            try:
                ending = lane.write(now)
            except OSError:
                self.end(Ending.RESET)
                return
            if ending is Ending.STALL:
                lane.stalled = True
            elif ending is Ending.VANISH:
                self.vanish(Side.CLIENT if lane is self.lanes[0] else Side.SERVER)
            elif ending is not None:
                self.end(ending)
        if not self.closed and all(lane.done or (lane.swallow and lane.ended) for lane in self.lanes):
            self.end(Ending.CLOSE)

    def vanish(self, side: Side) -> None:
        """Close that side's connection; the other stays open, is read from and never answered."""
        gone, kept = (self.client, self.lanes[1]) if side is Side.CLIENT else (self.server, self.lanes[0])
        other = self.lanes[0] if kept is self.lanes[1] else self.lanes[1]
        shut(gone, reset=True)
        other.ended = other.done = True
        kept.swallow = True

    def end(self, how: Ending) -> None:
        """Close both sides."""
        self.closed = True
        for sock in (self.client, self.server):
            shut(sock, reset=how is Ending.RESET)


def shut(sock: socket.socket, *, reset: bool) -> None:
    """Close a socket, with a TCP reset or in order."""
    with contextlib.suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        else:
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()
