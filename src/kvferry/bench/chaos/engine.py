"""An engine process that computes nothing and checks everything: ``python -m kvferry.bench.chaos.engine``.

It uses the clients and the copying threads of the vLLM connector as they are: lookup, load, copy, verify
after the copy, then reserve, fill and commit. Each of its users is a request at a time.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvferry.bench.chaos.contents import CHUNK_TOKENS, MAX_CHUNKS, PART_BYTES, Prompt, is_stored
from kvferry.bench.chaos.journal import Kind
from kvferry.bench.chaos.rig import HANG_S, LOOKUP_WAIT_S, Engine, EngineSettings
from kvferry.client.messages import LookupAnswer, LookupRequest, Prefill
from kvferry.client.scheduler import GRACE_S, LOOKUP_WAIT_SHARE, MAX_LOOKUP_WAIT_S
from kvferry.client.stream import GRACE_S as LOAD_GRACE_S
from kvferry.client.stream import LoadStream
from kvferry.costs import PrefillModel
from kvferry.engines.planning import GroupLoad
from kvferry.engines.vllm.messages import SaveChunk, SaveSpec, WorkerPart
from kvferry.engines.vllm.transfers import LoadJob, SaveJob

POLL_S = 0.001
WARM_PAUSE_S = 0.002
CANCEL_SHARE = 0.03
ABORT_SHARE = 0.03
# A chunk takes 40 ms: a prompt of 24 is worth a second, and a load of it has a deadline of 1.4 s.
PREFILL = PrefillModel(0.01, 0.04 / CHUNK_TOKENS, 0.0)


class User:
    """One request after the other."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._rng = random.Random(f"{engine.settings.seed}/{engine.settings.name}/{number}/{os.getpid()}")
        self._number = number
        self._requests = 0
        self._first_block = number * MAX_CHUNKS
        self._slowest_call = (0.0, 0.0, "")
        self._held: list[set[int]] = []  # by part, the chunks of this request whose bytes are there

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
            pause_s = WARM_PAUSE_S if self._requests < settings.warm_requests else settings.pause_s
            self._engine.stopping.wait(self._rng.expovariate(1.0 / pause_s))

    def _request(self) -> None:
        engine, rng = self._engine, self._rng
        prompt = engine.prompts.pick(rng, time.monotonic() - engine.settings.start)
        own = rng.randrange(len(prompt.digests)) if rng.random() < 0.25 else 0
        self._requests += 1
        self._slowest_call = (0.0, 0.0, "")
        request_id = f"{engine.settings.name}-{os.getpid()}-{self._number}-{self._requests}"
        self._held = [set() for _ in PART_BYTES]
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
        for rank, held in enumerate(self._held):
            self._check(prompt, sorted(held), rank, "after the request")
        took_s, began, name = self._slowest_call
        engine.note(Kind.CALL, name, began, ended=began + took_s, bound_s=1e-9)

    def _compute(self, at: int, digest: bytes) -> None:
        for blocks, held in zip(self._engine.blocks, self._held, strict=True):
            blocks.compute(self._first_block + at, digest)
            held.add(at)

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
        parts = range(len(PART_BYTES))
        tickets = tuple(answer.ticket(part) for part in parts)
        wanted = [
            tuple((self._first_block + ticket.first_chunk + at,) for at in range(len(ticket.places)))
            for ticket in tickets
        ]
        for part in parts:
            engine.blocks[part].poison([block for (block,) in wanted[part]])
        began = time.monotonic()
        for part in parts:
            stream = self._call("load", engine.stores[part].load, tickets[part])
            if not isinstance(stream, LoadStream):
                raise TypeError(f"load gave {stream!r}")
            job = LoadJob(
                request_id,
                stream,
                copier=engine.blocks[part],
                wanted=GroupLoad(tickets[part].first_chunk, 0, wanted[part]),
                part=WorkerPart(part, 1),
                after=None,
            )
            engine.loaders[part].submit(job)
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
            good = [block - self._first_block for (block,) in wanted[part] if block not in failed]
            if "flip" in engine.settings.plant and good:
                engine.blocks[part].flip(self._first_block + good[-1])
            self._check(prompt, good, part, f"loaded from {tier}")
            self._held[part].update(good)
            if result.chunks < len(wanted[part]):
                reach = 0 if answer.all_or_nothing else min(reach, result.chunks)
            engine.note(
                Kind.LOAD,
                result.reason,
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
        if start == len(prompt.digests):
            return
        began = time.monotonic()
        save_id = self._number << 32 | self._requests
        for rank, store in enumerate(engine.stores):
            chunks = tuple(
                SaveChunk(at, digest, (self._first_block + at,))
                for at, digest in enumerate(prompt.digests)
                if at >= start and is_stored(engine.namespace, rank, at)
            )
            spec = SaveSpec(save_id, prompt.digests[:start], chunks)
            job = SaveJob(spec, store, engine.blocks[rank], WorkerPart(rank, 1), 0, None)
            engine.savers[rank].submit(job)
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
