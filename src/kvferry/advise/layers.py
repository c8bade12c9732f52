"""The advice, layer by layer from the bottom: what to set, and why, with the plan's own numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.advise.expect import Routing
from kvferry.advise.plan import Plan
from kvferry.advise.settings import CONTEXT_HEADROOM, HOST_HEADROOM, LATENCY_TOKENS
from kvferry.advise.workload import Kind


@dataclass(frozen=True, slots=True)
class Advice:
    """Of one layer. sets: what to set, each a few words. why: sentences."""

    layer: str
    sets: tuple[str, ...]
    why: tuple[str, ...]


def gb(nbytes: float) -> str:
    """Of 10^9 bytes: ``1,475 GB``, ``6.8 GB``."""
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 1e11 else f"{nbytes / 1e9:,.1f} GB"


def percent(share: float) -> str:
    """``94.7%``."""
    return f"{100 * share:.1f}%"


def advise(plan: Plan) -> tuple[Advice, ...]:
    """From the bottom: each layer multiplies those above it."""
    found = (layer(plan) for layer in LAYERS)
    return tuple(Advice(one.layer, one.sets, tuple(map(sentence, one.why))) for one in found)


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def _architecture(plan: Plan) -> Advice:
    served = plan.served
    per_token = served.copy_bytes(plan.load.grown_tokens) / max(1, round(plan.load.grown_tokens))
    dtypes = " and ".join(dict.fromkeys(part.dtype.name for part in served.parts))
    return Advice(
        "architecture",
        (f"TP {served.tensor}, {served.replicas} replica{'s' if served.replicas > 1 else ''}",),
        (
            f"{plan.tensor_why}.",
            f"A token's KV takes {per_token:,.0f} B in {dtypes}, a conversation of "
            f"{plan.load.grown_tokens:,.0f} tokens {gb(served.copy_bytes(plan.load.grown_tokens))}.",
        ),
    )


def _sizing(plan: Plan) -> Advice:
    settings, served, load = plan.settings, plan.served, plan.load
    batched = (
        f"{LATENCY_TOKENS:,} tokens a step keep a running answer's tokens close together"
        if settings.latency
        else "large steps read prompts faster; answers stutter a little"
    )
    return Advice(
        "sizing",
        (
            f"context {settings.max_model_len}",
            f"memory utilisation {settings.utilization:g}",
            f"batched tokens {settings.batched_tokens}",
        ),
        (
            f"The p99 is {load.context_p99:,.0f} tokens in and {load.output_tokens:,.0f} out; with "
            f"{100 * (CONTEXT_HEADROOM - 1):.0f}% on top.",
            f"{batched}.",
            f"{gb(served.budget.kv_bytes * served.tensor)} are left for KV per replica: "
            f"{served.in_flight(load.context_p50 + load.output_tokens):,} requests of the median length, "
            f"{served.in_flight(settings.max_model_len):,} of the longest.",
            "Raise utilisation in steps of 0.01 until a start fails, then take one back. Preemptions "
            "(vllm:num_preemptions_total) mean too little KV: fewer sequences or batched tokens, or more "
            "ranks.",
            "At start-up vLLM logs a value for --kv-cache-memory-bytes: it skips profiling at the next "
            "start, and holds for that GPU with as much of it free.",
        ),
    )


def _reuse(plan: Plan) -> Advice:
    load, own = plan.load, plan.expected[0].hit_rate
    replicas = plan.served.replicas
    routing = "routing by affinity" if plan.question.routing is Routing.AFFINITY else "round robin"
    sets = ["prefix caching on"]
    if replicas > 1:
        sets.append("cache-aware routing" if plan.settings.cache_aware else "affinity routing")
    why = [
        f"Of the input, {percent(load.curve.most)} was computed before ({load.origin['reuse']}); GPU memory "
        f"alone finds {percent(own)} with {routing}."
    ]
    if replicas > 1:
        why.append(
            f"The cache of an engine is its own: round robin over {replicas} replicas finds a turn's prefix "
            f"with chance 1/{replicas}. Route a conversation by its id, or by its prefix."
        )
    why.append("Put what changes last in the prompt: `kvferry analyze` shows what breaks prefixes.")
    if load.kind is Kind.AGENT:
        why.append(
            "An agent's turn is nearly all prefix: hit rate is the number to watch, after cold starts. "
            "Agents that branch suit SGLang's radix tree."
        )
    if plan.served.windows:
        why.append(
            "Layers with a window reuse what lies in it: a prefix ends where every kind of layer can go on."
        )
    return Advice("reuse", tuple(sets), tuple(why))


def _precision(plan: Plan) -> Advice:
    if plan.settings.kv_dtype != "fp8":
        return Advice("precision", ("KV as the model's own",), ("As asked for; fp8 would halve it.",))
    sets = ["fp8 KV"]
    why = [
        "Half the bytes: twice the requests, half of every transfer.",
        "Scales are 1.0 unless a checkpoint brings calibrated ones (llm-compressor makes them): compare "
        "answers on your own prompts before and after.",
    ]
    if plan.settings.skip_windows:
        sets.append("windows stay 16-bit")
        why.append(
            "Layers with a window are sensitive and small: they keep their own precision. (SGLang has no "
            "such argument: its windows are fp8, too.)"
        )
    if not plan.served.gpu.fp8_tflops:
        why.append(
            f"{plan.served.gpu.name} does not compute in fp8: it stores KV so and widens it. Check in the "
            "start-up log that the attention backend takes it."
        )
    return Advice("precision", tuple(sets), tuple(why))


def _tiering(plan: Plan) -> Advice:
    settings, served, load, tier = plan.settings, plan.served, plan.load, plan.tier
    working = tier.peak_bytes / served.replicas
    holds = served.copy_bytes(load.grown_tokens) * served.gpu_tokens(load.grown_tokens) / load.grown_tokens
    why = [
        f"What comes back is {gb(working)} per replica; its GPUs hold {gb(holds)}, its share of the host "
        f"{gb(served.host_bytes)}, which lasts {_minutes(plan.keeps_s)} at this rate of new tokens."
    ]
    if not settings.offload_bytes and not settings.shared:
        return Advice("tiering", ("none",), (*why, _no_tier(plan)))
    why += _repeats(plan)
    block = settings.offload_block_tokens
    sets: tuple[str, ...]
    if settings.shared:
        sets = (
            f"host pool {gb(settings.offload_bytes)} per replica",
            f"shared tier {gb(tier.planned_bytes)}",
        )
        why.append(
            "The pool of kvferry is the host tier, one for all engines of a host: "
            f"{gb(settings.offload_bytes * served.on_host)} there. (Without it: vLLM's own offloading of "
            f"{gb(settings.offload_bytes)} with blocks of {block} tokens, for each engine alone.)"
        )
    elif settings.pool:
        sets = (f"host pool {gb(settings.offload_bytes)} per replica",)
        why.append(
            f"Turns go anywhere, so one pool for the {served.on_host} engines of a host, kvferry's node "
            f"without Valkey, finds what any of them computed: {percent(plan.expected[1].hit_rate)} of the "
            "input."
        )
    else:
        sets = (f"CPU tier {gb(settings.offload_bytes)} per replica", f"offload blocks of {block} tokens")
        why.append(
            f"Host memory finds {percent(plan.expected[1].hit_rate)} of the input: {gb(working)} and "
            f"{100 * (HOST_HEADROOM - 1):.0f}%, at most what is given (--host-memory).",
        )
        why.append(
            "A request with max_load_tokens 0 in kv_transfer_params loads nothing: for prompts used once."
        )
        if served.on_host > 1:
            why.append(
                "Where turns cannot be routed, a node without Valkey (`kvferry node --pool`) shares one "
                "pool among the engines of a host (--routing round-robin)."
            )
    return Advice("tiering", sets, tuple(why))


def _no_tier(plan: Plan) -> str:
    served, load = plan.served, plan.load
    if load.curve.most <= 0:
        return "Nothing is reused: a tier would find nothing."
    if served.gpu_tokens(load.grown_tokens) * served.replicas >= load.curve.enough_tokens:
        return "GPUs hold it all: a tier would only be a copy."
    return (
        "GPUs do not hold it all, but the host's share is no larger than what they hold, and would be a copy "
        "of that (--host-memory)."
    )


def _repeats(plan: Plan) -> list[str]:
    """What engines keep of a host more often than once."""
    settings, served, grown = plan.settings, plan.served, plan.load.grown_tokens
    found = []
    times = served.offloaded_bytes(grown) / max(1, served.copy_bytes(grown))
    if times > 1.01 and not settings.pool:
        found.append(
            f"Ranks repeat heads that they cannot split, and each offloads its own: {times:.2g} times the "
            "bytes."
        )
    if settings.sglang_wants > settings.sglang_rank_bytes:
        gets = f"it gets {gb(settings.sglang_rank_bytes)} per rank"
        found.append(
            "SGLang keeps what each rank holds, repeats included: it would take "
            f"{gb(settings.sglang_wants)} per rank, {gb(settings.sglang_wants * served.tensor)} per replica; "
            f"{gets if settings.sglang_rank_bytes else 'less is a copy of what GPUs hold, so it gets none'} "
            "(--host-memory)."
        )
    return found


def _topology(plan: Plan) -> Advice:
    if plan.settings.split:
        return Advice(
            "topology",
            ("prefill/decode split where TTFT tails matter",),
            (
                "It buys latency and tails, not throughput: begin without it, and split when long prompts "
                "hold up other answers. Both sides share the pool.",
                "With a shared tier, moving a conversation off a hot replica costs a load, not a prefill.",
            ),
        )
    return Advice(
        "topology",
        ("engines do prefill and decode",),
        ("A prefill/decode split is a tool for tails, not for throughput; nothing here asks for it.",),
    )


def _minutes(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:,.0f} min" if seconds >= 120 else f"{seconds:,.0f} s"


LAYERS: tuple[Callable[[Plan], Advice], ...] = (
    _architecture,
    _sizing,
    _reuse,
    _precision,
    _tiering,
    _topology,
)
