"""Arguments and numbers that the sizing verbs share: a model as it is served, tokens, bytes."""

import argparse
import json
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from kvferry.cli.table import COLUMNS
from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import find_model
from kvferry.models.layers import Model, Span
from kvferry.models.precision import KV_DTYPES, kv_dtype
from kvferry.models.reserve import Allocator, EngineRules
from kvferry.models.sizes import MAX_RANKS, Sizing
from kvferry.values import parse_count

MAX_TOKENS = 1 << 30
MAX_TOKEN_BYTES = 1 << 30
CONTEXTS = tuple(1 << power for power in range(12, 21))  # 4K to 1M
_GROUPS = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+"  # 1,234 or 1234
_TOKENS = re.compile(rf"((?:{_GROUPS})(?:\.[0-9]+)?)([KMG]?)", re.IGNORECASE)
_NUMBER = re.compile(rf"[+-]?(?:(?:{_GROUPS})(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{{1,3}})?", re.IGNORECASE)
_COMMA = "a comma stands between thousands, like 1,234; decimals take a point, like 1.5"


def parse_tokens(text: str) -> int:
    """``28000``, ``128K`` (131,072) or ``1M`` (1,048,576). Raises MisconfiguredError."""
    return int(mean_tokens(text))


def mean_tokens(text: str) -> float:
    """The same, where parts of a token make sense. Raises MisconfiguredError."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        why = f"; {_COMMA}" if "," in text else ""
        raise MisconfiguredError(
            f"{text!r} is no number of tokens; write it like 28000 or 128K (x 1,024){why}"
        )
    number = (
        float(match[1].replace(",", "")) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2].upper()]
    )
    if not 1 <= number <= MAX_TOKENS:
        shown = text if len(text) <= 40 else f"{text[:20]}..."
        raise MisconfiguredError(f"{shown!r} is outside 1 to {MAX_TOKENS:,} tokens")
    return number


def parse_number(flag: str, text: str, *, lowest: float = 0.0, highest: float) -> float:
    """``1234``, ``1,234``, ``0.5`` or ``2e9``. Raises MisconfiguredError that names the flag."""
    plain = text.strip()
    value = float(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else math.nan
    if not lowest <= value <= highest:
        why = f" ({_COMMA})" if math.isnan(value) and "," in plain else ""
        raise MisconfiguredError(
            f"{flag} {text!r}: give a number from {_bound(lowest)} to {_bound(highest)}{why}"
        )
    return value


def _bound(number: float) -> str:
    if 0 < number < 1e-4:
        return f"{number:f}".rstrip("0")
    return f"{number:,.0f}" if number >= 1e5 else f"{number:g}"


def tokens(number: int) -> str:
    """``4K``, ``1M``, else the number."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and not number % size:
            return f"{number // size}{unit}"
    return f"{number:,}"


def formula(lines: Sequence[str]) -> str:
    """Lines of a formula within the columns; what is cut goes on further in."""
    return "\n".join(
        textwrap.fill(
            line,
            COLUMNS,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 4),
            break_on_hyphens=False,
        )
        for line, indent in ((line.lstrip(), len(line) - len(line.lstrip())) for line in lines)
    )


def parse_override(text: str) -> tuple[str, Any]:
    """``FIELD=VALUE``: the value is JSON, or else a text. Raises MisconfiguredError."""
    field, equals, value = text.partition("=")
    if not equals or not field.strip() or not value.strip():
        raise MisconfiguredError(f"--set {text!r} is not FIELD=VALUE, like num_key_value_heads=8")
    try:
        return field.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return field.strip(), value.strip()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, its dtype, its split and how the engine rounds."""
    parser.usage = f"{parser.prog} MODEL [options]"
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=COLUMNS)
    parser.add_argument(
        "model", nargs="?", help="a config.json, a directory with one, or a name of the catalogue"
    )
    parser.add_argument("--tp", default="1", metavar="N", help="tensor-parallel ranks (1)")
    parser.add_argument("--pp", default="1", metavar="N", help="pipeline-parallel ranks (1)")
    parser.add_argument(
        "--kv-dtype",
        default="bf16",
        metavar="DTYPE",
        help=f"bf16 (default), {', '.join(list(KV_DTYPES)[1:])}",
    )
    parser.add_argument("--block-tokens", default="16", metavar="N", help="tokens of an engine block (16)")
    parser.add_argument("--batched-tokens", default="8192", metavar="N", help="max_num_batched_tokens (8192)")
    parser.add_argument(
        "--allocator",
        choices=[allocator.value for allocator in Allocator],
        metavar="KIND",
        default=Allocator.GROUPED.value,
        help="grouped (vLLM): a window keeps its window; whole: it keeps all",
    )
    parser.add_argument("--set", action="append", metavar="FIELD=VALUE", help="replace a field of the config")
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def default_contexts(model: Model) -> list[int]:
    """4K to 1M, as far as the model's config goes."""
    longest = model.max_context or CONTEXTS[-1]
    return [length for length in CONTEXTS if length <= longest] or [longest]


def notes_of(sizing: Sizing, contexts: Sequence[int]) -> list[str]:
    """What a reader of the numbers should know."""
    model = sizing.model
    notes = list(model.notes)
    if 0 < model.max_context < max(contexts):
        notes.append(f"the config allows {model.max_context:,} tokens; {max(contexts):,} are more than that")
    if any(layer.index is not None for layer in model.layers) and sizing.dtype.bits > 8:
        notes.append("the indexer's keys are counted in 16 bits, as the KV; engines may keep them in 8")
    return notes + dtype_notes(sizing)


