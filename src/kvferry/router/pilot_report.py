"""What a pilot shows so far: pools side by side, with intervals; nothing where there is too little. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.router.contract import Ended
from kvferry.router.intervals import CONFIDENCE, Estimate, paired, quantile, ratio, share
from kvferry.router.pilots import Measured, Pilots

KINDS = (("split", "split"), ("original", "mirror"))  # what is compared: the usual pool's, the other one's
_ROWS = (("ttft_s", 0.5), ("ttft_s", 0.99), ("tokens_per_s", 0.5), ("total_s", 0.5))
_NAMES = {"ttft_s": "TTFT", "tokens_per_s": "tokens/s of a stream", "total_s": "whole answer"}
_UNITS = {"ttft_s": ", ms", "tokens_per_s": "", "total_s": ", ms"}
_PERCENT = ("errors", "cached")


def document(pilots: Pilots) -> dict[str, Any]:
    """For ``--json``. Quantiles and shares with 95% intervals, ratios of the other pool to the usual one.

    Requests of one conversation are alike, so that few conversations say less than the intervals do: their
    number is told beside.
    """
    found: dict[str, Any] = {"confidence": CONFIDENCE, "split": None, "mirror": None}
    for usual_kind, other_kind in KINDS:
        chosen = pilots.split if usual_kind == "split" else pilots.mirror
        if chosen is None:
            continue
        pools = {pool: told for (kind, pool), told in pilots.measured.items() if kind == usual_kind}
        usual = next((told for pool, told in pools.items() if pool != chosen.pool), Measured())
        other = pilots.of(other_kind, chosen.pool)
        found["split" if usual_kind == "split" else "mirror"] = {
            "share": chosen.part,
            "pool": chosen.pool,
            "usual": _told(usual),
            "other": _told(other),
            "ratios": _ratios(usual, other),
        }
    return found


def text(pilots: Pilots) -> list[str]:
    """The same for people."""
    if not pilots.active:
        return ["no pilot: start the router with --split 10%=POOL or --mirror 5%=POOL"]
    lines = []
    for name, part in document(pilots).items():
        if not isinstance(part, dict):
            continue
        lines.append(f"{name} {part['share'] * 100:g}% to {part['pool']}")
        lines.append(f"  {'':26} {'usual':>32}  {part['pool']:>32}   ratio")
        lines += [
            f"  {row:26} {part['usual'][row]:>32}  {part['other'][row]:>32}"
            for row in ("conversations", "requests")
        ]
        rows = [(f"{_NAMES[what]} p{q * 100:g}{_UNITS[what]}", f"{what}_p{q * 100:g}") for what, q in _ROWS]
        for title, key in [*rows, ("errors, %", "errors"), ("cached tokens, %", "cached")]:
            scale = 100 if key in _PERCENT else 1000 if key.startswith(("ttft_s", "total_s")) else 1
            cells = [_cell(part[side][key], scale) for side in ("usual", "other")]
            lines.append(f"  {title:26} {cells[0]:>32}  {cells[1]:>32}   {_verdict(part['ratios'].get(key))}")
        lines.append("  value [95% interval] n=samples; ?: too few for this end of it, -: none yet")
        if part["other"]["skipped"]:
            lines.append(f"  {part['other']['skipped']} copies were not made: too many in flight")
    return lines


def _told(told: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {
        "requests": sum(told.ended.values()),
        "conversations": len(told.conversations),
        "ended": dict(told.ended),
        "skipped": told.skipped,
        "errors": _numbers(share(told.ended[Ended.FAILED.value], told.judged)),
        "cached": _numbers(None),
    }
    if told.prompt_tokens:  # of tokens that come together: no interval would be true
        found["cached"] = _numbers(
            Estimate(told.cached_tokens / told.prompt_tokens, None, None, len(told.total_s))
        )
    for what, q in _ROWS:
        found[f"{what}_p{q * 100:g}"] = _numbers(quantile(_samples(told, what), q))
    return found


def _ratios(usual: Measured, other: Measured) -> dict[str, Any]:
    both = paired()
    return {
        f"{what}_p{q * 100:g}": _numbers(
            ratio(
                quantile(_samples(other, what), q, confidence=both),
                quantile(_samples(usual, what), q, confidence=both),
            )
        )
        for what, q in _ROWS
    }


def _samples(told: Measured, what: str) -> Sequence[float]:
    found: Sequence[float] = tuple(getattr(told, what))
    return found


def _numbers(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"value": None, "low": None, "high": None, "n": 0}
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.of}


def _cell(numbers: Mapping[str, Any], scale: int) -> str:
    """In the row's unit."""
    if numbers["value"] is None:
        return "-"
    ends = (numbers["low"], numbers["high"])
    low, high = (f"{end * scale:,.4g}" if end is not None else "?" for end in ends)
    return f"{numbers['value'] * scale:,.4g} [{low}, {high}] n={numbers['n']}"


def _verdict(numbers: Mapping[str, Any] | None) -> str:
    """Of a ratio: what its interval allows to say."""
    if numbers is None or numbers["value"] is None:
        return ""
    low, high = numbers["low"], numbers["high"]
    if low is None or high is None:
        return f"{numbers['value']:.2f}, too few to tell"
    said = "no difference shown" if low <= 1 <= high else "less" if high < 1 else "more"
    return f"{numbers['value']:.2f} [{low:.2f}, {high:.2f}] {said}"
