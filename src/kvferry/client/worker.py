"""The worker side of an engine: reads parts out of the pool and puts new ones in."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.client.connection import NodeConnection
from kvferry.client.handshake import Identity
from kvferry.client.messages import (
    LoadTicket,
    NamespaceInfo,
    Reason,
    ReservedSlot,
    ReserveOutcome,
)
from kvferry.client.stream import LoadStream
from kvferry.errors import RefusedError
from kvferry.node.framing import join_checksums
from kvferry.node.wire import (
    MAX_BATCH,
    MAX_CHUNKS,
    Abandon,
    Commit,
    Copied,
    Corrupt,
    Filled,
    FromNode,
    Join,
    LoadEnded,
    PartsReady,
    Reserve,
    Reserved,
    Role,
    Welcome,
)
from kvferry.pool.arena import ArenaMapping

MAX_LATE = 256  # reservations whose answer came too late are given back; so many are remembered
MAX_RESERVE = 4096


@dataclass(slots=True)
class _Call:
    """connects: the number of the connection that it was sent on. unsent: waits for a connection."""

    part: int
    digests: list[bytes]
    connects: int
    unsent: Reserve | None = None
    answer: Reserved | None = None
    lost: bool = False
    late: bool = False

    @property
    def granted(self) -> list[bytes]:
        """Of what was asked for."""
        if self.answer is None:
            return []
        places = zip(self.digests, self.answer.places, strict=True)
        return [digest for digest, place in places if place.outcome is ReserveOutcome.RESERVED]

    @property
    def settled(self) -> bool:
        """Nothing more to wait for."""
        return self.lost or self.answer is not None


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Since start. ended: streams that ended early, by reason."""

    connected: bool
    connects: int
    streams: int
    ended: dict[str, int]
    reserve_timeouts: int
    breaker_opened: int


