"""A plan as one JSON document, which every way to show it is made from. docs/plan.md has the fields."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvferry.advise import flags
from kvferry.advise.expect import Expected
from kvferry.advise.explain import assumptions, explain
from kvferry.advise.layers import advise
from kvferry.advise.option import Option
from kvferry.advise.plan import Plan, Return
from kvferry.advise.price import HOURS, net_usd
from kvferry.advise.speed import LOAD_ERROR, PREFILL_ERROR
from kvferry.advise.verdict import MEASURE
from kvferry.advise.workload import Numbers, Workload

VALKEY = "valkeys://kvferry@valkey.internal:6379"
FLAG_COLUMNS = 100
_TUNED = re.compile(r"instruct|chat|-it(?:-|$)|deepseek|gpt-oss|qwen3|kimi|glm|minimax")


def document(
    plan: Plan, *, path: str, connector: Mapping[str, Any], backend: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything. path: the model as engines are told. connector, backend: kvferry's own settings in them."""
    served, budget = plan.served, plan.served.budget
    return {
        "model": {
            "name": served.model.name,
            "source": served.model.source,
            "weights_bytes": served.weights.nbytes,
            "weights_source": served.weights.why,
            "active_parameters": served.compute.parameters if served.compute else None,
            "notes": list(served.model.notes),
        },
        "fleet": {
            "gpu": served.gpu.name,
            "gpus": served.gpus,
            "tensor_parallel": served.tensor,
            "tensor_parallel_why": plan.tensor_why,
            "replicas": served.replicas,
            "hosts": served.hosts,
            "replicas_per_host": served.replicas_per_host,
            "memory_bytes_per_gpu": budget.memory_bytes,
            "kv_budget_bytes_per_gpu": budget.kv_bytes,
            "kv_budget_bytes_per_replica": budget.kv_bytes * served.tensor,
            "host_bytes_per_replica": served.host_bytes,
            "requests_in_flight_p50": served.in_flight(plan.load.context_p50 + plan.load.output_tokens),
            "requests_in_flight_longest": served.in_flight(plan.settings.max_model_len),
        },
        "workload": workload(plan.load),
        "shared_tier_advised": plan.verdict.shared,
        "why_not": [
            {"reason": reason.name.lower(), "text": reason.value, "what_would_change_it": MEASURE[reason]}
            for reason in plan.verdict.reasons
        ],
        "layers": [
            {"layer": layer.layer, "set": list(layer.sets), "why": list(layer.why)} for layer in advise(plan)
        ],
        "settings": {
            name: value.value if hasattr(value, "value") else value
            for name, value in asdict(plan.settings).items()
        },
        "flags": commands(plan, path=path, connector=connector, backend=backend),
        "shared_tier": _tier(plan),
        "shared_tier_sizes": [_size(found) for found in plan.options],
        "expected": [_expected(found) for found in plan.expected],
        "returns": [_return(found) for found in plan.returns],
        "error": {"prefill": PREFILL_ERROR, "load": LOAD_ERROR},
        "price": _price(plan),
        "assumptions": [*assumptions(plan), *_named(path)],
        "explanation": list(explain(plan)),
    }


def _named(path: str) -> list[str]:
    """Weights that nobody tuned for a task answer no chats."""
    if "/" not in path or path.startswith(("/", ".", "~")) or _TUNED.search(path.lower()):
        return []
    return [
        f"Commands name {path}, under which the config is published: put the checkpoint that you serve, "
        "which for chats is one that was tuned for them."
    ]


def workload(load: Workload) -> dict[str, Any]:
    """Its numbers, each with where it is from."""
    names = [*Numbers.__slots__, "first_tokens", "grown_tokens"]
    return {
        "kind": load.kind.value,
        "goal": load.goal.value,
        **{name: {"value": getattr(load, name), "from": load.origin.get(name, "")} for name in names},
        "reuse_by_tokens": [list(point) for point in load.curve.points],
    }


