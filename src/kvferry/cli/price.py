"""``kvferry price``: what a shared cache earns and costs a month, with the user's own prices."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from kvferry.advise.price import BENEFITS, HOURS, Answer, Deal, Part, answer, explain
from kvferry.cli.quantities import (
    add_token_arguments,
    formula,
    mean_tokens,
    parse_number,
    token_bytes_notes,
    token_bytes_of,
)
from kvferry.cli.table import COLUMNS, labelled, plain, table
from kvferry.errors import MisconfiguredError
from kvferry.models.gpus import find_gpu
from kvferry.values import parse_count, parse_path

# Of memory: r7g.16xlarge, $3.427 an hour for 512 GiB.
PRICES_OF = "AWS us-east-1, list of 2025"
# flag -> (field, default, highest, help)
NUMBERS: dict[str, tuple[str, float | None, float, str]] = {
    "--requests-s": ("requests_s", None, 1e9, "requests a second, mean of the month"),
    "--prompt-tokens": ("prompt_tokens", None, 1e9, "mean tokens of a prompt, like 20000 or 16K (x 1,024)"),
    "--prefill-tokens-s": ("prefill_tokens_s", None, 1e9, "prefill of one GPU, measured, tokens a second"),
    "--hit-rate": ("hit_rate", None, 1.0, "share of prompt tokens reused with the cache (kvferry analyze)"),
    "--own-hit-rate": ("own_hit_rate", None, 1.0, "the same without it: vllm:prefix_cache_hits / _queries"),
    "--gpus": ("gpus", None, 1e7, "GPUs of the fleet"),
    "--gpu-usd-hour": ("gpu_usd_hour", None, 1e6, "price of one, or --gpu NAME for the catalogue's"),
    "--ram-gib": ("ram_gib", None, 1e9, "memory of the shared cache"),
    "--ram-usd": ("ram_usd_gib", 4.89, 1e6, "per GiB and month"),
    "--disk-gib": ("disk_gib", 0.0, 1e9, "NVMe or block storage behind it"),
    "--disk-usd": ("disk_usd_gib", 0.08, 1e6, "per GiB and month"),
    "--objects-gib": ("objects_gib", 0.0, 1e12, "object storage behind it"),
    "--objects-usd": ("objects_usd_gib", 0.023, 1e6, "per GiB and month"),
    "--objects-read-share": ("objects_read_share", 0.0, 1.0, "of the tokens hit, read from objects"),
    "--read-usd": ("read_usd_million", 0.4, 1e6, "per million object reads"),
    "--write-usd": ("write_usd_million", 5.0, 1e6, "per million object writes"),
    "--far-share": ("far_share", 0.0, 1.0, "of the bytes, those that cross zones"),
    "--zone-usd": ("zone_usd_gb", 0.02, 1e6, "per GB across zones, both ends"),
    "--throughput-gain": (
        "throughput_gain",
        0.0,
        100.0,
        "of what GPUs do besides prefill; 0.1 is 10%%",
    ),
    "--deferred-usd": ("deferred_usd_month", 0.0, 1e12, "a month, of purchases put off"),
    "--other-usd": ("other_usd_month", 0.0, 1e12, "a month, of anything else: people, support"),
    "--working-set-gib": ("working_set_gib", 0.0, 1e12, "what is used again (kvferry analyze)"),
    "--host-gib": ("host_gib", 0.0, 1e9, "host memory for KV that each replica has anyway"),
}
FLAG_OF = {field: flag for flag, (field, *_) in NUMBERS.items()} | {"bytes_per_token": "--kv-bytes-per-token"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The deal."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=COLUMNS)
    parser.usage = f"{parser.prog} [options]"
    for flag, (_, default, _, what) in NUMBERS.items():
        shown = "" if default is None or default == 0 else f" ({default:g}: {PRICES_OF})"
        parser.add_argument(flag, metavar="N", help=what + shown)
    add_token_arguments(parser)
    parser.add_argument("--gpu", metavar="NAME", help="for its price, as kvferry concurrency")
    parser.add_argument("--gpus-file", metavar="FILE", help="GPUs of your own")
    parser.add_argument("--replicas", default="2", metavar="N", help="engine processes that share (2)")
    parser.add_argument("--long-gaps", action="store_true", help="users come back after hours")
    parser.add_argument("--explain", action="store_true", help="the formula with its numbers")
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def _tokens(flag: str, text: str) -> float:
    try:
        return mean_tokens(text)
    except MisconfiguredError as error:
        raise MisconfiguredError(f"{flag}: {error}") from error


# flag that is 0 unless given -> flags that say nothing without it
USELESS_WITHOUT = {
    "--disk-gib": ("--disk-usd",),
    "--objects-gib": ("--objects-usd", "--objects-read-share", "--read-usd", "--write-usd"),
    "--far-share": ("--zone-usd",),
    "--working-set-gib": ("--host-gib", "--long-gaps"),
    "--host-gib": ("--working-set-gib",),
    "--gpu": ("--gpus-file",),
}


def _refuse_useless(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Raises MisconfiguredError for a flag whose number would not be used."""
    for needed, flags in USELESS_WITHOUT.items():
        has = given[NUMBERS[needed][0]] if needed in NUMBERS else args.gpu
        useless = [flag for flag in flags if getattr(args, flag[2:].replace("-", "_"))]
        if not has and useless:
            raise MisconfiguredError(
                f"{' and '.join(useless)} would change nothing without {needed}; give that too, or leave "
                f"{'them' if len(useless) > 1 else 'it'} out"
            )


