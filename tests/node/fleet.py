"""A node and engines that talk to it over real sockets, for tests of both sides."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvferry.client.messages import (
    LoadEnd,
    LookupAnswer,
    LookupRequest,
    NamespaceInfo,
    Pending,
    Prefill,
    ReadyPart,
    ReserveOutcome,
)
from kvferry.client.scheduler import SchedulerClient
from kvferry.client.stream import LoadStream
from kvferry.client.worker import WorkerClient
from kvferry.config import NodeSettings
from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.node.node import Node
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.memory_tier import MemoryTier

PART_BYTES = 1 << 20
NAMESPACE = NamespaceInfo(b"test" + b"n" * 12, (PART_BYTES,), 128, "test", "model")
TWO_PARTS = NamespaceInfo(b"test" + b"m" * 12, (PART_BYTES, PART_BYTES), 128, "test", "model-tp2")
POOL_BYTES = 64 << 20
LOOKUP_WAIT_S = 10.0  # no lookup of a test fails for a busy host; tests of silence set their own
SAVED_AT_ONCE = 10  # one connection may reserve a quarter of the pool
SLOW_PREFILL = Prefill(0.0, 1.0, 0.0)  # recomputing takes for ever: loads are always worth it


def digests(count: int, seed: str = "") -> list[bytes]:
    """Chunk digests of one prompt."""
    return [sha256(f"{seed}/{number}".encode()).digest() for number in range(count)]


def content(digest: bytes, part: int, nbytes: int = PART_BYTES) -> bytes:
    """What the part of that name holds: different for every name."""
    return (sha256(digest + bytes([part])).digest() * (nbytes // 32 + 1))[:nbytes]


def settings(tmp_path: Path, *, pool_bytes: int = POOL_BYTES, deadline_cap_ms: int = 10_000) -> NodeSettings:
    """A node with nothing on the network."""
    return NodeSettings(
        pool_bytes=pool_bytes,
        socket_path=tmp_path / "node.sock",
        deadline_cap_ms=deadline_cap_ms,
        metrics_port=0,
    )


class Engine:
    """One engine process's clients: a scheduler, and a worker per part."""

    def __init__(
        self,
        socket_path: Path,
        namespace: NamespaceInfo = NAMESPACE,
        name: str = "engine",
        *,
        group: int | None = None,
        token: str = "",
    ) -> None:
        self.namespace = namespace
        shown: dict[str, Any] = {"socket_path": socket_path, "engine": name, "group": group, "token": token}
        self.scheduler = SchedulerClient(namespace=namespace, lookup_wait_s=LOOKUP_WAIT_S, **shown)
        self.workers = [
            WorkerClient(rank=rank, namespace=namespace, **shown) for rank in range(len(namespace.part_bytes))
        ]

    @property
    def worker(self) -> WorkerClient:
        """The first rank's."""
        return self.workers[0]

    def connected(self) -> "Engine":
        """Itself, once both sides are connected."""
        assert self.scheduler.wait_connected(WAIT_S)
        assert all(worker.wait_connected(WAIT_S) for worker in self.workers)
        return self

    def lookup(
        self, chunks: Sequence[bytes], request_id: str = "r", *, first_chunk: int = 0, **options: Any
    ) -> LookupAnswer:
        """Ask and wait for the answer."""
        options.setdefault("prefill", SLOW_PREFILL)
        self.scheduler.lookup(
            LookupRequest(
                request_id=request_id,
                chunks=chunks,
                first_chunk=first_chunk,
                prompt_tokens=len(chunks) * 128 + 5,
                **options,
            )
        )
        give_up = time.monotonic() + WAIT_S
        while (answer := self.scheduler.poll(request_id)) is None:
            assert time.monotonic() < give_up, "no answer"
            time.sleep(0.0005)
        return answer

    def save(self, chunks: Sequence[bytes], *, prefix: Sequence[bytes] = ()) -> int:
        """Store all parts of these chunks, a few at a time; returns how many parts were really written."""
        written = 0
        for part, worker in enumerate(self.workers):
            for start in range(0, len(chunks), SAVED_AT_ONCE):
                before = [*prefix, *chunks[:start]]
                filled = []
                wanted = chunks[start : start + SAVED_AT_ONCE]
                for slot in worker.reserve(before, wanted, part=part, timeout_s=WAIT_S):
                    if slot.outcome is ReserveOutcome.RESERVED:
                        assert slot.view is not None
                        slot.view[:] = content(slot.digest, part, len(slot.view))
                        filled.append((slot.digest, part_checksums(slot.view)))
                worker.commit(part, filled)
                written += len(filled)
        return written

    def load(self, answer: LookupAnswer, chunks: Sequence[bytes]) -> list[LoadEnd]:
        """Copy and verify every part of an answered load, then end it."""
        ends = []
        for part, worker in enumerate(self.workers):
            stream = worker.load(answer.ticket(part))
            ends.append(drain(stream, chunks))
            stream.close()
        self.scheduler.end(answer.load_id)
        return ends

    def close(self) -> None:
        """Both sides."""
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def drain(stream: LoadStream, chunks: Sequence[bytes]) -> LoadEnd:
    """Take every part of a stream; each must be exactly what its name says."""
    give_up = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < give_up, "the stream never ended"
        step = stream.next(0.5)
        if isinstance(step, LoadEnd):
            return step
        if step is Pending.PENDING:
            continue
        assert isinstance(step, ReadyPart)
        copy = bytes(step.view)
        assert part_checksums(memoryview(copy)) == step.checksums
        assert copy == content(chunks[step.index], stream.ticket.part, len(copy))
        stream.copied(step.index)


def fill_tier(tier: MemoryTier, chunks: Sequence[bytes], namespace: NamespaceInfo = NAMESPACE) -> None:
    """Put all parts of these chunks into a tier, as another host would have."""
    for digest in chunks:
        for part, nbytes in enumerate(namespace.part_bytes):
            tier.parts[PartKey(namespace.namespace, digest, part)] = content(digest, part, nbytes)


def at_rest(node: Node) -> None:
    """Nothing is pinned, reserved, loading or on its way, and the pool's books balance."""

    def idle() -> bool:
        now = node.statistics()
        held = now.catalogue
        return not (
            held.pins or held.filling_parts or now.loads or now.fetches or now.writeback_backlog_bytes
        )

    eventually(idle, "the node at rest")
    assert node.statistics().defects == 0
    node.check()


def save_in_turns(node: Node, engine: Engine, chunks: Sequence[bytes]) -> None:
    """A prompt longer than what may be on its way at a time; each piece is written before the next."""
    for begin in range(0, len(chunks), SAVED_AT_ONCE):
        piece = chunks[begin : begin + SAVED_AT_ONCE]
        assert engine.save(piece, prefix=chunks[:begin]) == len(piece)
        at_rest(node)


class NodeProcess:
    """``kvferry node`` as a process of its own, to be killed and stopped."""

    def __init__(self, socket_path: Path, *, pool_bytes: int = POOL_BYTES, extra: Sequence[str] = ()) -> None:
        self.socket_path = socket_path
        command = [sys.executable, "-m", "kvferry", "node", "--socket", str(socket_path)]
        command += ["--pool", str(pool_bytes), "--metrics-port", "0", *extra]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the node."""
        self.process.send_signal(number)

    def close(self) -> int:
        """Kill it if it still runs; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WAIT_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.process.returncode
