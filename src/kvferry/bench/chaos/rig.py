"""What one engine process is made of: the clients, the copying threads, its blocks, its journal."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvferry.bench.chaos.contents import PART_BYTES, Contents, Prompts, namespace_of
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import JournalWriter, Kind, Operation
from kvferry.bench.chaos.memory import Blocks
from kvferry.client.messages import LoadTicket, ReservedSlot
from kvferry.client.scheduler import SchedulerClient
from kvferry.client.stream import LoadStream
from kvferry.client.worker import WorkerClient
from kvferry.engines.vllm.messages import LoadResult, SaveResult
from kvferry.engines.vllm.transfers import RESERVE_TIMEOUT_S, Loader, Saver
from kvferry.node.wire import ReserveOutcome

LOOKUP_WAIT_S = 0.05
PAUSED_POLL_S = 0.01
HANG_S = 180.0  # no answer is bounded so loosely: who waits for longer is stuck (or was stopped)
LEAKED_EVERY = 8  # reservation, by a planted defect


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says on the command line. start: the run's, monotonic seconds. plant: a defect.

    warm_requests: so many of each user follow each other without a pause.
    """

    name: str
    socket: str
    journal: str
    seed: int
    start: float
    users: int = 2
    pause_s: float = 0.05
    warm_requests: int = 0
    conversations: int = 24
    lasts_s: float = 60.0
    heartbeat_s: float = 0.01
    plant: str = ""


class Results:
    """Waits for what the copying threads report, by request or save."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads: dict[tuple[str, int], tuple[LoadResult, list[int], float]] = {}
        self._saves: dict[tuple[int, int], SaveResult] = {}

    def loaded(self, rank: int) -> Callable[[LoadResult, list[int]], None]:
        """``on_done`` of a rank's loader."""

        def done(result: LoadResult, failed: list[int]) -> None:
            with self._changed:
                self._loads[result.request_id, rank] = (result, failed, time.monotonic())
                self._changed.notify_all()

        return done

    def saved(self, rank: int) -> Callable[[SaveResult], None]:
        """``on_done`` of a rank's saver."""

        def done(result: SaveResult) -> None:
            with self._changed:
                self._saves[result.save_id, rank] = result
                self._changed.notify_all()

        return done

    def load(self, request_id: str, rank: int) -> tuple[LoadResult, list[int], float] | None:
        """The result, the blocks that failed and when it came; None when it never did."""
        with self._changed:
            self._changed.wait_for(lambda: (request_id, rank) in self._loads, HANG_S)
            return self._loads.pop((request_id, rank), None)

    def save(self, save_id: int, rank: int) -> SaveResult | None:
        """None when it never came."""
        with self._changed:
            self._changed.wait_for(lambda: (save_id, rank) in self._saves, HANG_S)
            return self._saves.pop((save_id, rank), None)


class TimedStore:
    """``transfers.Store``: a worker's client, with a record of what was promised and kept."""

    def __init__(self, engine: "Engine", worker: WorkerClient) -> None:
        self._engine = engine
        self.worker = worker
        self._reservations: Counter[int | None] = Counter()  # by connection

    def load(self, ticket: LoadTicket) -> LoadStream:
        """As the client does."""
        return self.worker.load(ticket)

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        """Timed; a planted leak keeps one of eight, so that there is room to store the rest."""
        began = time.monotonic()
        slots = self.worker.reserve(prefix, wanted, part=part, timeout_s=timeout_s)
        outcomes = sorted({slot.outcome.value for slot in slots})
        self._engine.note(
            Kind.RESERVE, "+".join(outcomes), began, bound_s=RESERVE_TIMEOUT_S, chunks=len(wanted)
        )
        return [] if "leak-reservation" in self._engine.settings.plant and self._leaks(slots) else slots

    def _leaks(self, slots: Sequence[ReservedSlot]) -> bool:
        """The first of each connection, which the node gives back with it, and every eighth after it."""
        lost_with = [slot.connection for slot in slots if slot.outcome is ReserveOutcome.RESERVED]
        if not lost_with:
            return False
        self._reservations[lost_with[0]] += 1
        return self._reservations[lost_with[0]] % LEAKED_EVERY == 1

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        """As the client does."""
        return self.worker.commit(part, filled)

    def abandon(self, part: int, digests: Sequence[bytes]) -> None:
        """As the client does."""
        self.worker.abandon(part, digests)

    def close(self) -> None:
        """As the client does."""
        self.worker.close()


class Engine:
    """One process: a scheduler's client, and a worker, a loader and a saver for each rank."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.contents = Contents(settings.seed)
        self.namespace = namespace = namespace_of(settings.seed)
        self.prompts = Prompts(
            settings.seed,
            namespace.namespace,
            conversations=settings.conversations,
            lasts_s=settings.lasts_s,
        )
        self._journal = JournalWriter(Path(settings.journal))
        self.heartbeat = Heartbeat(settings.heartbeat_s)
        self.results = Results()
        self.paused = threading.Event()
        self.stopping = threading.Event()
        self._busy = 0
        self._changed = threading.Condition()
        path = Path(settings.socket)
        self.scheduler = SchedulerClient(
            socket_path=path, engine=settings.name, namespace=namespace, lookup_wait_s=LOOKUP_WAIT_S
        )
        self.blocks = [
            Blocks(self.contents, part=rank, users=settings.users) for rank in range(len(PART_BYTES))
        ]
        self.stores = [
            TimedStore(
                self, WorkerClient(socket_path=path, engine=settings.name, rank=rank, namespace=namespace)
            )
            for rank in range(len(PART_BYTES))
        ]
        self.loaders = [
            Loader(on_thread_start=_nothing, on_done=self.results.loaded(rank))
            for rank in range(len(self.blocks))
        ]
        self.savers = [
            Saver(on_thread_start=_nothing, on_done=self.results.saved(rank))
            for rank in range(len(self.blocks))
        ]

    def note(
        self,
        kind: Kind,
        outcome: str,
        began: float,
        *,
        ended: float | None = None,
        bound_s: float = 0.0,
        tier: str = "",
        chunks: int = 0,
        note: str = "",
    ) -> None:
        """Tell the driver."""
        ended = time.monotonic() if ended is None else ended
        late = bound_s and ended - began > bound_s
        self._journal.write(
            Operation(
                kind=kind,
                outcome=outcome,
                began=began,
                took_s=ended - began,
                bound_s=bound_s,
                lost_s=self.heartbeat.lost_s(began, ended) if late else 0.0,
                tier=tier,
                chunks=chunks,
                pid=os.getpid(),
                note=note,
            )
        )

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around one request of a user; waits while the engine is paused."""
        while self.paused.is_set() and not self.stopping.is_set():
            time.sleep(PAUSED_POLL_S)
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def pause(self) -> None:
        """Finish what is under way, and say so."""
        self.paused.set()
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._busy, HANG_S)
        if idle:
            self.note(Kind.IDLE, "paused", time.monotonic())
        else:
            self.note(Kind.DEFECT, "stuck", time.monotonic(), note=f"{self._busy} users never finished")

    def close(self) -> None:
        """Everything but the journal's last words."""
        for loader in self.loaders:
            loader.close()
        for saver in self.savers:
            saver.close()
        for store in self.stores:
            store.close()
        self.scheduler.close()
        self.heartbeat.close()
        self._journal.close()


def _nothing() -> None:
    """Copying threads need no preparation here."""