def deal_of(args: argparse.Namespace) -> Deal:
    """What the arguments say. Raises MisconfiguredError, naming all that is missing."""
    given: dict[str, Any] = {}
    missing: list[str] = []
    for flag, (field, default, highest, _) in NUMBERS.items():
        text = getattr(args, flag[2:].replace("-", "_"))
        if text is not None:
            given[field] = (
                _tokens(flag, text) if field == "prompt_tokens" else parse_number(flag, text, highest=highest)
            )
        elif default is not None:
            given[field] = default
        elif field != "gpu_usd_hour":
            missing.append(flag)
    _refuse_useless(args, given)
    # Looked up even where its price is given beside it: a name that is wrong is said to be.
    gpu = find_gpu(args.gpu, parse_path(args.gpus_file) if args.gpus_file else None) if args.gpu else None
    if "gpu_usd_hour" not in given and gpu is not None:
        if not gpu.usd_per_hour:
            raise MisconfiguredError(f"the catalogue has no price of {gpu.name}; give it with --gpu-usd-hour")
        given["gpu_usd_hour"] = gpu.usd_per_hour
    elif "gpu_usd_hour" not in given:
        missing.append("--gpu-usd-hour or --gpu")
    per_token = token_bytes_of(args)
    if per_token is None:
        missing.append("--model or --kv-bytes-per-token")
    else:
        given["bytes_per_token"] = per_token
    if missing:
        raise MisconfiguredError(f"missing: {', '.join(missing)}; kvferry price --help says what each is")
    return Deal(
        **given, replicas=parse_count(args.replicas, lowest=1, highest=1 << 20), long_gaps=args.long_gaps
    )


def document(deal: Deal, found: Answer, notes: list[str]) -> dict[str, Any]:
    """Everything as one JSON document; dollars of a month."""
    return {
        "inputs": asdict(deal),
        "usd_per_month": {part.name.lower(): amount for part, amount in found.usd.items()},
        "benefit_usd_per_month": found.benefit_usd,
        "cost_usd_per_month": found.cost_usd,
        "net_usd_per_month": found.net_usd,
        "gpu_hours_saved_per_month": found.gpu_hours,
        "break_even_hit_rate": found.break_even,
        "buy": not found.reasons,
        "why_not": {reason.name.lower(): reason.value for reason in found.reasons},
        "sensitivity": {
            name: [{"value": moved.value, "net_usd_per_month": moved.net_usd} for moved in pair]
            for name, pair in found.sensitivity.items()
        },
        "notes": notes,
        "explanation": explain(deal),
    }


def usd(amount: float) -> str:
    """``$1,234``; ``-$5``."""
    return f"{'-' if round(amount) < 0 else ''}${abs(amount):,.0f}"


def render(deal: Deal, found: Answer, notes: list[str]) -> str:
    """For people."""
    rows = [
        ("+" if part in BENEFITS else "-", part.value, usd(amount))
        for part, amount in found.usd.items()
        if amount or part in (Part.REREAD, Part.RAM)
    ]
    blocks = [table(("", "a month of 730 h", "USD"), [*rows, ("=", "net", usd(found.net_usd))])]
    if found.reasons:
        blocks.append("\n".join(labelled("No", f"{reason.value}.") for reason in found.reasons))
    else:
        blocks.append(labelled("Yes", f"it brings {usd(found.net_usd)} a month more than it costs."))
    even = "no hit rate" if found.break_even is None else f"hit rate {100 * found.break_even:.1f}%"
    points = 100 * (deal.hit_rate - deal.own_hit_rate)
    blocks.append(
        labelled(
            "Pays from",
            f"{even}; counted here: {100 * deal.hit_rate:.1f}%, {points:.1f} points more than without",
        )
    )
    share = found.gpu_hours / deal.fleet_hours
    blocks.append(
        labelled(
            "Mind",
            f"{found.gpu_hours:,.0f} GPU hours are {found.gpu_hours / HOURS:.1f} of {plain(deal.gpus)} GPUs "
            f"({100 * share:.0f}%). They are money only if you run fewer GPUs or put off buying some; else "
            "they are room for more users.",
        )
    )
    if notes:
        blocks.append("\n".join(labelled("KV", note) for note in notes))
    moved = [
        (
            FLAG_OF[name],
            plain(getattr(deal, name)),
            plain(low.value),
            usd(low.net_usd),
            plain(high.value),
            usd(high.net_usd),
        )
        for name, (low, high) in list(found.sensitivity.items())[:6]
    ]
    blocks.append(table(("if", "is not", "but", "net", "or", "net"), moved))
    return "\n\n".join(blocks)


def main(args: argparse.Namespace) -> int:
    """Print the answer; 0 whatever it is."""
    deal = deal_of(args)
    found = answer(deal)
    notes = token_bytes_notes(args, deal.prompt_tokens)
    if args.json:
        print(json.dumps(document(deal, found, notes), indent=2))
        return 0
    print(render(deal, found, notes))
    if args.explain:
        print("\n" + formula(explain(deal)))
    return 0
