"""One request and its answer: read, placed, sent, passed on, ended.

READING ──► WAITING ──► CONNECTING ──► SENT ──first byte──► PASSING ──► OVER
               ▲────────────────────────┴─ another worker, before the first byte
"""

import enum
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from kvferry.errors import RefusedError
from kvferry.router.contract import Ended, Usage
from kvferry.router.health import Failure
from kvferry.router.http.desk import Order, Request
from kvferry.router.http.errand import Errand
from kvferry.router.http.framing import Body
from kvferry.router.http.guard import Guard
from kvferry.router.http.head import AnswerHead, RequestHead, answer_bytes, request_bytes
from kvferry.router.http.link import Attempt
from kvferry.router.http.refusals import TurnedAwayError, as_chunk, broken_stream, own_answer, refusal
from kvferry.router.http.usage import Tail
from kvferry.router.http.worker import WorkerConnection

if TYPE_CHECKING:
    from kvferry.router.http.client import ClientConnection
    from kvferry.router.http.proxy import Proxy

MAX_SENDS = 2
"""A request that kills its worker kills one more at most."""
_REPEATED = (502, 503, 504)


class Phase(enum.Enum):
    """Where it is."""

    READING = "reading"
    WAITING = "waiting"
    CONNECTING = "connecting"
    SENT = "sent"
    PASSING = "passing"
    OVER = "over"


