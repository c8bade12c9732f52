"""Performs stages: from the disk or from objects into Valkey, part by part. On the keeper's thread.

look below ──► queued ──► reading (buffer) ──► storing in Valkey ──► answered; the buffer is free, or
                             └─ the disk failed: objects              the disk is given it too
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import CorruptError
from kvferry.identity.names import PartKey, PartRef
from kvferry.keeper.backlog import positions_in
from kvferry.keeper.below import Below, Held
from kvferry.keeper.buffers import Buffer, Buffers, Use
from kvferry.keeper.copies import Copies
from kvferry.keeper.limits import Limits
from kvferry.keeper.staging import Request, Stage, StageTable, Waiter
from kvferry.loop import Loop, Timer
from kvferry.tiers.contract import FetchItem, FetchResult, Outcome, StoreItem, Tier, Transfer

REFILL_DIVISOR = 4
"""Reads begin when this share of the memory for stages is free, so that several go to a tier at a time."""

Done = Callable[[int, Outcome], None]


@dataclass(slots=True, eq=False)
class _Batch:
    """Parts that went to a tier in one call. wanted: those under way that somebody waits for."""

    wanted: set["_Run"] = field(default_factory=set["_Run"])
    transfer: Transfer | None = None

    def leave(self, run: "_Run") -> None:
        """It came, or nobody wants it: if no other is wanted, what is left of the call may end."""
        self.wanted.discard(run)
        if not self.wanted and self.transfer is not None:
            self.transfer.cancel()


@dataclass(slots=True, eq=False)
class _Run:
    """A stage under way. name: what it is called where it comes from. disk: what the disk said of it.

    abandoned: nobody waited for it any more at some time; its tier may never end it.
    """

    stage: Stage
    buffer: Buffer
    name: PartRef
    from_disk: bool
    batch: _Batch
    checksums: tuple[bytes, ...] = ()
    disk: Outcome = Outcome.MISS
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Live:
    request: Request
    done: Done
    timer: Timer


@dataclass(slots=True)
class StageCounts:
    """Since start. parts, nbytes: staged, by the tier they came from. outcomes: of what was asked for."""

    requests: int = 0
    joined: int = 0
    promoted: int = 0
    parts: Counter[str] = field(default_factory=Counter[str])
    nbytes: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])


class Stager:
    """All stages of a keeper."""

    def __init__(
        self,
        *,
        loop: Loop,
        valkey: Tier,
        below: Below,
        buffers: Buffers,
        copies: Copies,
        dropping: Callable[[Sequence[PartRef]], frozenset[PartRef]],
        limits: Limits,
    ) -> None:
        """dropping: which parts are being deleted now."""
        self.counts = StageCounts()
        self._loop = loop
        self._valkey = valkey
        self._below = below
        self._buffers = buffers
        self._copies = copies
        self._dropping = dropping
        self._table = StageTable(max_parts=limits.staged_parts)
        self._live: dict[int, _Live] = {}
        self._runs: dict[Stage, _Run] = {}
        self._abandoned_bytes = 0  # of buffers
        self._closed = False

    @property
    def parts(self) -> int:
        """Parts that wait or are under way."""
        return len(self._table)

    @property
    def running(self) -> int:
        """Parts under way."""
        return len(self._runs)

    @property
    def requests(self) -> int:
        """Requests that are owed answers."""
        return len(self._live)

    def stage(self, refs: Sequence[PartRef], *, deadline: float, done: Done) -> Request:
        """Bring them into Valkey: ``done`` once per index, by the deadline."""
        request = self._table.open(refs, deadline)
        self.counts.requests += 1
        timer = self._loop.at(deadline, partial(self.cancel, request))
        self._live[request.number] = _Live(request, done, timer)
        if self._closed or not refs:
            self.cancel(request)
            return request
        self._below.look(
            refs, deadline=deadline, done=lambda held: self._loop.post(partial(self._looked, request, held))
        )
        return request

    def cancel(self, request: Request) -> None:
        """What has no answer is LATE. Idempotent."""
        live = self._live.get(request.number)
        if live is None:
            return
        left, unwanted = self._table.close(request)
        self._tell(live, [(index, Outcome.LATE) for index in left])
        for stage in unwanted:
            run = self._runs[stage]
            if not run.abandoned:
                run.abandoned = True
                self._set_aside(run)
            run.batch.leave(run)

    def _set_aside(self, run: _Run) -> None:
        """Its tier may hang. A disk that does is no place for copies, so their memory stands in for what it
        holds; what has no room there is at least not waited for."""
        if run.from_disk and any(self._buffers.move(run.buffer, use) for use in (Use.COPY, Use.FLUSH)):
            return
        self._abandoned_bytes += run.buffer.nbytes

    def forget(self, unwanted: Callable[[PartRef], bool]) -> None:
        """Those are being deleted: what is under way is not found in Valkey afterwards."""
        self._table.remove(unwanted)

    def forget_named(self, keys: Iterable[PartKey]) -> None:
        """The same of the parts with these keys."""
        self._table.remove_named(keys)

    def close(self) -> None:
        """Answer everything; begin nothing any more."""
        self._closed = True
        for live in list(self._live.values()):
            self.cancel(live.request)

    def pump(self) -> None:
        """Begin what may begin now."""
        share = self._buffers.share(Use.STAGE) - self._abandoned_bytes  # what hangs is not waited for
        if self._runs and self._buffers.room(Use.STAGE) < share // REFILL_DIVISOR:
            return
        begun: dict[tuple[bool, float], list[_Run]] = {}
        while (stage := self._table.peek()) is not None:
            buffer = self._buffers.take(self._below.form.below_bytes(stage.ref), Use.STAGE)
            if buffer is None:
                break
            self._table.begin(stage)
            run = self._run(stage, buffer)
            self._runs[stage] = run
            begun.setdefault((run.from_disk, stage.deadline), []).append(run)
        for runs in begun.values():
            self._read(runs)

    # ---- steps of a request

    def _looked(self, request: Request, held: Sequence[Held]) -> None:
        live = self._live.get(request.number)
        if live is None:
            return
        answers: list[tuple[int, Outcome]] = []
        positions = positions_in(request.refs)
        silent = self._loop.clock() >= request.deadline
        going = self._dropping(request.refs)
        for index, where in enumerate(held):
            ref = request.refs[index]
            if ref in going:
                answers.append((index, Outcome.MISS))
            elif not where.anywhere:
                answers.append((index, _unheld(where, silent=silent)))
            elif not self._buffers.holds(self._below.form.below_bytes(ref)):
                answers.append((index, Outcome.REFUSED))
            else:
                self.counts.joined += self._table.has(ref)
                if not self._table.enqueue(request, index, positions[index], where):
                    answers.append((index, Outcome.REFUSED))
        for index, _ in answers:
            self._table.answered(request, index)
        self._tell(live, answers)

    def _tell(self, live: _Live, answers: Sequence[tuple[int, Outcome]]) -> None:
        for index, outcome in answers:
            self.counts.outcomes[outcome.value] += 1
            live.done(index, outcome)
        if not live.request.open:
            live.timer.cancel()
            self._live.pop(live.request.number, None)

    # ---- steps of a part

    def _run(self, stage: Stage, buffer: Buffer) -> _Run:
        held = stage.held
        name = held.disk or held.objects or stage.ref
        return _Run(stage, buffer, name, held.disk is not None, _Batch())

    def _read(self, runs: Sequence[_Run]) -> None:
        """All from one tier, with one deadline."""
        first = runs[0]
        tier = self._below.disk if first.from_disk else self._below.objects
        batch = _Batch(set(runs))
        for run in runs:
            run.batch = batch
        if tier is None:
            for run in runs:
                self._finish(run, Outcome.MISS)
            return
        batch.transfer = tier.fetch(
            [FetchItem(run.name, run.buffer.memory[: run.name.nbytes]) for run in runs],
            deadline=first.stage.deadline,
            done=lambda index, result: self._loop.post(partial(self._came, runs[index], result)),
        )

    def _came(self, run: _Run, result: FetchResult) -> None:
        run.batch.leave(run)
        if run.stage.removed:
            self._finish(run, Outcome.MISS)
        elif result.outcome is Outcome.OK:
            run.checksums = result.checksums
            self._store(run)
        elif run.from_disk and self._below.objects is not None and result.outcome is not Outcome.LATE:
            run.from_disk = False
            run.disk = result.outcome
            self._read([run])
        elif result.outcome is Outcome.MISS and run.disk not in (Outcome.MISS, Outcome.CORRUPT):
            self._finish(run, run.disk)  # the disk may have it: a failure is no miss
        else:
            self._finish(run, result.outcome)

    def _store(self, run: _Run) -> None:
        stage = run.stage
        if not stage.waiters:
            self._finish(run, Outcome.LATE)
            return
        try:
            checksums = self._below.form.up(stage.ref, run.buffer.memory[: run.name.nbytes], run.checksums)
        except CorruptError:
            self._finish(run, Outcome.CORRUPT)
            return
        run.batch = _Batch({run})
        run.batch.transfer = self._valkey.store(
            [StoreItem(stage.ref, run.buffer.memory[: stage.ref.nbytes], checksums, stage.position)],
            deadline=stage.deadline,
            done=lambda index, outcome: self._loop.post(partial(self._stored, run, outcome)),
        )

    def _stored(self, run: _Run, outcome: Outcome) -> None:
        if outcome is Outcome.OK and run.stage.removed:
            self._valkey.remove([run.stage.ref])
            outcome = Outcome.MISS
        self._finish(run, outcome)

    def _finish(self, run: _Run, outcome: Outcome) -> None:
        del self._runs[run.stage]
        if run.abandoned and run.buffer.use is Use.STAGE:
            self._abandoned_bytes -= run.buffer.nbytes
        if outcome is Outcome.OK:
            source = "disk" if run.from_disk else "objects"
            self.counts.parts[source] += 1
            self.counts.nbytes[source] += run.stage.ref.nbytes
        for waiter in self._table.finished(run.stage, outcome):
            self._answer(waiter, outcome)
        if outcome is Outcome.OK and not run.from_disk and self._promote(run):
            self.counts.promoted += 1
        else:
            self._buffers.give(run.buffer)

    def _answer(self, waiter: Waiter, outcome: Outcome) -> None:
        live = self._live.get(waiter.request.number)
        if live is not None:
            self._tell(live, [(waiter.index, outcome)])

    def _promote(self, run: _Run) -> bool:
        """To the disk, from the same memory; where that is needed more, later and from Valkey."""
        ref = run.stage.ref
        if not self._table.queued and self._copies.promote(ref, run.name, run.buffer, run.checksums):
            return True
        self._copies.used([ref], [Held(objects=run.name)])
        return False


def _unheld(where: Held, *, silent: bool) -> Outcome:
    """What to say of a part that no tier says it has. silent: their time was up."""
    if not where.unknown:
        return Outcome.MISS
    return Outcome.LATE if silent else Outcome.FAILED
