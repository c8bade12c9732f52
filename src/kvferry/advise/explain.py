"""Where a plan's numbers are from: formulas with their numbers, and what was assumed with its error."""

from kvferry.advise.expect import MAX_SEQUENCES
from kvferry.advise.plan import Plan
from kvferry.advise.price import HOURS, net_usd
from kvferry.advise.price import explain as explain_price
from kvferry.advise.settings import CONTEXT_HEADROOM, HOST_HEADROOM
from kvferry.advise.shared import HEADROOM, SUSTAINED
from kvferry.advise.speed import (
    HOST_BYTES_S,
    KV_BANDWIDTH,
    LOAD_ERROR,
    PREFILL_ERROR,
    WEIGHT_BANDWIDTH,
    operations,
    peak_share,
)
from kvferry.advise.workload import Numbers


def explain(plan: Plan) -> tuple[str, ...]:
    """A line for each step, inputs first."""
    return (
        *_inputs(plan),
        *_sizes(plan),
        *_options(plan),
        *_tier(plan),
        *_speed(plan),
        *_rates(plan),
        *_money(plan),
    )


def number(value: float) -> str:
    """``43,600``, ``0.947``, ``1.28``: whole from a hundred on, else three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _inputs(plan: Plan) -> list[str]:
    load, served, question = plan.load, plan.served, plan.question
    names = [*Numbers.__slots__, "first_tokens", "grown_tokens"]
    return [
        *(f"{name} = {number(getattr(load, name))} ({load.origin.get(name, '-')})" for name in names),
        f"GPU = {served.gpu.name}: {served.budget.memory_bytes / 1e9:g} GB, {served.gpu.bandwidth_gb_s:,g} "
        f"GB/s, {question.flops or served.gpu.bf16_tflops:,g} TFLOP/s ({served.gpu.source or 'given'}, "
        f"{served.gpu.date})",
        f"weights = {served.weights.nbytes:,} B ({served.weights.why})",
        _parameters(plan),
        f"overhead = {question.overhead_bytes:,} B per GPU; host memory = {served.host_bytes:,} B per "
        "replica",
    ]


def _parameters(plan: Plan) -> str:
    compute, question = plan.served.compute, plan.question
    if compute is None:
        return "parameters that a token uses: unknown (--active-parameters)"
    why = "as the model's card has it" if compute.experts else "all of the model's"
    why = "as given" if question.active_parameters else why
    return f"parameters that a token uses = {compute.parameters:,.0f} ({why})"


def _sizes(plan: Plan) -> list[str]:
    load, served, settings, budget = plan.load, plan.served, plan.settings, plan.served.budget
    need = (load.context_p99 + load.output_tokens) * CONTEXT_HEADROOM
    grown = load.grown_tokens
    parts = " + ".join(
        f"{part.request(round(grown)).kv + part.request(round(grown)).state:,} ({part.dtype.name})"
        for part in served.parts
    )
    return [
        f"context = ({load.context_p99:,.0f} + {load.output_tokens:,.0f}) x {CONTEXT_HEADROOM:g} = "
        f"{need:,.0f}, up to the next half power of two, at most the model's = {settings.max_model_len:,} "
        "tokens",
        f"KV per GPU = {budget.memory_bytes:,} x {budget.utilization:g} - {budget.rank_weights_bytes:,} "
        f"weights - {budget.overhead_bytes:,} = {budget.kv_bytes:,} B",
        f"a conversation of {grown:,.0f} tokens = {parts} B, once; on one GPU the engine takes "
        f"{served.reserved_bytes(grown):,} B",
        f"GPUs of a replica hold {budget.kv_bytes:,} / {served.reserved_bytes(grown):,} x {grown:,.0f} = "
        f"{served.gpu_tokens(grown):,.0f} tokens",
        f"its host memory holds {served.host_bytes:,} / {served.copy_bytes(grown):,} x {grown:,.0f} = "
        f"{served.host_tokens(grown):,.0f} tokens",
        f"what comes back = {load.curve.enough_tokens:,.0f} tokens / {served.replicas} replicas; of host "
        f"memory, that x {HOST_HEADROOM:g} in steps of 10 GB, at most what there is, none where GPUs hold it "
        f"= {settings.offload_bytes:,} B",
    ]


def _options(plan: Plan) -> list[str]:
    if len(plan.options) < 2:
        return []
    return [
        f"of {found.tokens:,.0f} tokens: {found.tier.planned_bytes / 1e9:,.0f} GB on {found.tier.shards} "
        f"servers, hit rate {found.deal.hit_rate:.4f}, net ${net_usd(found.deal):,.0f} a month"
        for found in plan.options
    ]


def _tier(plan: Plan) -> list[str]:
    load, tier, served = plan.load, plan.tier, plan.served
    conversation = served.copy_bytes(load.grown_tokens)
    count = tier.peak_bytes / conversation if conversation else 0.0
    far = plan.expected[2].hit_rate - plan.expected[1].hit_rate
    return [
        f"shared tier = {conversation:,} B x {count:,.1f} conversations = {tier.peak_bytes / 1e9:,.1f} GB at "
        f"the peak; x {HEADROOM:g} = {tier.planned_bytes / 1e9:,.1f} GB",
        f"read from it = {load.requests_s:,.3g} requests/s x {max(0.0, far):.4f} of {load.context_mean:,.0f} "
        f"tokens = {tier.read_bytes_s / 1e9:,.2f} GB/s",
        f"shards by capacity = {tier.planned_bytes / 1e9:,.0f} / {tier.shard.capacity_bytes / 1e9:,.0f} GB = "
        f"{tier.by_capacity}",
        f"shards by read bandwidth = {tier.read_bytes_s / 1e9:,.2f} / ({tier.shard.ceiling_bytes_s / 1e9:g} "
        f"GB/s x {SUSTAINED:.3f} sustained) = {tier.by_bandwidth}",
        f"shards = the larger, and 3 rather than 2 (a Cluster has at least 3) = {tier.shards}",
        f"hosts read {100 * plan.intake:.1f}% of what {served.hosts} of them take in at "
        f"{HOST_BYTES_S / 1e9:g} GB/s",
        f"NVMe = {load.requests_s / load.turns:,.3g} new conversations/s x {min(load.resume_h, 24):g} h x "
        f"{conversation:,} B = {tier.disk_bytes / 1e9:,.0f} GB; bucket, hours beyond 24 = "
        f"{tier.bucket_bytes / 1e9:,.0f} GB",
        f"in another zone = bytes loaded and stored in {HOURS:g} h x ${plan.question.prices.zone_usd_gb:g} "
        f"per GB = ${plan.zone_usd_month:,.0f}",
    ]


def _speed(plan: Plan) -> list[str]:
    compute = plan.served.compute
    if compute is None:
        return ["speed: unknown, as the parameters that a token uses or the GPU's figures are"]
    lines = []
    for found in plan.returns:
        ops = operations(compute, found.tokens)
        share = peak_share(compute, found.tokens)
        lines.append(
            f"prefill of {found.tokens:,.0f} tokens = {ops:.3e} operations / ({compute.ranks} x "
            f"{compute.flops:.3e}/s x {share:.3f}) = {found.computed_s:,.3f} s"
        )
        lines.append(
            f"return of {found.tokens:,.0f} tokens = {found.new_tokens:,.0f} computed in {found.gpu_s:,.3f} "
            f"s + {found.kv_bytes:,} B loaded: {plan.link.start_s:g} s + at {plan.link.bytes_s / 1e9:,.2f} "
            f"GB/s = {found.shared_s:,.3f} s"
        )
    load = plan.load
    read = f"weights {compute.weights_bytes:,.0f} B"
    if compute.active_bytes < compute.weights_bytes:
        read = f"(at most {read}, {compute.active_bytes:,.0f} B x requests)"
    kv = plan.served.gpu_bytes(load.context_mean + load.output_tokens / 2)
    lines.append(
        f"decode step = {read} / {compute.ranks} / ({WEIGHT_BANDWIDTH:g} x {compute.bandwidth:.3e}) + "
        f"requests x {kv:,} B / ({KV_BANDWIDTH:g} x {compute.bandwidth:.3e})"
    )
    return lines


def _rates(plan: Plan) -> list[str]:
    load, served = plan.load, plan.served
    rate = load.requests_s / served.replicas
    lines = []
    for found in plan.expected:
        name = found.keeps.value
        lines.append(
            f"{name}: hit rate {found.hit_rate:.4f} (of the reuse, at the tokens held); computed = "
            f"{load.requests_s:,.3g} x {load.context_mean:,.0f} x (1 - that) = "
            f"{found.computed_tokens_s:,.0f} tokens/s"
        )
        if found.times is None:
            continue
        times = found.times
        decode = f"{load.output_tokens:,.0f} x {times.full_step_s:.4f} s / {times.full_batch} at once"
        lines += [
            f"{name}: busy {found.busy:.3f} = {rate:,.3g} requests/s per replica x (prefill "
            f"{times.prefill_s:.3f} s + {decode}); most = {served.replicas} / that sum = "
            f"{found.most_requests_s:,.3g} requests/s",
            f"{name}: stream = (1 - {rate * times.prefill_s:.3f} of the time for prefill) / step of "
            f"{times.step_s:.4f} s with {times.batch:,.1f} at once; TTFT = prefill + load {times.load_s:.3f} "
            f"s + wait {times.wait_s:.3f} s"
            if found.ttft_s is not None
            else f"{name}: more is asked for than can be served: the queue grows",
        ]
    return lines


def _money(plan: Plan) -> list[str]:
    if plan.verdict.money is None:
        return ["price: the GPU's hour or its prefill rate is unknown"]
    own, tier, deal = plan.expected[1], plan.expected[2], plan.verdict.deal
    lines = []
    if own.times and tier.times and tier.times.prefill_s < own.times.prefill_s:
        lines.append(
            f"prefill rate of what the tier saves = {plan.load.context_mean:,.0f} tokens x "
            f"({tier.hit_rate:.4f} - {own.hit_rate:.4f}) / ({own.times.prefill_s:.3f} s - "
            f"{tier.times.prefill_s:.3f} s) / {plan.served.tensor} GPUs = {deal.prefill_tokens_s:,.0f} "
            "tokens/s"
        )
    return [*lines, *explain_price(deal)]


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What the expectations rest on, and how far off they may be."""
    load = plan.load
    found = []
    if plan.question.gpus is None:
        found.append(f"{plan.served.replicas} replicas, as nobody said how many GPUs there are (--gpus).")
    if any(text.startswith("preset") for text in load.origin.values()):
        found.append(
            f"The workload is the preset {load.kind.value}, not yours: `kvferry analyze LOG --json` and "
            "--trace put your own numbers in its place. This is the largest error by far."
        )
    found.append(
        f"Prefill times: within 10% of the published points they were fitted to, {100 * PREFILL_ERROR:.0f}% "
        f"either way elsewhere. Loads: within 2% of three published points, {100 * LOAD_ERROR:.0f}% "
        "elsewhere. A benchmark of your model settles it (--prefill-tokens-s)."
    )
    measured = plan.question.measured
    if measured is not None and measured[1] is None and load.origin["reuse"] == measured[2]:
        found.append(
            "The trace's sessions have clocks of their own: how many run at once is not in it, and follows "
            "from requests a second and from how long a conversation is kept after each turn."
        )
    elif measured is not None and measured[1] is None:
        found.append(
            "The trace does not say which prompts share content, so its reuse is unknown: what is said of "
            "it follows from --turns, --new-tokens and --reuse, and is none where those are not given."
        )
    found.append(
        "Hit rates by capacity take reuse as spread evenly over what comes back. In strict rotation a cache "
        "that is too small finds nothing; with favourites it finds more."
        if measured is None or measured[1] is None
        else "Hit rates by capacity are those of LRU on the trace, over its last half."
    )
    found.append(
        "TTFT is a mean with one queue per replica and requests at random times; above 80% busy it is a "
        f"direction, not a number. At most {MAX_SEQUENCES} answers run at once in a replica."
    )
    found.append("Host memory loads at 20 GB/s per GPU, which no published point backs.")
    found.append(
        "Decode steps are memory reads alone, without launches, all-reduces and samplers: tok/s each is an "
        "upper bound, the more so where a token uses few of the weights."
    )
    if any(part.state_bytes for part in plan.served.parts):
        found.append(
            "Recurrent state is counted once for a conversation; a shared tier keeps it once for each "
            "boundary that it stores."
        )
    if load.resume_share:
        tier = plan.tier
        everything = (tier.planned_bytes + tier.disk_bytes + tier.bucket_bytes) / 1e9
        found.append(
            f"{100 * load.resume_share:.0f}% of the reuse is by users who come back after hours. It is "
            "counted for the shared tier, with NVMe and a bucket behind its memory, which this version does "
            f"not have: in memory alone it would take {everything:,.0f} GB."
        )
    found.append(
        "The shared tier is memory of whole servers; NVMe and buckets behind Valkey are sized but not part "
        "of this version."
    )
    return tuple(found)
