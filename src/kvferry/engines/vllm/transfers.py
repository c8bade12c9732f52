"""The threads that copy: loads on two, saves on one of lower priority. Nothing here touches vLLM.

A load is pulled by one thread at a time and copied by both: whoever pulled a part copies it while the
other pulls the next. Every job ends in exactly one result, whatever happens; a job's blocks are never
written or read after its result is out.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvferry.client.messages import (
    LoadEnd,
    LoadTicket,
    Pending,
    ReadyPart,
    Reason,
    ReservedSlot,
    ReserveOutcome,
)
from kvferry.engines.planning import GroupLoad, failed_block_ids
from kvferry.engines.vllm.copy import BlockCopier, Fence
from kvferry.engines.vllm.messages import LoadResult, SaveResult, SaveSpec, WorkerPart
from kvferry.identity.stripes import part_checksums

_log = logging.getLogger("vllm.kvferry")

LOAD_THREADS = 2
PULL_WAIT_S = 0.02
SHARED_PULL_WAIT_S = 0.002
RESERVE_TIMEOUT_S = 1.0
MAX_QUEUED_SAVES = 4096


class Stream(Protocol):
    """What is used of ``LoadStream``."""

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending: ...
    def copied(self, index: int) -> None: ...
    def corrupt(self, index: int) -> None: ...
    def close(self) -> None: ...


class Store(Protocol):
    """What is used of ``WorkerClient``."""

    def load(self, ticket: LoadTicket) -> Stream: ...
    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]: ...
    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool: ...
    def abandon(self, part: int, digests: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


class LoadJob:
    """One part of a load on this rank. All fields are guarded by the pool's condition.

    copier: to the blocks of the part's group. wanted: those to fill.
    """

    def __init__(
        self,
        request_id: str,
        stream: Stream,
        *,
        copier: BlockCopier,
        wanted: GroupLoad,
        part: WorkerPart,
        after: Fence | None,
    ) -> None:
        self.request_id = request_id
        self.stream = stream
        self.copier = copier
        self.wanted = wanted
        self.part = part
        self.after = after
        self.pulling = False
        self.copying = 0
        self.ended = False
        self.cancelled = False
        self.arrived: set[int] = set()
        self.nbytes = 0
        self.reason: str = Reason.COMPLETE
        self.began = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether no thread has anything left to do for it."""
        return self.ended and not self.pulling and not self.copying

    def stop(self, reason: str) -> None:
        """No further parts. The first reason given stays, unless it was that all is well."""
        if not self.ended or self.reason == Reason.COMPLETE:
            self.ended, self.reason = True, reason

    def result(self) -> tuple[LoadResult, list[int]]:
        """The result, and the blocks that do not hold what was promised."""
        total = len(self.wanted.blocks)
        failed = failed_block_ids(self.wanted.blocks, self.arrived)
        chunks = next((p for p in range(total) if p not in self.arrived), total)
        reason = self.reason if chunks < total else Reason.COMPLETE
        if chunks < total and reason == Reason.COMPLETE:
            reason = Reason.ENDED
        seconds = time.monotonic() - self.began
        return LoadResult(self.request_id, chunks, self.nbytes, seconds, str(reason)), failed


