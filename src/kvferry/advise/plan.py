"""A plan: the workload on the machines, with and without a shared tier, and what follows. Pure."""

from dataclasses import dataclass, replace

from kvferry.advise.expect import Expected, request_s
from kvferry.advise.option import Option, options_of
from kvferry.advise.option import best as best_of
from kvferry.advise.parameters import active_parameters, has_experts, query_heads
from kvferry.advise.price import HOURS
from kvferry.advise.question import Question
from kvferry.advise.served import Served, choose_tensor, sizings
from kvferry.advise.settings import Settings, batched_tokens, choose, context_of
from kvferry.advise.shared import SharedTier
from kvferry.advise.speed import Compute, Link, attention_of, host_link, prefill_s
from kvferry.advise.verdict import Not, Verdict, judge
from kvferry.advise.workload import Workload, complete
from kvferry.errors import MisconfiguredError
from kvferry.models.concurrency import Budget
from kvferry.models.reserve import Allocator, EngineRules

TENSORS = (1, 2, 4, 8, 16)
REPLICA_HOST_BYTES, HOST_BYTES = 200_000_000_000, 800_000_000_000  # of a host's memory, for KV
REPLICAS = 2  # where nobody says how many GPUs there are
FEW_TURNS = 1.5  # below it, most requests begin a conversation
PRESET_KV = "fp8"  # that a preset's load is laid out for, whatever is asked


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

    tier: of options, the one that pays best. intake: of what hosts can take in, the share that they read.
    keeps_s: for how long host memory keeps what nobody uses; tensor_why: why so many ranks.
    """

    question: Question
    served: Served
    load: Workload
    settings: Settings
    tier: SharedTier
    options: tuple[Option, ...]
    intake: float
    expected: tuple[Expected, Expected, Expected]
    returns: tuple[Return, ...]
    verdict: Verdict
    link: Link
    keeps_s: float
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
    sketch = _workload(question, replicas=1)
    most = question.model.max_context
    if most and sketch.context_p99 + sketch.output_tokens > most:
        raise MisconfiguredError(
            f"requests of {sketch.context_p99:,.0f} tokens (p99) and {sketch.output_tokens:,.0f} of an "
            f"answer are more than the {most:,} that {question.model.name} allows; give --context-p50, "
            "--context-p99 and --output-tokens, or another model"
        )
    length = context_of(sketch.context_p99, sketch.output_tokens, most)
    served, why = _serve(question, sketch, length)
    load = _workload(question, replicas=served.gpus / _preset_tensor(question, sketch, served))
    return _decide(question, served, load, length, why)


def _workload(question: Question, *, replicas: float) -> Workload:
    return complete(
        question.numbers,
        kind=question.kind,
        replicas=replicas,
        goal=question.goal,
        measured=question.measured,
        longest=question.model.max_context,
    )


def _serve(question: Question, sketch: Workload, length: int) -> tuple[Served, str]:
    """The fleet: ranks as given, or the fewest that do."""
    rules = _rules(sketch)
    tensor, why = question.tensor, "as given"
    if tensor is None:
        tensor, why = _fewest(question, sketch, question.kv)
    gpus = question.gpus or REPLICAS * tensor
    if gpus % tensor:
        raise MisconfiguredError(
            f"{gpus} GPUs are no whole replicas of TP {tensor}; give a multiple of {tensor}"
        )
    served = Served(
        model=question.model,
        gpu=question.gpu,
        parts=sizings(question.model, question.kv, tensor, rules),
        budget=_budget(question, tensor),
        weights=question.weights,
        replicas=gpus // tensor,
        gpus_per_host=question.gpus_per_host,
        host_bytes=_host_bytes(question, tensor),
        compute=_compute(question, tensor, sketch.context_mean),
    )
    if served.in_flight(length) < 1:
        raise MisconfiguredError(
            f"TP {tensor} leaves {served.budget.kv_bytes / 1e9:.1f} GB per GPU for KV, and one request of "
            f"{length:,} tokens takes {served.reserved_bytes(length) / 1e9:.1f}; use more ranks (--tp) or "
            "larger GPUs"
        )
    return served, why


def _rules(sketch: Workload) -> EngineRules:
    """A step as large as it will be set, which windows keep room for."""
    return EngineRules(allocator=Allocator.GROUPED, batched_tokens=batched_tokens(sketch.goal))


def _budget(question: Question, ranks: int) -> Budget:
    memory = question.gpu.memory_bytes if question.memory_bytes is None else question.memory_bytes
    return Budget(memory, question.utilization, question.weights.nbytes, ranks, question.overhead_bytes)


def _fewest(question: Question, sketch: Workload, kv: str) -> tuple[int, str]:
    """Ranks of a replica where nobody said, and why."""
    budgets: dict[int, Budget | None] = {}
    for ranks in TENSORS:
        try:
            budgets[ranks] = _budget(question, ranks)
        except MisconfiguredError:
            budgets[ranks] = None
    return choose_tensor(
        question.model,
        kv,
        _rules(sketch),
        most=min(question.gpus or question.gpus_per_host, question.gpus_per_host),
        tokens=sketch.context_p99 + sketch.output_tokens,
        budgets=budgets,
    )


def _preset_tensor(question: Question, sketch: Workload, served: Served) -> int:
    """GPUs that share one replica's load of a preset: the same however they are split and KV is kept."""
    try:
        return _fewest(question, sketch, PRESET_KV)[0]
    except MisconfiguredError:
        return served.tensor


