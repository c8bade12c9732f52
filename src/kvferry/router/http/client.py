"""One client's connection: requests are read from it one by one, with bounds on all that it may cost.

IDLE ──a byte──► HEAD ──► BODY ──► BUSY ──answered──► IDLE, or CLOSING
                                    ╰─101──► TUNNEL
"""

import asyncio
import enum
from typing import TYPE_CHECKING, cast

from kvferry.errors import CorruptError
from kvferry.router.http.desk import Request
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.framing import Body
from kvferry.router.http.head import MAX_HEAD_BYTES, BadHeadError, RequestHead, read_request
from kvferry.router.http.link import notice_dead
from kvferry.router.http.refusals import refusal

if TYPE_CHECKING:
    from kvferry.router.http.proxy import Proxy

MAX_AHEAD_BYTES = 64 << 10  # of requests that come before their turn, beside what one read brings
MAX_PARTS = 4096  # of a body, before they are put together
LINGER_S = 2.0
WRITE_BUFFER_BYTES = 256 << 10


class State(enum.Enum):
    """Where it is."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    BUSY = "busy"
    TUNNEL = "tunnel"
    CLOSING = "closing"


class ClientConnection(asyncio.Protocol):
    """Made by ``Proxy`` for each."""

    __slots__ = (
        "_ahead",
        "_body",
        "_exchange",
        "_head",
        "_held",
        "_parts",
        "_peer",
        "_proxy",
        "_transport",
        "_waits",
        "began_at",
        "stalled_at",
        "state",
    )  # fmt: skip

    def __init__(self, proxy: "Proxy") -> None:
        self._proxy = proxy
        self._transport: asyncio.Transport | None = None
        self._ahead = b""  # not looked at yet, or of a head that is not whole
        self._head: RequestHead | None = None
        self._body: Body | None = None
        self._parts: list[bytes] = []
        self._held = 0  # bytes of the body
        self._exchange: Exchange | None = None
        self._peer = ""
        self._waits = False  # with what it sent before its turn: it is not read for now
        self.state = State.IDLE
        self.began_at = proxy.now()  # the state, or the request
        self.stalled_at: float | None = None  # since when it takes no bytes

    @property
    def deadline(self) -> float:
        """When it is given up, unless it moves on."""
        limits = self._proxy.limits
        if self.state is State.IDLE:
            return self.began_at + limits.keep_s
        if self.state is State.HEAD:
            return self.began_at + limits.head_s
        if self.state is State.BODY:
            return self.began_at + 2 * limits.head_s + self._held / limits.body_rate
        return float("inf") if self.stalled_at is None else self.stalled_at + limits.stall_s

    def late(self) -> None:
        """Its deadline is over."""
        if self.state in (State.HEAD, State.BODY):
            self._proxy.count("client_slow")
            self._refuse(408, "the request did not come in time")
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """No further request; what is in flight goes on."""
        if self.state is State.IDLE and self._transport is not None:
            self._transport.close()

    # Of the exchange.

    def write(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self._transport is not None:
            self._transport.write(data)

    def stall(self, *, stalled: bool) -> None:
        """Read no more for now, or again."""
        if self._transport is None or self._transport.is_closing():
            return
        if stalled:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def tunnel(self) -> None:
        """From now on bytes are passed on."""
        self.state = State.TUNNEL
        if self._waits:
            self._waits = False
            self.stall(stalled=False)
        ahead, self._ahead = self._ahead, b""
        if ahead and self._exchange is not None:
            self._exchange.client_data(ahead)

    def finished(self, *, keep: bool) -> None:
        """The answer has been written."""
        self._exchange = None
        self._forget_body()
        transport = self._transport
        if transport is None:
            return
        if not keep or self._proxy.draining:
            self.state = State.CLOSING
            transport.close()
            return
        self.state, self.began_at = State.IDLE, self._proxy.now()
        if self._ahead:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._read_on()

    # Of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        notice_dead(transport.get_extra_info("socket"))
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if not self._proxy.came(self):
            self.hang_up()

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        state = self.state
        if state is State.BUSY:
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD_BYTES and not self._waits:
                self._waits = True  # for its turn; that such a client leaves shows when it is answered
                self.stall(stalled=True)
        elif state is State.TUNNEL:
            if self._exchange is not None:
                self._exchange.client_data(data)
        elif state is not State.CLOSING:
            self._take(data)

    def eof_received(self) -> None:
        """Of asyncio. A client that will send no more is taken to be gone: there is no other sign of it."""
        if self.state is not State.CLOSING:
            self._gone()
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._transport = None
        self._gone()
        self.state = State.CLOSING
        self._forget_body()
        self._proxy.went(self)

    def pause_writing(self) -> None:
        """Of asyncio."""
        self.stalled_at = self._proxy.now()
        if self._exchange is not None:
            self._exchange.client_stalls(stalled=True)

    def resume_writing(self) -> None:
        """Of asyncio."""
        self.stalled_at = None
        if self._exchange is not None:
            self._exchange.client_stalls(stalled=False)

    # Reading.

    def _gone(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def _go_on(self) -> None:
        """With what came before its turn."""
        if self.state is State.IDLE and self._ahead:
            ahead, self._ahead = self._ahead, b""
            self._take(ahead)
            self._read_on()

    def _read_on(self) -> None:
        """Once there is room for what comes before its turn."""
        if self._waits and len(self._ahead) <= MAX_AHEAD_BYTES:
            self._waits = False
            self.stall(stalled=False)

    def _take(self, data: bytes) -> None:
        try:
            if self.state is State.BODY:
                self._more(data)
            else:
                self._begin(self._ahead + data if self._ahead else data)
        except BadHeadError as error:
            self._proxy.count("bad_requests")
            self._refuse(error.status, str(error))
        except CorruptError as error:
            self._proxy.count("bad_requests")
            self._refuse(400, str(error))

    def _begin(self, data: bytes) -> None:
        if self.state is State.IDLE:
            data = data.lstrip(b"\r\n")  # RFC 9112, section 2.2
            if not data:
                return
            self.state, self.began_at = State.HEAD, self._proxy.now()
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
        if end < 4:
            if len(data) >= MAX_HEAD_BYTES:
                raise BadHeadError(431, f"the head is longer than {MAX_HEAD_BYTES} bytes")
            self._ahead = data
            return
        self._ahead = b""
        head = read_request(data[:end])
        limits = self._proxy.limits
        if head.length > limits.body_bytes:
            raise BadHeadError(413, f"a body of {head.length} bytes; at most {limits.body_bytes} are taken")
        self._head, self._body = head, head.body()
        self.state = State.BODY
        if head.expects and len(data) == end:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._more(data[end:])

    def _more(self, data: bytes) -> None:
        body, head = self._body, self._head
        if body is None or head is None:
            return
        before = len(self._parts)
        end = body.feed(data, self._parts)
        came = sum(map(len, self._parts[before:]))
        if not self._proxy.hold(came):
            raise BadHeadError(503, "too many large requests at once; try again later")
        self._held += came
        if self._held > self._proxy.limits.body_bytes:
            raise BadHeadError(413, f"at most {self._proxy.limits.body_bytes} bytes of a body are taken")
        if len(self._parts) > MAX_PARTS:
            self._parts = [b"".join(self._parts)]
        if end < 0:
            return
        self._ahead = data[end:]
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self.state = State.BUSY
        request = Request(
            head.method,
            head.target,
            head.fields,
            whole,
            self._proxy.new_id(head.request_id),
            self._peer,
            head.upgrade,
        )
        self._exchange = self._proxy.exchange(self, head, request)
        self._exchange.begin()

    def _refuse(self, status: int, message: str) -> None:
        """And close, but let the client read it: it may be sending still."""
        self._proxy.answered_here(status)
        self.state = State.CLOSING
        self._ahead = b""
        self._forget_body()
        transport = self._transport
        if transport is None:
            return
        transport.write(refusal(status, message, close=True))
        if transport.can_write_eof():
            transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.hang_up)

    def _forget_body(self) -> None:
        self._proxy.let_go(self._held)
        self._held = 0
        self._parts = []
        self._head, self._body = None, None
