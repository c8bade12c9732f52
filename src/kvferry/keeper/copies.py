"""Performs copies: from Valkey to the disk and to objects, from the disk to objects. On the keeper's thread.

A part read from Valkey is written to the disk, and to objects from the same memory where there is room;
otherwise objects get it later, from the disk.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.backlog import RANKS, Backlog, positions_in, rank_of
from kvferry.keeper.below import NOWHERE, Ask, Below, Held
from kvferry.keeper.buffers import Buffer, Buffers, Use
from kvferry.keeper.keeping import Line, Task
from kvferry.keeper.limits import Limits
from kvferry.loop import Loop, Timer
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier

TOO_LARGE = "too_large"
HANGS = 2
"""A disk hangs that takes so many times as long for a copy as that may take."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A part in a buffer. name, checksums: what it is below. writes: tiers that still read the buffer."""

    ref: PartRef
    buffer: Buffer
    held: Held = NOWHERE
    name: PartRef | None = None
    checksums: tuple[bytes, ...] = ()
    writes: int = 0


class Copies:
    """keep: the line to the disk; flush: to objects; None where there is no such tier."""

    def __init__(self, *, loop: Loop, valkey: Tier, below: Below, buffers: Buffers, limits: Limits) -> None:
        self._loop = loop
        self._valkey = valkey
        self._below = below
        self._buffers = buffers
        self._limits = limits
        self._timer: Timer | None = None
        self._wakes_at = 0.0
        self._closed = False
        self._at_disk: dict[_Copy, tuple[float, Line, Task]] = {}  # since when, oldest first
        self._to_disk_bytes = 0
        self._hung = False
        self._keep_line = self._line(limits.copy_share, batch_bytes=limits.copy_bytes)
        half = buffers.share(Use.FLUSH) // 2  # the rest is for others, should the disk hang
        self._flush_line = self._line(1.0, batch_bytes=min(limits.copy_bytes, half))
        self.keep = self._keep_line if below.disk is not None else None
        self.flush = self._flush_line if below.objects is not None else None

    def _line(self, share: float, *, batch_bytes: int) -> Line:
        backlog = Backlog(max_parts=self._limits.backlog_parts, max_bytes=self._limits.backlog_bytes)
        return Line(backlog, batch_bytes=batch_bytes, share=share, pause_s=self._limits.retry_s)

    @property
    def running(self) -> int:
        """Parts under way."""
        return sum(line.running for line in self._lines)

    @property
    def disk_hangs(self) -> bool:
        """Whether it has not ended a read or write of a copy long after its time."""
        return bool(self._at_disk) and self._loop.clock() > self._hangs_at

    @property
    def _hangs_at(self) -> float:
        began = next((began for began, _, _ in self._at_disk.values()), math.inf)
        return began + HANGS * self._limits.copy_s

    @property
    def _lines(self) -> list[Line]:
        return [line for line in (self.keep, self.flush) if line is not None]

    def stored(self, refs: Sequence[PartRef], positions: Sequence[int], likely: Sequence[bool]) -> None:
        """Those are in Valkey now. Only what is likely to be wanted again is worth a copy."""
        for ref, position, wanted in zip(refs, positions, likely, strict=True):
            if wanted:
                self._want(ref, rank_of(position, used=False))

    def used(self, refs: Sequence[PartRef], held: Sequence[Held]) -> None:
        """Those were used, and are held below so."""
        for ref, where, position in zip(refs, held, positions_in(refs), strict=True):
            rank = rank_of(position, used=True)
            if where.unwanted:
                continue
            if self.keep is not None and where.disk is None:
                self._want(ref, rank)
            elif self.flush is not None and where.objects is None:
                self._want_in(self.flush, ref, rank)

    def missing(self, names: Sequence[PartRef]) -> None:
        """Those are on the disk, so called there, and not in objects."""
        for name in names:
            if self.flush is not None and self._buffers.holds(self._below.form.below_bytes(name)):
                self.flush.want(name, RANKS - 1, self._loop.clock(), named=True)

    def forget(self, unwanted: Callable[[PartRef], bool], *, tier: str | None = None) -> None:
        """Those are being deleted in ``disk``, ``objects`` or both: no copy that is under way survives."""
        if tier in (None, "disk"):
            self._keep_line.forget(unwanted)
        if tier in (None, "objects"):
            self._flush_line.forget(unwanted)

    def forget_named(self, keys: Collection[PartKey], *, tier: str | None = None) -> None:
        """The same of the parts with these keys."""
        if tier in (None, "disk"):
            self._keep_line.forget_named(keys)
        if tier in (None, "objects"):
            names = [name.key for key in keys for name in self._below.form.names(PartRef(key, 1))]
            self._flush_line.forget_named({*keys, *names})

    def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def pump(self, *, waited_for: bool) -> None:
        """Begin what may begin now. waited_for: whether requests wait for stages."""
        if self._closed:
            return
        self._pass_by_disk()
        if self.keep is not None:
            self._begin(self.keep, Use.COPY, self._kept_looked, ask=Ask.DISK, waited_for=waited_for)
        if self.flush is not None:
            self._begin(self.flush, Use.FLUSH, self._flush_looked, ask=Ask.BOTH, waited_for=waited_for)
        self._sleep()

    def promote(self, ref: PartRef, name: PartRef, buffer: Buffer, checksums: tuple[bytes, ...]) -> bool:
        """What came from objects goes to the disk too. False: not now, and the buffer stays the caller's."""
        if self.keep is None or self._closed or not self._buffers.move(buffer, Use.COPY):
            return False
        task = self.keep.adopt(ref, rank_of(0, used=True), self._loop.clock())
        if task is None:
            return False
        copy = _Copy(ref, buffer, Held(objects=name), name, checksums)
        self._write_disk(copy, task)
        return True

    def _pass_by_disk(self) -> None:
        """When it hangs: nobody waits for its reads to end, and what waits for it goes to objects too."""
        hung, self._hung = self._hung, self.disk_hangs
        if not self._hung:
            return
        for _, line, task in self._at_disk.values():
            line.read(task, self._loop.clock())
        if not hung and self.flush is not None:
            for wanted in list(self._keep_line.waiting):
                self._want_in(self.flush, wanted.ref, wanted.rank)

    # ---- wishes

    def _want(self, ref: PartRef, rank: int) -> None:
        """On the disk first; while that is in trouble also in objects at once."""
        if self.keep is not None:
            self._want_in(self.keep, ref, rank)
        if self.flush is not None and (self.keep is None or self.keep.paused or self.disk_hangs):
            self._want_in(self.flush, ref, rank)

    def _want_in(self, line: Line, ref: PartRef, rank: int) -> None:
        if self._buffers.holds(self._below.form.below_bytes(ref)):
            line.want(ref, rank, self._loop.clock())
        else:
            line.counts.failed[TOO_LARGE] += 1

    def _begin(
        self,
        line: Line,
        use: Use,
        looked: Callable[[Sequence[tuple[Task, _Copy]], Sequence[Held]], None],
        *,
        ask: Ask,
        waited_for: bool,
    ) -> None:
        copies: list[_Copy] = []

        def reserve(ref: PartRef) -> bool:
            nbytes = self._to_disk_bytes + sum(copy.ref.nbytes for copy in copies) + ref.nbytes
            if use is Use.COPY and self._to_disk_bytes and nbytes > self._buffers.share(use):
                return False  # what the disk does not take is not to fill the memory for objects
            buffer = self._buffers.take(self._below.form.below_bytes(ref), use)
            if buffer is not None:
                copies.append(_Copy(ref, buffer))
            return buffer is not None

        now = self._loop.clock()
        try:
            tasks = line.take(now, waited_for=waited_for, reserve=reserve)
        except BaseException:
            for copy in copies:
                self._release(copy)
            raise
        if not tasks:
            return
        batch = list(zip(tasks, copies, strict=True))
        self._below.look(
            [task.ref for task in tasks],
            deadline=now + self._limits.ask_s,
            done=lambda held: self._loop.post(partial(looked, batch, held)),
            ask=ask,
            named=frozenset(task.ref for task in tasks if task.wanted.named),
        )

    def _sleep(self) -> None:
        now = self._loop.clock()
        times = [due for line in self._lines if (due := line.due_at(now)) is not None]
        times += [self._hangs_at] if self._at_disk and self._hangs_at > now else []
        if times and not now < self._wakes_at <= min(times):
            if self._timer is not None:
                self._timer.cancel()
            self._wakes_at = min(times)
            self._timer = self._loop.at(self._wakes_at, _nothing)

    # ---- to the disk

    def _kept_looked(self, batch: Sequence[tuple[Task, _Copy]], held: Sequence[Held]) -> None:
        line, now = self._keep_line, self._loop.clock()
        reading: list[tuple[Task, _Copy]] = []
        for (task, copy), where in zip(batch, held, strict=True):
            copy.held = where
            if task.removed:
                line.gone(task, now)
            elif where.disk is not None:
                line.was_there(task, now)
                if self.flush is not None:
                    self.flush.want(task.ref, task.wanted.rank, now)
            else:
                reading.append((task, copy))
                continue
            self._release(copy)
        self._fetch_valkey(reading, self._kept_read)

    def _kept_read(self, task: Task, copy: _Copy, result: FetchResult) -> None:
        line, now = self._keep_line, self._loop.clock()
        line.read(task, now)
        if not self._came(line, task, copy, result):
            return
        self._write_disk(copy, task)
        if self.flush is not None:
            riding = None
            if self._buffers.move(copy.buffer, Use.FLUSH):
                riding = self.flush.adopt(task.ref, task.wanted.rank, now)
            if riding is not None:
                self._write_objects(copy, riding)

    def _write_disk(self, copy: _Copy, task: Task) -> None:
        self._at_disk[copy] = (self._loop.clock(), self._keep_line, task)
        self._to_disk_bytes += copy.ref.nbytes
        self._write(self._below.disk, copy, self._limits.copy_s, partial(self._on_disk, copy, task))

    def _on_disk(self, copy: _Copy, task: Task, outcome: Outcome) -> None:
        line, now = self._keep_line, self._loop.clock()
        del self._at_disk[copy]
        self._to_disk_bytes -= copy.ref.nbytes
        self._written(copy)
        if outcome is Outcome.OK:
            line.copied(task, now)
            self._undo(self._below.disk, copy, task)
        else:
            line.again(task, outcome.value, now)
        if self.flush is not None and copy.held.objects is None and not task.removed:
            self.flush.want(task.ref, task.wanted.rank, now)  # unless it is on its way there

    # ---- to objects

    def _flush_looked(self, batch: Sequence[tuple[Task, _Copy]], held: Sequence[Held]) -> None:
        line, now = self._flush_line, self._loop.clock()
        from_valkey: list[tuple[Task, _Copy]] = []
        from_disk: list[tuple[Task, _Copy]] = []
        for (task, copy), where in zip(batch, held, strict=True):
            copy.held = where
            if task.removed:
                line.gone(task, now)
                self._release(copy)
            elif where.objects is not None:
                line.was_there(task, now)
                self._release(copy)
            elif task.wanted.named and (where.disk is None or self.disk_hangs):
                self._not_on_disk(task, copy, unknown=where.unknown)
            else:
                on_disk = where.disk is not None and not self.disk_hangs
                (from_disk if on_disk else from_valkey).append((task, copy))
        self._fetch_disk(from_disk)
        self._fetch_valkey(from_valkey, self._flush_read)

    def _fetch_disk(self, batch: Sequence[tuple[Task, _Copy]]) -> None:
        disk = self._below.disk
        items: list[FetchItem] = []
        for task, copy in batch:
            if copy.held.disk is not None:
                self._at_disk[copy] = (self._loop.clock(), self._flush_line, task)
                items.append(FetchItem(copy.held.disk, copy.buffer.memory[: copy.held.disk.nbytes]))
        if disk is not None and items:
            disk.fetch(
                items,
                deadline=self._loop.clock() + self._limits.copy_s,
                done=lambda index, result: self._loop.post(
                    partial(self._flush_from_disk, *batch[index], result)
                ),
            )

    def _flush_from_disk(self, task: Task, copy: _Copy, result: FetchResult) -> None:
        del self._at_disk[copy]
        if result.outcome is not Outcome.OK and task.wanted.named:
            self._not_on_disk(task, copy, unknown=result.outcome not in (Outcome.MISS, Outcome.CORRUPT))
            return
        if result.outcome is not Outcome.OK:  # Valkey may still have it
            self._fetch_valkey([(task, copy)], self._flush_read)
            return
        self._flush_line.read(task, self._loop.clock())
        copy.name, copy.checksums = copy.held.disk, result.checksums
        self._write_objects(copy, task)

    def _not_on_disk(self, task: Task, copy: _Copy, *, unknown: bool) -> None:
        """What is nowhere else. unknown: or the disk did not say."""
        now = self._loop.clock()
        if unknown and not task.removed:
            self._flush_line.again(task, "read_disk", now)
        else:
            self._flush_line.gone(task, now)
        self._release(copy)

    def _flush_read(self, task: Task, copy: _Copy, result: FetchResult) -> None:
        self._flush_line.read(task, self._loop.clock())
        if self._came(self._flush_line, task, copy, result):
            self._write_objects(copy, task)

    def _write_objects(self, copy: _Copy, task: Task) -> None:
        self._write(self._below.objects, copy, self._limits.flush_s, partial(self._in_objects, copy, task))

    def _in_objects(self, copy: _Copy, task: Task, outcome: Outcome) -> None:
        line, now = self._flush_line, self._loop.clock()
        self._written(copy)
        if outcome is Outcome.OK:
            line.copied(task, now)
            self._undo(self._below.objects, copy, task)
        else:
            line.again(task, outcome.value, now)

    # ---- both

    def _fetch_valkey(
        self,
        batch: Sequence[tuple[Task, _Copy]],
        read: Callable[[Task, _Copy, FetchResult], None],
    ) -> None:
        if batch:
            self._valkey.fetch(
                [FetchItem(copy.ref, copy.buffer.memory[: copy.ref.nbytes]) for _, copy in batch],
                deadline=self._loop.clock() + self._limits.copy_s,
                done=lambda index, result: self._loop.post(partial(read, *batch[index], result)),
            )

    def _came(self, line: Line, task: Task, copy: _Copy, result: FetchResult) -> bool:
        """Whether Valkey gave the part and it has a place below; otherwise it ended."""
        now, outcome = self._loop.clock(), result.outcome
        if outcome is Outcome.OK and not task.removed:
            memory = copy.buffer.memory[: self._below.form.below_bytes(copy.ref)]
            found = self._below.form.down(copy.ref, memory, result.checksums)
            if found is not None:
                copy.name, copy.checksums = found
                return True
            line.given_up(task, "no_name", now)
        elif outcome in (Outcome.OK, Outcome.MISS):
            line.gone(task, now)
        elif outcome is Outcome.CORRUPT:
            line.given_up(task, outcome.value, now)
        else:
            line.again(task, f"read_{outcome.value}", now)
        self._release(copy)
        return False

    def _write(
        self, tier: Tier | None, copy: _Copy, within_s: float, done: Callable[[Outcome], None]
    ) -> None:
        copy.writes += 1
        if tier is None or copy.name is None:
            done(Outcome.FAILED)
            return
        item = StoreItem(copy.name, copy.buffer.memory[: copy.name.nbytes], copy.checksums)
        tier.store(
            [item],
            deadline=self._loop.clock() + within_s,
            done=lambda index, outcome: self._loop.post(partial(done, outcome)),
        )

    def _written(self, copy: _Copy) -> None:
        copy.writes -= 1
        if not copy.writes:
            self._release(copy)

    def _release(self, copy: _Copy) -> None:
        self._buffers.give(copy.buffer)

    @staticmethod
    def _undo(tier: Tier | None, copy: _Copy, task: Task) -> None:
        """It was deleted while it was being written."""
        if task.removed and tier is not None and copy.name is not None:
            tier.remove([copy.name])


def _nothing() -> None:
    """A timer that only wakes the loop: its turn ends with a look at what may begin."""
