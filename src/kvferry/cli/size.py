"""``kvferry size MODEL``: KV bytes per token and per request, from a model's config."""

import argparse
import json
from typing import Any

from kvferry.cli.quantities import (
    add_model_arguments,
    default_contexts,
    formula,
    model_of,
    notes_of,
    parse_tokens,
    sizing_of,
    tokens,
)
from kvferry.cli.table import COLUMNS, clip, labelled, table
from kvferry.config import format_size
from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries
from kvferry.models.formula import explain, kind_name
from kvferry.models.sizes import Sizing, state_bytes, token_bytes

MAX_CONTEXTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it is served."""
    add_model_arguments(parser)
    parser.add_argument(
        "--context",
        action="append",
        metavar="TOKENS",
        help="length of a request, like 28000 or 128K (x 1,024)",
    )
    parser.add_argument("--layers", action="store_true", help="layer by layer")
    parser.add_argument("--explain", action="store_true", help="the formula with its numbers")
    parser.add_argument("--list", action="store_true", help="the models of the catalogue")


def contexts_of(args: argparse.Namespace, sizing: Sizing) -> list[int]:
    """The lengths asked for; else those of a table, up to what the model allows."""
    if args.context:
        if len(args.context) > MAX_CONTEXTS:
            raise MisconfiguredError(f"--context is given {len(args.context)} times; at most {MAX_CONTEXTS}")
        return [parse_tokens(text) for text in args.context]
    return default_contexts(sizing.model)


def document(sizing: Sizing, contexts: list[int]) -> dict[str, Any]:
    """Everything as one JSON document; all sizes in bytes."""
    model = sizing.model
    return {
        "model": model.name,
        "model_type": model.model_type,
        "source": model.source,
        "max_context_tokens": model.max_context,
        "kv_dtype": sizing.dtype.name,
        "tensor_parallel": sizing.tensor,
        "pipeline_parallel": sizing.pipeline,
        "engine": {
            "allocator": sizing.engine.allocator.value,
            "block_tokens": sizing.engine.block_tokens,
            "batched_tokens": sizing.engine.batched_tokens,
        },
        "bytes_per_token_full_layers": sizing.full_token_bytes,
        "bytes_per_token_window_layers": sizing.bounded_token_bytes,
        "window_tokens": list(sizing.spans),
        "fixed_state_bytes_per_sequence": sizing.state_bytes,
        "requests": [
            {
                "tokens": request.tokens,
                "kv_bytes": request.kv,
                "kv_peak_bytes": request.peak,
                "state_bytes": request.state,
                "live_bytes_per_gpu": request.gpu_live,
                "reserved_bytes_per_gpu": request.gpu_reserved,
                "live_bytes_per_replica": request.replica_live,
                "reserved_bytes_per_replica": request.replica_reserved,
            }
            for request in map(sizing.request, contexts)
        ],
        "layers": [
            {
                "layer": number,
                "kind": kind_name(layer),
                "span": layer.span.value,
                "span_tokens": layer.span_tokens,
                "tokens_per_entry": layer.every,
                "bytes_per_entry": token_bytes(layer, sizing.dtype),
                "bytes_per_entry_per_gpu": token_bytes(layer, sizing.dtype, sizing.tensor),
                "state_bytes": state_bytes(layer),
                "state_bytes_per_gpu": state_bytes(layer, sizing.tensor),
                "shares_layer": layer.shares_layer,
            }
            for number, layer in zip(model.numbers, model.layers, strict=True)
        ],
        "facts": dict(model.facts),
        "notes": notes_of(sizing, contexts),
        "explanation": explain(sizing, contexts[-1]),
    }


def render(sizing: Sizing, contexts: list[int]) -> str:
    """The answer as text for people."""
    model = sizing.model
    gpus = sizing.tensor * sizing.pipeline
    lines = [
        labelled("model", f"{model.name} ({model.model_type}), {model.layer_count} layers"),
        labelled("source", model.source or "-"),
        labelled(
            "served",
            f"{sizing.dtype.name} KV, TP {sizing.tensor} x PP {sizing.pipeline} = {gpus} "
            f"GPU{'s' if gpus > 1 else ''} per replica",
        ),
    ]
    per_token = f"{sizing.full_token_bytes:,} B for good ({format_size(sizing.full_token_bytes)})"
    if sizing.bounded_token_bytes:
        spans = " and ".join(f"{span:,}" for span in sizing.spans)
        per_token += f", {sizing.bounded_token_bytes:,} B within windows of {spans} tokens"
    lines.append(labelled("token", f"{per_token}; one copy"))
    if sizing.state_bytes:
        lines.append(
            labelled("state", f"{sizing.state_bytes:,} B ({format_size(sizing.state_bytes)}) per sequence")
        )
    rows = [
        [
            tokens(request.tokens),
            format_size(request.kv + request.state),
            format_size(request.gpu_live),
            format_size(request.gpu_reserved),
            format_size(request.replica_live),
            format_size(request.replica_reserved),
        ]
        for request in map(sizing.request, contexts)
    ]
    head = ("tokens", "one copy", "GPU, live", "GPU, reserved", "replica, live", "replica, reserved")
    lines += ["", "One request:", table(head, rows)]
    lines += [labelled("note", note) for note in notes_of(sizing, contexts)]
    return "\n".join(lines)


def render_layers(sizing: Sizing) -> str:
    """Layer by layer."""
    rows = [
        [
            str(number),
            kind_name(layer) if layer.shares_layer is None else f"KV of layer {layer.shares_layer}",
            f"{token_bytes(layer, sizing.dtype):,} B",
            f"{token_bytes(layer, sizing.dtype, sizing.tensor):,} B",
            f"{state_bytes(layer):,} B",
        ]
        for number, layer in zip(sizing.model.numbers, sizing.model.layers, strict=True)
    ]
    return table(("layer", "keeps", "per entry", "per entry and GPU", "state"), rows)


def render_list() -> str:
    """The catalogue: name, layers in kinds, where its config is published."""
    rows = [
        [entry.name, entry.config["model_type"], entry.read, clip(entry.repo, COLUMNS - 61)]
        for entry in entries()
    ]
    return table(("name", "model_type", "read", "published as"), rows)


def main(args: argparse.Namespace) -> int:
    """Print the size of a model, or the catalogue."""
    if args.list:
        names = [{"name": entry.name, "repo": entry.repo, "source": entry.source} for entry in entries()]
        print(json.dumps(names, indent=2) if args.json else render_list())
        return 0
    sizing = sizing_of(args, model_of(args))
    contexts = contexts_of(args, sizing)
    if args.json:
        print(json.dumps(document(sizing, contexts), indent=2))
        return 0
    print(render(sizing, contexts))
    if args.explain:
        print("\nFormula, one copy, at " + tokens(contexts[-1]) + " tokens:")
        print(formula(explain(sizing, contexts[-1])))
    if args.layers:
        print("\n" + render_layers(sizing))
    return 0