class Exchange:
    """Belongs to one client connection; told by it, by a worker's connection and by the proxy's clock."""

    __slots__ = (
        "_answer", "_attempt", "_before", "_client", "_connection", "_followed", "_guard", "_head",
        "_in_head_since", "_order", "_proxy", "_request", "_reused", "_sends", "_sse", "_started",
        "_status", "_tail", "_told", "_tried", "_tunnel", "_why", "moved_at", "phase",
    )  # fmt: skip

    def __init__(
        self, proxy: "Proxy", client: "ClientConnection", head: RequestHead, request: Request
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._head = head
        self._request = request
        self._order: Order | None = None
        self._before: Errand | None = None
        self._guard: Guard | None = None
        self._connection: WorkerConnection | None = None
        self._attempt: Attempt | None = None
        self._tried: dict[str, None] = {}
        self._sends = 0
        self._told = False  # the desk, that it is on its way
        self._reused = False
        self._answer: AnswerHead | None = None
        self._followed: Body | None = None
        self._started = False  # the client has bytes
        self._sse = False
        self._tunnel = False
        self._tail = Tail()
        self.phase = Phase.READING
        self.moved_at = proxy.now()  # when bytes moved last, or the phase began
        self._in_head_since = self.moved_at
        self._why = ""
        self._status = 502

    @property
    def _id(self) -> bytes:
        return self._request.request_id.encode("latin-1")

    def begin(self) -> None:
        """Read it, beside the loop where it is large."""
        self._proxy.read(self._request, self)

    def ordered(self, order: Order) -> None:
        """It was read."""
        if self.phase is Phase.READING:
            self._order = order
            if order.reply is not None:
                self._reply(order.reply)
                return
            self._before = self._proxy.desk.before(order, self._prepared)
            if self._before is None:
                self._find()

    def _prepared(self, order: Order) -> None:
        """What was to go on before it has ended, one way or the other."""
        self._before = None
        if self.phase is Phase.READING:
            self._order = order
            self._find()

    def unreadable(self, error: RefusedError) -> None:
        """It is refused: the client's fault, or its model has gone while it waited."""
        if self.phase in (Phase.READING, Phase.WAITING):
            status = error.status if isinstance(error, TurnedAwayError) else 400
            self._refuse(status, str(error), again=status == 503)

    def defect(self) -> None:
        """The router failed at it."""
        if self.phase is not Phase.OVER and not self._started:
            self._refuse(500, "the router failed at this request, which is a defect of it")

    @property
    def lane(self) -> Hashable:
        """See ``waiting.Waiter``."""
        order = self._order
        return None if order is None else (*order.wants, *self._tried)

    @property
    def caller(self) -> str:
        """See ``waiting.Waiter``."""
        return "" if self._order is None else self._order.caller

    def crowded_out(self) -> None:
        """See ``waiting.Waiter``."""
        self._proxy.count("queue_full")
        self._refuse(429, "too many requests wait; try again later", again=True)

    def place(self) -> bool:
        """See ``waiting.Waiter``."""
        order = self._order
        if order is None or self.phase is not Phase.WAITING:
            return True
        # It may be the end of another one that lets this one in: what fails now is this one alone.
        proxy = self._proxy
        proxy.survive(self, lambda: self._place(order, proxy.desk.candidates(order, self._tried)))
        return self.phase is not Phase.WAITING

    def client_gone(self) -> None:
        """Stop everything, the engine first."""
        if self.phase is not Phase.OVER:
            done = self._sse and self._tail.done  # it had all of it, but for the end of HTTP's framing
            self._end(Ended.DONE if done else Ended.ABORTED, self._tail.usage() if done else None)

    def client_stalls(self, *, stalled: bool) -> None:
        """The client takes no bytes for now: neither do we."""
        self._moved()
        if self._connection is not None:
            self._connection.stall(stalled=stalled)

    def client_data(self, data: bytes) -> None:
        """After 101."""
        self._moved()
        if self._connection is not None:
            self._connection.pass_on(data)

    def waited_too_long(self) -> None:
        """For a place."""
        if self.phase is Phase.WAITING:
            self._proxy.count("queue_timeout")
            there = self._order is not None and self._proxy.desk.candidates(self._order, self._tried)
            status, why = (429, "all workers are busy") if there else (503, "no worker is available any more")
            self._refuse(status, f"{why}; try again later", again=True)

    def look(self, now: float) -> None:
        """Whether its worker has been silent for too long."""
        limits, quiet_s = self._proxy.limits, now - self.moved_at
        if self.phase is Phase.SENT and quiet_s > limits.first_byte_s and self._order is not None:
            why = f"{self.worker}: no byte of an answer in {limits.first_byte_s:g} s"
            if self._order.stream:
                self.cut(why)
            else:  # which comes when all of it is computed: no sign of how its worker is
                self._refuse(504, why)
        if self._connection is None or not self._connection.in_head:
            self._in_head_since = now
        elif now - self._in_head_since > limits.head_s:
            self.cut(f"{self.worker}: no whole head of an answer in {limits.head_s:g} s")
        stalled = self._client.stalled_at is not None
        if self.phase is Phase.PASSING and quiet_s > limits.idle_s and not stalled and not self._tunnel:
            self.cut(f"{self.worker}: no further byte in {limits.idle_s:g} s")

    def cut(self, why: str) -> None:
        """The worker has been silent for too long, is gone for good, or the router stops."""
        if self.phase in (Phase.SENT, Phase.PASSING, Phase.CONNECTING):
            self._drop_connection()
            self._failed(why, Failure.SILENT)
        elif self.phase is not Phase.OVER:
            self._refuse(503, why)

    @property
    def worker(self) -> str:
        """Where it is; empty: nowhere yet."""
        return self._guard.worker if self._guard is not None else ""

    # Towards the worker.

    def _place(self, order: Order, candidates: Sequence[str]) -> None:
        proxy = self._proxy
        among = [url for url in candidates if proxy.has_room(url)]
        if among:
            flight = proxy.desk.begin(order, among=among, now=proxy.now())
            self._guard = Guard(flight, proxy.link(flight.worker))
            self._reach()

    def _find(self) -> None:
        """A place now, or later."""
        self.phase = Phase.WAITING
        self._moved()
        proxy, order = self._proxy, self._order
        if order is None:
            return
        try:
            known = proxy.desk.candidates(order, self._tried)
        except TurnedAwayError as error:
            self._refuse(error.status, str(error))
            return
        if known and not (len(proxy.waiting) and proxy.waiting.has(self.lane)):
            proxy.survive(self, lambda: self._place(order, known))
            if self.phase is not Phase.WAITING:
                return
        if not known:
            if self._tried:
                self._refuse(self._status, self._why)
            else:
                proxy.count("no_worker")
                self._refuse(503, "no worker is available", again=True)
        elif not proxy.waiting.join(self):
            self.crowded_out()

    def _reach(self) -> None:
        guard, order = self._guard, self._order
        if guard is None or order is None:
            return
        self.phase = Phase.CONNECTING
        self._moved()
        idle = guard.link.idle() if order.repeatable else None
        self._reused = idle is not None
        if idle is not None:
            self._send(idle)
        else:
            self._attempt = guard.link.connect(self)

    def connected(self, connection: WorkerConnection) -> None:
        """See ``link.Connecting``."""
        self._attempt = None
        self._send(connection)

    def unconnected(self, why: str, what: Failure) -> None:
        """See ``link.Connecting``."""
        self._attempt = None
        self._failed(f"{self.worker}: {why}", what)

    def _send(self, connection: WorkerConnection) -> None:
        guard, order = self._guard, self._order
        if guard is None or order is None:
            return
        self._connection = connection
        self._answer = None
        self._sends += 1
        self.phase = Phase.SENT
        self._moved()
        head = self._head
        head.fields = order.fields
        with_body = bool(order.body) or head.method in (b"POST", b"PUT", b"PATCH")
        length = len(order.body) if with_body else None
        written = request_bytes(head, host=guard.link.host_field, request_id=self._id, length=length)
        connection.send(self, method=head.method, head=written, body=order.body, upgrade=head.upgrade)
        if self._client.stalled_at is not None:  # with an answer that came before
            connection.stall(stalled=True)
        guard.sent()
        if not self._told:
            self._told = True
            self._proxy.desk.sent(order)

    # From the worker.

    def answer_head(self, head: AnswerHead, body: Body) -> None:
        """See ``worker.Receiver``. It is kept back until the first byte of the body is there."""
        guard, order = self._guard, self._order
        if guard is None or order is None:
            return
        self._moved()
        proxy = self._proxy
        proxy.desk.answered(guard.worker, head.status, proxy.now())
        again = head.status in _REPEATED and order.repeatable and self._sends < MAX_SENDS
        if again and proxy.desk.candidates(order, {**self._tried, guard.worker: None}):
            self._drop_connection()
            self._failed(f"{guard.worker} answered {head.status}", None)
            return
        self._answer, self._followed, self._sse = head, body, head.sse
        if head.status == 101:
            self._tunnel = True
            self._start()
            self._client.tunnel()

    def answer_data(self, data: bytes) -> None:
        """See ``worker.Receiver``."""
        guard = self._guard
        if guard is None:
            return
        now = self.moved_at = guard.link.heard_at = self._proxy.now()
        if self._started:
            self._client.write(data)
        else:
            self._start(data)
            guard.first_byte(now)
        if self._sse:
            guard.token(now)
        self._tail.add(data)

    def answer_end(self) -> None:
        """See ``worker.Receiver``."""
        self._connection = None
        if not self._started:
            self._start()
        status = self._answer.status if self._answer is not None else 502
        how = Ended.DONE if status < 400 else Ended.REFUSED if status < 500 else Ended.FAILED
        self._end(how, self._tail.usage() if how is Ended.DONE else None)

    def answer_lost(self, why: str) -> None:
        """See ``worker.Receiver``."""
        connection, self._connection = self._connection, None
        guard = self._guard
        if guard is None:
            return
        if self._reused and self._answer is None and connection is not None and connection.silent:
            self._reused = False
            self._sends -= 1
            self.phase = Phase.CONNECTING
            self._attempt = guard.link.connect(self)  # it had closed the connection before it saw the request
            return
        self._failed(f"{guard.worker}: {why}", Failure.LOST)

    def worker_stalls(self, *, stalled: bool) -> None:
        """See ``worker.Receiver``."""
        self._client.stall(stalled=stalled)

    # To the client.

    def _start(self, data: bytes = b"") -> None:
        """The head goes out, with what follows, and with it the chance of another worker."""
        self._started = True
        self.phase = Phase.PASSING
        answer, body = self._answer, self._followed
        if answer is None or body is None:
            return
        if body.ends_with_connection or self._proxy.draining:
            self._head.close = True
        head = answer_bytes(answer, request_id=self._id, close=self._head.close, worker=self.worker)
        self._client.write(head + data)

    def _failed(self, why: str, what: Failure | None) -> None:
        """Another worker, or the end."""
        guard, order, proxy = self._guard, self._order, self._proxy
        if guard is None or order is None:
            return
        if what is not None:
            proxy.desk.failed(guard.worker, what, proxy.now())
        proxy.count("worker_" + (what or Failure.ERROR).value)
        if self._started:
            proxy.count("broken_streams")
            self._break(why)
            self._end(Ended.FAILED)
            return
        if what is Failure.UNTRIED:
            self._refuse(503, why, again=True)
            return
        self._why, self._status = why, 504 if what is Failure.SILENT and self._sends else 502
        self._tried[guard.worker] = None
        sent = self._sends > 0
        self._release(Ended.FAILED)
        self._answer = None
        self._tail = Tail()
        if not sent or (order.repeatable and self._sends < MAX_SENDS):
            self._find()
            if self._guard is not None or self.phase is Phase.WAITING:
                proxy.count("retries")
        else:
            self._refuse(self._status, why)

    def _break(self, why: str) -> None:
        """What the client has is not whole: say so where it can be said, and never end it properly."""
        body = self._followed
        if self._sse and body is not None and body.between_pieces and not self._tunnel:
            event = broken_stream(f"the stream broke off: {why}")
            self._client.write(event if body.ends_with_connection else as_chunk(event))
        self._head.close = True

    def _refuse(self, status: int, message: str, *, again: bool = False) -> None:
        """again: it may be asked later."""
        close = self._head.close = self._head.close or self._proxy.draining
        later_s = self._proxy.retry_after_s if again else None
        self._say(status, refusal(status, message, request_id=self._id, retry_after_s=later_s, close=close))
        self._end(Ended.REFUSED if status < 500 else Ended.FAILED)

    def _reply(self, document: bytes) -> None:
        """What the router knows itself."""
        close = self._head.close = self._head.close or self._proxy.draining
        self._say(200, own_answer(200, document, request_id=self._id, close=close))
        self._end(Ended.DONE)

    def _say(self, status: int, answer: bytes) -> None:
        """An answer of the router itself; to HEAD its head alone, or the rest would be the next answer."""
        self._client.write(
            answer if self._head.method != b"HEAD" else answer[: answer.index(b"\r\n\r\n") + 4]
        )
        self._proxy.answered_here(status)

    # The end.

    def _release(self, how: Ended, usage: Usage | None = None) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(how, self._proxy.now(), usage)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.give_up()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.forget()

    def _end(self, how: Ended, usage: Usage | None = None) -> None:
        self.phase = Phase.OVER
        before, self._before = self._before, None
        if before is not None:
            before.cut()
        self._drop_connection()
        self._release(how, usage)
        self._proxy.over(self, how)
        self._client.finished(keep=not self._head.close and not self._tunnel)

    def _moved(self) -> None:
        self.moved_at = self._proxy.now()
