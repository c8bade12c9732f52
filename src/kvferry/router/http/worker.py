"""One connection to a worker: sends a request, says what comes back, byte for byte, and where it ends.

IDLE ──send──► HEAD ──head──► BODY ──its end──► IDLE, or closed
                │ 1xx: once more   101 that was asked for: both sides pass bytes on until one is gone
"""

import asyncio
import select
from collections.abc import Callable
from typing import Protocol, cast

from kvferry.errors import BrokenError, CorruptError
from kvferry.router.http.framing import Body
from kvferry.router.http.head import MAX_HEAD_BYTES, AnswerHead, may_begin_answer, read_answer

MAX_INTERIM, MAX_INTERIM_BYTES = 64, 64 << 10  # answers before the one that counts


class Receiver(Protocol):
    """Whom an answer is for. After ``answer_end`` or ``answer_lost`` nothing more is said."""

    def answer_head(self, head: AnswerHead, body: Body) -> None:
        """It begins. body: as far as it has been followed, in every later call."""

    def answer_data(self, data: bytes) -> None:
        """Bytes of the body, with their framing."""

    def answer_end(self) -> None:
        """It is whole."""

    def answer_lost(self, why: str) -> None:
        """There will be no more of it."""

    def worker_stalls(self, *, stalled: bool) -> None:
        """Whether the worker takes no bytes for now: of a connection that passes bytes on."""


class WorkerConnection(asyncio.Protocol):
    """Made by ``Link``."""

    __slots__ = (
        "_body",
        "_head",
        "_interim",
        "_interim_bytes",
        "_keep",
        "_method",
        "_on_free",
        "_on_lost",
        "_receiver",
        "_stalled",
        "_tunnel",
        "_unread",
        "_upgrade",
        "answered",
        "idle_since",
        "transport",
    )

    def __init__(
        self,
        *,
        on_free: Callable[["WorkerConnection"], None],
        on_lost: Callable[["WorkerConnection"], None],
    ) -> None:
        """on_free: it can take another request. on_lost: it is gone."""
        self.transport: asyncio.Transport | None = None
        self.answered = 0  # requests, whole
        self.idle_since = 0.0  # by the clock of whose it is
        self._on_free = on_free
        self._on_lost = on_lost
        self._receiver: Receiver | None = None
        self._method = b""
        self._upgrade = b""
        self._head = b""
        self._interim = 0
        self._interim_bytes = 0
        self._body: Body | None = None
        self._tunnel = False
        self._keep = True
        self._stalled = False
        self._unread: select.poll | None = None

    @property
    def silent(self) -> bool:
        """Whether not one byte came since the request was sent."""
        return self._body is None and not self._head and not self._interim

    def watch(self, descriptor: int) -> None:
        """Its socket's, on which nothing should come between answers."""
        self._unread = select.poll()
        self._unread.register(descriptor, select.POLLIN)

    @property
    def quiet(self) -> bool:
        """Whether it is open, and nothing came that nobody asked for: as far as the kernel knows by now."""
        if self.transport is None or self.transport.is_closing():
            return False
        return self._unread is None or not self._unread.poll(0)

    @property
    def in_head(self) -> bool:
        """Whether the head of an answer has begun, and not ended."""
        return self._body is None and bool(self._head)

    def send(
        self, receiver: Receiver, *, method: bytes, head: bytes, body: bytes, upgrade: bytes = b""
    ) -> None:
        """The whole request. Its answer goes to the receiver. upgrade: what else may be spoken after it."""
        if self._receiver is not None or self.transport is None:
            raise BrokenError("a request on a connection that is in use")
        self._receiver, self._method, self._upgrade = receiver, method, upgrade
        self._head, self._body = b"", None
        self._interim = self._interim_bytes = 0
        self.transport.writelines((head, body))  # in one piece: the worker is woken once

    def pass_on(self, data: bytes) -> None:
        """Bytes of the client, after 101."""
        if self.transport is not None:
            self.transport.write(data)

    def stall(self, *, stalled: bool) -> None:
        """Read no more for now, or again."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._stalled = stalled
        if stalled:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def give_up(self) -> None:
        """Close at once, which stops the engine; the receiver hears nothing more."""
        self._receiver = None
        self._close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        if self._body is not None and self._receiver is not None:
            self._follow(data)
        elif self._receiver is None:
            self._close()  # it speaks unasked
        else:
            self._head += data
            try:
                self._heads()
            except CorruptError as error:
                self._lose(str(error))

    def eof_received(self) -> None:
        """Of asyncio, which closes the transport then."""
        receiver, body = self._receiver, self._body
        if receiver is not None and body is not None and (body.ends_with_connection or self._tunnel):
            self._receiver = None
            receiver.answer_end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self.transport = None
        self._on_lost(self)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.answer_lost("the connection was reset" if exc is not None else "the connection ended")

    def pause_writing(self) -> None:
        """Of asyncio."""
        if self._tunnel and self._receiver is not None:
            self._receiver.worker_stalls(stalled=True)

    def resume_writing(self) -> None:
        """Of asyncio."""
        if self._tunnel and self._receiver is not None:
            self._receiver.worker_stalls(stalled=False)

    def _heads(self) -> None:
        while self._body is None and self._receiver is not None:
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4 or end > MAX_HEAD_BYTES:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise CorruptError("the head of an answer is too long")
                if not may_begin_answer(self._head):
                    raise CorruptError("what came is no HTTP/1.1 answer")
                return
            head = read_answer(self._head[:end])
            rest, self._head = self._head[end:], b""
            if head.status < 200 and head.status != 101:
                self._head = rest
                self._interim += 1
                self._interim_bytes += end
                if self._interim > MAX_INTERIM or self._interim_bytes > MAX_INTERIM_BYTES:
                    raise CorruptError("too many interim answers")
                continue
            if head.status == 101 and (not self._upgrade or head.upgrade != self._upgrade):
                raise CorruptError("it answered 101 to what asked for no such upgrade")
            self._tunnel = head.status == 101
            self._body = head.body(self._method)
            if self._tunnel:
                self._receiver.answer_head(head, self._body)
                if rest and self._receiver is not None:
                    self._receiver.answer_data(rest)
                return
            self._keep = not head.close and not self._body.ends_with_connection
            self._receiver.answer_head(head, self._body)
            self._follow(rest)

    def _follow(self, data: bytes) -> None:
        receiver, body = self._receiver, self._body
        if receiver is None or body is None:
            return
        if self._tunnel:
            receiver.answer_data(data)
            return
        back = body.unsure
        try:
            end = body.feed(data)
        except CorruptError as error:
            self._lose(str(error))
            return
        if back:
            data = back + data
        if end < 0:
            unsure = len(body.unsure)
            ready = data[:-unsure] if unsure else data
            if ready:
                receiver.answer_data(ready)
            return
        end += len(back)
        if end:
            receiver.answer_data(data if end == len(data) else data[:end])
            if self._receiver is None:
                return
        self._receiver = None
        self.answered += 1
        if self._keep and end == len(data) and self._is_free():
            self._on_free(self)
        else:
            self._close()
        receiver.answer_end()

    def _is_free(self) -> bool:
        """Of the request nothing is left to send, and the next answer will be read."""
        transport = self.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if self._stalled:  # by the client that had this answer
            self.stall(stalled=False)
        return True

    def _lose(self, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.answer_lost(why)

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
