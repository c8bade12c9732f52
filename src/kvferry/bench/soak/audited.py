"""The connector of an engine under audit: it writes down what its blocks hold, see ``audit``.

It looks at the KV tensors themselves: in the thread that copied, between a part's arrival in the blocks and
the load's report to the engine; and once a part was copied out, before it is published.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvferry.bench.soak.audit import DIRECTORY_VARIABLE, Notes
from kvferry.client.messages import (
    LoadEnd,
    LoadTicket,
    LookupAnswer,
    LookupRequest,
    Pending,
    ReadyPart,
    Report,
    ReservedSlot,
)
from kvferry.engines.vllm.asker import Asker
from kvferry.engines.vllm.connector import KvferryConnector
from kvferry.engines.vllm.copy import BlockCopier, Fence
from kvferry.engines.vllm.kv_memory import KvMemory
from kvferry.engines.vllm.messages import Assignment
from kvferry.engines.vllm.transfers import Store, Stream
from kvferry.identity.stripes import part_checksums


class AuditedConnector(KvferryConnector):
    """Use it in place of KvferryConnector; the environment names a directory for the notes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes = Notes(Path(os.environ[DIRECTORY_VARIABLE]), f"{self.role.name.lower()}-{id(self)}")
        self._copied = _Copied()

    def _kv_memory(self, kv_caches: Mapping[str, Any], *, layers: Sequence[Sequence[str]]) -> KvMemory:
        memory = super()._kv_memory(kv_caches, layers=layers)
        blocks = _Blocks(kv_caches)
        memory.copiers = [
            _Copier(copier, blocks, notes=self._notes, copied=self._copied) if copier is not None else None
            for copier in memory.copiers
        ]
        return memory

    def _node_worker(self, assignment: Assignment, rank: int) -> Store:
        return _Store(super()._node_worker(assignment, rank), notes=self._notes, copied=self._copied)

    def _node_asker(self, assignment: Assignment) -> Asker:
        return _Asker(super()._node_asker(assignment), self._notes)


class _Copied(threading.local):
    """What this thread copies: a part of a load, or one that was just copied out."""

    ticket: LoadTicket | None = None
    ready: ReadyPart | None = None
    saved: tuple[str, ...] = ()


class _Blocks:
    """Digests of the engine's blocks over all of its KV tensors, whatever layout a part gives them."""

    def __init__(self, kv_caches: Mapping[str, Any]) -> None:
        tensors = [
            tensor
            for cache in kv_caches.values()
            for tensor in (cache if isinstance(cache, list | tuple) else (cache,))
        ]
        # Layers of several groups may lie at one place: a block belongs to one of them at a time.
        self._tensors = list({(t.data_ptr(), tuple(t.shape), t.stride()): t for t in tensors}.values())

    def digest(self, block: int) -> str:
        """Of one block."""
        import torch

        state = xxhash.xxh3_128()
        for tensor in self._tensors:
            row = tensor[block].contiguous().flatten().view(torch.uint8)
            state.update(memoryview(row.numpy()))
        return state.hexdigest()


class _Copier:
    """A ``BlockCopier`` that is looked at."""

    def __init__(self, inner: BlockCopier, blocks: _Blocks, *, notes: Notes, copied: _Copied) -> None:
        self._inner = inner
        self._blocks = blocks
        self._notes = notes
        self._copied = copied

    @property
    def block_bytes(self) -> int:
        """Of the copier inside."""
        return self._inner.block_bytes

    def fence(self) -> Fence | None:
        """Of the copier inside."""
        return self._inner.fence()

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: Fence | None) -> None:
        """Then look at the blocks. A part that was damaged meanwhile fails later, and counts as nothing."""
        self._inner.load(part, blocks, first=first, after=after)
        ticket, ready = self._copied.ticket, self._copied.ready
        if ticket is None or ready is None:
            return
        found = [self._blocks.digest(block) for block in blocks]
        if part_checksums(part) == ready.checksums:
            self._notes.loaded(
                load=ticket.load_id,
                epoch=ticket.epoch,
                part=ticket.part,
                position=ready.index,
                first=first,
                blocks=found,
            )

    def save(self, blocks: Sequence[int], part: memoryview, *, after: Fence | None) -> None:
        """Then look at the blocks."""
        self._inner.save(blocks, part, after=after)
        self._copied.saved = tuple(self._blocks.digest(block) for block in blocks)

    def close(self) -> None:
        """Of the copier inside."""
        self._inner.close()


