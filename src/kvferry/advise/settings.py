"""What to set in an engine, decided from the workload and the machines: the lower five layers in numbers."""

import math
from dataclasses import dataclass

from kvferry.advise.expect import Routing
from kvferry.advise.served import Served
from kvferry.advise.workload import Goal, Workload

CONTEXT_HEADROOM = 1.1
UTILIZATION = 0.92
LATENCY_TOKENS = 2048
THROUGHPUT_TOKENS = 16_384
OFFLOAD_BLOCK_TOKENS = 64
HOST_HEADROOM = 1.3
HOST_STEP = 10_000_000_000
SHORTEST_CONTEXT = 2048
POOL_LEAST = 10_000_000_000
SPLIT_INPUT = 16_384  # from prompts of this length on, a prefill is felt by everybody's decode


@dataclass(frozen=True, slots=True)
class Settings:
    """Of every engine of the fleet.

    max_model_len: tokens. kv_dtype: ``fp8`` or ``auto``, the model's own. skip_windows: whether layers with
    a window keep theirs. offload_bytes: of host memory behind one replica, 0: none. one_group: whether all
    layers are of full attention. pool: whether engines of a host share its memory. cache_aware: of the
    router. split: whether prefill and decode go apart if tails matter.
    """

    max_model_len: int
    utilization: float
    kv_dtype: str
    skip_windows: bool
    batched_tokens: int
    tensor: int
    offload_bytes: int
    offload_block_tokens: int
    one_group: bool
    shared: bool
    pool: bool
    routing: Routing
    cache_aware: bool
    split: bool
    latency: bool


def context_of(load_p99: float, output: float, most: int) -> int:
    """The real p99 with its answer and a tenth on top, up to the next half power of two: 12K, 16K, 24K ..."""
    need = (load_p99 + output) * CONTEXT_HEADROOM
    power = 1 << max(0, math.floor(math.log2(max(need, SHORTEST_CONTEXT))))
    sizes = (power, power + power // 2, 2 * power)
    length = next(size for size in sizes if size >= need) if need > SHORTEST_CONTEXT else SHORTEST_CONTEXT
    return min(length, most) if most else length


def offload_bytes(served: Served, load: Workload, *, shared: bool) -> int:
    """Host memory for one replica: what comes back and 30%, in steps of 10 GB, as far as there is so much.

    None where GPUs hold all that, unless it is the pool before a shared tier, through which everything goes.
    """
    working = load.curve.enough_tokens / served.replicas
    if not shared and (served.gpu_tokens(load.grown_tokens) >= working or load.curve.most <= 0):
        return 0
    wanted = served.copy_bytes(load.grown_tokens) * working / load.grown_tokens * HOST_HEADROOM
    least = POOL_LEAST if shared else 0
    return max(least, min(served.host_bytes, math.ceil(wanted / HOST_STEP) * HOST_STEP))


def choose(
    served: Served,
    load: Workload,
    *,
    kv: str,
    utilization: float,
    max_model_len: int,
    shared: bool,
    routing: Routing,
) -> Settings:
    """The settings that the workload asks for."""
    latency = load.goal is Goal.LATENCY
    offload = offload_bytes(served, load, shared=shared)
    pool = shared or (routing is Routing.ROUND_ROBIN and served.on_host > 1 and not served.compressed)
    fp8 = kv == "fp8"
    return Settings(
        max_model_len=max_model_len,
        utilization=utilization,
        kv_dtype="fp8" if fp8 else "auto",
        skip_windows=fp8 and served.windows,
        batched_tokens=LATENCY_TOKENS if latency else THROUGHPUT_TOKENS,
        tensor=served.tensor,
        offload_bytes=offload,
        offload_block_tokens=OFFLOAD_BLOCK_TOKENS,
        one_group=served.one_group,
        shared=shared,
        pool=pool and offload > 0,
        routing=routing,
        cache_aware=shared,
        split=shared and load.context_p99 >= SPLIT_INPUT,
        latency=latency,
    )
