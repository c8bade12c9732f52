"""What one peer asks of a keeper: its running questions, and their answers on the way back.

The keeper's threads call ``done`` back; here that only posts, and what ended in one turn of the loop goes
out in one message.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from kvferry.errors import RefusedError
from kvferry.identity.names import PartRef
from kvferry.keeper.wire import (
    MAX_REFS,
    OUTCOMES,
    Cancel,
    Document,
    Drop,
    DropEnded,
    Locate,
    Located,
    Message,
    MostReused,
    Parts,
    Ping,
    Pong,
    Remove,
    Reused,
    Role,
    Stage,
    Staged,
    StatusQuery,
    Stored,
    ToKeeper,
    Used,
    Where,
)
from kvferry.loop import Loop, Timer
from kvferry.tiers.contract import Dropped, Outcome, Transfer

MAX_TICKETS = 4096
MAX_ASKED_PARTS = 1 << 18
"""Of one peer under way: what it asks beyond is answered at once, with UNKNOWN and REFUSED."""
MAX_WAIT_S = 600.0
"""Longest for a question; a node asks for no longer."""
MAX_RUNNING = 16
"""Of one admin: questions about the keeper as a whole."""
_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}


class Keeping(Protocol):
    """What a keeper does for its peers. Nothing blocks; ``done`` comes from any thread, once per item.

    Deadlines are absolute ``time.monotonic()`` seconds.
    """

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in Valkey now."""

    def used(self, refs: Sequence[PartRef]) -> None:
        """These were loaded."""

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each is."""

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """Bring them into Valkey, in this order."""
        ...

    def remove(self, refs: Sequence[PartRef], *, done: Callable[[], None] | None = None) -> None:
        """Delete them in every tier."""

    def drop(
        self,
        tier: str,
        *,
        namespace: bytes | None,
        older_than_s: float | None,
        parts: Sequence[PartRef] | None,
        alone: bool,
        done: Callable[[Dropped], None],
    ) -> None:
        """Forget what a tier holds; see ``wire.Drop``. Raises RefusedError for a tier that there is not."""

    def drop_ended(self, namespace: bytes | None) -> None:
        """See ``wire.DropEnded``."""

    def most_reused(self, *, within_s: float, max_bytes: int, namespace: bytes | None) -> Sequence[PartRef]:
        """Most reused first."""
        ...


class _Question:
    """A Locate or Stage that was not wholly answered. transfer: of a Stage, to cancel it by.

    timer: of a Locate, which nobody waits for after its deadline, whatever the tiers do.
    """

    __slots__ = ("count", "left", "timer", "transfer")

    def __init__(self, count: int) -> None:
        self.count = count
        self.left = count
        self.transfer: Transfer | None = None
        self.timer: Timer | None = None


class Requests:
    """All on the loop's thread, but for what ``done`` posts."""

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        keeping: Keeping,
        loop: Loop,
        status: Callable[[], bytes],
        slowly: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """status: the keeper's as JSON. slowly: runs what may take a moment, on another thread."""
        self._send = send
        self._keeping = keeping
        self._loop = loop
        self._status = status
        self._slowly = slowly
        self._running = 0
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        self._parts = 0
        self._ended: dict[int, list[tuple[int, Outcome]]] = {}
        self._dropping: set[bytes | None] = set()  # namespaces that this peer drops tier by tier
        self._closed = False

    def __len__(self) -> int:
        return len(self._questions)

    def message(self, message: ToKeeper, role: Role) -> None:
        """Do what it says. Raises RefusedError for what this peer should not have sent."""
        match message:
            case Locate():
                self._locate(message)
            case Stage():
                self._stage(message)
            case Stored(parts=parts, positions=positions, likely=likely):
                self._keeping.stored(parts.refs(), positions=positions, likely=[byte != 0 for byte in likely])
            case Used(parts=parts):
                self._keeping.used(parts.refs())
            case Cancel(ticket=ticket):
                question = self._questions.get(ticket)
                if question is not None and question.transfer is not None:
                    question.transfer.cancel()
            case Remove(parts=parts):
                self._keeping.remove(parts.refs())
            case Ping():
                self._send(Pong())
            case _ if role is Role.ADMIN:
                self._admin(message)
            case _:
                raise RefusedError(f"unexpected {type(message).__name__} from a {role}")

    def close(self) -> None:
        """The peer is gone: nobody wants the rest, and what it was dropping tier by tier is over."""
        self._closed = True
        for question in self._questions.values():
            if question.transfer is not None:
                question.transfer.cancel()
            if question.timer is not None:
                question.timer.cancel()
        self._questions.clear()
        self._ended.clear()
        for namespace in self._dropping:
            self._keeping.drop_ended(namespace)

    def _locate(self, message: Locate) -> None:
        refs = message.parts.refs()
        if not self._admit(message.ticket, len(refs)):
            self._send(Located(ticket=message.ticket, where=bytes([Where.UNKNOWN]) * len(refs)))
            return

        def done(where: Sequence[Where]) -> None:
            self._loop.post(partial(self._located, message.ticket, bytes(where)))

        over_at = self._loop.clock() + min(message.deadline_s, MAX_WAIT_S)
        self._questions[message.ticket].timer = self._loop.at(over_at, partial(self._forget, message.ticket))
        self._keeping.locate(refs, deadline=self._until(message.deadline_s), done=done)

    def _located(self, ticket: int, where: bytes) -> None:
        if not self._closed and ticket in self._questions:
            self._forget(ticket)
            self._send(Located(ticket=ticket, where=where))

    def _stage(self, message: Stage) -> None:
        ticket, refs = message.ticket, message.parts.refs()
        if not self._admit(ticket, len(refs)):
            self._send(Staged(ticket, tuple(range(len(refs))), bytes([_CODES[Outcome.REFUSED]]) * len(refs)))
            return

        def done(index: int, outcome: Outcome) -> None:
            self._loop.post(partial(self._staged, ticket, index, outcome))

        question = self._questions[ticket]
        question.transfer = self._keeping.stage(refs, deadline=self._until(message.deadline_s), done=done)
        if not refs:
            self._forget(ticket)

    def _staged(self, ticket: int, index: int, outcome: Outcome) -> None:
        if self._closed or ticket not in self._questions:
            return
        if not self._ended:
            self._loop.post(self._tell)
        self._ended.setdefault(ticket, []).append((index, outcome))

    def _tell(self) -> None:
        """All that was staged meanwhile."""
        ended, self._ended = self._ended, {}
        for ticket, items in ended.items():
            question = self._questions.get(ticket)
            if question is None:
                continue
            question.left -= len(items)
            if question.left <= 0:
                self._forget(ticket)
            codes = bytes(_CODES[outcome] for _, outcome in items)
            self._send(Staged(ticket=ticket, indexes=tuple(index for index, _ in items), outcomes=codes))

    def _until(self, deadline_s: float) -> float:
        return self._clock() + min(deadline_s, MAX_WAIT_S)

    def _admit(self, ticket: int, parts: int) -> bool:
        """Whether there is room. Raises RefusedError for a ticket that is in use."""
        if ticket in self._questions:
            raise RefusedError(f"ticket {ticket} is in use")
        if len(self._questions) >= MAX_TICKETS or self._parts + parts > MAX_ASKED_PARTS:
            return False
        self._questions[ticket] = _Question(parts)
        self._parts += parts
        return True

    def _forget(self, ticket: int) -> None:
        question = self._questions.pop(ticket, None)
        if question is not None:
            self._parts -= question.count
            if question.timer is not None:
                question.timer.cancel()

    def _admin(self, message: ToKeeper) -> None:
        match message:
            case StatusQuery(ticket=ticket):
                self._run(lambda: [Document(ticket=ticket, json=self._status())])
            case Drop():
                self._drop(message)
            case DropEnded(namespace=namespace):
                self._dropping.discard(namespace or None)
                self._keeping.drop_ended(namespace or None)
            case MostReused():
                self._run(partial(self._reused, message))
            case _:
                raise RefusedError(f"unexpected {type(message).__name__}")

    def _run(self, work: Callable[[], Sequence[Message]]) -> None:
        """On the thread for such things; the answers go out from here."""
        if self._running >= MAX_RUNNING:
            raise RefusedError(f"{MAX_RUNNING} questions wait already")
        self._running += 1

        def run() -> None:
            answers: Sequence[Message] = []
            try:
                answers = work()
            finally:
                self._loop.post(partial(self._ran, answers))

        self._slowly(run)

    def _ran(self, answers: Sequence[Message]) -> None:
        self._running -= 1
        for answer in answers:
            self._answer(answer)

    def _drop(self, message: Drop) -> None:
        ticket, namespace = message.ticket, message.namespace or None
        whole = message.parts is None and not message.older_than_s
        if whole and not message.alone:
            self._dropping.add(namespace)

        def done(dropped: Dropped) -> None:
            document = {
                "dropped_parts": dropped.parts,
                "dropped_bytes": dropped.nbytes,
                "outcome": dropped.outcome.value,
            }
            answer = Document(ticket=ticket, json=msgspec.json.encode(document))
            self._loop.post(partial(self._dropped, namespace, answer))

        try:
            self._keeping.drop(
                message.tier.value,
                namespace=namespace,
                older_than_s=message.older_than_s or None,
                parts=message.parts.refs() if message.parts is not None else None,
                alone=message.alone,
                done=done,
            )
        except RefusedError as error:
            self._send(Document(ticket=ticket, error=str(error)))

    def _dropped(self, namespace: bytes | None, answer: Message) -> None:
        if self._closed and namespace in self._dropping:
            self._keeping.drop_ended(namespace)  # from the end of this drop on it would count for minutes
        self._answer(answer)

    def _answer(self, message: Message) -> None:
        if not self._closed:
            self._send(message)

    def _reused(self, message: MostReused) -> list[Message]:
        """In runs of one namespace each, so that the order says which are the most reused."""
        found = self._keeping.most_reused(
            within_s=message.within_s, max_bytes=message.max_bytes, namespace=message.namespace or None
        )
        runs: list[list[PartRef]] = []
        for ref in found:
            if not runs or runs[-1][-1].key.namespace != ref.key.namespace or len(runs[-1]) >= MAX_REFS:
                runs.append([])
            runs[-1].append(ref)
        if not runs:
            return [Reused(ticket=message.ticket, parts=None, last=True)]
        return [Reused(ticket=message.ticket, parts=Parts.of(run)[0], last=run is runs[-1]) for run in runs]