def _host_bytes(question: Question, tensor: int) -> int:
    if question.host_bytes is not None:
        return question.host_bytes
    return min(REPLICA_HOST_BYTES, HOST_BYTES // max(1, question.gpus_per_host // tensor))


def _compute(question: Question, tensor: int, tokens: float) -> Compute | None:
    """What speed is told from; a measured rate of prefill corrects it, at prompts of ``tokens``."""
    gpu, model = question.gpu, question.model
    weights = question.weights.nbytes
    count = model.parameters or weights / question.weight_bytes
    active = question.active_parameters or active_parameters(model, question.config, count)
    flops = (question.flops or gpu.bf16_tflops) * 1e12
    if active and count and active > count * (1 + 1e-6):
        raise MisconfiguredError(
            f"--active-parameters {active:,.4g} are more than the {count:,.4g} that {model.name} has"
        )
    if not active or not flops or not gpu.bandwidth_gb_s:
        if question.prefill_tokens_s is not None:
            what = (
                "bf16_tflops and bandwidth_gb_s of the GPU (--gpus-file)" if active else "--active-parameters"
            )
            raise MisconfiguredError(
                f"--prefill-tokens-s corrects an estimate, and there is none without {what}; give that too"
            )
        return None
    found = Compute(
        parameters=active,
        weights_bytes=weights,
        active_bytes=min(weights, weights * active / count),
        attention=attention_of(model.layers, query_heads(question.config)),
        experts=has_experts(model, question.config),
        ranks=tensor,
        flops=flops,
        bandwidth=gpu.bandwidth_gb_s * 1e9,
    )
    if question.prefill_tokens_s is None:
        return found
    return replace(found, measured=question.prefill_tokens_s / (tokens / prefill_s(found, tokens) / tensor))


def _decide(question: Question, served: Served, load: Workload, length: int, why: str) -> Plan:
    priced = question.prices.gpu_usd_hour is not None and served.compute is not None
    options = options_of(question, served, load)
    best = best_of(options, priced=priced)
    returns = _returns(served, load, best.link)
    against = {
        Not.COMPRESSED: served.compressed,
        Not.NETWORK: best.intake > 1,
        Not.SEVERAL_HOSTS: served.tensor > served.gpus_per_host,
        Not.NOTHING_RETURNS: _nothing_returns(load),
        Not.SLOWER: any(_slower(found, best.expected[1].busy or 0.0) for found in returns[:1]),
    }
    verdict = judge(
        best.deal,
        priced=priced,
        against=tuple(reason for reason, holds in against.items() if holds),
        prefill_share=_prefill_share(served, load, best.expected[2]),
        busy=best.expected[2].busy or 0.0,
    )
    settings = choose(
        served,
        load,
        kv=question.kv,
        utilization=question.utilization,
        max_model_len=length,
        shared=verdict.shared,
        routing=question.routing,
    )
    made = load.context_mean * (1 - best.expected[1].hit_rate) + load.output_tokens
    new_s = load.requests_s * made / served.replicas
    moved = 1 - best.expected[1].hit_rate  # what is not there already is loaded or stored
    crossing = load.requests_s * HOURS * 3600 * served.copy_bytes(load.context_mean) * moved / 1e9
    return Plan(
        question=question,
        served=served,
        load=load,
        settings=settings,
        tier=best.tier,
        options=options,
        intake=best.intake,
        expected=best.expected,
        returns=returns,
        verdict=verdict,
        link=best.link,
        keeps_s=served.host_tokens(load.grown_tokens) / new_s if new_s else 0.0,
        tensor_why=why,
        zone_usd_month=crossing * question.prices.zone_usd_gb,
    )


def _nothing_returns(load: Workload) -> bool:
    """Nothing at all, or of single requests what one of them holds: their instructions."""
    few = load.turns < FEW_TURNS and load.curve.at(load.grown_tokens) >= load.curve.most
    return few or load.curve.most <= 0


def _slower(found: Return, busy: float) -> bool:
    """Whether loading takes longer than computing on replicas as busy as they are without the tier."""
    return found.kv_bytes > 0 and busy < 1 and found.shared_s >= found.computed_s / (1 - busy)


def _prefill_share(served: Served, load: Workload, found: Expected) -> float:
    """Of a replica's time, what prompts alone take with the shared tier; 0 where speed is unknown."""
    if served.compute is None:
        return 0.0
    return load.requests_s / served.replicas * request_s(served.compute, load, found.hit_rate)[0]


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
