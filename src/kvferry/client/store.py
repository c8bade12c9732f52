"""A small blocking client: match, load and save, for engines that call from threads of their own.

Any thread may call. A call takes a bounded time: it waits for the node's answer (``answer_s``), for the
load's deadline (the node's, at most ``deadline_s``) and its stall timeout, or for reservations
(``copying.RESERVE_S`` each); what the callbacks take comes on top. A node that is lost, silent or full costs
no exception: the call returns less, and ``statistics`` says why.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.client.copying import Fill, Has, Into, LoadCopy, SaveBatch
from kvferry.client.forks import fork_safe_lock
from kvferry.client.messages import LookupAnswer, LookupRequest, NamespaceInfo, Prefill, Reason
from kvferry.client.scheduler import SchedulerClient
from kvferry.client.worker import WorkerClient

ANSWER_S = 0.25
DEADLINE_S = 10.0
ASK_AGAIN_S = 0.0005
BATCH_BYTES = 64 << 20  # reserved at a time
POOL_DIVISOR = 8  # and at most this fraction of the pool: a node lets one connection hold a quarter unfilled
MAX_ENGINE = 256  # characters of the engine's label in a request's id

UNWEIGHED = Prefill(0.0, 0.0, 0.0)  # load whatever is there: the caller has nothing better to do


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Since start. matches, loads, saves: calls. loaded_chunks, loaded_bytes: whole and verified ones.

    matched, ended: matches and loads by why they reached no further (``Reason``), "complete" for those that
    found, or brought, all that was asked for.
    declined: parts that were not stored, by ``ReserveOutcome``; "full" also counts those that a node that is
    gone or silent gave no place.
    """

    connected: bool
    matches: int
    matched: dict[str, int]
    loads: int
    loaded_chunks: int
    loaded_bytes: int
    ended: dict[str, int]
    saves: int
    stored_parts: int
    stored_bytes: int
    declined: dict[str, int]