def model_of(args: argparse.Namespace) -> Model:
    """The model asked for. Raises MisconfiguredError."""
    if not args.model:
        raise MisconfiguredError("no model given; give a config.json, a model directory, or a name of --list")
    return find_model(args.model, dict(parse_override(text) for text in args.set or ()))


def flag_count(flag: str, text: str, *, highest: int) -> int:
    """A whole number from 1. Raises MisconfiguredError that names the flag."""
    try:
        return parse_count(text, lowest=1, highest=highest)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


def sizing_of(args: argparse.Namespace, model: Model, dtype: str = "") -> Sizing:
    """The model as served. ``dtype`` overrides that of the arguments. Raises MisconfiguredError."""
    return Sizing(
        model,
        kv_dtype(dtype or args.kv_dtype),
        tensor=flag_count("--tp", args.tp, highest=MAX_RANKS),
        pipeline=flag_count("--pp", args.pp, highest=MAX_RANKS),
        engine=EngineRules(
            block_tokens=flag_count("--block-tokens", args.block_tokens, highest=1 << 16),
            batched_tokens=flag_count("--batched-tokens", args.batched_tokens, highest=1 << 24),
            allocator=Allocator(args.allocator),
        ),
    )


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """What a token of KV takes, for verbs that need nothing else of a model."""
    parser.add_argument("--model", metavar="NAME", help="for the KV bytes of a token, as for kvferry size")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help="of --model (bf16)")
    parser.add_argument("--kv-bytes-per-token", metavar="N", help="instead of --model")


def _token_sizing(args: argparse.Namespace) -> Sizing | None:
    """Of the model asked for, if any. Raises MisconfiguredError, also for a flag that would say nothing."""
    if args.kv_bytes_per_token is not None and args.model:
        raise MisconfiguredError("--model and --kv-bytes-per-token both say what a token takes; give one")
    if args.kv_dtype is not None and not args.model:
        raise MisconfiguredError("--kv-dtype says nothing without --model; give that too, or leave it out")
    if not args.model:
        return None
    return Sizing(find_model(args.model), kv_dtype(args.kv_dtype or "bf16"))


def token_bytes_of(args: argparse.Namespace) -> int | None:
    """KV bytes of a token over the whole replica; None where nobody said. Raises MisconfiguredError."""
    sizing = _token_sizing(args)
    if args.kv_bytes_per_token is not None:
        return flag_count("--kv-bytes-per-token", args.kv_bytes_per_token, highest=MAX_TOKEN_BYTES)
    if sizing is None:
        return None
    found = sizing.full_token_bytes + sizing.bounded_token_bytes
    if not found:
        raise MisconfiguredError(f"{args.model} keeps no KV per token: it has recurrent state alone")
    return found


def token_bytes_why(args: argparse.Namespace) -> list[str]:
    """Where ``token_bytes_of`` has its figure from, for those who ask. Raises MisconfiguredError."""
    found = token_bytes_of(args)
    if found is None:
        return []
    sizing = _token_sizing(args)
    if sizing is None:
        return [f"KV of a token = {found:,} B, as given by --kv-bytes-per-token"]
    return [
        f"KV of a token of {sizing.model.name} = {sizing.full_token_bytes:,} B in layers that keep all + "
        f"{sizing.bounded_token_bytes:,} B in those with a window = {found:,} B in {sizing.dtype.name}, one "
        f"copy (kvferry size {args.model} --explain)"
    ]


def token_bytes_notes(args: argparse.Namespace, tokens: float) -> list[str]:
    """For which lengths that figure holds, and what it is at ``tokens``. Raises MisconfiguredError."""
    sizing, found = _token_sizing(args), token_bytes_of(args)
    if sizing is None or found is None:
        return []
    text = f"a token is {found:,} B of {sizing.dtype.name}, one copy, at any length"
    if sizing.bounded_token_bytes:
        text = (
            f"a token is {found:,} B of {sizing.dtype.name}, one copy, in prompts of up to "
            f"{sizing.spans[0]:,} tokens; windows make it less in longer ones"
        )
        length = max(1, round(tokens))
        if length > sizing.spans[0]:
            text += f": {sizing.request(length).kv / length:,.0f} B at {length:,}. Counted is the most"
    if sizing.state_bytes:
        text += f"; {sizing.state_bytes:,} B of recurrent state for each sequence are not in it"
    return [text, *dtype_notes(sizing)]


def dtype_notes(sizing: Sizing) -> list[str]:
    """Where engines keep what is called fp8 in another form, which the plan knows."""
    layers = [layer for layer in sizing.model.layers if layer.keeps]
    if sizing.dtype.name != "fp8":
        return []
    if any(layer.latent and layer.index for layer in layers):
        return ["fp8 is counted bare here; for such models vLLM keeps fp8_ds_mla, which kvferry plan counts"]
    spans = {layer.span for layer in layers}
    if Span.WINDOW in spans and len(spans) > 1 and all(layer.every == 1 for layer in layers):
        return ["fp8 is counted in all layers here; vLLM leaves windows in 16 bits, as kvferry plan counts"]
    return []