class Loader:
    """Two threads that serve all loads of a worker, oldest first."""

    def __init__(
        self,
        *,
        on_thread_start: Callable[[], None],
        on_done: Callable[[LoadResult, list[int]], None],
        threads: int = LOAD_THREADS,
    ) -> None:
        self._on_thread_start = on_thread_start
        self._on_done = on_done
        self._changed = threading.Condition()
        self._jobs: list[LoadJob] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-load-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: LoadJob) -> None:
        """Begin. The result goes to ``on_done`` from a copying thread."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request's load early; its result still comes."""
        with self._changed:
            for job in self._jobs:
                if job.request_id == request_id:
                    job.cancelled = True

    def close(self) -> None:
        """End all loads and join the threads."""
        with self._changed:
            self._closing = True
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        self._on_thread_start()
        while True:
            with self._changed:
                while (job := self._claim()) is None:
                    if self._closing and not self._jobs:
                        return
                    self._changed.wait()
                alone = len(self._jobs) == 1
            got = self._pull(job, PULL_WAIT_S if alone else SHARED_PULL_WAIT_S)
            if isinstance(got, ReadyPart):
                with self._changed:
                    job.pulling = False
                    job.copying += 1
                    self._changed.notify()
                self._copied(job, got, self._copy(job, got))
            else:
                self._release(job, got)

    def _claim(self) -> LoadJob | None:
        """The next job nobody pulls, moved to the back so that jobs take turns."""
        for at, job in enumerate(self._jobs):
            if not job.pulling and not job.ended:
                job.pulling = True
                self._jobs.append(self._jobs.pop(at))
                return job
        return None

    def _pull(self, job: LoadJob, wait_s: float) -> ReadyPart | LoadEnd | Pending:
        if job.cancelled:
            return LoadEnd(Reason.ENDED, job.wanted.first_chunk)
        try:
            return job.stream.next(wait_s)
        except Exception:  # noqa: BLE001 - a copying thread never dies of one load
            _log.exception("kvferry: a load failed and its rest is recomputed; please report this")
            return LoadEnd(Reason.FAILED, job.wanted.first_chunk)

    def _copy(self, job: LoadJob, ready: ReadyPart) -> Reason:
        """COMPLETE when the part is in the engine's blocks, bit for bit."""
        try:
            first, blocks = job.wanted.needed(ready.index - job.wanted.first_chunk)
            job.copier.load(ready.view, blocks, first=first, after=job.after)
            # After the copy: a slot that was given to someone else meanwhile cannot pass.
            if part_checksums(ready.view) != ready.checksums:
                job.stream.corrupt(ready.index)
                return Reason.CORRUPT
            if job.part.replicas == 1:  # else another rank may still be reading the slot
                job.stream.copied(ready.index)
        except Exception:  # noqa: BLE001 - nor of one part
            _log.exception("kvferry: a part could not be copied and is recomputed; please report this")
            return Reason.FAILED
        return Reason.COMPLETE

    def _copied(self, job: LoadJob, ready: ReadyPart, outcome: Reason) -> None:
        with self._changed:
            job.copying -= 1
            if outcome is Reason.COMPLETE:
                position = ready.index - job.wanted.first_chunk
                job.arrived.add(position)
                blocks = job.wanted.blocks[position]
                job.nbytes += len(blocks) * job.copier.block_bytes
            else:
                job.stop(outcome)
            self._finish_if_over(job)

    def _release(self, job: LoadJob, end: LoadEnd | Pending) -> None:
        """Stop pulling for now, or for good."""
        with self._changed:
            job.pulling = False
            if isinstance(end, LoadEnd):
                job.stop(end.reason)
            self._finish_if_over(job)
            self._changed.notify()

    def _finish_if_over(self, job: LoadJob) -> None:
        if job.over and job in self._jobs:
            self._jobs.remove(job)
            job.stream.close()
            self._on_done(*job.result())
            self._changed.notify_all()


class SaveJob(NamedTuple):
    """One group's parts of a save on this rank. copier: of the group's blocks."""

    spec: SaveSpec
    store: Store
    copier: BlockCopier
    part: WorkerPart
    rank: int
    after: Fence | None


class Saver:
    """One thread that copies blocks out, in the order of the steps that computed them."""

    def __init__(
        self,
        *,
        on_thread_start: Callable[[], None],
        on_done: Callable[[SaveResult], None],
    ) -> None:
        self._on_thread_start = on_thread_start
        self._on_done = on_done
        self._changed = threading.Condition()
        self._queue: deque[SaveJob] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-save", daemon=True)
        self._thread.start()

    def submit(self, job: SaveJob) -> None:
        """Copy these chunks' blocks and publish them. The result goes to ``on_done``."""
        with self._changed:
            if not self._closing and len(self._queue) < MAX_QUEUED_SAVES:
                self._queue.append(job)
                self._changed.notify()
                return
        self._on_done(declined(job.spec))

    def close(self) -> None:
        """Drop what is queued and join the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        self._on_thread_start()
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                closing = self._closing
            result = declined(job.spec)
            try:
                if not closing:
                    result = self._save(job)
            except Exception:  # noqa: BLE001 - nor the saving thread of one save
                _log.exception("kvferry: chunks could not be stored; please report this")
            self._on_done(result)

    def _save(self, job: SaveJob) -> SaveResult:
        spec, store, part = job.spec, job.store, job.part
        # Ranks with equal bytes take turns; the others count the chunk as stored, the writer decides.
        turn = job.rank % part.replicas
        mine = [chunk for chunk in spec.chunks if chunk.number % part.replicas == turn]
        stored = [c.digest for c in spec.chunks if c not in mine]
        refused = nbytes = 0
        if mine:
            slots = store.reserve(
                spec.prefix, [c.digest for c in mine], part=part.number, timeout_s=RESERVE_TIMEOUT_S
            )
            open_slots = {slot.digest for slot in slots if slot.outcome is ReserveOutcome.RESERVED}
            lost = False
            try:
                for chunk, slot in zip(mine, slots, strict=True):
                    if slot.outcome is ReserveOutcome.EXISTS:
                        stored.append(chunk.digest)
                    elif slot.view is None or lost:
                        refused += 1
                    else:
                        job.copier.save(chunk.blocks, slot.view, after=job.after)
                        filled = [(chunk.digest, part_checksums(slot.view))]
                        open_slots.discard(chunk.digest)
                        if store.commit(part.number, filled):
                            stored.append(chunk.digest)
                            nbytes += slot.view.nbytes
                        else:  # the slots went with their connection: others are given them shortly
                            refused += 1
                            lost = True
            finally:
                if open_slots:
                    store.abandon(part.number, sorted(open_slots))
        return SaveResult(spec.save_id, tuple(stored), refused, nbytes)


def declined(spec: SaveSpec) -> SaveResult:
    """The result of a save that is not made."""
    return SaveResult(spec.save_id, (), len(spec.chunks), 0)
