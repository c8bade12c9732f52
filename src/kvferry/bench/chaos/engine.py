"""An engine process that computes nothing and checks everything: ``python -m kvferry.bench.chaos.engine``.

It uses the clients and the copying threads of the vLLM connector as they are: lookup, load, copy, verify
after the copy, then reserve, fill and commit. Each of its users is a request at a time.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvferry.bench.chaos.contents import (
    CHUNK_TOKENS,
    MAX_CHUNKS,
    PART_BYTES,
    Contents,
    Prompt,
    Prompts,
    namespace_of,
)
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import JournalWriter, Kind, Operation
from kvferry.bench.chaos.memory import Blocks
from kvferry.client.messages import LoadTicket, LookupAnswer, LookupRequest, Prefill, Reason, ReservedSlot
from kvferry.client.scheduler import GRACE_S, LOOKUP_WAIT_SHARE, MAX_LOOKUP_WAIT_S, SchedulerClient
from kvferry.client.stream import GRACE_S as LOAD_GRACE_S
from kvferry.client.stream import LoadStream
from kvferry.client.worker import WorkerClient
from kvferry.costs import PrefillModel
from kvferry.engines.planning import BlockSpan
from kvferry.engines.vllm.messages import LoadResult, LoadSpec, SaveChunk, SaveResult, SaveSpec, WorkerPart
from kvferry.engines.vllm.transfers import RESERVE_TIMEOUT_S, Loader, LoadJob, Saver

LOOKUP_WAIT_S = 0.05
POLL_S = 0.001
HANG_S = 60.0  # no answer is bounded so loosely: who waits for longer is stuck
CANCEL_SHARE = 0.03
ABORT_SHARE = 0.03
# A chunk takes 40 ms: a prompt of 24 is worth a second, and a load of it has a deadline of 1.4 s.
PREFILL = PrefillModel(0.01, 0.04 / CHUNK_TOKENS, 0.0)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says on the command line. start: the run's, monotonic seconds. plant: a defect."""

    name: str
    socket: str
    journal: str
    seed: int
    start: float
    users: int = 2
    pause_s: float = 0.05
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

    def load(self, ticket: LoadTicket) -> LoadStream:
        """As the client does."""
        return self.worker.load(ticket)

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        """Timed; a planted leak keeps what it gets."""
        began = time.monotonic()
        slots = self.worker.reserve(prefix, wanted, part=part, timeout_s=timeout_s)
        outcomes = sorted({slot.outcome.value for slot in slots})
        self._engine.note(
            Kind.RESERVE, "+".join(outcomes), began, bound_s=RESERVE_TIMEOUT_S, chunks=len(wanted)
        )
        if self._engine.settings.plant == "leak-reservation":
            return []
        return slots

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> None:
        """As the client does."""
        self.worker.commit(part, filled)

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
        namespace = namespace_of(settings.seed)
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
            Loader(blocks, on_thread_start=_nothing, on_done=self.results.loaded(rank))
            for rank, blocks in enumerate(self.blocks)
        ]
        self.savers = [
            Saver(blocks, on_thread_start=_nothing, on_done=self.results.saved(rank))
            for rank, blocks in enumerate(self.blocks)
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
            time.sleep(POLL_S * 10)
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


class User:
    """One request after the other."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._rng = random.Random(f"{engine.settings.seed}/{engine.settings.name}/{number}/{os.getpid()}")
        self._number = number
        self._requests = 0
        self._first_block = number * MAX_CHUNKS
        self._slowest_call = (0.0, 0.0, "")

    def run(self) -> None:
        """Until the engine stops. Anything unforeseen is a defect, and reported."""
        settings = self._engine.settings
        while not self._engine.stopping.is_set():
            try:
                with self._engine.working():
                    if not self._engine.paused.is_set():
                        self._request()
            except Exception as error:  # noqa: BLE001 (top of a driver)
                self._engine.note(Kind.DEFECT, type(error).__name__, time.monotonic(), note=repr(error))
            self._engine.stopping.wait(self._rng.expovariate(1.0 / settings.pause_s))

    def _request(self) -> None:
        engine, rng = self._engine, self._rng
        prompt = engine.prompts.pick(rng, time.monotonic() - engine.settings.start)
        own = rng.randrange(len(prompt.digests)) if rng.random() < 0.25 else 0
        self._requests += 1
        self._slowest_call = (0.0, 0.0, "")
        request_id = f"{engine.settings.name}-{os.getpid()}-{self._number}-{self._requests}"
        for at, digest in enumerate(prompt.digests[:own]):
            self._compute(at, digest)
        answer = self._lookup(request_id, prompt, own)
        loaded = 0
        if answer is not None and answer.count:
            loaded = self._load(request_id, prompt, answer)
            self._call("end", engine.scheduler.end, answer.load_id)
        for at in range(own + loaded, len(prompt.digests)):
            self._compute(at, prompt.digests[at])
        self._store(prompt, own + loaded)
        for rank in range(len(PART_BYTES)):
            self._check(prompt, range(len(prompt.digests)), rank, "after the request")
        took_s, began, name = self._slowest_call
        engine.note(Kind.CALL, name, began, ended=began + took_s, bound_s=1e-9)

    def _compute(self, at: int, digest: bytes) -> None:
        for blocks in self._engine.blocks:
            blocks.compute(self._first_block + at, digest)

    def _call(self, name: str, call: Callable[..., object], *arguments: object) -> object:
        """A call that must return at once."""
        began = time.monotonic()
        result = call(*arguments)
        took_s = time.monotonic() - began
        if took_s >= self._slowest_call[0]:
            self._slowest_call = (took_s, began, name)
        return result

    def _lookup(self, request_id: str, prompt: Prompt, own: int) -> LookupAnswer | None:
        """The answer, or None where the request was cancelled."""
        engine = self._engine
        began = time.monotonic()
        prefill = Prefill(PREFILL.base_s, PREFILL.per_token_s, PREFILL.per_token2_s)
        asked = LookupRequest(
            request_id=request_id,
            chunks=prompt.digests,
            first_chunk=own,
            prompt_tokens=prompt.tokens,
            prefill=prefill,
        )
        recompute_s = PREFILL.seconds(prompt.tokens - own * CHUNK_TOKENS, own * CHUNK_TOKENS)
        bound_s = max(LOOKUP_WAIT_S, min(MAX_LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE * recompute_s)) + GRACE_S
        self._call("lookup", engine.scheduler.lookup, asked)
        cancel = self._rng.random() < CANCEL_SHARE
        answer: object = None
        while answer is None:
            if cancel:
                self._call("cancel", engine.scheduler.cancel, request_id)
                engine.note(Kind.LOOKUP, "cancelled", began)
                return None
            answer = self._call("poll", engine.scheduler.poll, request_id)
            if answer is None:
                time.sleep(POLL_S)
            if time.monotonic() - began > HANG_S:
                engine.note(Kind.DEFECT, "lookup", began, note="never answered")
                return None
        if not isinstance(answer, LookupAnswer):
            raise TypeError(f"poll answered {answer!r}")
        tier = "valkey" if any(answer.tiers) else "memory" if answer.tiers else ""
        outcome = "hit" if answer.count else answer.reason.value
        engine.note(Kind.LOOKUP, outcome, began, bound_s=bound_s, tier=tier, chunks=answer.count)
        return answer

    def _load(self, request_id: str, prompt: Prompt, answer: LookupAnswer) -> int:
        """How many chunks every rank has, in a row from the answer's first one on."""
        engine = self._engine
        first = self._first_block + answer.first_chunk
        blocks = tuple((first + at,) for at in range(answer.count))
        parts = range(len(PART_BYTES))
        tickets = tuple(answer.ticket(part) for part in parts)
        spec = LoadSpec(request_id, tickets, blocks, BlockSpan(0, 1))
        for part in parts:
            engine.blocks[part].poison([block for (block,) in blocks])
        began = time.monotonic()
        for part in parts:
            stream = self._call("load", engine.stores[part].load, tickets[part])
            if not isinstance(stream, LoadStream):
                raise TypeError(f"load gave {stream!r}")
            engine.loaders[part].submit(LoadJob(spec, stream, part=WorkerPart(part, 1), after=None))
        if self._rng.random() < ABORT_SHARE:
            for part in parts:
                engine.loaders[part].cancel(request_id)
        bound_s = max(answer.deadline - began, LOAD_GRACE_S)
        tier = "valkey" if any(answer.tiers) else "memory"
        reach = answer.count
        for part in parts:
            found = engine.results.load(request_id, part)
            if found is None:
                engine.note(Kind.DEFECT, "load", began, note=f"part {part} never ended")
                return 0
            result, failed, ended = found
            good = [at for at, (block,) in enumerate(blocks) if block not in failed]
            if engine.settings.plant == "flip" and good:
                engine.blocks[part].flip(first + good[-1])
            self._check(prompt, [answer.first_chunk + at for at in good], part, f"loaded from {tier}")
            reach = min(reach, result.chunks)
            engine.note(
                Kind.LOAD,
                result.reason if result.reason != Reason.COMPLETE else "complete",
                began,
                ended=ended,
                bound_s=bound_s,
                tier=tier,
                chunks=result.chunks,
            )
        return reach

    def _store(self, prompt: Prompt, start: int) -> None:
        """Save what was not loaded."""
        engine = self._engine
        chunks = tuple(
            SaveChunk(at, digest, (self._first_block + at,))
            for at, digest in enumerate(prompt.digests)
            if at >= start
        )
        if not chunks:
            return
        began = time.monotonic()
        save_id = self._number << 32 | self._requests
        spec = SaveSpec(save_id, prompt.digests[:start], chunks)
        for rank, store in enumerate(engine.stores):
            engine.savers[rank].submit(spec, store, part=WorkerPart(rank, 1), rank=0, after=None)
        for rank in range(len(engine.stores)):
            result = engine.results.save(save_id, rank)
            if result is None:
                engine.note(Kind.DEFECT, "store", began, note=f"part {rank} never ended")
                return
            outcome = "stored" if not result.declined else "some" if result.stored else "declined"
            engine.note(Kind.STORE, outcome, began, chunks=len(result.stored))

    def _check(self, prompt: Prompt, positions: Sequence[int] | range, rank: int, when: str) -> None:
        for at in positions:
            wrong = self._engine.blocks[rank].difference(self._first_block + at, prompt.digests[at])
            if wrong:
                note = f"chunk {at} ({prompt.digests[at].hex()}) {when}: {wrong}"
                self._engine.note(Kind.WRONG, when, time.monotonic(), note=note)


def _nothing() -> None:
    """Copying threads need no preparation here."""


def main(arguments: Sequence[str]) -> int:
    """Serve the users until SIGTERM; SIGUSR1 pauses, SIGUSR2 resumes."""
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited by every thread made from here on
    engine = Engine(settings)
    threads = [
        threading.Thread(target=User(engine, number).run, name=f"kvferry-user-{number}", daemon=True)
        for number in range(settings.users)
    ]
    for thread in threads:
        thread.start()
    engine.note(Kind.IDLE, "ready", time.monotonic())
    while (number := signal.sigwait(signals)) not in (signal.SIGTERM, signal.SIGINT):
        if number == signal.SIGUSR1:
            engine.pause()
        else:
            engine.paused.clear()
    engine.stopping.set()
    for thread in threads:
        thread.join(HANG_S)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
