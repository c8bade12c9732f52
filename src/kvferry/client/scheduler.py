"""The scheduler side of an engine: asks how far a prefix reaches, without ever blocking."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.client.connection import NodeConnection
from kvferry.client.handshake import Identity
from kvferry.client.messages import (
    LookupAnswer,
    LookupRequest,
    MatchAnswer,
    NamespaceInfo,
    PartPlace,
    Reason,
    Report,
)
from kvferry.errors import KvferryError, RefusedError
from kvferry.frames import LENGTH
from kvferry.identity.names import DIGEST_BYTES
from kvferry.node.framing import decode_from_client, encode
from kvferry.node.wire import (
    MAX_CHUNKS,
    Answer,
    Came,
    EndLoad,
    FromNode,
    Lookup,
    Match,
    Matched,
    Role,
    Welcome,
)

MAX_UNCLAIMED = 4096
MAX_LOOKUP_WAIT_S = 0.4  # with the grace, less than the half second that a fault may cost
UNMEASURED_LOOKUP_WAIT_S = 0.25
LOOKUP_WAIT_SHARE = 0.05  # of the predicted recompute
GRACE_S = 0.05  # on top of the node's own bound, for an answer to travel


@dataclass(slots=True)
class _Waiting:
    """unsent: waits for the connection that is being made."""

    ticket: int
    first_chunk: int
    give_up: float
    unsent: Lookup | None = None


@dataclass(slots=True)
class _Matching:
    """A call of ``match`` that waits. unsent: as above."""

    unsent: Match | None = None
    answer: MatchAnswer | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Since start. answered: by reason."""

    connected: bool
    connects: int
    lookups: int
    answered: dict[str, int]
    breaker_opened: int


