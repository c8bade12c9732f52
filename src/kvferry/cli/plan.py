"""``kvferry plan MODEL --gpu NAME``: what to set, bottom up, and whether a shared tier is worth it."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.advise.document import document
from kvferry.advise.expect import Routing
from kvferry.advise.plan import make
from kvferry.advise.question import Prices, Question
from kvferry.advise.shared import SHARD_BYTES, SHARD_GBIT, SHARD_MACHINE_BYTES, Shard
from kvferry.advise.workload import Goal, Kind, Numbers
from kvferry.cli.flags import BACKEND, CONNECTOR
from kvferry.cli.plan_text import NAMES, markdown, render, summary, tables, verdict
from kvferry.cli.price import NUMBERS as PRICE_NUMBERS
from kvferry.cli.quantities import flag_count, parse_number, parse_override, parse_tokens
from kvferry.cli.table import COLUMNS
from kvferry.config import parse_size
from kvferry.errors import MisconfiguredError
from kvferry.models.catalogue import entries, find_model
from kvferry.models.concurrency import mean_weight_bytes, weights_dtype, weights_of
from kvferry.models.gpus import Gpu, find_gpu
from kvferry.models.layers import Model
from kvferry.models.published import WEIGHT_BYTES
from kvferry.models.sizes import MAX_RANKS
from kvferry.values import parse_path

MAX_GPUS = 1 << 20
_GAP = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|min|h)?")
_GAP_S = {None: 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
# flag -> (its field, highest, help). Lengths take K as elsewhere.
LENGTHS = {
    "--context-p50": ("context_p50", "input tokens of a request, history included: the median"),
    "--context-p99": ("context_p99", "the same of the longest hundredth"),
    "--new-tokens": ("new_tokens", "of them, new in each turn"),
    "--output-tokens": ("output_tokens", "tokens of an answer"),
}
COUNTS = {
    "--turns": ("turns", 1.0, 1e6, "turns of a conversation"),
    "--conversations": ("conversations", 0.0, 1e9, "going on at a time, in the fleet"),
    "--requests-s": ("requests_s", 1e-9, 1e9, "requests a second, of the fleet"),
    "--reuse": ("reuse", 0.0, 1.0, "share of input tokens computed before"),
    "--resume-hours": ("resume_h", 0.0, 1e5, "users come back after up to so long (0)"),
    "--resume-share": ("resume_share", 0.0, 1.0, "of what is reused, the part that is then (0.2)"),
}
MONEY = ("--ram-usd", "--disk-usd", "--objects-usd", "--zone-usd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the machines, the workload, prices, and how to show it."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=COLUMNS)
    parser.usage = f"{parser.prog} MODEL --gpu NAME [--workload KIND] [options]"
    parser.add_argument(
        "model", nargs="?", help="a name of kvferry size --list, a config.json, a directory with one"
    )
    parser.add_argument("--gpu", metavar="NAME", help="of kvferry concurrency --list-gpus")
    parser.add_argument("--gpus", metavar="N", help="GPUs in all (two replicas)")
    parser.add_argument("--tp", metavar="N", help="tensor-parallel ranks (the fewest that do)")
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--workload",
        choices=[kind.value for kind in Kind if kind is not Kind.OWN],
        metavar="KIND",
        help="a preset to start from: chat, rag, agent or one-shot",
    )
    load.add_argument("--trace", metavar="FILE", help="what kvferry analyze --json wrote, or a log it reads")
    for flag, (_, what) in LENGTHS.items():
        load.add_argument(flag, metavar="TOKENS", help=what)
    for flag, (_, _, _, what) in COUNTS.items():
        load.add_argument(flag, metavar="N", help=what)
    load.add_argument("--gap", metavar="TIME", help="between turns, like 30s or 5min")
    load.add_argument(
        "--goal", choices=[goal.value for goal in Goal], metavar="GOAL", help="latency or throughput"
    )
    load.add_argument(
        "--routing",
        choices=[way.value for way in Routing],
        metavar="WAY",
        default=Routing.AFFINITY.value,
        help="of turns: affinity (default) or round-robin",
    )
    _add_machines(parser.add_argument_group("machines"))
    money = parser.add_argument_group("prices, US dollars")
    money.add_argument("--gpu-usd-hour", metavar="USD", help="of one GPU (the catalogue's)")
    for flag in MONEY:
        _, default, _, what = PRICE_NUMBERS[flag]
        money.add_argument(flag, metavar="USD", help=f"{what} ({default:g})")
    show = parser.add_argument_group("output")
    show.add_argument("--explain", action="store_true", help="where every number is from")
    show.add_argument("--json", action="store_true", help="everything, for programs")
    show.add_argument("--markdown", action="store_true", help="for a document")
    show.add_argument("--html", metavar="PATH", help="also write a page with charts")


def _add_machines(group: Any) -> None:
    group.add_argument("--weights", metavar="SIZE", help="of all weights, like 16GB")
    group.add_argument(
        "--weights-dtype", choices=list(WEIGHT_BYTES), metavar="DTYPE", help="x parameters (as published)"
    )
    group.add_argument("--active-parameters", metavar="N", help="that a token uses, like 22e9")
    group.add_argument("--kv-dtype", choices=["fp8", "bf16"], default="fp8", help="of the KV cache (fp8)")
    group.add_argument("--set", action="append", metavar="FIELD=VALUE", help="replace a field of the config")
    group.add_argument("--utilization", default="0.92", metavar="SHARE", help="of GPU memory (0.92)")
    group.add_argument(
        "--overhead", default="3GB", metavar="SIZE", help="per GPU, beside weights and KV (3GB)"
    )
    group.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU, in place of the catalogue's")
    group.add_argument("--gpus-file", metavar="FILE", help="TOML with GPUs of your own, prices too")
    group.add_argument("--host-memory", metavar="SIZE", help="for KV, per replica (200GB; 800GB per host)")
    group.add_argument("--gpus-per-host", default="8", metavar="N", help="(8)")
    group.add_argument("--prefill-tokens-s", metavar="N", help="of one GPU, measured, instead of estimated")
    group.add_argument("--shard-memory", metavar="SIZE", help="for KV on a cache server (450GB of 512GiB)")
    group.add_argument("--shard-gbit", metavar="N", help="network of a cache server (30)")


def _size(flag: str, text: str, *, lowest: int = 0) -> int:
    try:
        found = parse_size(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error
    if found < lowest:
        raise MisconfiguredError(f"{flag} is {text}: give at least {lowest:,} bytes")
    return found


def _given(args: argparse.Namespace, flag: str) -> str | None:
    value: str | None = getattr(args, flag[2:].replace("-", "_"))
    return value


def _gap(text: str) -> float:
    match = _GAP.fullmatch(text.strip())
    if match is None:
        raise MisconfiguredError(f"--gap {text!r} is no time; write it like 30s, 5min or 2h")
    return float(match[1]) * _GAP_S[match[2]]


def numbers_of(args: argparse.Namespace) -> Numbers:
    """What the user said of the workload. Raises MisconfiguredError."""
    found: dict[str, float] = {}
    for flag, (field, _) in LENGTHS.items():
        if (text := _given(args, flag)) is not None:
            try:
                found[field] = parse_tokens(text)
            except MisconfiguredError as error:
                raise MisconfiguredError(f"{flag}: {error}") from error
    for flag, (field, lowest, highest, _) in COUNTS.items():
        if (text := _given(args, flag)) is not None:
            found[field] = parse_number(flag, text, lowest=lowest, highest=highest)
    if args.gap is not None:
        found["gap_s"] = _gap(args.gap)
    return Numbers(**found)


def _config(model: Model, name: str) -> dict[str, Any]:
    """The fields of the config, for heads and experts."""
    named = [entry.config for entry in entries() if entry.name == model.name and entry.source in model.source]
    if named:
        return dict(named[0])
    path = Path(name).expanduser()
    found = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    nested = [value for value in found.values() if isinstance(value, dict) and "num_hidden_layers" in value]
    return {**found, **(nested[0] if nested else {})}


def _prices(args: argparse.Namespace, gpu: Gpu) -> Prices:
    money = {}
    for flag in MONEY:
        field, default, highest, _ = PRICE_NUMBERS[flag]
        text = _given(args, flag)
        money[field] = default or 0.0 if text is None else parse_number(flag, text, lowest=0, highest=highest)
    usd = gpu.usd_per_hour or None
    if args.gpu_usd_hour is not None:
        usd = parse_number("--gpu-usd-hour", args.gpu_usd_hour, lowest=1e-6, highest=1e6)
    return Prices(gpu_usd_hour=usd, **money)


def _shard(args: argparse.Namespace) -> Shard:
    capacity, machine = SHARD_BYTES, float(SHARD_MACHINE_BYTES)
    if args.shard_memory is not None:
        capacity = float(_size("--shard-memory", args.shard_memory, lowest=1 << 30))
        machine = capacity * SHARD_MACHINE_BYTES / SHARD_BYTES
    gbit = SHARD_GBIT
    if args.shard_gbit is not None:
        gbit = parse_number("--shard-gbit", args.shard_gbit, lowest=0.1, highest=1e4)
    return Shard(capacity, machine, gbit)


def question_of(args: argparse.Namespace) -> Question:
    """The arguments as one question. Raises MisconfiguredError."""
    if not args.model:
        raise MisconfiguredError("no model given; give a name of kvferry size --list, or its config.json")
    if args.json and args.markdown:
        raise MisconfiguredError("--json and --markdown are two forms; give one")
    if not args.gpu:
        raise MisconfiguredError("no GPU given; name one like --gpu h100 (kvferry concurrency --list-gpus)")
    overrides = dict(parse_override(text) for text in args.set or ())
    model = find_model(args.model, overrides)
    gpu = find_gpu(args.gpu, None if args.gpus_file is None else parse_path(args.gpus_file))
    weights = None if args.weights is None else _size("--weights", args.weights, lowest=1)
    kind = Kind(args.workload) if args.workload else Kind.OWN
    measured = None
    if args.trace is not None:
        from kvferry.cli.plan_trace import read_trace

        measured = read_trace(parse_path(args.trace))
    active = args.active_parameters
    rate = args.prefill_tokens_s
    return Question(
        model=model,
        config=_config(model, args.model) | overrides,
        gpu=gpu,
        weights=weights_of(model, args.weights_dtype, weights),
        kind=kind,
        numbers=numbers_of(args),
        prices=_prices(args, gpu),
        gpus=None if args.gpus is None else flag_count("--gpus", args.gpus, highest=MAX_GPUS),
        tensor=None if args.tp is None else flag_count("--tp", args.tp, highest=MAX_RANKS),
        goal=None if args.goal is None else Goal(args.goal),
        measured=measured,
        kv=args.kv_dtype,
        utilization=parse_number("--utilization", args.utilization, lowest=0.01, highest=1),
        overhead_bytes=_size("--overhead", args.overhead),
        memory_bytes=None if args.gpu_memory is None else _size("--gpu-memory", args.gpu_memory, lowest=1),
        host_bytes=None if args.host_memory is None else _size("--host-memory", args.host_memory),
        weight_bytes=mean_weight_bytes(model, args.weights_dtype),
        gpus_per_host=flag_count("--gpus-per-host", args.gpus_per_host, highest=1024),
        routing=Routing(args.routing),
        shard=_shard(args),
        active_parameters=None
        if active is None
        else parse_number("--active-parameters", active, lowest=1e6, highest=1e14),
        prefill_tokens_s=None
        if rate is None
        else parse_number("--prefill-tokens-s", rate, lowest=1e-3, highest=1e9),
        flops=gpu.fp8_tflops or None if weights_dtype(model, args.weights_dtype) == "fp8" else None,
    )


def _path_of(model: Model, name: str) -> str:
    """How an engine is told of it."""
    for entry in entries():
        if entry.name == model.name and entry.source in model.source:
            return entry.repo
    path = Path(name).expanduser()
    return str(path.parent if path.name == "config.json" else path)


def main(args: argparse.Namespace) -> int:
    """Print the plan; 0 whatever it says."""
    question = question_of(args)
    found = document(
        make(question), path=_path_of(question.model, args.model), connector=CONNECTOR, backend=BACKEND
    )
    if args.html is not None:
        from kvferry.advise.plan_page import page

        path = parse_path(args.html)
        text = page(
            found,
            summary=summary(found),
            verdict=verdict(found),
            tables=tables(found),
            names=NAMES,
            version=__version__,
        )
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise MisconfiguredError(f"--html: cannot write {path}: {error.strerror}") from error
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.markdown:
        print(markdown(found, explain=args.explain))
    else:
        print(render(found, explain=args.explain))
    return 0
