"""An engine without its model: SGLang's radix cache, its pools and controller, our storage."""

import itertools
import json
from array import array
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import common as pool_memory
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from tests.engines.sglang.cases import rig

from kvferry.testing.expectations import eventually


def _backup(
    self: MHATokenToKVPoolHost, device_pool: Any, host: torch.Tensor, device: torch.Tensor, io_backend: str
) -> None:
    for layer in range(self.layer_num):
        for refs, source in (
            (self.k_data_refs, device_pool.k_buffer),
            (self.v_data_refs, device_pool.v_buffer),
        ):
            _put(refs[layer], self.page_size, host, source[layer][device])


def _load(
    self: MHATokenToKVPoolHost,
    device_pool: Any,
    host: torch.Tensor,
    device: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    device_pool.k_buffer[layer_id][device] = _take(self.k_data_refs[layer_id], self.page_size, host)
    device_pool.v_buffer[layer_id][device] = _take(self.v_data_refs[layer_id], self.page_size, host)


def _put(ref: torch.Tensor, page: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if ref.dim() == 4:  # pages of slots
        ref[slots // page, slots % page] = rows
    else:
        ref[slots] = rows


def _take(ref: torch.Tensor, page: int, slots: torch.Tensor) -> torch.Tensor:
    return ref[slots // page, slots % page] if ref.dim() == 4 else ref[slots]


class Replica:
    """One engine."""

    def __init__(self, device: Any, cache: UnifiedRadixCache, allocator: PagedTokenToKVPoolAllocator) -> None:
        self.device = device
        self.cache = cache
        self.allocator = allocator
        self._requests = itertools.count()

    def compute(self, tokens: "array[int]", *, salt: str | None = None) -> list[bytes]:
        """A prefill: KV of random bytes, inserted into the tree. What the slots hold."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            buffer.view(torch.uint8)[slots] = torch.randint(
                0, 256, buffer.view(torch.uint8)[slots].shape, dtype=torch.uint8
            )
        self.cache.insert(InsertParams(key=RadixKey(tokens, cache_salt=salt), value=slots))
        return self.held(slots)

    def held(self, slots: torch.Tensor) -> list[bytes]:
        """The bytes of device slots, by layer."""
        return [
            buffer[slots].contiguous().view(torch.uint8).numpy().tobytes()
            for buffer in (*self.device.k_buffer, *self.device.v_buffer)
        ]

    def settle(self) -> None:
        """As the scheduler between steps, until everything written to host memory is stored."""

        def done() -> bool:
            self.cache.check_hicache_events()
            return not (self.cache.ongoing_write_through or self.cache.ongoing_backup)

        eventually(done, "backed up")

    def flush(self) -> None:
        """``/flush_cache``: device and host memory are empty."""
        self.cache.reset()
        self.allocator.clear()

    def evict(self, pages: int) -> None:
        """From device memory."""
        self.cache.evict(EvictParams(num_tokens=pages * rig.PAGE))

    def match(self, tokens: "array[int]", *, salt: str | None = None) -> Any:
        """What the tree has."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, cache_salt=salt)))

    def prefetch(self, tokens: "array[int]", *, salt: str | None = None) -> None:
        """As the scheduler does it for a request that waits, until the request may run."""
        found = self.match(tokens, salt=salt)
        have = found.device_prefix_len + found.host_hit_length
        handle = CacheRequestHandle(f"r{next(self._requests)}", 0)
        self.cache.prefetch_from_storage(
            handle,
            found.last_host_node,
            tokens[have:],
            self.cache.get_last_hash_value(found.last_host_node),
            matched_prefix_tokens=tokens[:have],
            cache_salt=salt,
        )

        def done() -> bool:
            self.cache.check_hicache_events()
            return bool(self.cache.check_prefetch_progress(handle))

        eventually(done, "the request may run")

    def loaded(self, tokens: "array[int]", *, salt: str | None = None) -> list[bytes]:
        """The bytes of the prefix that is in device memory then, by layer."""
        found = self.match(tokens, salt=salt)
        request = SimpleNamespace(
            rid="x",
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        self.cache.init_load_back(
            InitLoadBackParams(found.best_match_node, found.host_hit_length, req=request)
        )
        self.cache.ready_to_load_host_cache()

        def done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.ongoing_load_back

        eventually(done, "loaded")
        after = self.match(tokens, salt=salt)
        slots = self.cache.tree_core.collect_full_device_indices(
            after.last_device_node, self.cache.root_node_handle()
        )
        return self.held(slots)


def replicas(count: int, model: Path, socket: Path, stack: ExitStack, **options: Any) -> list[Replica]:
    """Engines of one deployment in this process."""
    config = {
        "page_size": rig.PAGE,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_backend": "dynamic",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(
            {**rig.extra_config(socket), "prefetch_threshold": rig.PAGE}
        ),
        **options,
    }
    arguments = stack.enter_context(
        runtime_context.get_context().override_server_args(model_path=str(model), **config)
    )
    stack.enter_context(patch.object(MHATokenToKVPoolHost, "backup_from_device_all_layer", _backup))
    stack.enter_context(patch.object(MHATokenToKVPoolHost, "load_to_device_per_layer", _load))
    stack.enter_context(patch.object(pool_memory, "_cuda_host_register", lambda *_: None))
    return [_replica(arguments, stack) for _ in range(count)]


def _replica(arguments: Any, stack: ExitStack) -> Replica:
    device, _ = rig.mha_pool()
    allocator = PagedTokenToKVPoolAllocator(
        rig.SLOTS, page_size=rig.PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=SimpleNamespace(),
        token_to_kv_pool_allocator=allocator,
        page_size=rig.PAGE,
        tp_cache_group=torch.distributed.group.WORLD,
        tree_components=(ComponentType.FULL,),
    )
    cache = UnifiedRadixCache(params)
    cache.init_hicache(arguments, params)
    stack.callback(cache.shutdown)
    return Replica(device, cache, allocator)
