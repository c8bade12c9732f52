"""A plan: the workload on the machines, with and without a shared tier, and what follows. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.advise.expect import Expected, Keeps, Routing, expect, held, request_s
from kvferry.advise.parameters import active_parameters, has_experts, query_heads
from kvferry.advise.price import HOURS, Deal
from kvferry.advise.served import Served, choose_tensor, sizings
from kvferry.advise.settings import UTILIZATION, Settings, choose, context_of
from kvferry.advise.shared import Shard, SharedTier, size_shared
from kvferry.advise.speed import Compute, Link, attention_of, host_link, prefill_s, valkey_link
from kvferry.advise.verdict import Verdict, judge
from kvferry.advise.workload import Goal, Kind, Numbers, ReuseCurve, Workload, complete
from kvferry.errors import MisconfiguredError
from kvferry.models.concurrency import Budget, Weights
from kvferry.models.gpus import Gpu
from kvferry.models.layers import Model
from kvferry.models.reserve import Allocator, EngineRules

TENSORS = (1, 2, 4, 8, 16)
REPLICAS = 2  # where nobody says how many GPUs there are
GIB = 1 << 30
LONG_GAP_H = 1.0
UNPRICED = 1.0


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

    overhead_bytes: per GPU. host_bytes: of host memory for KV, per replica. prefill_tokens_s: of one GPU,
    where it was measured. measured: numbers and reuse of a trace, and its name.
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
    host_bytes: int = 200_000_000_000
    gpus_per_host: int = 8
    routing: Routing = Routing.AFFINITY
    shard: Shard = field(default_factory=Shard)
    active_parameters: float | None = None
    prefill_tokens_s: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class Return:
    """One request of ``tokens`` input tokens that comes back to an idle replica.

    The seconds are until its first token, by where its prefix lies.
    """

    tokens: float
    new_tokens: float
    kv_bytes: int
    gpu_s: float
    host_s: float
    shared_s: float
    computed_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. expected: GPU memory alone, with host memory, with the shared tier.

    keeps_s: for how long host memory keeps what nobody uses; tensor_why: why so many ranks.
    """

    question: Question
    served: Served
    load: Workload
    settings: Settings
    tier: SharedTier
    expected: tuple[Expected, Expected, Expected]
    returns: tuple[Return, ...]
    verdict: Verdict
    link: Link
    keeps_s: float
    prefill_tokens_s: float | None
    tensor_why: str
    zone_usd_month: float

    @property
    def advised(self) -> Expected:
        """What to expect of what is advised."""
        if self.settings.shared:
            return self.expected[2]
        return self.expected[1] if self.settings.offload_bytes else self.expected[0]


def make(question: Question) -> Plan:
    """The plan. Raises MisconfiguredError for what cannot be."""
    sketch = complete(
        question.numbers, kind=question.kind, replicas=1, goal=question.goal, measured=question.measured
    )
    most = question.model.max_context
    if most and sketch.context_p99 > most:
        raise MisconfiguredError(
            f"requests of {sketch.context_p99:,.0f} tokens (p99) are more than the {most:,} that "
            f"{question.model.name} allows; give --context-p50 and --context-p99, or another model"
        )
    length = context_of(sketch.context_p99, sketch.output_tokens, most)
    served, why = _serve(question, sketch, length)
    load = complete(
        question.numbers,
        kind=question.kind,
        replicas=served.replicas,
        goal=question.goal,
        measured=question.measured,
    )
    return _decide(question, served, load, length, why)


