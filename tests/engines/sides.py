"""Connectors of fake engines over one real node: both sides as vLLM drives them, without vLLM."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from kvferry.client.messages import LoadEnd, LoadTicket, NamespaceInfo, Pending, ReadyPart, ReservedSlot
from kvferry.client.scheduler import SchedulerClient
from kvferry.client.worker import WorkerClient
from kvferry.config import NodeSettings
from kvferry.engines.planning import ChunkGeometry
from kvferry.engines.vllm import lookups, transfers
from kvferry.engines.vllm.copy import CpuBlockCopier
from kvferry.engines.vllm.identity import AdapterDigests, rank_parts
from kvferry.engines.vllm.layout import LayerView, plan_layout
from kvferry.engines.vllm.messages import Assignment
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import PrefillWatch
from kvferry.engines.vllm.requests import Admission
from kvferry.engines.vllm.roles import KvRole
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.transfers import Stream
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.identity.domain import DomainKey
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup
from kvferry.node.node import Node
from kvferry.testing.connector_contract import BLOCK_TOKENS
from kvferry.testing.engine_tables import full_attention
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.testing.fake_engine import FakeEngine, Kv
from kvferry.testing.holdings import at_rest

LAYERS, BLOCK_BYTES = 3, 1024
POOL_BYTES = 64 << 20


class HeldStream:
    """A stream that gives nothing while its gate is closed."""

    def __init__(self, stream: Stream, gate: threading.Event) -> None:
        self._stream = stream
        self._gate = gate

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        if not self._gate.wait(timeout_s):
            return Pending.PENDING
        return self._stream.next(timeout_s)

    def copied(self, index: int) -> None:
        self._stream.copied(index)

    def corrupt(self, index: int) -> None:
        self._stream.corrupt(index)

    def close(self) -> None:
        self._stream.close()


class GatedStore:
    """A worker's client whose loads and saves can be held."""

    def __init__(self, client: WorkerClient, gate: threading.Event, saves: threading.Event) -> None:
        self.client = client
        self._gate = gate
        self._saves = saves

    def load(self, ticket: LoadTicket) -> HeldStream:
        return HeldStream(self.client.load(ticket), self._gate)

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        slots = self.client.reserve(prefix, wanted, part=part, timeout_s=timeout_s)
        self._saves.wait()
        return slots

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        return self.client.commit(part, filled)

    def abandon(self, part: int, digests: Sequence[bytes]) -> None:
        self.client.abandon(part, digests)

    def close(self) -> None:
        self.client.close()


FULL = (full_attention(BLOCK_TOKENS),)
"""One group of full attention: most engines."""


def window(tokens: int) -> KvGroup:
    """A group that sees so many tokens."""
    return replace(FULL[0], kind=GroupKind.WINDOW, window_tokens=tokens)


STATE = replace(FULL[0], kind=GroupKind.STATE, kv_heads=0)


def extents(groups: Sequence[KvGroup]) -> list[tuple[int, int]]:
    """Layers, and bytes of a block in each, that a group uses: all of its own, in the same memory."""
    return [(LAYERS - at % LAYERS, BLOCK_BYTES - 100 * at) for at in range(len(groups))]


class HostMemory:
    """One rank's KV in host memory. One block more than the engine uses: the null block."""

    def __init__(self, blocks: int, groups: Sequence[KvGroup] = FULL) -> None:
        blocks += 1
        self.kv: Kv = np.zeros((LAYERS, blocks, BLOCK_BYTES), dtype=np.uint8)
        self.copiers: list[CpuBlockCopier | None] = [
            CpuBlockCopier(
                plan_layout(
                    [
                        LayerView(
                            f"{at}.{n}", 0, n * blocks * BLOCK_BYTES, (blocks, nbytes), (BLOCK_BYTES, 1), 1
                        )
                        for n in range(layers)
                    ],
                    blocks=blocks,
                ),
                [self.kv.reshape(-1)],
            )
            for at, (layers, nbytes) in enumerate(extents(groups))
        ]
        self.cores = frozenset({0})
        self.device = "cpu"

    def fence(self) -> None:
        """Nothing is queued here."""

    def close(self) -> None:
        for copier in self.copiers:
            if copier is not None:
                copier.close()


