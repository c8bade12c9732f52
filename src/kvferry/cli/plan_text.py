"""A plan's document as text for people, and as Markdown."""

from collections.abc import Sequence
from typing import Any

from kvferry.cli.quantities import formula
from kvferry.cli.table import compact, duration, labelled, table


def render(found: dict[str, Any], *, explain: bool) -> str:
    """At most 100 columns, but for commands whose values are longer."""
    blocks = [_head(found), _verdict(found), _layers(found), _flags(found)]
    blocks += [f"{title}\n{table(head, rows)}" for title, head, rows in tables(found)]
    blocks.append("\n".join(labelled("assumed", text) for text in found["assumptions"]))
    if explain:
        blocks.append("Where the numbers are from:\n" + formula(found["explanation"]))
    return "\n\n".join(blocks)


def markdown(found: dict[str, Any], *, explain: bool) -> str:
    """The same for a document."""
    lines = [
        f"# KV cache plan: {found['model']['name']}",
        "",
        *(f"- {text}" for _, text in summary(found)),
        "",
    ]
    lines += [f"**{verdict(found)}**", ""]
    for reason in found["why_not"]:
        lines.append(f"- {reason['text']}. What would change it: {reason['what_would_change_it']}.")
    lines += ["", "## Layers, bottom up", "", "| layer | set | why |", "|---|---|---|"]
    for layer in found["layers"]:
        why = " ".join(layer["why"])
        lines.append(f"| {layer['layer']} | {'; '.join(layer['set'])} | {why} |")
    for name, command in found["flags"].items():
        lines += ["", f"## {NAMES[name]}", "", "```console", *command["lines"], "```"]
    for title, head, rows in tables(found):
        lines += ["", f"## {title.rstrip(':')}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "## Assumed", "", *(f"- {text}" for text in found["assumptions"])]
    if explain:
        lines += ["", "## Where the numbers are from", "", *(f"- `{line}`" for line in found["explanation"])]
    return "\n".join(lines)


NAMES = {"vllm": "vLLM", "sglang": "SGLang", "node": "kvferry, on each host"}


def summary(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The question, in a few lines with labels."""
    fleet, load, model = found["fleet"], found["workload"], found["model"]
    number = {name: value["value"] for name, value in load.items() if isinstance(value, dict)}
    on_host = fleet["host_bytes_per_replica"] * min(fleet["replicas"], fleet["replicas_per_host"])
    preset = "" if load["kind"] == "own" else f"{load['kind']}: "
    return [
        (
            "model",
            f"{model['name']}, weights {model['weights_bytes'] / 1e9:,.1f} GB ({model['weights_source']})",
        ),
        (
            "GPUs",
            f"{fleet['gpus']} x {fleet['gpu']} = {fleet['replicas']} "
            f"replica{'s' if fleet['replicas'] > 1 else ''} of TP {fleet['tensor_parallel']} on "
            f"{fleet['hosts']} host{'s' if fleet['hosts'] > 1 else ''}; host memory for KV: "
            f"{fleet['host_bytes_per_replica'] / 1e9:,.0f} GB per replica, {on_host / 1e9:,.0f} GB per host",
        ),
        (
            "workload",
            f"{preset}{number['context_p50']:,.0f} input tokens (p99 {number['context_p99']:,.0f}), "
            f"{_turns(load)}; {_plain(number['requests_s'])} requests/s; {percent(number['reuse'])} of all "
            "input was there before",
        ),
    ]


def _turns(load: dict[str, Any]) -> str:
    """What is new and what comes back, and what a preset's load was laid out for."""
    number = {name: field["value"] for name, field in load.items() if isinstance(field, dict)}
    out = f"{number['output_tokens']:,.0f} out"
    if number["turns"] <= 1:
        return f"{number['new_tokens']:,.0f} of them new, {out}; single requests"
    measured = load["new_tokens"]["from"].startswith("trace")
    kept = load["gap_s"]["from"].startswith("trace")
    apart = f"kept {duration(number['gap_s'])} after each" if kept else f"{duration(number['gap_s'])} apart"
    origin, laid = load["conversations"]["from"], ""
    if origin.startswith("preset") and " x " in origin:
        laid = f" ({origin.partition(': ')[2].partition(',')[0]}, as for replicas of the fewest ranks)"
    return (
        f"{'about ' if measured else ''}{number['new_tokens']:,.0f} of them new when a conversation goes on, "
        f"{out}; {number['turns']:,.3g} turns, {apart}; {number['conversations']:,.0f} at a time{laid}"
    )


def verdict(found: dict[str, Any]) -> str:
    """One line."""
    if found["shared_tier_advised"]:
        tier = found["shared_tier"]
        return (
            f"A shared tier is worth it: {volume(tier['planned_bytes'])} on {tier['shards']} Valkey "
            f"server{'s' if tier['shards'] > 1 else ''}."
        )
    return "You do not need a shared tier."


def _head(found: dict[str, Any]) -> str:
    return "\n".join(labelled(label, text) for label, text in summary(found))


def _verdict(found: dict[str, Any]) -> str:
    lines = [labelled("verdict", verdict(found))]
    for reason in found["why_not"]:
        lines.append(labelled("because", f"{reason['text']}."))
        lines.append(labelled("measure", f"{reason['what_would_change_it']}."))
    return "\n".join(lines)


def _layers(found: dict[str, Any]) -> str:
    lines = ["Layers, bottom up: each multiplies those above it."]
    for number, layer in enumerate(found["layers"], 1):
        lines.append(f"{number}. {layer['layer']}: {'; '.join(layer['set'])}")
        lines += [labelled("", text) for text in layer["why"]]
    return "\n".join(lines)


def _flags(found: dict[str, Any]) -> str:
    return "\n\n".join(
        f"{NAMES[name]}:\n" + "\n".join(command["lines"]) for name, command in found["flags"].items()
    )


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def tables(found: dict[str, Any]) -> list[Table]:
    """Title, head, rows: what to expect, what a return takes, the shared tier, a month."""
    return [_expected(found), *_returns(found), _tier(found), *_sizes(found), _month(found)]


def _expected(found: dict[str, Any]) -> Table:
    rows = [
        [
            row["kv_in"],
            percent(row["hit_rate"]),
            compact(row["computed_input_tokens_per_s"]),
            percent(row["busy_share"]),
            "grows"
            if row["ttft_mean_s"] is None and row["busy_share"] is not None
            else seconds(row["ttft_mean_s"]),
            _plain(row["stream_tokens_per_s"]),
            _plain(row["most_requests_per_s"]),
        ]
        for row in found["expected"]
    ]
    head = ("KV in", "hit rate", "computed tok/s", "busy", "mean TTFT", "tok/s each", "most requests/s")
    return (
        f"Expected at this load, of the fleet (times and rates {_error(found)}; see what is assumed):",
        head,
        rows,
    )


def _returns(found: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"{row['input_tokens']:,.0f}",
            f"{row['new_tokens']:,.0f}",
            volume(row["kv_bytes_loaded"]),
            *(
                seconds(row[f"ttft_{way}_s"])
                for way in ("own_cache", "host_memory", "shared_tier", "computed")
            ),
        ]
        for row in found["returns"]
    ]
    head = ("input", "new", "KV", "own cache", "host memory", "shared tier", "computed again")
    return (
        [(f"TTFT of one request on an idle replica, by where its prefix lies ({_error(found)}):", head, rows)]
        if rows
        else []
    )


def _tier(found: dict[str, Any]) -> Table:
    tier = found["shared_tier"]
    rows = [
        [
            "capacity",
            volume(tier["planned_bytes"]),
            f"peak {volume(tier['peak_bytes'])} and 30%",
        ],
        [
            "shards",
            compact(tier["shards"]),
            f"{compact(tier['shards_by_capacity'])} by capacity, "
            f"{compact(tier['shards_by_read_bandwidth'])} by reads of {volume(tier['read_bytes_per_s'])}/s",
        ],
        ["reads", f"{volume(tier['sustained_bytes_per_s'])}/s", "that these shards sustain"],
        ["NVMe", volume(tier["nvme_bytes"]), "of who comes back within a day (--resume-hours)"],
        ["bucket", volume(tier["bucket_bytes"]), "of who comes back later"],
        [
            "zone",
            "the engines'",
            f"in another one, traffic would cost {usd(tier['usd_per_month_if_in_another_zone'])} a month",
        ],
        [
            "bucket's region",
            "the engines'",
            "through an endpoint of the network: traffic within a region is free",
        ],
    ]
    advised = "The shared tier:" if found["shared_tier_advised"] else "A shared tier, if you had one:"
    return advised, ("what", "size", "why"), rows


def _sizes(found: dict[str, Any]) -> list[Table]:
    """Where a trace says what each would find."""
    rows = [
        [
            compact(row["tokens"]),
            volume(row["planned_bytes"]),
            f"{row['shards']}",
            percent(row["hit_rate"]),
            _plain(row["most_requests_per_s"]),
            usd(row["net_usd_per_month"]) if found["price"]["net_usd_per_month"] is not None else "-",
        ]
        for row in found["shared_tier_sizes"]
    ]
    head = ("tokens", "planned", "shards", "hit rate", "most requests/s", "net, USD a month")
    return [("Shared tiers of other sizes:", head, rows)] if len(rows) > 1 else []


def _month(found: dict[str, Any]) -> Table:
    price = found["price"]
    rows = [
        ["GPUs", usd(price["gpus_usd_per_month"]), "on all the time"],
        ["shared tier", usd(price["shared_tier_usd_per_month"]), "memory of whole servers, NVMe, bucket"],
        ["it brings", usd(price["benefit_usd_per_month"]), _hours(price)],
        ["net", usd(price["net_usd_per_month"]), _even(price)],
    ]
    return "A month of 730 h:", ("what", "USD", "how"), rows


def _hours(price: dict[str, Any]) -> str:
    if price["gpu_hours_saved_per_month"] is None:
        return "unknown: the GPU's price or speed is (--gpu-usd-hour, --prefill-tokens-s)"
    text = f"{price['gpu_hours_saved_per_month']:,.0f} GPU hours not spent on reading again"
    if price["purchases_put_off_usd_per_month"]:
        text += f", {usd(price['purchases_put_off_usd_per_month'])} of GPUs not bought"
    return text


def _even(price: dict[str, Any]) -> str:
    if price["break_even_hit_rate"] is None:
        return "at no hit rate does it pay" if price["net_usd_per_month"] is not None else "unknown"
    even, most = price["break_even_hit_rate"], price["inputs"]["hit_rate"]
    text = f"pays from a hit rate of {percent(even)}"
    return text if even <= most else f"{text}; with it, there are {percent(most)}"


def _error(found: dict[str, Any]) -> str:
    return f"{100 * found['error']['prefill']:.0f}% either way"


def percent(share: float | None) -> str:
    """``94.7%``, or ``-``."""
    return "-" if share is None else f"{100 * share:.1f}%"


def seconds(value: float | None) -> str:
    """``1.89 s``, or ``-``."""
    return "-" if value is None else f"{compact(value) if value >= 1e5 else f'{value:,.2f}'} s"


def usd(amount: float | None) -> str:
    """``$1,234``, ``-$5``, from ten millions on ``$12.3 mn``; ``-`` where it is unknown."""
    if amount is None:
        return "-"
    size = f"{abs(amount):,.0f}" if abs(amount) < 1e7 else compact(abs(amount))
    return f"{'-' if round(amount) < 0 else ''}${size}"


def volume(nbytes: float) -> str:
    """``6.8 GB``, ``1,475 GB``, from a hundred TB on ``123 TB``."""
    if nbytes >= 1e14:
        return f"{compact(nbytes / 1e12)} TB"
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 1e11 else f"{nbytes / 1e9:,.1f} GB"


def _plain(value: float | None) -> str:
    return "-" if value is None else compact(value) if value >= 10 else f"{value:,.3g}"
