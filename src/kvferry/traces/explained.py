"""How each number of the findings came about, for people: a line for each step, with its numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.traces.policies import Policy


def explain(found: Mapping[str, Any], *, token_bytes: Sequence[str] = ()) -> list[str]:
    """From the lines of the files to the rates. token_bytes: where the bytes of a token come from."""
    lines = [line for file in found["files"] for line in _file(file)]
    traffic = found["traffic"]
    malformed = found["malformed"]["lines"]
    lines.append(
        f"requests = all of these lines, without {malformed:,} malformed ones = {traffic['requests']:,}"
    )
    lines.append(f"input tokens = the sum over requests = {traffic['input_tokens']:,}")
    lines += _traffic(traffic)
    reuse = found["reuse"]
    if reuse is None:
        return lines
    size = found["block_tokens"]
    lines.append(
        f"distinct = {reuse['distinct_blocks']:,} blocks, each after what precedes it, x {size:,} tokens = "
        f"{reuse['distinct_tokens']:,} tokens"
    )
    lines += token_bytes
    per_token = found["kv_bytes_per_token"]
    if per_token:
        nbytes = reuse["distinct_tokens"] * per_token
        lines.append(
            f"distinct KV = {reuse['distinct_tokens']:,} tokens x {per_token:,} B = {nbytes:,} B; "
            "KiB, MiB, GiB are powers of 1,024"
        )
    lines += _reusable(reuse["hit_rate"], traffic)
    lines += _capacities(reuse["by_capacity"], reuse["hit_rate"], traffic, size, per_token)
    lines += _people(reuse)
    lines += _gaps(reuse["gaps"])
    return lines + _slices(reuse["slices"], size)


def _file(file: Mapping[str, Any]) -> list[str]:
    """What was read of a file, and how tokens are counted there."""
    said = file["note"] or "tokens as the file has them"
    return [f"{file['path']}: {file['lines']:,} lines, {file['other_lines']:,} of them no requests; {said}"]


def _traffic(traffic: Mapping[str, Any]) -> list[str]:
    lines = [
        "p50, p90, p99 = the value that so many of 100 requests do not exceed; it occurs among them",
    ]
    if traffic["requests"]:
        lines.append(
            f"average input = {traffic['input_tokens']:,} tokens / {traffic['requests']:,} requests = "
            f"{traffic['input_mean']:,.1f}"
        )
    if traffic["span_s"]:
        lines.append(
            f"rate = {traffic['requests']:,} requests / ({traffic['span_s']:,.1f} s from the earliest to the "
            f"latest) = {traffic['requests'] / traffic['span_s']:,.4f} a second"
        )
    if traffic["input_to_output"] is not None:
        lines.append(
            f"ratio = input / output tokens of the requests that have both, the latter "
            f"{traffic['output_tokens']:,} = {traffic['input_to_output']:.1f}"
        )
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part:,} / {whole:,} = {100 * part / whole:.1f}%" if whole else f"{part:,} of none"


def _reusable(rates: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[str]:
    half = traffic["last_half"]
    return [
        "reusable = input tokens that an earlier request began with, in blocks without a gap; whole trace "
        + _share(rates["whole_trace_tokens"], traffic["input_tokens"]),
        f"last half = requests from number {half['first_request'] + 1:,} on: "
        + _share(rates["last_half_tokens"], half["input_tokens"]),
    ]


def _capacities(
    rows: Sequence[Mapping[str, Any]],
    unbounded: Mapping[str, Any],
    traffic: Mapping[str, Any],
    size: int,
    per_token: int | None,
) -> list[str]:
    """Of the largest capacity; the others are alike."""
    if not rows:
        return []
    row, half = rows[-1], traffic["last_half"]["input_tokens"]
    held = f"{row['blocks']:,} blocks x {size:,} tokens = {row['tokens']:,} tokens"
    if per_token:
        held += f" x {per_token:,} B = {row['tokens'] * per_token:,} B"
    policies = [policy for policy in Policy if policy in row]
    found = "; ".join(f"{policy} {_share(row[policy]['last_half_tokens'], half)}" for policy in policies)
    lines = [f"capacity, the last row: {held}", f"hits over the last half there: {found}"]
    best = row[Policy.OPTIMUM]["last_half_tokens"]
    lines.append(
        f"lost to policy = optimum - LRU = {_share(best - row[Policy.LRU]['last_half_tokens'], half)}; lost "
        f"to capacity = reusable - optimum = {_share(unbounded['last_half_tokens'] - best, half)}"
    )
    return lines


def _people(reuse: Mapping[str, Any]) -> list[str]:
    talks = reuse["conversations"]
    lines = [
        f"turns = requests that have all blocks of an earlier one, and more; others begin one of the "
        f"{talks['number']:,} conversations"
    ]
    kinds = (("conversation", talks), ("session", reuse["sessions"]))
    for name, kind in kinds:
        if kind is not None:
            own, others = kind["sharing"]["own_tokens"], kind["sharing"]["others_tokens"]
            lines.append(
                f"sharing = reusable tokens that the same {name} had of all: {_share(own, own + others)}"
            )
    return lines


def _gaps(gaps: Mapping[str, Any] | None) -> list[str]:
    if gaps is None:
        return []
    whole = gaps["reused_tokens"]
    first = next((gap for gap in gaps["within"] if gap["tokens"]), gaps["within"][-1])
    return [
        f"kept for = reused tokens by the time since their last use, of {whole:,} on one clock; "
        f"within {first['gap_s']:,} s {_share(first['tokens'], whole)}; longest {gaps['longest_s']:,.1f} s"
    ]


def _slices(slices: Sequence[Mapping[str, Any]], size: int) -> list[str]:
    if not slices:
        return []
    row = slices[-1]
    return [
        f"working set, the last row: {row['touched_tokens'] // size:,} distinct blocks used x {size:,} = "
        f"{row['touched_tokens']:,} tokens, {row['new_tokens']:,} of them new; hits "
        + _share(row["hit_tokens"], row["input_tokens"])
    ]
