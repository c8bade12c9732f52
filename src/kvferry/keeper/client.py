"""A node's side of its keepers: what it tells them and asks of them, on one thread of its own."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry import __version__
from kvferry.addresses import Address
from kvferry.identity.names import PartRef
from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.peer import Peer
from kvferry.keeper.questions import Asked, Calls, Locating, Question, Staging
from kvferry.keeper.rendezvous import complaint, namesakes, owner, told_apart
from kvferry.keeper.wire import (
    OUTCOMES,
    PROTOCOL,
    Cancel,
    FromKeeper,
    Hello,
    Locate,
    Located,
    Message,
    Parts,
    Remove,
    Stage,
    Staged,
    Stored,
    Used,
    Where,
)
from kvferry.loop import Loop
from kvferry.tiers.contract import Outcome, Transfer

__all__ = ["KeeperAccess", "KeeperStatus", "Keepers", "KeepersStatistics", "Where"]

MAX_KEEPERS = 64
MAX_TICKETS = 4096
"""Questions to all keepers together; what is asked beyond is answered at once."""
MAX_UNTOLD_PARTS = 1 << 17
"""Told by other threads and not yet on its way: more is dropped."""
MAX_WAIT_S = 600.0
JOIN_S = 5.0

log = logging.getLogger("kvferry.keepers")


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """One keeper, as this node sees it now. Counters are since start.

    state: "up", "silent" (connected, does not answer), "down", "refused" (it does not want this node).
    asked: questions under way. dropped: parts it was not told about. unanswered: questions that ended without
    it. strange: answers that fitted no question.
    """

    address: str
    name: str
    version: str
    state: str
    error: str
    connects: int
    asked: int
    queued_parts: int
    dropped_parts: int
    located_parts: int
    staged_parts: int
    unanswered: int
    strange: int


@dataclass(frozen=True, slots=True)
class KeepersStatistics:
    """All of them, in the order of their addresses."""

    keepers: tuple[KeeperStatus, ...]
    dropped_parts: int  # that no keeper was told about
    defects: int

    @property
    def up(self) -> int:
        """How many are up."""
        return sum(keeper.state == "up" for keeper in self.keepers)


@dataclass(slots=True)
class _Tally:
    """Of one keeper, since start."""

    located: int = 0
    staged: int = 0
    unanswered: int = 0
    strange: int = 0


class _Running:
    """A stage under way."""

    def __init__(self, keepers: "Keepers", question: Question) -> None:
        self._keepers = keepers
        self._question = question

    def cancel(self) -> None:
        """See ``contract.Transfer``."""
        self._keepers.cancel(self._question)


class Keepers:
    """Any thread may call; nothing blocks. ``done`` is called on this object's own thread.

    Each part has one keeper, by rendezvous of its chunk's digest over those that are up. Deadlines are
    absolute ``clock`` seconds, and no longer from now than MAX_WAIT_S.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        access: KeeperAccess,
        node: str = "",
        key_ids: Sequence[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """node: this node's name, for people. key_ids: of its encryption keys, the current one first.

        Raises MisconfiguredError where the files of ``access`` cannot be used.
        """
        tls = access.contexts()
        self._hello = Hello(
            protocol=PROTOCOL,
            version=__version__,
            token=access.token,
            node=node,
            key_ids=b"".join(key_ids),
        )
        self._loop = Loop(after_turn=_nothing, clock=clock)
        made = partial(Peer, loop=self._loop, hello=lambda: self._hello, tls=tls, listener=self)
        self._peers = [made(address, ticket=self._ticket) for address in dict.fromkeys(addresses)]
        self._tallies = {peer: _Tally() for peer in self._peers}
        self._namesakes: set[str] = set()  # that were told of
        self._asked: dict[int, Asked] = {}
        self._tickets = 0
        self._lock = threading.Lock()
        self._untold_parts = 0
        self._dropped_parts = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run, name="kvferry-keepers", daemon=True)
        self._loop.post(self._start)
        self._thread.start()

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        """Where each part is; UNKNOWN where its keeper did not say so by the deadline. Once."""
        question = Locating(len(refs), done)
        self._begin(question, refs, deadline)

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Transfer:
        """Have parts brought into Valkey, in this order. Once per index, by the deadline.

        OK: it is there now. MISS: its keeper does not have it. REFUSED: no keeper is up. LATE: not in
        time. FAILED: its keeper went away, or could not.
        """
        question = Staging(len(refs), done)
        self._begin(question, refs, deadline)
        return _Running(self, question)

    def stored(self, refs: Sequence[PartRef], *, positions: Sequence[int], likely: Sequence[bool]) -> None:
        """These are in Valkey now. positions: chunks of the prompt before each. likely: wanted again.

        This, ``used`` and ``remove`` are told at most once; what a keeper that is down misses is counted.
        """
        before, again = tuple(positions), bytes(map(bool, likely))
        self._tell(
            refs,
            lambda parts, places: Stored(
                parts=parts,
                positions=tuple(before[at] for at in places),
                likely=bytes(again[at] for at in places),
            ),
        )

    def used(self, refs: Sequence[PartRef]) -> None:
        """These were loaded."""
        self._tell(refs, lambda parts, places: Used(parts=parts))

    def remove(self, refs: Sequence[PartRef]) -> None:
        """The bytes of these are wrong: away with them, in every tier. All keepers are told."""
        self._tell(refs, lambda parts, places: Remove(parts=parts), everybody=True)

    def cancel(self, question: Question) -> None:
        """What is left of it ends as LATE, soon."""
        self._post(partial(self._cancel, question))

    def statistics(self) -> KeepersStatistics:
        """A snapshot, from any thread."""
        asked = list(self._asked.values())
        statuses = [
            KeeperStatus(
                address=str(peer.address),
                name=peer.name,
                version=peer.version,
                state=peer.state.value,
                error=peer.error,
                connects=peer.connects,
                asked=sum(one.peer is peer for one in asked),
                queued_parts=peer.queued_parts,
                dropped_parts=peer.dropped_parts,
                located_parts=tally.located,
                staged_parts=tally.staged,
                unanswered=tally.unanswered,
                strange=tally.strange,
            )
            for peer, tally in self._tallies.items()
        ]
        return KeepersStatistics(tuple(statuses), self._dropped_parts, self._loop.defects)

    def close(self) -> None:
        """End everything under way as LATE, join the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.post(self._end)
        self._thread.join(JOIN_S)
        for peer in self._peers:
            peer.join()
        self._loop.close()

    # ---- from other threads

    def _post(self, call: Callable[[], None]) -> bool:
        """Whether it will be run; no more once closed."""
        with self._lock:
            if not self._closed:
                self._loop.post(call)
            return not self._closed

    def _begin(self, question: Question, refs: Sequence[PartRef], deadline: float) -> None:
        if not self._post(partial(self._ask, question, tuple(refs), deadline)):
            for call in question.end(Outcome.REFUSED):
                call()

    def _tell(
        self,
        refs: Sequence[PartRef],
        made: Callable[[Parts, list[int]], Message],
        *,
        everybody: bool = False,
    ) -> None:
        count = len(refs)
        with self._lock:
            if self._closed or self._untold_parts + count > MAX_UNTOLD_PARTS:
                self._dropped_parts += count
                return
            self._untold_parts += count
            self._loop.post(partial(self._tell_now, tuple(refs), made, everybody=everybody))

    # ---- on the loop's thread

    def message(self, peer: Peer, message: FromKeeper) -> None:
        """See ``peer.PeerListener``."""
        match message:
            case Located(ticket=ticket, where=where):
                self._located(peer, ticket, where)
            case Staged(ticket=ticket, indexes=indexes, outcomes=outcomes):
                self._staged(peer, ticket, indexes, outcomes)
            case _:
                self._tallies[peer].strange += 1

    def greeted(self, peer: Peer) -> None:
        """See ``peer.PeerListener``. Namesakes are told apart by their addresses, and told of once."""
        found = namesakes([(peer.name, str(peer.address)) for peer in self._peers])
        if peer.name in found and peer.name not in self._namesakes:
            self._namesakes.add(peer.name)
            log.warning(
                "%s; meanwhile they are told apart by address", complaint(peer.name, found[peer.name])
            )

    def lost(self, peer: Peer) -> None:
        """See ``peer.PeerListener``."""
        for ticket, asked in list(self._asked.items()):
            if asked.peer is peer:
                del self._asked[ticket]
                self._tallies[peer].unanswered += 1
                self._run(asked.question, asked.give_up(Outcome.FAILED))

    def _start(self) -> None:
        for peer in self._peers:
            peer.start()

    def _end(self) -> None:
        for asked in list(self._asked.values()):
            self._run(asked.question, asked.give_up(Outcome.LATE))
        self._asked.clear()
        for peer in self._peers:
            peer.close()
        self._loop.post(self._loop.stop)  # after what the questions still tell

    def _shares(self, refs: Sequence[PartRef], peers: Sequence[Peer]) -> dict[Peer, list[int]]:
        """Places in ``refs``, by the keeper whose they are."""
        known = told_apart([(peer.name, str(peer.address)) for peer in self._peers])
        by_name = {name: peer for name, peer in zip(known, self._peers, strict=True) if peer in peers}
        names = list(by_name)
        owners: dict[bytes, Peer] = {}
        shares: dict[Peer, list[int]] = {}
        for at, ref in enumerate(refs):
            chunk = ref.key.chunk
            peer = owners.get(chunk)
            if peer is None:
                peer = owners[chunk] = by_name[owner(chunk, names)]
            shares.setdefault(peer, []).append(at)
        return shares

    def _ask(self, question: Question, refs: Sequence[PartRef], deadline: float) -> None:
        now = self._loop.clock()
        deadline = min(deadline, now + MAX_WAIT_S)
        up = [peer for peer in self._peers if peer.is_up]
        if not refs or not up or deadline <= now:
            self._run(question, question.end(Outcome.LATE if up else Outcome.REFUSED))
            return
        question.timer = self._loop.at(deadline, partial(self._overdue, question))
        for peer, places in self._shares(refs, up).items():
            for parts, some in Parts.split([refs[at] for at in places]):
                self._ask_peer(peer, question, parts, [places[at] for at in some], wait_s=deadline - now)

    def _ask_peer(
        self, peer: Peer, question: Question, parts: Parts, places: list[int], *, wait_s: float
    ) -> None:
        if len(self._asked) >= MAX_TICKETS or not peer.is_up:
            self._run(question, question.give_up(places, Outcome.REFUSED))
            return
        ticket = self._ticket()
        self._asked[ticket] = Asked(peer, question, places, parts=parts, at=self._loop.clock())
        question.tickets.append(ticket)
        kind = Locate if isinstance(question, Locating) else Stage
        peer.ask(kind(ticket=ticket, parts=parts, deadline_s=wait_s))

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _located(self, peer: Peer, ticket: int, where: bytes) -> None:
        asked = None if peer.answering.settles(ticket) else self._asked_of(peer, ticket)
        if asked is None:
            return
        question = asked.question
        if not isinstance(question, Locating) or len(where) != len(asked.places):
            self._tallies[peer].strange += 1
            return
        del self._asked[ticket]
        peer.answering.answered()
        self._tallies[peer].located += len(where)
        self._run(question, question.located(asked.places, [Where(byte) for byte in where]))

    def _staged(self, peer: Peer, ticket: int, indexes: Sequence[int], outcomes: bytes) -> None:
        asked = self._asked_of(peer, ticket)
        if asked is None:
            return
        if not isinstance(asked.question, Staging):
            self._tallies[peer].strange += 1
            return
        for index, code in zip(indexes, outcomes, strict=True):
            if not asked.take(index):
                self._tallies[peer].strange += 1
                continue
            self._tallies[peer].staged += OUTCOMES[code] is Outcome.OK
            self._run(asked.question, asked.question.give_up([asked.places[index]], OUTCOMES[code]))
        if asked.answered:
            del self._asked[ticket]

    def _asked_of(self, peer: Peer, ticket: int) -> Asked | None:
        """What it answers; None where that is over, or was never asked."""
        asked = self._asked.get(ticket)
        if asked is not None and asked.peer is peer:
            return asked
        if asked is not None or not 0 < ticket <= self._tickets:
            self._tallies[peer].strange += 1
        return None

    def _overdue(self, question: Question) -> None:
        for asked in self._take_back(question):
            self._tallies[asked.peer].unanswered += 1
            asked.peer.doubt()
            if isinstance(question, Locating):
                asked.peer.answering.unanswered(asked.parts, self._loop.clock() - asked.at)
        self._run(question, question.end(Outcome.LATE))

    def _cancel(self, question: Question) -> None:
        self._take_back(question)
        self._run(question, question.end(Outcome.LATE))

    def _take_back(self, question: Question) -> list[Asked]:
        """What was not answered yet; its keepers are told."""
        taken = []
        for ticket in question.tickets:
            asked = self._asked.pop(ticket, None)
            if asked is not None:
                taken.append(asked)
                if isinstance(question, Staging):
                    asked.peer.ask(Cancel(ticket=ticket))
        return taken

    def _run(self, question: Question, calls: Calls) -> None:
        """Each by itself: one that fails is a defect, and costs the others nothing."""
        for call in calls:
            self._loop.post(call)
        if question.over and question.timer is not None:
            question.timer.cancel()

    def _tell_now(
        self, refs: Sequence[PartRef], made: Callable[[Parts, list[int]], Message], *, everybody: bool
    ) -> None:
        with self._lock:
            self._untold_parts -= len(refs)
        peers = [peer for peer in self._peers if peer.counts]
        if not peers:
            self._dropped_parts += len(refs)
        elif everybody:
            for parts, places in Parts.split(refs):
                for peer in peers:
                    peer.tell(made(parts, places), len(parts))
        else:
            for peer, places in self._shares(refs, peers).items():
                for parts, some in Parts.split([refs[at] for at in places]):
                    peer.tell(made(parts, [places[at] for at in some]), len(parts))


def _nothing() -> None:
    """At the end of a turn of the loop."""
