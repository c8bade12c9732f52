"""LMCache's own classes around the adapter: its plugin loader, its objects, its way of waiting."""

import argparse
import json
import select
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.servers import Cluster, Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of OpenTelemetry, on import
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L2AdapterListener
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    from kvferry.engines.lmcache.adapter import KvferryL2Adapter

__all__ = ["KvferryL2Adapter", "MemoryLayoutDesc", "ObjectKey"]

WAIT_S = 60.0
PATIENT = {"lookup_deadline_ms": 60_000, "load_deadline_ms": 60_000, "store_deadline_ms": 60_000}
"""A test that is not about time should not fail for lack of it."""
SHAPE = (2, 4, 256, 160)  # 640 KiB in bfloat16
MODEL = "test/model"


def spec(url: str, **params: Any) -> dict[str, Any]:
    """As given to ``--l2-adapter``."""
    return {
        "type": "plugin",
        "module_path": "kvferry.engines.lmcache.adapter",
        "class_name": "KvferryL2Adapter",
        "adapter_params": {"valkey": url, **PATIENT, **params},
    }


def loaded(servers: Server | Cluster | str, **params: Any) -> KvferryL2Adapter:
    """The adapter as LMCache makes it from its argument."""
    url = servers if isinstance(servers, str) else servers.url
    arguments = argparse.Namespace(l2_adapter=[json.dumps(spec(url, **params))])
    made = create_l2_adapter(parse_args_to_l2_adapters_config(arguments).adapters[0])
    assert isinstance(made, KvferryL2Adapter)
    return made


def key(number: int, **fields: Any) -> ObjectKey:
    """Of a chunk. fields: others than a test's usual ones."""
    usual = {"model_name": MODEL, "kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)}
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), **{**usual, **fields})


def desc(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])


def thing(
    seed: int | None, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16, *, room: int = 0
) -> MemoryObj:
    """An object with bytes of its own, or empty. room: bytes that its allocation has beyond its layout."""
    size = torch.Size(shape)
    nbytes = size.numel() * dtype.itemsize
    raw = torch.zeros(nbytes + room, dtype=torch.uint8)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    meta = MemoryObjMetadata(
        shape=size,
        dtype=dtype,
        address=0,
        phy_size=nbytes + room,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
        shapes=[size],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None)


def content(of: MemoryObj) -> bytes:
    """Every byte of its allocation."""
    return bytes(of.raw_data.numpy())


def store(adapter: KvferryL2Adapter, keys: list[ObjectKey], things: list[MemoryObj]) -> Any:
    """The task's ``L2StoreResult``."""
    task = adapter.submit_store_task(keys, things)
    found: dict[int, Any] = {}

    def done() -> Any:
        found.update(adapter.pop_completed_store_tasks())
        return found.get(task)

    return _wait(adapter.get_store_event_fd(), done)


def look_up(
    adapter: KvferryL2Adapter, keys: list[ObjectKey], layout: MemoryLayoutDesc | None = None
) -> list[int]:
    """Places of the keys that were found."""
    described = {} if layout is None else {k.object_group_id: layout for k in keys}
    task = adapter.submit_lookup_and_lock_task(keys, described)
    found = _wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert len(found) == len(keys)
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is given once"
    return [int(place) for place in found.get_indices_list()]


def load(adapter: KvferryL2Adapter, keys: list[ObjectKey], things: list[MemoryObj]) -> list[int]:
    """Places of the keys that were loaded."""
    task = adapter.submit_load_task(keys, things)
    found = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert len(found) == len(keys)
    assert adapter.query_load_result(task) is None, "a result is given once"
    return [int(place) for place in found.get_indices_list()]


def _wait(fd: int, result: Callable[[], Any]) -> Any:
    """As LMCache's controllers: sleep on the descriptor, then ask."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if poller.poll(1000):
            consume_fd(fd)
            found = result()
            if found is not None:
                return found
    raise AssertionError("no result, or no event that announces it")


class Told(L2AdapterListener):  # type: ignore[misc]
    """Writes down what an adapter tells its listeners."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys
