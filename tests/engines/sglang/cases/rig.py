"""SGLang's own pools and controllers on CPU tensors, over a node of ours."""

import hashlib
import json
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import utils as cache_utils
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvferry.client import copying, scheduler
from kvferry.config import NodeSettings
from kvferry.engines.sglang import backend
from kvferry.engines.sglang.backend import KvferryStorage
from kvferry.node.node import Node
from kvferry.testing.expectations import WAIT_S
from kvferry.tiers.contract import Tier

PAGE = 16
LAYERS = 3
SLOTS = 16 * PAGE
POOL_BYTES = 64 << 20
LOOKUP_S, RESERVE_S = scheduler.UNMEASURED_LOOKUP_WAIT_S, copying.RESERVE_S
TEXT_MODEL = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": LAYERS,
    }
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def page_hash(raw: Any, prior: bytes | None, page_size: int | None) -> Any:
    """SGLang's page hash: SHA-256 over the one before and the tokens, 32 bits each (64 for image tokens)."""
    tokens = list(raw)
    size = page_size or len(tokens)
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        page = tokens[start : start + size]
        wide = any(token >= 1 << 32 for token in page)
        packed = b"\xff" + struct.pack(f"<{size}Q", *page) if wide else struct.pack(f"<{size}I", *page)
        prior = hashlib.sha256((prior or b"") + packed).digest()
        found.append(prior.hex())
    return found if page_size else found[0]


def _native_hash(key: Any, prior: bytes | None, page_size: int | None = None) -> Any:
    tokens = getattr(key, "token_ids", key)
    return page_hash(list(tokens)[: len(key)], prior, page_size)


@contextmanager
def one_rank() -> Iterator[None]:
    """One process that is all ranks there are."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with (
        patch.object(cache_utils, "get_native_hash", _native_hash),
        patient(),
        runtime_context.get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_size=1, attn_dcp_rank=0),
    ):
        yield
    torch.distributed.destroy_process_group()


def model(directory: Path, *, weights: bytes = b"w", config: str = TEXT_MODEL) -> Path:
    """A checkpoint that is only looked at."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return directory


@contextmanager
def serving(model_path: Path, **options: Any) -> Iterator[None]:
    """This process serves that model, as SGLang's own tests say it."""
    with runtime_context.get_context().override_server_args(model_path=str(model_path), **options):
        yield


def start_node(
    directory: Path, stack: ExitStack, *, pool_bytes: int = POOL_BYTES, tier: Tier | None = None
) -> Node:
    """A node in this process."""
    directory.mkdir(mode=0o700, exist_ok=True)
    node = Node(
        NodeSettings(pool_bytes=pool_bytes, socket_path=directory / "node.sock", metrics_port=0), tier=tier
    )
    stack.callback(node.close)
    node.start()
    return node


def mha_pool(
    layout: str = "page_first", *, heads: int = 2, dtype: torch.dtype = torch.bfloat16, slots: int = SLOTS
) -> Any:
    """SGLang's device pool of a small model with attention heads, and its host pool."""
    device = MHATokenToKVPool(
        size=slots,
        page_size=PAGE,
        dtype=dtype,
        head_num=heads,
        head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=slots,
        start_layer=0,
        end_layer=LAYERS,
    )
    return device, host


def mla_pool(layout: str = "page_first") -> Any:
    """The same for a model with latent attention."""
    device = MLATokenToKVPool(
        size=SLOTS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    return device, host


def mamba_pool(*, side_state: bool = False, temporal: torch.dtype = torch.float32) -> MambaPoolHost:
    """Host slots for recurrent states of two layers."""
    slots = 8
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, slots, 4, 6, dtype=temporal),
        conv=(torch.zeros(2, slots, 5, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(slots, 7, dtype=torch.float32),) if side_state else (),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


def storage_config(extra: dict[str, Any], **fields: Any) -> HiCacheStorageConfig:
    """What the controller makes of its process, with one rank unless told otherwise."""
    known: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "small",
    }
    return HiCacheStorageConfig(**(known | fields), extra_config=extra)


def extra_config(socket: Path, **more: Any) -> dict[str, Any]:
    """``--hicache-storage-backend-extra-config``."""
    return {
        "backend_name": "kvferry",
        "module_path": "kvferry.engines.sglang.backend",
        "class_name": "KvferryStorage",
        "interface_v1": 1,
        "socket": str(socket),
        "deadline_ms": 60_000,
        **more,
    }


@contextmanager
def patient() -> Iterator[None]:
    """A busy host may keep a node from answering for longer than an engine would wait."""
    with (
        patch.object(backend, "CONNECT_S", WAIT_S),
        patch.object(backend, "QUERY_S", WAIT_S),
        patch.object(scheduler, "UNMEASURED_LOOKUP_WAIT_S", WAIT_S),
        patch.object(copying, "RESERVE_S", WAIT_S),
    ):
        yield


@contextmanager
def impatient() -> Iterator[None]:
    """As an engine waits, and for no connection that cannot be."""
    with (
        patch.object(backend, "CONNECT_S", 0.0),
        patch.object(scheduler, "UNMEASURED_LOOKUP_WAIT_S", LOOKUP_S),
        patch.object(copying, "RESERVE_S", RESERVE_S),
    ):
        yield


def damage(node: Node, *, page: int) -> None:
    """Change a byte of one stored part, the ``page``-th that was stored."""
    state = node._app.state
    entry = list(state.catalogue._at.values())[page]
    view = state.arena.view(entry.offset, entry.nbytes)
    view[0] ^= 0xFF


def storage(
    socket: Path, host: Any, stack: ExitStack, *, sides: dict[Any, Any] | None = None, **fields: Any
) -> KvferryStorage:
    """Through SGLang's factory, with its pools registered as the controllers do it."""
    more = fields.pop("extra", {})
    config = storage_config(extra_config(socket, **more), **fields)
    made = StorageBackendFactory.create_backend("dynamic", config, host)
    assert isinstance(made, KvferryStorage)
    stack.callback(made.close)
    made.register_mem_pool_host(host)
    for name, pool in (sides or {}).items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


def controller(
    socket: Path, device: Any, host: Any, stack: ExitStack, *, model_name: str = "small", **options: Any
) -> HiCacheController:
    """SGLang's controller with our storage attached and its threads running."""
    allocator = PagedTokenToKVPoolAllocator(
        SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
    )
    made = HiCacheController(
        allocator,
        host,
        PAGE,
        tp_group=torch.distributed.group.WORLD,
        load_cache_event=threading.Event(),
        write_policy=options.pop("write_policy", "write_through"),
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name=model_name,
        storage_backend_extra_config=extra_config(socket),
        enable_storage_metrics=True,
        **options,
    )
    stack.callback(made.detach_storage_backend)
    return made


def tokens(pages: int, *, seed: int = 1) -> "array[int]":
    """Of one prompt, as long as so many pages."""
    return array("q", range(seed * 100_000, seed * 100_000 + pages * PAGE))


def hashes(pages: int, *, seed: int = 1, prior: str | None = None) -> list[str]:
    """The names of so many pages of one prompt."""
    found: list[str] = cache_utils.get_hash_str(tokens(pages, seed=seed), prior, PAGE)
    return found


def scramble(host: Any, seed: int = 0) -> None:
    """Random bytes in all of a pool's memory."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in _tensors(host):
        tensor.view(torch.uint8).random_(0, 256, generator=generator)


def _tensors(host: Any) -> Iterator[torch.Tensor]:
    found = [host.kv_buffer]
    while found:
        one = found.pop()
        if isinstance(one, (list, tuple)):
            found += list(one)
        elif one.numel():
            yield one


def page_bytes(host: Any, indices: torch.Tensor) -> list[bytes]:
    """What SGLang itself says the pages hold."""
    size = host.page_size
    pages = [host.get_data_page(int(indices[at]), flat=True) for at in range(0, len(indices), size)]
    return [page.contiguous().view(torch.uint8).numpy().tobytes() for page in pages]


def slots(host: Any, pages: int) -> torch.Tensor:
    """Allocated in the pool."""
    found = host.alloc(pages * host.page_size)
    assert found is not None
    return found


def take(queue: Any) -> Any:
    """The next entry of one of the controller's queues."""
    return queue.get(timeout=WAIT_S)


def flat(lists: Sequence[Sequence[bool]]) -> list[bool]:
    return [one for part in lists for one in part]


class HybridEngine(NamedTuple):
    """SGLang's controller for models with pools beside their KV pages."""

    made: HybridCacheController
    kv: Any
    states: Any


def hybrid_controller(socket: Path, stack: ExitStack) -> HybridEngine:
    """With KV pages and recurrent states, our storage attached and its threads running."""
    device, host = mha_pool()
    states = mamba_pool()
    group = HostPoolGroup(
        [
            PoolEntry(PoolName.KV, host, device, lambda layer: layer, is_primary_index_anchor=True),
            PoolEntry(PoolName.MAMBA, states, None, lambda layer: layer),
        ]
    )
    made = HybridCacheController(
        PagedTokenToKVPoolAllocator(
            SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
        ),
        group,
        PAGE,
        tp_group=torch.distributed.group.WORLD,
        load_cache_event=threading.Event(),
        write_policy="write_through",
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="small",
        storage_backend_extra_config=extra_config(socket),
    )
    stack.callback(made.detach_storage_backend)
    return HybridEngine(made, host, states)
