"""What a ``PrefixStore`` does with streams and slots: one load's copies, one batch of a save."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvferry.client.messages import (
    LoadEnd,
    LookupAnswer,
    Pending,
    ReadyPart,
    Reason,
    ReservedSlot,
    ReserveOutcome,
)
from kvferry.client.stream import LoadStream
from kvferry.client.worker import WorkerClient
from kvferry.identity.stripes import part_checksums

RESERVE_S = 2.0  # for one reservation; a node that lets it pass opens the breaker, and the save ends
PART_WAIT_S = 0.01  # for one part, before the others are looked at again

Into = Callable[[int, int, memoryview], None]
Fill = Callable[[int, int, memoryview], None]
Has = Callable[[int, int], bool]


class LoadCopy:
    """One load, all parts in one thread: whatever part is there is copied next."""

    def __init__(self, answer: LookupAnswer) -> None:
        self._answer = answer
        self._last = answer.first_chunk + answer.count
        self._next: dict[int, int] = {}  # of parts that go on, the chunk that comes next
        self._streams: dict[int, LoadStream] = {}
        self._end = LoadEnd(Reason.COMPLETE, self._last)

    def run(self, worker: WorkerClient, parts: Sequence[int], into: Into) -> tuple[int, Reason]:
        """Whole leading chunks, and why there are no more of those that were promised."""
        with ExitStack() as opened:
            for part in parts:
                stream = self._streams[part] = worker.load(self._answer.ticket(part))
                opened.callback(stream.close)
                self._next[part] = stream.ticket.first_chunk
            while self._next:
                took = [self._take(self._streams[part], into, wait_s=0.0) for part in list(self._next)]
                if not any(took):
                    behind = min(self._next, key=self._next.__getitem__)  # which the node serves first
                    self._take(self._streams[behind], into, wait_s=PART_WAIT_S)
        whole = self._end.chunk - self._answer.first_chunk
        if whole < self._answer.count and self._answer.all_or_nothing:
            whole = 0
        return whole, self._end.reason

    def _take(self, stream: LoadStream, into: Into, *, wait_s: float) -> bool:
        """Whether something happened."""
        step = stream.next(wait_s)
        if isinstance(step, Pending):
            return False
        if isinstance(step, LoadEnd):
            self._ended(stream, step)
        else:
            self._copy(stream, step, into)
        return True

    def _copy(self, stream: LoadStream, ready: ReadyPart, into: Into) -> None:
        into(ready.index, stream.ticket.part, ready.view)
        # After the copy: a slot that was given to someone else meanwhile cannot pass.
        if part_checksums(ready.view) == ready.checksums:
            stream.copied(ready.index)
            self._next[stream.ticket.part] = ready.index + 1
        else:
            stream.corrupt(ready.index)
            self._ended(stream, LoadEnd(Reason.CORRUPT, ready.index))
        for part in self._next:
            self._streams[part].resumed()

    def _ended(self, stream: LoadStream, end: LoadEnd) -> None:
        """One part ends there; the first end of all decides."""
        del self._next[stream.ticket.part]
        if end.chunk < self._end.chunk:
            self._end = end


class SaveBatch:
    """Some chunks of one save, reserved together and filled chunk by chunk.

    held: positions of chunks all of whose parts are in the node. lost: the slots went with their connection.
    """

    def __init__(self, worker: WorkerClient, parts: Sequence[int], *, first: int, has: Has | None) -> None:
        self._worker = worker
        self._parts = parts
        self._first = self._last = first
        self._has = has
        self._slots: dict[tuple[int, int], ReservedSlot] = {}  # by position and part
        self._stored: tuple[int, bytes] | None = None  # part and digest of the last one
        self.held: set[int] = set()
        self.full = self.lost = False
        self.stored_parts = self.stored_bytes = 0
        self.declined: Counter[str] = Counter()

    def reserve(self, prefix: Sequence[bytes], digests: Sequence[bytes]) -> None:
        """Ask for a slot for every part that there is."""
        self._last = self._first + len(digests)
        for part in self._parts:
            positions = [
                at for at in range(self._first, self._last) if self._has is None or self._has(at, part)
            ]
            wanted = [digests[at - self._first] for at in positions]
            if wanted:
                slots = self._worker.reserve(prefix, wanted, part=part, timeout_s=RESERVE_S)
                self._slots.update(((positions[slot.index], part), slot) for slot in slots)

    def fill(self, fill: Fill) -> int:
        """Fill and publish; the position that there was no room for, or the one after the last."""
        try:
            for position in range(self._first, self._last):
                outcomes = {self._fill_one(position, part, fill) for part in self._parts}
                if outcomes <= {ReserveOutcome.EXISTS, None}:
                    self.held.add(position)
                if outcomes & {ReserveOutcome.FULL, ReserveOutcome.TOO_LARGE}:
                    self.full = True
                    return position
            return self._last
        finally:
            self._give_back()

    def settle(self) -> None:
        """Wait until the node has read what was published: a load by another connection finds it."""
        if self._stored is not None and not self.lost:
            part, digest = self._stored
            again = self._worker.reserve([], [digest], part=part, timeout_s=RESERVE_S)[0]
            if (
                again.outcome is ReserveOutcome.RESERVED
            ):  # evicted meanwhile, from a pool too small to hold it
                self._worker.abandon(part, [digest], connection=again.connection)
            self.lost |= again.outcome is ReserveOutcome.FULL

    def _fill_one(self, position: int, part: int, fill: Fill) -> ReserveOutcome | None:
        """EXISTS when the part is in the node; None when there is no such part."""
        slot = self._slots.pop((position, part), None)
        if slot is None:
            return None
        outcome = slot.outcome
        if slot.view is not None:
            try:
                fill(position, part, slot.view)
            except BaseException:
                self._worker.abandon(part, [slot.digest], connection=slot.connection)
                raise
            filled = [(slot.digest, part_checksums(slot.view))]
            if self._worker.commit(part, filled, connection=slot.connection):
                self._stored = part, slot.digest
                self.stored_parts += 1
                self.stored_bytes += slot.view.nbytes
                return ReserveOutcome.EXISTS
            self.lost = True
            outcome = ReserveOutcome.FULL
        if outcome is not ReserveOutcome.EXISTS:
            self.declined[outcome.value] += 1
        return outcome

    def _give_back(self) -> None:
        """What was reserved and is not filled."""
        left, self._slots = self._slots, {}
        for part in self._parts:
            slots = [slot for (_, of), slot in left.items() if of == part and slot.view is not None]
            for connection in {slot.connection for slot in slots}:  # one, but for a loss between the parts
                digests = [slot.digest for slot in slots if slot.connection == connection]
                self._worker.abandon(part, digests, connection=connection)