class SideFleet:
    """``ConnectorFleet`` over a node inside this process."""

    def __init__(
        self, directory: Path, stack: ExitStack, *, chunk_blocks: int, groups: Sequence[KvGroup] = FULL
    ) -> None:
        self._stack = stack
        self._groups = tuple(groups)
        self._chunk_blocks = chunk_blocks
        # Nothing stands still here that could cost a test so much.
        stack.enter_context(patch.object(lookups, "LOOKUP_MAX_S", WAIT_S))
        stack.enter_context(patch.object(transfers, "RESERVE_TIMEOUT_S", WAIT_S))
        self._gate = threading.Event()
        self._saves = threading.Event()
        for gate in (self._gate, self._saves):
            gate.set()
        self._stores: list[GatedStore] = []
        self._schedulers: dict[int, tuple[SchedulerSide, Pins]] = {}
        self._workers: dict[int, list[WorkerSide]] = {}
        self._settings = NodeSettings(pool_bytes=POOL_BYTES, socket_path=directory / "n.sock", metrics_port=0)
        self._start_node()

    def _start_node(self) -> None:
        self.node = Node(self._settings)
        self._stack.callback(self.node.close)
        self.node.start()
        self._node_runs = True

    def engine(
        self,
        *,
        blocks: int = 64,
        ranks: int = 1,
        kv_heads: int = 0,
        tokens_per_step: int = 64,
        role: KvRole = KvRole.BOTH,
    ) -> FakeEngine:
        blocks *= len(self._groups)  # every group needs as many as one alone would, at most
        geometry = ChunkGeometry(BLOCK_TOKENS, BLOCK_TOKENS * self._chunk_blocks, self._groups)
        parts = Geometry(
            tuple(
                replace(group, stages=(("layer",),), block_bytes=(layers * nbytes,), kv_heads=kv_heads)
                for group, (layers, nbytes) in zip(self._groups, extents(self._groups), strict=True)
            ),
            geometry.chunk_tokens,
            tensor_ranks=ranks,
        )
        namespace = NamespaceInfo(
            b"test" + bytes([parts.shards]) * 12,
            parts.part_bytes,
            geometry.chunk_tokens,
            "default",
            trailing=parts.trailing if any(parts.trailing) else (),
        )
        assignment = Assignment(
            str(self.node.settings.socket_path),
            f"engine{len(self._schedulers)}",
            namespace,
            rank_parts(parts),
        )
        pins = Pins(ranks=ranks)
        client = SchedulerClient(
            socket_path=assignment.socket, engine=assignment.engine, namespace=namespace, lookup_wait_s=10.0
        )
        adapters = AdapterDigests()
        admission = Admission(
            key=DomainKey.default("default"),
            namespace=namespace.namespace,
            chunk_tokens=geometry.chunk_tokens,
            adapters=adapters,
            role=role,
        )
        scheduler = SchedulerSide(
            assignment=assignment,
            geometry=geometry,
            admission=admission,
            client=client,
            pins=pins,
            prefill=PrefillWatch(),
        )
        self._stack.callback(adapters.close)
        self._stack.callback(scheduler.close)
        memories = [HostMemory(blocks, self._groups) for _ in range(ranks)]
        workers = [
            WorkerSide(memory, rank=rank, connect=self._connect, by_block=geometry.by_block)
            for rank, memory in enumerate(memories)
        ]
        others = len(self._stores)
        for worker in workers:
            worker.connect(assignment)
            self._stack.callback(worker.close)
        assert client.wait_connected(WAIT_S)
        assert all(store.client.wait_connected(WAIT_S) for store in self._stores[others:])
        engine = FakeEngine(
            memories=[memory.kv for memory in memories],
            block_tokens=BLOCK_TOKENS,
            scheduler=scheduler,
            workers=workers,
            tokens_per_step=tokens_per_step,
            groups=self._groups,
            extents=extents(self._groups),
            shards=[parts.part(0, tensor_rank=rank) for rank in range(ranks)],
        )
        self._ranks = ranks
        pins.bind(engine.pool)
        self._schedulers[id(engine)] = (scheduler, pins)
        self._workers[id(engine)] = workers
        return engine

    def _connect(self, assignment: Assignment, rank: int) -> GatedStore:
        client = WorkerClient(
            socket_path=assignment.socket, engine=assignment.engine, rank=rank, namespace=assignment.namespace
        )
        store = GatedStore(client, self._gate, self._saves)
        self._stores.append(store)
        return store

    def scheduler(self, engine: FakeEngine) -> SchedulerSide:
        return self._schedulers[id(engine)][0]

    def settle(self, engine: FakeEngine) -> None:
        _, pins = self._schedulers[id(engine)]
        engine.run(lambda: not pins.pending and not engine.requests)

    def at_rest(self) -> None:
        """Fails while the node holds anything of any engine."""
        if self._node_runs:
            at_rest(self.node)

    def stop_node(self) -> None:
        self._node_runs = False
        self.node.close()

    def restart_node(self) -> None:
        self.stop_node()
        self._start_node()

    def kill_engine(self, engine: FakeEngine) -> None:
        """Its connections end without a word; then what is left of its threads is ended too."""
        for worker in self._workers[id(engine)]:
            store = worker._store
            assert isinstance(store, GatedStore)
            store.client.close()
        scheduler, _ = self._schedulers[id(engine)]
        scheduler.close()

    def damage_node(self, *, rank: int | None = None) -> None:
        """See the contract. A rank's parts have its number, group after group."""
        state = self.node._app.state
        pool = np.frombuffer(state.arena.view(0, POOL_BYTES), dtype=np.uint8)
        # Not while a slot is being filled: its writer would sign the damage. And never back to what it was.
        eventually(lambda: not self.node.statistics().catalogue.filling_parts, "no slot that is being filled")
        for entry in list(state.catalogue._at.values()):
            if rank in (None, entry.key.part % self._ranks):
                pool[entry.offset : entry.offset + entry.nbytes] += 1

    def hold_loads(self) -> Callable[[], None]:
        self._gate.clear()
        return self._gate.set

    def hold_saves(self) -> Callable[[], None]:
        self._saves.clear()
        return self._saves.set