class PrefixStore:
    """One namespace of one node. ``close`` it; its threads are daemons."""

    def __init__(
        self,
        *,
        socket_path: Path | str,
        engine: str,
        namespace: NamespaceInfo,
        token: str = "",
        group: int | None = None,
        answer_s: float = ANSWER_S,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine: names this process to people. answer_s: how long a match or load waits for the node's
        answer. deadline_s: of a load; the node's setting if that is less.
        """
        self._namespace = namespace
        self._parts = [part for part, nbytes in enumerate(namespace.part_bytes) if nbytes]
        self._deadline_s = deadline_s
        self._clock = clock
        self._requests = (f"{engine[:MAX_ENGINE]}/{os.getpid()}/{n}" for n in itertools.count(1))
        self._lock = fork_safe_lock()
        self._matches = 0
        self._matched: Counter[str] = Counter()
        self._loads = self._loaded_chunks = self._loaded_bytes = 0
        self._saves = self._stored_parts = self._stored_bytes = 0
        self._ended: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._scheduler = SchedulerClient(
            socket_path=socket_path,
            engine=engine,
            namespace=namespace,
            lookup_wait_s=answer_s,
            token=token,
            group=group,
            clock=clock,
        )
        self._worker = WorkerClient(
            socket_path=socket_path,
            engine=engine,
            rank=0,
            namespace=namespace,
            token=token,
            group=group,
            clock=clock,
        )

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a node, for tests and start-up reports; nothing else needs it."""
        give_up = self._clock() + timeout_s
        connected = self._scheduler.wait_connected(timeout_s)
        return connected and self._worker.wait_connected(max(0.0, give_up - self._clock()))

    @property
    def connected(self) -> bool:
        """Whether there is a node now."""
        return self._scheduler.connected and self._worker.connected

    @property
    def last_error(self) -> str:
        """Why there is no node; empty while there is one, or before the first attempt."""
        return self._worker.last_error

    def match(self, digests: Sequence[bytes]) -> int:
        """How many leading chunks could be loaded now. Nothing is pinned: a load may bring less."""
        answer = self._scheduler.match(digests)
        with self._lock:
            self._matches += 1
            self._matched[answer.reason.value] += 1
        return answer.count

    def load(self, digests: Sequence[bytes], into: Into, *, first: int = 0) -> int:
        """Bring chunks from ``first`` on; how many of them, without a gap, are whole and verified.

        digests: of all the prompt's chunks. ``into(chunk, part, view)`` copies out of the pool's memory and
        writes nothing there. It is called before the bytes are verified, so only chunks that the returned
        number counts may be used: those beyond may have been copied partly or wrongly. Parts of different
        chunks mix.

        Of a part that only the last chunks before a boundary are needed of (``NamespaceInfo.trailing``) only
        those come, and such a load brings all that it found, or 0.

        What ``into`` raises ends the load, leaves nothing pinned, and is raised here.
        """
        answer = self._ask(digests, first)
        whole, reason = 0, answer.reason
        try:
            if answer.count:
                reason = Reason.FAILED  # unless the callback comes through
                whole, reason = self._run(answer, into)
        finally:
            with self._lock:
                self._loads += 1
                self._loaded_chunks += whole
                self._loaded_bytes += sum(
                    max(0, whole - answer.start(part)) * self._namespace.part_bytes[part]
                    for part in self._parts
                )
                self._ended[reason.value] += 1
        return whole

    def save(
        self, prefix: Sequence[bytes], digests: Sequence[bytes], fill: Fill, *, has: Has | None = None
    ) -> int:
        """Store chunks; how many of them, without a gap, the node holds now, stored before or by this call.

        prefix: digests of the chunks before them. ``fill(position, part, view)`` writes all of the part of
        ``digests[position]`` into the pool's memory. has: which parts there are; None: all. A part that
        another is storing just now counts as not held; one that there is no room for, and the loss of the
        node, end the save.

        What ``fill`` raises ends the save, gives back what is not filled, and is raised here.
        """
        held: set[int] = set()
        at = 0
        epoch = None
        try:
            while at < len(digests):
                batch = SaveBatch(self._worker, self._parts, first=at, has=has)
                batch.reserve([*prefix, *digests[:at]], digests[at : at + self._batch_chunks()])
                epoch = epoch or self._worker.epoch
                try:
                    at = batch.fill(fill)
                finally:
                    self._count_saved(batch)
                batch.settle()
                held |= batch.held
                if batch.lost or not self._worker.connected or self._worker.epoch != epoch:
                    return 0  # and what it held before with it
                if batch.full and not batch.stored_parts:
                    break  # and not just what one connection may reserve at a time
        finally:
            with self._lock:
                self._saves += 1
        return next(n for n in itertools.count() if n not in held)

    def statistics(self) -> StoreStatistics:
        """A snapshot."""
        connected = self.connected
        with self._lock:
            return StoreStatistics(
                connected=connected,
                matches=self._matches,
                matched=dict(self._matched),
                loads=self._loads,
                loaded_chunks=self._loaded_chunks,
                loaded_bytes=self._loaded_bytes,
                ended=dict(self._ended),
                saves=self._saves,
                stored_parts=self._stored_parts,
                stored_bytes=self._stored_bytes,
                declined=dict(self._declined),
            )

    def close(self) -> None:
        """Idempotent; joins the threads. Later calls find and store nothing."""
        self._scheduler.close()
        self._worker.close()

    def _ask(self, digests: Sequence[bytes], first: int) -> LookupAnswer:
        with self._lock:
            request_id = next(self._requests)
        self._scheduler.lookup(
            LookupRequest(
                request_id=request_id,
                chunks=digests,
                first_chunk=first,
                prompt_tokens=len(digests) * self._namespace.chunk_tokens,
                prefill=UNWEIGHED,
                deadline_cap_s=self._deadline_s,
            )
        )
        while (answer := self._scheduler.poll(request_id)) is None:  # which gives up by itself
            time.sleep(ASK_AGAIN_S)
        return answer

    def _run(self, answer: LookupAnswer, into: Into) -> tuple[int, Reason]:
        try:
            whole, ended = LoadCopy(answer).run(self._worker, self._parts, into)
        finally:
            self._scheduler.end(answer.load_id)
        return whole, answer.reason if ended is Reason.COMPLETE else ended

    def _batch_chunks(self) -> int:
        mapping = self._worker.mapping
        nbytes = BATCH_BYTES if mapping is None else min(BATCH_BYTES, mapping.nbytes // POOL_DIVISOR)
        return max(1, nbytes // max(1, sum(self._namespace.part_bytes)))

    def _count_saved(self, batch: SaveBatch) -> None:
        with self._lock:
            self._stored_parts += batch.stored_parts
            self._stored_bytes += batch.stored_bytes
            self._declined.update(batch.declined)
