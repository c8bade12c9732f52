"""The audit of a soak sees what is in the engine's blocks, not what should be: planted defects are found."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.soak.audit import Notes, judge
from kvferry.client.messages import LoadEnd, LoadTicket, Pending, ReadyPart, ReservedSlot
from kvferry.engines.vllm.kv_memory import KvMemory
from kvferry.identity.stripes import part_checksums

pytestmark = pytest.mark.engine

BLOCKS, PER_CHUNK = 12, 2
CHUNK = b"c" * 32


@pytest.fixture(scope="module")
def audited() -> Any:
    """The module, which imports vLLM."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the engine's own imports
        from kvferry.bench.soak import audited as module
    return module


def tensors(order: str) -> dict[str, Any]:
    """Two layers in one allocation: layers outermost, or blocks; the second layer's alias is a third."""
    import torch

    shape = (2, BLOCKS, 2, 4, 8) if order == "layers first" else (BLOCKS, 2, 2, 4, 8)
    whole = torch.zeros(shape, dtype=torch.bfloat16)
    layers = list(whole) if order == "layers first" else list(whole.transpose(0, 1))
    return {"one": layers[0], "two": layers[1], "three": layers[1]}


class Pool:
    """A ``Store`` and a ``Stream`` of one part."""

    def __init__(self, nbytes: int) -> None:
        self.memory = bytearray(nbytes)
        self.sent = False

    def load(self, ticket: LoadTicket) -> "Pool":
        return self

    def next(self, timeout_s: float) -> ReadyPart | LoadEnd | Pending:
        return ReadyPart(0, memoryview(self.memory), part_checksums(memoryview(self.memory)))

    def reserve(self, *args: Any, **options: Any) -> list[ReservedSlot]:
        return []

    def commit(self, part: int, filled: Sequence[tuple[bytes, tuple[bytes, ...]]]) -> bool:
        return True

    def abandon(self, part: int, digests: Sequence[bytes]) -> None: ...

    def copied(self, index: int) -> None: ...

    def corrupt(self, index: int) -> None: ...

    def close(self) -> None: ...


class Engine:
    """What an engine's worker has, under audit."""

    def __init__(self, audited: Any, directory: Path, name: str, *, order: str, pool: Pool) -> None:
        self.kv = {key: t for key, t in tensors(order).items() if key != "three"}
        self.all = list(self.kv.values())
        memory = KvMemory(self.kv, groups=[list(self.kv)], blocks=BLOCKS, part_blocks=[PER_CHUNK])
        self.notes, copied = Notes(directory, name), audited._Copied()
        (inner,) = memory.copiers
        assert inner is not None
        self.inner = inner
        watched = {"notes": self.notes, "copied": copied}
        self.copier = audited._Copier(inner, audited._Blocks(self.kv), **watched)
        self.store = audited._Store(pool, **watched)

    def saves(self, pool: Pool, blocks: Sequence[int]) -> None:
        import torch

        for layer in self.all:
            for block in blocks:
                layer[block] = torch.rand(layer[block].shape)
        self.copier.save(blocks, memoryview(pool.memory), after=None)
        self.store.commit(0, [(CHUNK, ())])

    def loads(self, blocks: Sequence[int]) -> None:
        self.notes.promised(load=1, epoch=1, chunks=[CHUNK])
        stream = self.store.load(LoadTicket(1, 1, 0, 0, (None,), 0.0, 0.0))
        ready = stream.next(0.0)
        assert isinstance(ready, ReadyPart)
        self.copier.load(ready.view, blocks, first=0, after=None)


def swap(engine: Engine, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a part in another order."""
    load = engine.inner.load
    monkeypatch.setattr(
        engine.inner, "load", lambda part, blocks, **o: load(part, list(reversed(blocks)), **o)
    )


def drop_layer(engine: Engine, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is forgotten."""
    load = engine.inner.load

    def forgetful(part: memoryview, blocks: Sequence[int], **options: Any) -> None:
        load(part, blocks, **options)
        engine.all[1][blocks[-1]] = 0

    monkeypatch.setattr(engine.inner, "load", forgetful)


def other_content(engine: Engine, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chunk's bytes, with checksums that fit."""
    pool.memory[:] = bytes(reversed(pool.memory))


DEFECTS: list[Callable[[Engine, Pool, pytest.MonkeyPatch], None]] = [swap, drop_layer, other_content]


@pytest.mark.parametrize("order", ["layers first", "blocks first"])
@pytest.mark.parametrize("defect", [None, *DEFECTS])
def test_blocks_that_hold_something_else_are_found_and_right_ones_pass(
    audited: Any, tmp_path: Path, order: str, defect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(PER_CHUNK * 2 * 2 * 4 * 8 * 2)
    one, two = (Engine(audited, tmp_path, name, order=order, pool=pool) for name in ("one", "two"))
    one.saves(pool, [3, 7])
    if defect is not None:
        defect(two, pool, monkeypatch)
    two.loads([5, 2])
    verdict = judge(tmp_path)
    assert (verdict.chunks, verdict.blocks) == (1, 2)
    assert bool(verdict.wrong) is (defect is not None)
    for engine in (one, two):
        engine.notes.close()


def test_layers_that_share_their_memory_are_looked_at_once(audited: Any) -> None:
    held = tensors("layers first")
    assert len(audited._Blocks(held)._tensors) == 2
