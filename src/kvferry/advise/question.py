"""What is asked of a plan: a model on machines, a workload, prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.advise.expect import Routing
from kvferry.advise.settings import UTILIZATION
from kvferry.advise.shared import Shard
from kvferry.advise.workload import Goal, Kind, Numbers, ReuseCurve
from kvferry.models.concurrency import Weights
from kvferry.models.gpus import Gpu
from kvferry.models.layers import Model


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars: of a GPU's hour (None: unknown), per GiB and month, per GB across zones."""

    gpu_usd_hour: float | None
    ram_usd_gib: float
    disk_usd_gib: float
    objects_usd_gib: float
    zone_usd_gb: float


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that was asked. config: of the model, for its heads and experts. gpus, tensor: None: chosen.

    overhead_bytes: per GPU. host_bytes: of host memory for KV, per replica; None: 200 GB, as far as 800 GB of
    a host go. weight_bytes: of one weight, where only their sum is known. prefill_tokens_s: of one GPU, where
    it was measured. measured: numbers and reuse of a trace, and its name.
    """

    model: Model
    config: Mapping[str, Any]
    gpu: Gpu
    weights: Weights
    kind: Kind
    numbers: Numbers
    prices: Prices
    gpus: int | None = None
    tensor: int | None = None
    goal: Goal | None = None
    measured: tuple[Numbers, ReuseCurve | None, str] | None = None
    kv: str = "fp8"
    utilization: float = UTILIZATION
    overhead_bytes: int = 3_000_000_000
    memory_bytes: int | None = None
    host_bytes: int | None = None
    gpus_per_host: int = 8
    routing: Routing = Routing.AFFINITY
    shard: Shard = field(default_factory=Shard)
    active_parameters: float | None = None
    weight_bytes: float = 2.0
    prefill_tokens_s: float | None = None
    flops: float | None = None