def _serve(question: Question, sketch: Workload, length: int) -> tuple[Served, str]:
    """The fleet: ranks as given, or the fewest that do."""
    memory = question.gpu.memory_bytes if question.memory_bytes is None else question.memory_bytes
    rules = EngineRules(allocator=Allocator.GROUPED)

    def budget(ranks: int) -> Budget:
        return Budget(memory, question.utilization, question.weights.nbytes, ranks, question.overhead_bytes)

    tensor, why = question.tensor, "as given"
    if tensor is None:
        budgets: dict[int, Budget | None] = {}
        for ranks in TENSORS:
            try:
                budgets[ranks] = budget(ranks)
            except MisconfiguredError:
                budgets[ranks] = None
        tensor, why = choose_tensor(
            question.model,
            question.kv,
            rules,
            most=question.gpus or question.gpus_per_host,
            tokens=sketch.context_p99 + sketch.output_tokens,
            budgets=budgets,
        )
    gpus = question.gpus or REPLICAS * tensor
    if gpus % tensor:
        raise MisconfiguredError(
            f"{gpus} GPUs are no whole replicas of TP {tensor}; give a multiple of {tensor}"
        )
    served = Served(
        model=question.model,
        gpu=question.gpu,
        parts=sizings(question.model, question.kv, tensor, rules),
        budget=budget(tensor),
        weights=question.weights,
        replicas=gpus // tensor,
        replicas_per_host=max(1, question.gpus_per_host // tensor),
        host_bytes=question.host_bytes,
        compute=_compute(question, tensor),
    )
    if served.in_flight(length) < 1:
        raise MisconfiguredError(
            f"TP {tensor} leaves {served.budget.kv_bytes / 1e9:.1f} GB per GPU for KV, and one request of "
            f"{length:,} "
            f"tokens takes {served.reserved_bytes(length) / 1e9:.1f}; use more ranks (--tp) or larger GPUs"
        )
    return served, why


def _compute(question: Question, tensor: int) -> Compute | None:
    gpu, model = question.gpu, question.model
    weights = question.weights.nbytes
    count = model.parameters or weights / 2
    active = question.active_parameters or active_parameters(model, question.config, count)
    flops = (question.flops or gpu.bf16_tflops) * 1e12
    if not active or not flops or not gpu.bandwidth_gb_s:
        return None
    return Compute(
        parameters=active,
        weights_bytes=weights,
        active_bytes=min(weights, weights * active / count),
        attention=attention_of(model.layers, query_heads(question.config)),
        experts=has_experts(model, question.config),
        ranks=tensor,
        flops=flops,
        bandwidth=gpu.bandwidth_gb_s * 1e9,
    )


def _decide(question: Question, served: Served, load: Workload, length: int, why: str) -> Plan:
    routing = question.routing
    needed = load.curve.enough_tokens
    hits = [held(served, load, keeps=keeps, shared_tokens=needed, routing=routing) for keeps in Keeps]
    size = served.copy_bytes(load.context_p50)
    far = max(0.0, hits[2] - hits[1])
    tier = size_shared(
        conversation_bytes=served.copy_bytes(load.grown_tokens),
        conversations=needed / load.grown_tokens if load.curve.at(0.0) < load.curve.most else 0.0,
        read_bytes_s=load.requests_s * far * size,
        started_s=load.requests_s / load.turns,
        resume_h=load.resume_h,
        shard=question.shard,
    )
    link = valkey_link(served.tensor, tier.sustained_bytes_s)
    links = (None, host_link(served.tensor), link)
    shares = (0.0, hits[1] - hits[0], far)
    expected = tuple(
        expect(served, load, keeps=keeps, hit_rate=hit, link=behind, far_share=max(0.0, share))
        for keeps, hit, behind, share in zip(Keeps, hits, links, shares, strict=True)
    )
    prefill = question.prefill_tokens_s or _prefill_rate(served, load)
    deal = _deal(question, served, load, tier, expected, prefill)
    verdict = judge(
        deal,
        priced=question.prices.gpu_usd_hour is not None and prefill is not None,
        compressed=served.compressed,
        returns=load.curve.at(0.0) < load.curve.most,
        prefill_share=_prefill_share(served, load, expected[2]),
    )
    settings = choose(
        served,
        load,
        kv=question.kv,
        utilization=question.utilization,
        max_model_len=length,
        shared=verdict.shared,
        routing=routing,
    )
    new_s = (load.requests_s * (load.context_p50 * (1 - hits[1]) + load.output_tokens)) / served.replicas
    crossing = load.requests_s * HOURS * 3600 * size * (far + 1 - hits[2]) / 1e9
    return Plan(
        question=question,
        served=served,
        load=load,
        settings=settings,
        tier=tier,
        expected=(expected[0], expected[1], expected[2]),
        returns=_returns(served, load, link),
        verdict=verdict,
        link=link,
        keeps_s=served.host_tokens(load.grown_tokens) / new_s if new_s else 0.0,
        prefill_tokens_s=prefill,
        tensor_why=why,
        zone_usd_month=crossing * question.prices.zone_usd_gb,
    )


def _prefill_share(served: Served, load: Workload, found: Expected) -> float:
    """Of a replica's time, what prompts alone take with the shared tier; 0 where speed is unknown."""
    if served.compute is None:
        return 0.0
    return load.requests_s / served.replicas * request_s(served.compute, load, found.hit_rate)[0]


def _prefill_rate(served: Served, load: Workload) -> float | None:
    """Of one GPU that computes prompts of the median length."""
    if served.compute is None:
        return None
    return load.context_p50 / prefill_s(served.compute, load.context_p50) / served.tensor


def _returns(served: Served, load: Workload, link: Link) -> tuple[Return, ...]:
    if served.compute is None:
        return ()
    found = []
    for tokens in dict.fromkeys((load.context_p50, load.context_p99)):
        new = min(load.new_tokens, tokens)
        tail = prefill_s(served.compute, new, tokens - new)
        size = served.copy_bytes(tokens - new) if tokens > new else 0
        found.append(
            Return(
                tokens=tokens,
                new_tokens=new,
                kv_bytes=size,
                gpu_s=tail,
                host_s=tail + host_link(served.tensor).seconds(size),
                shared_s=tail + link.seconds(size),
                computed_s=prefill_s(served.compute, tokens),
            )
        )
    return tuple(found)


def _deal(
    question: Question,
    served: Served,
    load: Workload,
    tier: SharedTier,
    expected: Sequence[Expected],
    prefill: float | None,
) -> Deal:
    """As ``kvferry price`` counts it: the shared tier beside GPUs and host memory that are there anyway.

    GPUs that the load would need beyond the fleet, and does not with the tier, are purchases put off.
    """
    prices = question.prices
    before, after = (max(0.0, (found.busy or 0.0) - 1) for found in expected[1:])
    spared = max(0.0, before - after) * served.gpus
    grown = load.grown_tokens
    local = max(served.copy_bytes(grown) * served.gpu_tokens(grown) / grown, served.host_bytes)
    return Deal(
        gpus=served.gpus,
        gpu_usd_hour=prices.gpu_usd_hour or UNPRICED,
        requests_s=load.requests_s,
        prompt_tokens=load.context_p50,
        prefill_tokens_s=prefill or 1e12,
        hit_rate=min(1.0, max(expected[1].hit_rate, expected[2].hit_rate)),
        own_hit_rate=min(1.0, expected[1].hit_rate),
        deferred_usd_month=spared * (prices.gpu_usd_hour or 0.0) * HOURS,
        bytes_per_token=served.copy_bytes(load.context_p50) / load.context_p50,
        ram_gib=tier.machine_bytes / GIB,
        ram_usd_gib=prices.ram_usd_gib,
        disk_gib=tier.disk_bytes / GIB,
        disk_usd_gib=prices.disk_usd_gib,
        objects_gib=tier.bucket_bytes / GIB,
        objects_usd_gib=prices.objects_usd_gib,
        replicas=served.replicas,
        working_set_gib=tier.peak_bytes / served.replicas / GIB,
        host_gib=local / GIB,
        long_gaps=load.resume_h >= LONG_GAP_H,
    )