class WorkerClient:
    """One per rank. A background thread reads; it reconnects by itself."""

    def __init__(
        self,
        *,
        socket_path: Path | str,
        engine: str,
        rank: int,
        namespace: NamespaceInfo,
        token: str = "",
        group: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._epoch = 0
        self._mapping: ArenaMapping | None = None
        self._streams: dict[tuple[int, int], LoadStream] = {}
        self._calls: OrderedDict[int, _Call] = OrderedDict()
        self._granted: set[tuple[int, bytes]] = set()  # on this connection; neither filled nor given back
        self._tickets = 0
        self._ended: dict[str, int] = {}
        self._started_streams = 0
        self._reserve_timeouts = 0
        identity = Identity(
            role=Role.WORKER, engine=engine, rank=rank, token=token, namespace=namespace, group=group
        )
        self._connection = NodeConnection(Path(socket_path), identity, self, clock=clock)
        self._changed = threading.Condition(self._connection.lock)
        self._connection.start()

    @property
    def connected(self) -> bool:
        """Whether there is a node now."""
        return self._connection.is_up

    @property
    def last_error(self) -> str:
        """Why there is no node; empty while there is one, or before the first attempt."""
        return self._connection.last_error

    @property
    def epoch(self) -> int:
        """Of the node that was connected last; 0 before the first."""
        return self._epoch

    @property
    def mapping(self) -> ArenaMapping | None:
        """The pool as mapped here (address, nbytes), to register with a GPU; None without a node.

        A restarted node brings another one; views of the old stay valid while they are held.
        """
        return self._mapping

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a node, for start-up; everything else works without."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while not self._connection.is_up and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._connection.is_up

    def load(self, ticket: LoadTicket) -> LoadStream:
        """Start receiving. Never blocks, never raises for a lost node: the stream ends with a reason."""
        with self._changed:
            self._started_streams += 1
            known = 0 <= ticket.part < len(self._namespace.part_bytes)
            if known and self._connection.is_up and ticket.epoch != self._epoch:
                self._connection.pump_all()  # perhaps that the old node ended was not read yet
            up = self._connection.is_up
            stream = LoadStream(
                ticket,
                owner=self,
                mapping=self._mapping if up else None,
                part_bytes=self._namespace.part_bytes[ticket.part] if known else 0,
                changed=self._changed,
                clock=self._clock,
            )
            if not known:
                self._stop(stream, Reason.REFUSED)
            elif up:
                self._join(stream)
            elif self._knock_with_ticket():
                self._streams[ticket.load_id, ticket.part] = stream
            else:
                self._stop(stream, Reason.NODE_DOWN)
            return stream

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        """Slots for new parts. prefix: digests before them, from the prompt's start.

        Returns one entry per wanted digest; all FULL when the node does not answer in time. Views are
        writable until ``commit`` or ``abandon``, and stay mapped whatever happens to the node.
        """
        slots: list[ReservedSlot] = []
        give_up = self._clock() + timeout_s
        before = list(prefix)
        for start in range(0, len(wanted), MAX_RESERVE):
            digests = list(wanted[start : start + MAX_RESERVE])
            slots += self._reserve(before, digests, part=part, index=start, give_up=give_up)
            before += digests
        return slots

    def commit(
        self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]], *, connection: int | None = None
    ) -> bool:
        """Publish (digest, checksums per stripe) of slots that were reserved and are now filled.

        Whether all of it left for the node; the slots of a lost connection are lost with it. connection: the
        slots', where several threads save: on the next one another may hold slots of these names.
        """
        with self._changed:
            held = self._granted if connection in (None, self._connection.connects) else set()
            ours = [(digest, checksums) for digest, checksums in filled if (part, digest) in held]
            self._granted.difference_update((part, digest) for digest, _ in ours)
            sent = len(ours) == len(filled)
            for at in range(0, len(ours), MAX_BATCH):
                entries = tuple(
                    Filled(digest, join_checksums(checksums))
                    for digest, checksums in ours[at : at + MAX_BATCH]
                )
                commit = Commit(namespace=self._namespace.namespace, part=part, filled=entries)
                sent &= self._connection.send(commit)
        return sent

    def abandon(self, part: int, digests: Sequence[bytes], *, connection: int | None = None) -> None:
        """Give reserved slots back. connection: as for ``commit``."""
        with self._changed:
            if connection not in (None, self._connection.connects):
                return
            self._granted.difference_update((part, digest) for digest in digests)
            for at in range(0, len(digests), MAX_BATCH):
                chunks = b"".join(digests[at : at + MAX_BATCH])
                self._connection.send(Abandon(namespace=self._namespace.namespace, part=part, chunks=chunks))

    def statistics(self) -> WorkerStatistics:
        """A snapshot."""
        with self._changed:
            return WorkerStatistics(
                connected=self._connection.is_up,
                connects=self._connection.connects,
                streams=self._started_streams,
                ended=dict(self._ended),
                reserve_timeouts=self._reserve_timeouts,
                breaker_opened=self._connection.breaker.opened,
            )

    def close(self) -> None:
        """Idempotent; joins the thread. Views that were handed out stay valid."""
        self._connection.close()
        with self._changed:
            if self._mapping is not None:
                self._mapping.close()
                self._mapping = None

    # ---- stream.StreamOwner

    def pump(self) -> None:
        """See ``stream.StreamOwner``."""
        self._connection.pump()

    def tell_copied(self, load_id: int, part: int, chunks: Sequence[int]) -> None:
        """See ``stream.StreamOwner``."""
        self._connection.send(Copied(load_id=load_id, part=part, chunks=tuple(chunks)))

    def tell_corrupt(self, load_id: int, part: int, chunk: int) -> None:
        """See ``stream.StreamOwner``."""
        self._connection.send(Corrupt(load_id=load_id, part=part, chunk=chunk))

    def forget(self, stream: LoadStream) -> None:
        """See ``stream.StreamOwner``."""
        key = (stream.ticket.load_id, stream.ticket.part)
        if self._streams.get(key) is stream:
            del self._streams[key]

    # ---- connection.Listener

    def connected_to(self, welcome: Welcome, descriptor: int | None) -> None:
        """See ``connection.Listener``. What waited for this connection goes out now."""
        self._changed.notify_all()
        if descriptor is not None and (self._mapping is None or welcome.epoch != self._epoch):
            if self._mapping is not None:
                self._mapping.close()
                self._mapping = None
            self._mapping = ArenaMapping.attach(descriptor, welcome.pool_bytes)
            self._epoch = welcome.epoch
        waiting = list(self._streams.values())
        self._streams.clear()
        for stream in waiting:
            stream.attach(self._mapping)
            self._join(stream)
        for call in list(self._calls.values()):
            if call.unsent is not None:
                request, call.unsent = call.unsent, None
                call.connects = self._connection.connects
                self._connection.send(request)

    def message(self, message: FromNode) -> None:
        """See ``connection.Listener``."""
        match message:
            case PartsReady(load_id=load_id, places=places):
                for place in places:
                    stream = self._streams.get((load_id, place.part))
                    if stream is not None:
                        stream.arrived(place)
                for stream in [] if places else list(self._streams.values()):
                    if stream.ticket.load_id == load_id:
                        stream.resumed()
            case LoadEnded(load_id=load_id, part=part, chunk=chunk, reason=reason):
                stream = self._streams.get((load_id, part))
                if stream is not None:
                    self._ended[reason.value] = self._ended.get(reason.value, 0) + 1
                    stream.ended(reason, chunk)
            case Reserved():
                self._reserved(message)
            case _:
                pass

    def disconnected(self, reason: Reason) -> None:
        """See ``connection.Listener``."""
        for stream in self._streams.values():
            self._stop(stream, reason)
        self._streams.clear()
        for call in self._calls.values():
            call.lost = True
        self._calls.clear()
        self._granted.clear()
        self._changed.notify_all()

    def _knock_with_ticket(self) -> bool:
        """A ticket is the node's answer to the scheduler side: it lives, whatever this side took it for."""
        self._connection.vouched()
        return self._connection.knock()

    def _join(self, stream: LoadStream) -> None:
        """Receive from the node that is connected, if it is the ticket's."""
        ticket = stream.ticket
        if ticket.epoch != self._epoch:
            self._stop(stream, Reason.EPOCH)
            return
        self._streams[ticket.load_id, ticket.part] = stream
        if stream.waits:
            self._connection.send(Join(load_id=ticket.load_id, epoch=ticket.epoch, part=ticket.part))

    def _stop(self, stream: LoadStream, reason: Reason) -> None:
        self._ended[reason.value] = self._ended.get(reason.value, 0) + 1
        stream.ended(reason, 0)

    def _reserve(
        self, prefix: list[bytes], digests: list[bytes], *, part: int, index: int, give_up: float
    ) -> list[ReservedSlot]:
        with self._changed:
            self._tickets += 1
            ticket = self._tickets
            call = _Call(part, digests, self._connection.connects)
            request = Reserve(
                ticket=ticket,
                namespace=self._namespace.namespace,
                part=part,
                prefix=b"".join(prefix[: MAX_CHUNKS - len(digests)]),
                chunks=b"".join(digests),
            )
            if self._connection.breaker.is_open:
                self._connection.knock()
                return _all_full(digests, index)
            if not self._connection.send(request):
                if not self._connection.knock():
                    return _all_full(digests, index)
                call.unsent = request
            self._calls[ticket] = call
            while not call.settled:
                left = give_up - self._clock()
                if left <= 0:
                    self._reserve_timeouts += 1
                    call.late = True
                    if call.unsent is not None:
                        del self._calls[ticket]
                    self._connection.silent()
                    while len(self._calls) > MAX_LATE:
                        self._calls.popitem(last=False)
                    return _all_full(digests, index)
                self._connection.pump()
                if not call.settled:
                    self._changed.wait(left)
            # Slots that another connection was given are another's by now, or in another node's pool.
            stale = call.connects != self._connection.connects or not self._connection.is_up
            if call.answer is None or self._mapping is None or stale:
                return _all_full(digests, index)
            self._granted.update((part, digest) for digest in call.granted)
            return [
                ReservedSlot(
                    index + at,
                    digest,
                    place.outcome,
                    self._mapping.view(place.offset, self._namespace.part_bytes[part])
                    if place.outcome is ReserveOutcome.RESERVED
                    else None,
                    call.connects,
                )
                for at, (digest, place) in enumerate(zip(digests, call.answer.places, strict=True))
            ]

    def _reserved(self, message: Reserved) -> None:
        call = self._calls.pop(message.ticket, None)
        if call is None:
            return
        if len(message.places) != len(call.digests):
            call.lost = True
            raise RefusedError(f"{len(message.places)} places for {len(call.digests)} reservations")
        call.answer = message
        if call.late:
            self.abandon(call.part, call.granted)
            return
        self._changed.notify_all()


def _all_full(digests: Sequence[bytes], index: int) -> list[ReservedSlot]:
    return [ReservedSlot(index + at, digest, ReserveOutcome.FULL, None) for at, digest in enumerate(digests)]