def commands(
    plan: Plan, *, path: str, connector: Mapping[str, Any], backend: Mapping[str, Any]
) -> dict[str, Any]:
    """What to start: arguments one by one, and as lines to paste."""
    settings, budget = plan.settings, plan.served.budget
    made = {
        "vllm": ("vllm serve", flags.vllm_arguments(settings, model=path, connector=connector)),
        "sglang": (
            "python -m sglang.launch_server",
            flags.sglang_arguments(
                settings,
                model=path,
                backend=backend,
                overhead_share=plan.question.overhead_bytes / budget.memory_bytes,
            ),
        ),
    }
    if settings.pool:
        node = flags.node_arguments(settings, replicas=plan.served.on_host, valkey=VALKEY)
        made["node"] = ("kvferry node", node)
    return {
        name: {
            "arguments": arguments,
            "lines": flags.lines(arguments, command=command, columns=FLAG_COLUMNS),
        }
        for name, (command, arguments) in made.items()
    }


def _tier(plan: Plan) -> dict[str, Any]:
    tier = plan.tier
    return {
        "peak_bytes": tier.peak_bytes,
        "planned_bytes": tier.planned_bytes,
        "conversation_bytes": plan.served.copy_bytes(plan.load.grown_tokens),
        "read_bytes_per_s": tier.read_bytes_s,
        "shards_by_capacity": tier.by_capacity,
        "shards_by_read_bandwidth": tier.by_bandwidth,
        "shards": tier.shards,
        "shard_capacity_bytes": tier.shard.capacity_bytes,
        "shard_ceiling_bytes_per_s": tier.shard.ceiling_bytes_s,
        "sustained_bytes_per_s": tier.sustained_bytes_s,
        "host_intake_share": plan.intake,
        "load_bytes_per_s_per_replica": plan.link.bytes_s,
        "nvme_bytes": tier.disk_bytes,
        "bucket_bytes": tier.bucket_bytes,
        "usd_per_month_if_in_another_zone": plan.zone_usd_month,
        "zone": "that of the engines",
        "bucket_region": "that of the engines",
    }


def _size(found: Option) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "planned_bytes": found.tier.planned_bytes,
        "shards": found.tier.shards,
        "hit_rate": found.deal.hit_rate,
        "most_requests_per_s": found.expected[2].most_requests_s,
        "net_usd_per_month": net_usd(found.deal),
    }


def _expected(found: Expected) -> dict[str, Any]:
    times = found.times
    return {
        "kv_in": found.keeps.value,
        "hit_rate": found.hit_rate,
        "computed_input_tokens_per_s": found.computed_tokens_s,
        "busy_share": found.busy,
        "ttft_mean_s": found.ttft_s,
        "prefill_mean_s": times.prefill_s if times else None,
        "load_mean_s": times.load_s if times else None,
        "wait_mean_s": times.wait_s if times and found.ttft_s is not None else None,
        "most_requests_per_s": found.most_requests_s,
        "stream_tokens_per_s": found.stream_tokens_s,
    }


def _return(found: Return) -> dict[str, Any]:
    return {
        "input_tokens": found.tokens,
        "new_tokens": found.new_tokens,
        "kv_bytes_loaded": found.kv_bytes,
        "ttft_own_cache_s": found.gpu_s,
        "ttft_host_memory_s": found.host_s,
        "ttft_shared_tier_s": found.shared_s,
        "ttft_computed_s": found.computed_s,
    }


def _price(plan: Plan) -> dict[str, Any]:
    deal, money = plan.verdict.deal, plan.verdict.money
    usd_hour = plan.question.prices.gpu_usd_hour
    return {
        "gpus_usd_per_month": None if usd_hour is None else plan.served.gpus * usd_hour * HOURS,
        "shared_tier_usd_per_month": deal.ram_gib * deal.ram_usd_gib
        + deal.disk_gib * deal.disk_usd_gib
        + deal.objects_gib * deal.objects_usd_gib,
        "benefit_usd_per_month": money.benefit_usd if money else None,
        "net_usd_per_month": money.net_usd if money else None,
        "break_even_hit_rate": money.break_even if money else None,
        "gpu_hours_saved_per_month": money.gpu_hours if money else None,
        "purchases_put_off_usd_per_month": deal.deferred_usd_month,
        "inputs": asdict(deal),
    }
