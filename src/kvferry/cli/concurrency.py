"""``kvferry concurrency MODEL --gpu NAME``: requests in flight, and what limits them."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.cli.quantities import (
    add_model_arguments,
    default_contexts,
    flag_count,
    formula,
    model_of,
    notes_of,
    parse_tokens,
    sizing_of,
    tokens,
)
from kvferry.cli.table import COLUMNS, labelled, table
from kvferry.config import format_size, parse_size
from kvferry.errors import MisconfiguredError
from kvferry.models.concurrency import (
    Budget,
    LengthShare,
    Weights,
    mixed_requests_in_flight,
    requests_in_flight,
    weights_of,
)
from kvferry.models.gpus import Gpu, find_gpu, gpus
from kvferry.models.published import WEIGHT_BYTES
from kvferry.models.sizes import Sizing
from kvferry.values import parse_path

MAX_LENGTHS = 1_000_000
MAX_GPUS = 1 << 20
MAX_SHARE = 1e12


@dataclass(frozen=True)
class Plan:
    """What was asked for. sizings: in the KV dtypes to compare; count: GPUs in all."""

    gpu: Gpu
    count: int
    budget: Budget
    weights: Weights
    sizings: tuple[Sizing, ...]
    contexts: tuple[int, ...]
    lengths: tuple[LengthShare, ...]

    @property
    def replicas(self) -> int:
        """Engines of that many GPUs."""
        return self.count // self.budget.ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the GPUs, and what else is in their memory."""
    add_model_arguments(parser)
    parser.add_argument("--gpu", metavar="NAME", help="of the catalogue: h100, h200, b200, l40s ...")
    parser.add_argument("--gpus", metavar="N", help="GPUs in all (those of one replica)")
    parser.add_argument("--utilization", default="0.9", metavar="SHARE", help="gpu_memory_utilization (0.9)")
    parser.add_argument("--weights", metavar="SIZE", help="of all weights, like 16GB")
    parser.add_argument(
        "--weights-dtype",
        choices=list(WEIGHT_BYTES),
        metavar="DTYPE",
        help=f"{', '.join(WEIGHT_BYTES)} (as published)",
    )
    parser.add_argument(
        "--overhead", default="3GB", metavar="SIZE", help="per GPU: activations, graphs (3GB)"
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU, in place of the catalogue's")
    parser.add_argument("--gpus-file", metavar="FILE", help="TOML with GPUs of your own, prices too")
    parser.add_argument("--context", action="append", metavar="TOKENS", help="length of a request (4K to 1M)")
    parser.add_argument("--lengths", metavar="MIX", help="as 4K:50,32K:40,128K:10, or a file of lengths")
    parser.add_argument("--explain", action="store_true", help="the formula with its numbers")
    parser.add_argument("--list-gpus", action="store_true", help="the GPUs of the catalogue")


def parse_lengths(text: str) -> tuple[LengthShare, ...]:
    """A mix like ``4K:50,128K:10``, or a file with a length on each line. Raises MisconfiguredError."""
    file = Path(text).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").split() if ":" not in text and file.is_file() else None
    except (OSError, ValueError) as error:
        raise MisconfiguredError(f"cannot read lengths from {text}: {error}") from error
    if lines is not None:
        pairs = [(line, "1") for line in lines]
    else:
        parts = [part.partition(":") for part in text.split(",")]
        pairs = [(length, share or "1") for length, _, share in parts]
    if not pairs or len(pairs) > MAX_LENGTHS:
        raise MisconfiguredError(f"{text!r} has {len(pairs)} lengths; give 1 to {MAX_LENGTHS:,}")
    weights: dict[int, float] = {}
    for length, share in pairs:
        try:
            weight = float(share)
        except ValueError as error:
            raise MisconfiguredError(f"share {share!r} of length {length!r} is no number") from error
        if not 0 < weight <= MAX_SHARE:
            raise MisconfiguredError(
                f"share {share!r} of length {length!r} is not above 0 and at most {MAX_SHARE:,.0f}"
            )
        key = parse_tokens(length)
        weights[key] = weights.get(key, 0.0) + weight
    whole = sum(weights.values())
    return tuple(LengthShare(length, weight / whole) for length, weight in sorted(weights.items()))


def _utilization(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise MisconfiguredError(f"utilization {text!r} is no number; write it like 0.9") from error


def _size(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


def _gpus_file(args: argparse.Namespace) -> Path | None:
    try:
        return None if args.gpus_file is None else parse_path(args.gpus_file)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"--gpus-file: {error}") from error


def plan_of(args: argparse.Namespace) -> Plan:
    """The arguments as one plan. Raises MisconfiguredError."""
    if not args.gpu:
        raise MisconfiguredError("no GPU given; name one like --gpu h100 (--list-gpus shows them)")
    model = model_of(args)
    gpu = find_gpu(args.gpu, _gpus_file(args))
    sizings = tuple(sizing_of(args, model, dtype) for dtype in dict.fromkeys((args.kv_dtype, "bf16", "fp8")))
    if args.kv_dtype not in ("bf16", "fp8"):
        sizings = (sizings[0], sizings[-1])
    elif args.kv_dtype == "fp8":
        sizings = sizings[::-1]
    ranks = sizings[0].tensor * sizings[0].pipeline
    count = ranks if args.gpus is None else flag_count("--gpus", args.gpus, highest=MAX_GPUS)
    if count % ranks:
        raise MisconfiguredError(
            f"{count} GPUs are no whole replicas of TP {sizings[0].tensor} x PP {sizings[0].pipeline}; "
            f"give a multiple of {ranks}"
        )
    if args.weights is not None and args.weights_dtype is not None:
        raise MisconfiguredError("--weights and --weights-dtype both say what the weights take; give one")
    weights = weights_of(model, args.weights_dtype, _size("--weights", args.weights))
    memory = _size("--gpu-memory", args.gpu_memory)
    if memory == 0:
        raise MisconfiguredError("--gpu-memory is 0: give what one GPU has, like 80GB")
    budget = Budget(
        gpu.memory_bytes if memory is None else memory,
        _utilization(args.utilization),
        weights.nbytes,
        ranks,
        _size("--overhead", args.overhead) or 0,
    )
    contexts = [parse_tokens(text) for text in args.context or ()] or default_contexts(model)
    lengths = () if args.lengths is None else parse_lengths(args.lengths)
    return Plan(gpu, count, budget, weights, sizings, tuple(contexts), lengths)


def document(plan: Plan) -> dict[str, Any]:
    """Everything as one JSON document; sizes in bytes, requests per replica and in the fleet."""
    budget = plan.budget
    return {
        "model": plan.sizings[0].model.name,
        "gpu": asdict(plan.gpu),
        "gpus": plan.count,
        "tensor_parallel": plan.sizings[0].tensor,
        "pipeline_parallel": plan.sizings[0].pipeline,
        "replicas": plan.replicas,
        "utilization": budget.utilization,
        "memory_bytes_per_gpu": budget.memory_bytes,
        "usable_bytes_per_gpu": budget.usable_bytes,
        "weights_bytes": budget.weights_bytes,
        "weights_source": plan.weights.why,
        "weights_bytes_per_gpu": budget.rank_weights_bytes,
        "overhead_bytes_per_gpu": budget.overhead_bytes,
        "kv_budget_bytes_per_gpu": budget.kv_bytes,
        "kv_budget_bytes_per_replica": budget.kv_bytes * budget.ranks,
        "usd_per_hour": plan.gpu.usd_per_hour * plan.count or None,
        "requests_in_flight": [
            {
                "tokens": context,
                "kv_dtype": sizing.dtype.name,
                "reserved_bytes_per_gpu": sizing.request(context).gpu_reserved,
                "per_replica": requests_in_flight(budget, sizing, context),
                "fleet": plan.replicas * requests_in_flight(budget, sizing, context),
            }
            for context in plan.contexts
            for sizing in plan.sizings
        ],
        "mixed_requests_in_flight": [
            {
                "kv_dtype": sizing.dtype.name,
                "lengths": [asdict(part) for part in plan.lengths],
                "per_replica": mixed_requests_in_flight(budget, sizing, plan.lengths),
                "fleet": plan.replicas * mixed_requests_in_flight(budget, sizing, plan.lengths),
            }
            for sizing in plan.sizings
            if plan.lengths
        ],
        "notes": notes_of(plan.sizings[0], plan.contexts),
        "explanation": explain(plan),
    }


def explain(plan: Plan) -> list[str]:
    """The budget and one row of requests, with the numbers filled in."""
    budget, context = plan.budget, plan.contexts[-1]
    lines = [
        f"{budget.memory_bytes:,} B x {budget.utilization:g} = {budget.usable_bytes:,} B for the engine",
        f"- weights {budget.weights_bytes:,} B / {budget.ranks} = {budget.rank_weights_bytes:,} B "
        f"({plan.weights.why})",
        f"- overhead {budget.overhead_bytes:,} B",
        f"= {budget.kv_bytes:,} B = {format_size(budget.kv_bytes)} for KV per GPU",
    ]
    for sizing in plan.sizings:
        reserved = sizing.request(context).gpu_reserved
        lines.append(
            f"{sizing.dtype.name}: {budget.kv_bytes:,} B / {reserved:,} B reserved per request of "
            f"{context:,} tokens = {requests_in_flight(budget, sizing, context):,} requests per replica"
        )
    return lines


def render(plan: Plan) -> str:
    """The answer as text for people."""
    budget, gpu, first = plan.budget, plan.gpu, plan.sizings[0]
    lines = [
        labelled(
            "model", f"{first.model.name}, weights {budget.weights_bytes / 1e9:.1f} GB: {plan.weights.why}"
        ),
        labelled(
            "GPUs",
            f"{plan.count:,} x {gpu.name} of {budget.memory_bytes / 1e9:g} GB = {plan.replicas:,} "
            f"replica{'s' if plan.replicas > 1 else ''} of TP {first.tensor} x PP {first.pipeline}",
        ),
        labelled(
            "budget",
            f"per GPU {budget.usable_bytes / 1e9:.1f} GB usable at {budget.utilization:g} "
            f"- {budget.rank_weights_bytes / 1e9:.1f} GB weights "
            f"- {budget.overhead_bytes / 1e9:.1f} GB overhead "
            f"= {budget.kv_bytes / 1e9:.1f} GB ({format_size(budget.kv_bytes)}) for KV; "
            f"per replica {format_size(budget.kv_bytes * budget.ranks)}",
        ),
    ]
    if gpu.usd_per_hour:
        lines.append(
            labelled(
                "price", f"{gpu.usd_per_hour * plan.count:,.2f} USD per hour ({gpu.price_date or 'undated'})"
            )
        )
    else:
        lines.append(
            labelled("price", f"not known for {gpu.name}; give yours with --gpus-file FILE (usd_per_hour)")
        )
    lines += [
        "",
        "Requests in flight, each of so many tokens (per GPU: what one reserves):",
        _in_flight(plan),
    ]
    if plan.lengths:
        lines += ["", _mixed(plan)]
    lines += [labelled("note", note) for note in notes_of(first, plan.contexts)]
    return "\n".join(lines)


def _in_flight(plan: Plan) -> str:
    """The dtypes side by side; where that is too wide, one below the other."""
    together = _table_of(plan, plan.sizings)
    if max(map(len, together.splitlines())) <= COLUMNS:
        return together
    return "\n\n".join(_table_of(plan, (sizing,)) for sizing in plan.sizings)


def _table_of(plan: Plan, sizings: Sequence[Sizing]) -> str:
    head = ["tokens"]
    for sizing in sizings:
        head += [f"{sizing.dtype.name}: per GPU", "per replica", "fleet"]
    rows = []
    for context in plan.contexts:
        row = [tokens(context)]
        for sizing in sizings:
            number = requests_in_flight(plan.budget, sizing, context)
            row += [
                format_size(sizing.request(context).gpu_reserved),
                f"{number:,}",
                f"{number * plan.replicas:,}",
            ]
        rows.append(row)
    return table(head, rows)


def _mixed(plan: Plan) -> str:
    mean = sum(part.share * part.tokens for part in plan.lengths)
    rows = []
    for sizing in plan.sizings:
        number = mixed_requests_in_flight(plan.budget, sizing, plan.lengths)
        rows.append([sizing.dtype.name, f"{number:,.1f}", f"{number * plan.replicas:,.1f}"])
    return f"Mixed lengths, {mean:,.0f} tokens on average, {plan.lengths[-1].tokens:,} at most:\n" + table(
        ("KV", "per replica", "fleet"), rows
    )


def render_gpus(file: Path | None) -> str:
    """The catalogue of GPUs."""
    rows = [
        [
            gpu.name,
            f"{gpu.memory_gb:g}",
            f"{gpu.bandwidth_gb_s:,.0f}" if gpu.bandwidth_gb_s else "-",
            *(
                f"{value:,.0f}" if value else "-"
                for value in (gpu.bf16_tflops, gpu.fp8_tflops, gpu.fp4_tflops)
            ),
            f"{gpu.usd_per_hour:.2f}" if gpu.usd_per_hour else "-",
            gpu.price_date if gpu.usd_per_hour else gpu.date,
        ]
        for gpu in gpus(file).values()
    ]
    head = ("GPU", "memory GB", "GB/s", "bf16 TFLOPS", "fp8", "fp4", "USD/h", "as of")
    return table(head, rows)


def main(args: argparse.Namespace) -> int:
    """Print how many requests fit, or the GPUs known."""
    if args.list_gpus:
        file = _gpus_file(args)
        print(
            json.dumps([asdict(gpu) for gpu in gpus(file).values()], indent=2)
            if args.json
            else render_gpus(file)
        )
        return 0
    plan = plan_of(args)
    if args.json:
        print(json.dumps(document(plan), indent=2))
        return 0
    print(render(plan))
    if args.explain:
        print("\nFormula, per GPU:")
        print(formula(explain(plan)))
    return 0
