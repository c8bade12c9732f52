"""What a router says of a request, as text: where it went, and what each worker would have cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cli.table import count, table

_COLUMNS = ("cost", "wait", "load", "prefill", "decode", "work", "slow", "engine", "memory", "shared")


def render(record: Mapping[str, Any]) -> str:
    """One of ``Guide.explain``'s documents."""
    lines = [
        f"request   {record['request_id']} of {record['model'] or 'a model'}",
        f"sent to   {record['worker']}" + (f": {record['reason']}" if record["reason"] else ", the cheapest"),
        f"prompt    {_both(record['prompt_tokens'], record['prompt_tokens_expected'], count, 'tokens')}",
        f"cached    {_both(record['cached_tokens'], record['cached_tokens_expected'], count, 'tokens')}",
        f"TTFT      {_ttft(record)}",
        f"ended     {record['ended'] or 'not yet'}",
        "",
        f"The cheapest that were looked at, of {count(record['workers'])} (ms; tokens):",
    ]
    lines.append(_table(record["candidates"]))
    if (prefill := record.get("prefill")) is not None:
        lines += ["", f"Before that it was prefilled at {prefill['worker']}:", "", render(prefill)]
    return "\n".join(lines)


def _ttft(record: Mapping[str, Any]) -> str:
    """Of an answer that came whole nobody can tell it."""
    if record["ttft_ms"] is None and record["ended"]:
        return f"- (no stream), {_ms(record['ttft_ms_expected'])} ms expected"
    return _both(record["ttft_ms"], record["ttft_ms_expected"], _ms, "ms")


def _both(seen: float | None, expected: float, shown: Any, unit: str) -> str:
    return f"{'not said' if seen is None else f'{shown(seen)} {unit}'} ({shown(expected)} expected)"


def _table(candidates: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for found in candidates:
        times = (found[f"{name}_ms"] for name in ("cost", "wait", "load", "prefill", "decode", "work"))
        tokens = (found[f"{name}_tokens"] for name in ("engine", "memory", "shared"))
        rows.append((found["worker"], *map(_ms, times), f"{found['slowness']:.2f}", *map(count, tokens)))
    return table(("worker", *_COLUMNS), rows)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f}"
