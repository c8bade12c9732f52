"""The thread that copies parts into packs, and closes packs that are full or old enough."""

import ctypes
import time
from collections import Counter, deque
from collections.abc import Sequence

from kvferry.identity.names import PartRef
from kvferry.identity.stripes import part_checksums
from kvferry.tiers.contract import Outcome
from kvferry.tiers.disk.address import address_of
from kvferry.tiers.objects.books import DEFECT, TOO_LARGE, Books, call
from kvferry.tiers.objects.format import head_bytes, pack_head
from kvferry.tiers.objects.packs import Buffers, OpenPack, Pending, Ready, smallest_buffer
from kvferry.tiers.objects.work import Item, Report, State

Move = tuple[Item, OpenPack, int]
"""What to copy, into which pack, to which offset."""
PAUSE_S = 0.1
"""After a defect that no part can be blamed for."""
IDLE_S = 30.0
"""After so long without work the memory of packs is given back."""


class Packer:
    """``run`` on a thread of its own; the other methods under the tier's lock."""

    def __init__(self, books: Books, ready: Ready) -> None:
        settings = books.settings
        self._books = books
        self._ready = ready
        self._linger_s = settings.linger_s
        self._queue: deque[Item] = deque()
        self._queued: Counter[bytes] = Counter()  # by namespace
        self._open: dict[bytes, OpenPack] = {}  # by namespace; the one opened first first
        self._pending: dict[PartRef, Pending] = {}
        self.buffers = Buffers(
            usual_bytes=settings.pack_bytes, limit=settings.write_bytes, kept=settings.uploads
        )

    # -- under the lock ------------------------------------------------------------------------------

    def queue(self, items: Sequence[Item]) -> None:
        """After those that wait."""
        self._queue.extend(items)
        self._queued.update(item.ref.key.namespace for item in items)
        self._books.packer.notify()

    def remove(self, ref: PartRef) -> bool:
        """A part that is on its way will not count. Whether there was one."""
        pending = self._pending.pop(ref, None)
        if pending is not None:
            pending.removed = True
        return pending is not None

    def remove_all(self, namespace: bytes | None) -> None:
        """All of a namespace, or of any."""
        for ref in [ref for ref in self._pending if namespace in (None, ref.key.namespace)]:
            self.remove(ref)

    def settled(self, pack: OpenPack, uploaded: memoryview) -> list[Item]:
        """A pack is in the bucket, or will never be: who waited for it."""
        waiting: list[Item] = []
        for pending in pack.parts:
            if self._pending.get(pending.ref) is pending:
                del self._pending[pending.ref]
            waiting += pending.waiting
        self.buffers.give_back(pack.buffer, uploaded)
        self._books.packer.notify()
        return waiting

    # -- the thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the tier is closed. A part that cannot be packed fails, and the next one has its turn."""
        while not self._books.closed:
            try:
                reports, move = self._take()
            except Exception as error:  # noqa: BLE001 - counted and told by the books
                self._books.defect("packing", error)
                reports, move = self._blame(), None
            if move is not None:
                reports = self._move(*move)
            for report in reports:
                call(report)
            del reports, move  # so that no memory of a caller is held while there is nothing to do

    def _blame(self) -> list[Report]:
        """The part that was looked at fails."""
        books = self._books
        with books.lock:
            if not self._queue:
                books.packer.wait(PAUSE_S)
                return []
            item = self._queue[0]
            self._leave()
            return books.end_all([item], Outcome.FAILED, DEFECT)

    def _move(self, item: Item, pack: OpenPack, offset: int) -> list[Report]:
        """Copy it, and if that fails nobody waits for it any longer."""
        books = self._books
        try:
            self._copy(item, pack, offset)
        except Exception as error:  # noqa: BLE001 - counted and told by the books
            books.defect("copying a part", error)
            with books.lock:
                return self._undo(item, pack)
        with books.lock:
            pack.added = time.monotonic()
            report = books.unclaim(item)
        return [report] if report is not None else []

    def _undo(self, item: Item, pack: OpenPack) -> list[Report]:
        """It was reserved last: its place is the next one's."""
        books = self._books
        pending = pack.undo()
        if self._pending.get(item.ref) is pending:
            del self._pending[item.ref]
        if not pack.parts:
            del self._open[pack.namespace]
            self.buffers.give_back(pack.buffer, None)
        report = books.end(item, Outcome.FAILED, DEFECT, moved=True)
        reports = books.end_all(pending.waiting, Outcome.FAILED, DEFECT)
        return [report, *reports] if report is not None else reports

    def _take(self) -> tuple[list[Report], Move | None]:
        """Waits for something to do, or until the tier is closed."""
        books = self._books
        with books.lock:
            while not books.closed:
                now = time.monotonic()
                for pack in [pack for pack in self._lonely() if now >= pack.due(self._linger_s)]:
                    self._close(pack)
                reports, move = self._next()
                if reports or move is not None:
                    return reports, move
                due = min((pack.due(self._linger_s) for pack in self._lonely()), default=None)
                if due is None and not self.buffers.used_bytes and not books.packer.wait(IDLE_S):
                    self.buffers.trim()
                elif due is not None or self.buffers.used_bytes:
                    books.packer.wait(None if due is None else max(0.0, due - now))
            return [], None

    def _lonely(self) -> list[OpenPack]:
        """Packs that no part in the queue will join."""
        return [pack for pack in self._open.values() if not self._queued[pack.namespace]]

    def _next(self) -> tuple[list[Report], Move | None]:
        """What is known of the first item of which something is; or the first to copy, and where to."""
        books = self._books
        while self._queue:
            item = self._queue[0]
            ref = item.ref
            report: Report | None = None
            if item.state is not State.WAITING:  # it ended while it waited
                self._leave()
                continue
            if books.catalogue.use(ref, time.monotonic()):
                report = books.end(item, Outcome.OK)
            elif (pending := self._pending.get(ref)) is not None:
                pending.waiting.append(item)
            elif smallest_buffer(ref) > books.settings.write_bytes:
                report = books.end(item, Outcome.REFUSED, TOO_LARGE)
            elif (pack := self._pack_for(ref)) is None:
                return [], None
            else:
                pending, offset = pack.reserve(ref)
                self._leave()
                books.claim(item)
                pending.waiting.append(item)
                self._pending[ref] = pending
                return [], (item, pack, offset)
            self._leave()
            if report is not None:
                return [report], None
        return [], None

    def _leave(self) -> None:
        """The first of the queue."""
        namespace = self._queue.popleft().ref.key.namespace
        self._queued[namespace] -= 1
        if not self._queued[namespace]:
            del self._queued[namespace]

    def _pack_for(self, ref: PartRef) -> OpenPack | None:
        """None: there is no memory until some pack has been uploaded."""
        pack = self._open.get(ref.key.namespace)
        if pack is not None:
            if pack.fits(ref):
                return pack
            self._close(pack)
        buffer = self.buffers.take(smallest_buffer(ref))
        if buffer is None:
            for oldest in list(self._open.values())[:1]:
                self._close(oldest)
            return None
        pack = self._open[ref.key.namespace] = OpenPack(ref.key.namespace, buffer)
        return pack

    def _close(self, pack: OpenPack) -> None:
        del self._open[pack.namespace]
        self._ready(pack)

    def _copy(self, item: Item, pack: OpenPack, offset: int) -> None:
        """Only this thread writes to packs that are open, and only it closes them."""
        nbytes = item.ref.nbytes
        start = offset + head_bytes(nbytes)
        view = pack.buffer.view
        ctypes.memmove(address_of(view) + start, address_of(item.memory), nbytes)
        checksums = item.checksums or part_checksums(view[start : start + nbytes])
        view[offset:start] = pack_head(item.ref, checksums)