class SchedulerClient:
    """One per engine process. Every method but ``match`` returns at once; none raises for a lost node."""

    def __init__(
        self,
        *,
        socket_path: Path | str,
        engine: str,
        namespace: NamespaceInfo,
        lookup_wait_s: float = 0.05,
        token: str = "",
        group: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """lookup_wait_s: how long the node may ask Valkey before it answers; longer for a long recompute."""
        self._namespace = namespace
        self._wait_s = lookup_wait_s
        self._clock = clock
        self._epoch = 0
        self._followed = False
        self._tickets = 0
        self._waiting: dict[str, _Waiting] = {}
        self._answers: OrderedDict[str, LookupAnswer] = OrderedDict()
        self._matching: dict[int, _Matching] = {}
        self._lookups = 0
        self._answered: dict[str, int] = {}
        identity = Identity(role=Role.SCHEDULER, engine=engine, token=token, namespace=namespace, group=group)
        self._connection = NodeConnection(Path(socket_path), identity, self, clock=clock)
        self._lock = self._connection.lock
        self._matched = threading.Condition(self._lock)
        self._connection.start()

    @property
    def connected(self) -> bool:
        """Whether there is a node now."""
        return self._connection.is_up

    @property
    def epoch(self) -> int:
        """Of the node that is connected now; 0 for none: what it held in memory may be gone."""
        return self._epoch

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a node, for tests and start-up reports; the engine never needs it."""
        give_up = time.monotonic() + timeout_s
        while not self._connection.is_up and time.monotonic() < give_up:
            time.sleep(0.002)
        return self._connection.is_up

    def lookup(self, request: LookupRequest) -> None:
        """Submit. At most one lookup per request_id is outstanding; a second one changes nothing."""
        with self._lock:
            request_id = request.request_id
            if request_id in self._waiting or request_id in self._answers:
                return
            self._lookups += 1
            self._tickets += 1
            if self._connection.breaker.is_open:
                self._connection.knock()  # should it be making a new connection, it need not rest long
                self._answer_none(request_id, request.first_chunk, Reason.BREAKER)
                return
            wait_s = self._worth_waiting_s(request)
            asked = self._question(request, wait_s)
            if not _acceptable(asked):
                self._answer_none(request_id, request.first_chunk, Reason.REFUSED)
                return
            waiting = _Waiting(self._tickets, request.first_chunk, self._clock() + wait_s + GRACE_S)
            if not self._connection.send(asked):
                if not self._connection.knock():
                    self._answer_none(request_id, request.first_chunk, Reason.NODE_DOWN)
                    return
                waiting.unsent = asked
            self._waiting[request_id] = waiting

    def poll(self, request_id: str) -> LookupAnswer | None:
        """None: not yet, ask again next step. The answer is handed out once. Unknown ids: count 0."""
        self._connection.pump()
        with self._lock:
            waiting = self._waiting.get(request_id)
            late = waiting is not None and self._clock() >= waiting.give_up
            if late:  # the engine may have been busy elsewhere while the answer lay in the socket
                self._connection.pump_all()
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                self._answered[answer.reason.value] = self._answered.get(answer.reason.value, 0) + 1
                return answer
            waiting = self._waiting.get(request_id)
            if waiting is None:
                return _nothing(request_id, 0, Reason.ENDED)
            if not late:
                return None
            del self._waiting[request_id]
            self._connection.silent()
            self._answered[Reason.TIMEOUT.value] = self._answered.get(Reason.TIMEOUT.value, 0) + 1
            return _nothing(request_id, waiting.first_chunk, Reason.TIMEOUT)

    def match(self, chunks: Sequence[bytes]) -> MatchAnswer:
        """How many of these chunks could be loaded now. Waits for the answer, from any thread, bounded.

        chunks: digests, from the prompt's start. Nothing is pinned for it: what a load brings may be less.
        """
        give_up = self._clock() + self._match_wait_s + GRACE_S
        with self._lock:
            self._tickets += 1
            ticket = self._tickets
            asked = Match(
                ticket=ticket,
                namespace=self._namespace.namespace,
                chunks=b"".join(chunks[:MAX_CHUNKS]),
                max_wait_s=self._match_wait_s,
            )
            if self._connection.breaker.is_open:
                self._connection.knock()
                return MatchAnswer(0, Reason.BREAKER)
            if not _acceptable(asked):
                return MatchAnswer(0, Reason.REFUSED)
            matching = _Matching()
            if not self._connection.send(asked):
                if not self._connection.knock():
                    return MatchAnswer(0, Reason.NODE_DOWN)
                matching.unsent = asked
            self._matching[ticket] = matching
            while matching.answer is None:
                left = give_up - self._clock()
                self._connection.pump_all()
                if matching.answer is None:
                    if left <= 0:
                        del self._matching[ticket]
                        self._connection.silent()
                        return MatchAnswer(0, Reason.TIMEOUT)
                    self._matched.wait(left)
            return matching.answer

    @property
    def _match_wait_s(self) -> float:
        """Asked for once per request, before anybody knows what a hit would save."""
        return max(self._wait_s, UNMEASURED_LOOKUP_WAIT_S)

    def cancel(self, request_id: str) -> None:
        """Forget a lookup; a load that its answer brings is ended."""
        with self._lock:
            self._waiting.pop(request_id, None)
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                self.end(answer.load_id)

    def end(self, load_id: int) -> None:
        """The load is over on every rank. Consumes the load; frees what is left of it in the node."""
        if load_id:
            self._connection.send(EndLoad(load_id=load_id))

    def suspect(self) -> None:
        """A load stalled: if it is the node that is silent, later lookups must not wait to find out."""
        self._connection.suspect()

    @property
    def followed(self) -> bool:
        """Whether the node tells others what comes here: then ``came`` is of use."""
        return self._followed

    def came(
        self, request_id: str, chunks: Sequence[bytes], *, prompt_tokens: int, engine_tokens: int
    ) -> None:
        """A request has come for which there is no lookup. chunks: all of its prompt's. Best effort."""
        message = Came(
            request_id=request_id,
            namespace=self._namespace.namespace,
            chunks=b"".join(chunks[:MAX_CHUNKS]),
            prompt_tokens=prompt_tokens,
            engine_tokens=engine_tokens,
        )
        if not self._connection.breaker.is_open and _acceptable(message):
            self._connection.send(message)

    def report(self, report: Report) -> None:
        """The engine's side of a request's story, for ``kvferry explain``. Best effort."""
        if not self._connection.breaker.is_open and _acceptable(report):
            self._connection.send(report)

    def statistics(self) -> SchedulerStatistics:
        """A snapshot."""
        with self._lock:
            return SchedulerStatistics(
                connected=self._connection.is_up,
                connects=self._connection.connects,
                lookups=self._lookups,
                answered=dict(self._answered),
                breaker_opened=self._connection.breaker.opened,
            )

    def close(self) -> None:
        """Idempotent; joins the thread."""
        self._connection.close()

    # ---- connection.Listener

    def connected_to(self, welcome: Welcome, descriptor: int | None) -> None:
        """See ``connection.Listener``. The scheduler never touches the pool's memory."""
        del descriptor
        self._epoch = welcome.epoch
        self._followed = welcome.feed
        for waiting in list(self._waiting.values()):
            if waiting.unsent is not None:
                asked, waiting.unsent = waiting.unsent, None
                self._connection.send(asked)
        for matching in list(self._matching.values()):
            if matching.unsent is not None:
                question, matching.unsent = matching.unsent, None
                self._connection.send(question)

    def message(self, message: FromNode) -> None:
        """See ``connection.Listener``."""
        if isinstance(message, Matched):
            self._settle(message.ticket, MatchAnswer(message.count, message.reason))
            return
        if not isinstance(message, Answer):
            return
        waiting = self._waiting.get(message.request_id)
        if waiting is None or waiting.ticket != message.ticket:
            self.end(message.load_id)  # came too late, or nobody wants it any more
            return
        answer = self._translate(message)
        del self._waiting[message.request_id]
        self._keep(answer)

    def disconnected(self, reason: Reason) -> None:
        """See ``connection.Listener``. Loads of answers that nobody fetched yet are gone too."""
        del reason
        self._epoch = 0
        self._followed = False
        for ticket in list(self._matching):
            self._settle(ticket, MatchAnswer(0, Reason.NODE_DOWN))
        lost = [(request_id, waiting.first_chunk) for request_id, waiting in self._waiting.items()]
        lost += [(answer.request_id, answer.first_chunk) for answer in self._answers.values()]
        self._waiting.clear()
        self._answers.clear()
        for request_id, first_chunk in lost:
            self._answer_none(request_id, first_chunk, Reason.NODE_DOWN)

    def _settle(self, ticket: int, answer: MatchAnswer) -> None:
        matching = self._matching.pop(ticket, None)
        if matching is not None:
            matching.answer = answer
            self._matched.notify_all()

    def _worth_waiting_s(self, request: LookupRequest) -> float:
        """A wait for Valkey that is small beside what it may save: a lost hit costs a whole recompute."""
        base_s, per_token_s, per_token2_s = (
            request.prefill.base_s,
            request.prefill.per_token_s,
            request.prefill.per_token2_s,
        )
        context = request.first_chunk * self._namespace.chunk_tokens
        new = max(0, request.prompt_tokens - context)
        recompute_s = base_s + per_token_s * new + per_token2_s * new * (new + 2 * context)
        if recompute_s <= 0.0:  # an engine that has computed nothing yet
            return max(self._wait_s, UNMEASURED_LOOKUP_WAIT_S)
        return max(self._wait_s, min(MAX_LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE * recompute_s))

    def _question(self, request: LookupRequest, wait_s: float) -> Lookup:
        """Within the bounds of the wire: what is past MAX_CHUNKS is not asked for."""
        return Lookup(
            ticket=self._tickets,
            request_id=request.request_id,
            namespace=self._namespace.namespace,
            chunks=b"".join(request.chunks[:MAX_CHUNKS]),
            first_chunk=request.first_chunk,
            prompt_tokens=request.prompt_tokens,
            prefill=request.prefill,
            queued_s=request.queued_s,
            max_wait_s=wait_s,
            deadline_cap_s=request.deadline_cap_s,
            engine_tokens=request.engine_tokens,
        )

    def _translate(self, message: Answer) -> LookupAnswer:
        if message.count > MAX_CHUNKS or len(message.tiers) != message.count:
            raise RefusedError(f"an answer of {message.count} chunks and {len(message.tiers)} tiers")
        parts: list[list[PartPlace | None]] = [
            [None] * len(self._namespace.part_bytes) for _ in range(message.count)
        ]
        for place in message.ready:
            position = place.chunk - message.first_chunk
            if 0 <= position < message.count and place.part < len(self._namespace.part_bytes):
                parts[position][place.part] = PartPlace(place.offset, place.checksums)
        return LookupAnswer(
            request_id=message.request_id,
            load_id=message.load_id,
            epoch=message.epoch,
            count=message.count,
            first_chunk=message.first_chunk,
            tiers=tuple(message.tiers),
            parts=tuple(tuple(chunk) for chunk in parts),
            deadline_s=message.deadline_s,
            stall_s=message.stall_s,
            deadline=self._clock() + message.deadline_s,
            reason=message.reason,
            trailing=self._namespace.trailing,
        )

    def _answer_none(self, request_id: str, first_chunk: int, reason: Reason) -> None:
        self._keep(_nothing(request_id, first_chunk, reason))

    def _keep(self, answer: LookupAnswer) -> None:
        self._answers[answer.request_id] = answer
        while len(self._answers) > MAX_UNCLAIMED:
            self.end(self._answers.popitem(last=False)[1].load_id)


def _acceptable(message: Lookup | Came | Match | Report) -> bool:
    """Whether a node would take it: one bad value must not cost the connection."""
    if isinstance(message, Lookup | Came | Match) and len(message.chunks) % DIGEST_BYTES:
        return False
    try:
        decode_from_client(encode(message)[LENGTH.size :])
    except (KvferryError, TypeError, OverflowError):
        return False
    return True


def _nothing(request_id: str, first_chunk: int, reason: Reason) -> LookupAnswer:
    return LookupAnswer(
        request_id=request_id,
        load_id=0,
        epoch=0,
        count=0,
        first_chunk=first_chunk,
        tiers=(),
        parts=(),
        deadline_s=0.0,
        stall_s=0.0,
        deadline=0.0,
        reason=reason,
    )