class _Store:
    """A ``Store`` that says which part is copied, and writes down what is published."""

    def __init__(self, inner: Store, *, notes: Notes, copied: _Copied) -> None:
        self._inner = inner
        self._notes = notes
        self._copied = copied

    @property
    def mapping(self) -> object:
        """The pool, for GPUs."""
        return getattr(self._inner, "mapping", None)

    def load(self, ticket: LoadTicket) -> Stream:
        """A stream that is watched."""
        return _Stream(self._inner.load(ticket), ticket, self._copied)

    def reserve(
        self, prefix: Sequence[bytes], wanted: Sequence[bytes], *, part: int, timeout_s: float
    ) -> list[ReservedSlot]:
        """As inside."""
        return self._inner.reserve(prefix, wanted, part=part, timeout_s=timeout_s)

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        """Written down first: it may be loaded at once. The part is the one that this thread just copied."""
        for digest, _ in filled:
            self._notes.stored(part=part, chunk=digest, blocks=self._copied.saved)
        return self._inner.commit(part, filled)

    def abandon(self, part: int, digests: Sequence[bytes]) -> None:
        """As inside."""
        self._inner.abandon(part, digests)

    def close(self) -> None:
        """As inside."""
        self._inner.close()


class _Stream:
    def __init__(self, inner: Stream, ticket: LoadTicket, copied: _Copied) -> None:
        self._inner = inner
        self._ticket = ticket
        self._copied = copied

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        """Whoever gets a part copies it."""
        found = self._inner.next(timeout_s)
        if isinstance(found, ReadyPart):
            self._copied.ticket, self._copied.ready = self._ticket, found
        return found

    def copied(self, index: int) -> None:
        """As inside."""
        self._inner.copied(index)

    def corrupt(self, index: int) -> None:
        """As inside."""
        self._inner.corrupt(index)

    def close(self) -> None:
        """As inside."""
        self._inner.close()


class _Asker:
    """An ``Asker`` that writes down which chunks a load was promised."""

    def __init__(self, inner: Asker, notes: Notes) -> None:
        self._inner = inner
        self._notes = notes
        self._asked: dict[str, Sequence[bytes]] = {}

    @property
    def epoch(self) -> int:
        """As inside."""
        return self._inner.epoch

    def lookup(self, request: LookupRequest) -> None:
        """As inside."""
        self._asked[request.request_id] = request.chunks
        self._inner.lookup(request)

    def poll(self, request_id: str) -> LookupAnswer | None:
        """As inside; a load begins after this at the earliest."""
        answer = self._inner.poll(request_id)
        if answer is not None:
            chunks = self._asked.pop(request_id, ())
            if answer.load_id:
                self._notes.promised(load=answer.load_id, epoch=answer.epoch, chunks=chunks)
        return answer

    def cancel(self, request_id: str) -> None:
        """As inside."""
        self._asked.pop(request_id, None)
        self._inner.cancel(request_id)

    def end(self, load_id: int) -> None:
        """As inside."""
        self._inner.end(load_id)

    @property
    def followed(self) -> bool:
        """As inside."""
        return self._inner.followed

    def came(
        self, request_id: str, chunks: Sequence[bytes], *, prompt_tokens: int, engine_tokens: int
    ) -> None:
        """As inside."""
        self._inner.came(request_id, chunks, prompt_tokens=prompt_tokens, engine_tokens=engine_tokens)

    def suspect(self) -> None:
        """As inside."""
        self._inner.suspect()

    def report(self, report: Report) -> None:
        """As inside."""
        self._inner.report(report)

    def close(self) -> None:
        """As inside."""
        self._inner.close()
