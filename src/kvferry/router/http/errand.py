"""A request of the router's own to one worker: a copy, or a prefill. Sent once; nobody waits for its bytes.

CONNECTING ──► SENT ──► over: answered, lost, late or cut; told exactly once
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.router.contract import Ended
from kvferry.router.health import Failure
from kvferry.router.http.desk import Desk, Order
from kvferry.router.http.framing import Body
from kvferry.router.http.guard import Guard
from kvferry.router.http.head import AnswerHead, RequestHead, request_bytes
from kvferry.router.http.link import Attempt
from kvferry.router.http.usage import Tail
from kvferry.router.http.worker import WorkerConnection


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: 0 where there was no answer. body: without framing; empty where it was not kept."""

    how: Ended
    status: int
    body: bytes


class Errand:
    """Owns its guard. keep_bytes: of the answer's body, for whoever reads it; beyond, it is not kept."""

    __slots__ = (
        "_answer", "_attempt", "_body", "_connection", "_desk", "_done", "_guard", "_keep_bytes",
        "_kept", "_now", "_order", "_request_id", "_reused", "_started", "_tail", "_timer",
    )  # fmt: skip

    def __init__(
        self,
        order: Order,
        guard: Guard,
        desk: Desk,
        *,
        request_id: str,
        deadline_s: float,
        now: Callable[[], float],
        done: Callable[[Outcome], None],
        keep_bytes: int = 0,
    ) -> None:
        self._order = order
        self._guard = guard
        self._desk = desk
        self._request_id = request_id.encode("latin-1")
        self._now = now
        self._done: Callable[[Outcome], None] | None = done
        self._keep_bytes = keep_bytes
        self._kept: list[bytes] = []
        self._answer: AnswerHead | None = None
        self._started = False
        self._tail = Tail()
        self._connection: WorkerConnection | None = None
        self._attempt: Attempt | None = None
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._late)
        guard.link.errands.add(self)
        idle = guard.link.idle()
        self._reused = idle is not None
        if idle is not None:
            self._send(idle)
        else:
            self._attempt = guard.link.connect(self)

    def cut(self) -> None:
        """It is not wanted any more."""
        self._end(Ended.ABORTED)

    def worker_down(self) -> None:
        """See ``link.Errand``. What answers already may go on."""
        if not self._started:
            self._end(Ended.FAILED)

    def connected(self, connection: WorkerConnection) -> None:
        """See ``link.Connecting``."""
        self._attempt = None
        self._send(connection)

    def unconnected(self, why: str, what: Failure) -> None:
        """See ``link.Connecting``."""
        del why
        self._attempt = None
        self._fail(what)

    def answer_head(self, head: AnswerHead, body: Body) -> None:
        """See ``worker.Receiver``."""
        del body
        self._answer = head
        self._desk.answered(self._guard.worker, head.status, self._now())

    def answer_data(self, data: bytes) -> None:
        """See ``worker.Receiver``."""
        now = self._now()
        if not self._started:
            self._started = True
            self._guard.first_byte(now)
        if self._answer is not None and self._answer.sse:
            self._guard.token(now)
        self._tail.add(data)
        if self._keep_bytes:
            self._keep_bytes = max(0, self._keep_bytes - len(data))
            self._kept.append(data)

    def answer_end(self) -> None:
        """See ``worker.Receiver``."""
        self._connection = None
        status = self._answer.status if self._answer is not None else 502
        self._end(Ended.DONE if status < 400 else Ended.REFUSED if status < 500 else Ended.FAILED)

    def answer_lost(self, why: str) -> None:
        """See ``worker.Receiver``."""
        del why
        connection, self._connection = self._connection, None
        if self._reused and self._answer is None and connection is not None and connection.silent:
            self._reused = False  # it had closed the connection before it saw the request
            self._attempt = self._guard.link.connect(self)
            return
        self._fail(Failure.LOST)

    def worker_stalls(self, stalled: bool) -> None:
        """See ``worker.Receiver``. Nothing is passed on here."""

    def _send(self, connection: WorkerConnection) -> None:
        self._connection = connection
        order = self._order
        head = RequestHead()
        head.method, head.target, head.fields = order.request.method, order.request.target, order.fields
        written = request_bytes(
            head, host=self._guard.link.host_field, request_id=self._request_id, length=len(order.body)
        )
        connection.send(self, method=head.method, head=written, body=order.body)

    def _late(self) -> None:
        self._fail(Failure.SILENT)

    def _fail(self, what: Failure) -> None:
        if self._done is not None:
            self._desk.failed(self._guard.worker, what, self._now())
            self._end(Ended.FAILED)

    def _end(self, how: Ended) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        self._guard.link.errands.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.give_up()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.forget()
        self._guard.end(how, self._now(), self._tail.usage() if how is Ended.DONE else None)
        done(Outcome(how, self._answer.status if self._answer is not None else 0, self._content()))

    def _content(self) -> bytes:
        """Of the body, without framing; nothing where not all of it was kept."""
        if self._answer is None or not self._kept or not self._keep_bytes:
            return b""
        pieces: list[bytes] = []
        self._answer.body(self._order.request.method).feed(b"".join(self._kept), pieces)
        return b"".join(pieces)
