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
    router. split: whether prefill and decode go apart if tails matter. sglang_rank_bytes: of host memory for
    each rank of SGLang, which keeps its own copy of what ranks repeat; 0: none. sglang_wants: what it would
    take there to hold as much as ``offload_bytes`` does elsewhere.
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
    sglang_rank_bytes: int
    sglang_wants: int


def context_of(load_p99: float, output: float, most: int) -> int:
    """The real p99 with its answer and a tenth on top, up to the next half power of two: 12K, 16K, 24K ..."""
    need = (load_p99 + output) * CONTEXT_HEADROOM
    power = 1 << max(0, math.floor(math.log2(max(need, SHORTEST_CONTEXT))))
    sizes = (power, power + power // 2, 2 * power)
    length = next(size for size in sizes if size >= need) if need > SHORTEST_CONTEXT else SHORTEST_CONTEXT
    return min(length, most) if most else length


def batched_tokens(goal: Goal) -> int:
    """Of a step."""
    return LATENCY_TOKENS if goal is Goal.LATENCY else THROUGHPUT_TOKENS


def offload_bytes(served: Served, load: Workload, *, shared: bool, pool: bool) -> int:
    """Host memory for one replica: what comes back and 30%, in steps of 10 GB, as far as there is so much.

    None where GPUs hold all that, or more than the host does of what they hold a copy of; unless it is the
    pool before a shared tier, through which everything goes. pool: whether it is one of the host.
    """
    working, grown = load.curve.enough_tokens / served.replicas, load.grown_tokens
    on_gpus = served.gpu_tokens(grown)
    if not shared and (on_gpus >= working or load.curve.most <= 0):
        return 0
    if not (shared or pool) and on_gpus >= served.host_tokens(grown):
        return 0
    each = served.copy_bytes(grown) if shared or pool else served.offloaded_bytes(grown)
    wanted = each * working / grown * HOST_HEADROOM
    least = POOL_LEAST if shared else 0
    return max(least, min(served.host_bytes, math.ceil(wanted / HOST_STEP) * HOST_STEP))


def sglang_rank_bytes(served: Served, load: Workload, offload: int, *, pool: bool) -> tuple[int, int]:
    """Of host memory for each rank: as much as there is of what is wanted, and what is wanted.

    SGLang keeps what its ranks hold, repeats and all. None where that is less than the GPU's own KV: a copy
    of a part of it finds nothing more. With a pool behind it, it is only what loads pass through.
    """
    grown = load.grown_tokens
    wanted = math.ceil(offload * served.rank_bytes(grown) / max(1, served.copy_bytes(grown)))
    if not pool and not served.latent:
        wanted = offload // served.tensor
    there = min(wanted, max(served.host_bytes, POOL_LEAST if pool else 0) // served.tensor)
    useless = there * served.reserved_bytes(grown) <= served.budget.kv_bytes * served.rank_bytes(grown)
    return (0 if useless and not pool else there), wanted


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
    pool = shared or (routing is Routing.ROUND_ROBIN and served.on_host > 1 and not served.compressed)
    offload = offload_bytes(served, load, shared=shared, pool=pool)
    pool = pool and offload > 0
    sglang, wanted = sglang_rank_bytes(served, load, offload, pool=pool)
    fp8 = kv == "fp8"
    return Settings(
        max_model_len=max_model_len,
        utilization=utilization,
        kv_dtype="fp8" if fp8 else "auto",
        skip_windows=fp8 and served.windows,
        batched_tokens=batched_tokens(load.goal),
        tensor=served.tensor,
        offload_bytes=offload,
        offload_block_tokens=OFFLOAD_BLOCK_TOKENS,
        one_group=served.one_group,
        shared=shared,
        pool=pool,
        routing=routing,
        cache_aware=shared,
        split=shared and load.context_p99 >= SPLIT_INPUT,
        latency=latency,
        sglang_rank_bytes=sglang,
        sglang_wants=wanted,
    )
