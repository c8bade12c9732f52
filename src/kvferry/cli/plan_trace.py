"""A trace as a workload: from the document that ``kvferry analyze --json`` wrote, or from a log itself."""

import json
from pathlib import Path
from typing import Any

from kvferry.advise.workload import Numbers, ReuseCurve
from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile

MAX_DOCUMENT_BYTES = 64 << 20
DATES_FROM_S = 9e8
KEPT = 0.95  # of the reuse lies within the gap that counts as the reuse window
Measured = tuple[Numbers, ReuseCurve | None, str]


def read_trace(path: Path) -> Measured:
    """Raises MisconfiguredError."""
    found = _document(path)
    return from_document(analysed(path) if found is None else found, name=f"trace {path.name}")


def _document(path: Path) -> dict[str, Any] | None:
    """What analyze wrote; None for anything else."""
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            return None
        with path.open("rb") as file:
            if file.read(1) != b"{":
                return None
            file.seek(0)
            found = json.load(file)
    except OSError as error:
        raise MisconfiguredError(f"--trace: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "traffic" in found and "reuse" in found else None


def analysed(path: Path) -> dict[str, Any]:
    """As ``kvferry analyze`` does it, with LRU alone."""
    source = TraceFile(path)
    log = ReuseLog(source.reader.block_tokens)
    for request in source.requests(Malformed()):
        dated = source.reader.clock is Clock.TRACE and (request.time_s or 0.0) >= DATES_FROM_S
        log.add(request, clock=0 if dated else 1)
    if not len(log):
        raise MisconfiguredError(f"--trace: {path} holds no request; `kvferry analyze {path}` says why")
    return findings.document(
        log,
        capacities=findings.default_capacities(log),
        policies=[Policy.LRU],
        clock=source.reader.clock,
    )


def from_document(found: dict[str, Any], *, name: str) -> Measured:
    """The numbers that it has, and the reuse by capacity. Raises MisconfiguredError where it is none."""
    try:
        traffic, reuse = found["traffic"], found["reuse"]
        inputs, outputs = traffic["input_quantiles"], traffic["output_quantiles"]
        span = traffic["span_s"]
        numbers: dict[str, float | None] = {
            "context_p50": inputs["p50"],
            "context_p99": inputs["p99"],
            "context_mean": traffic["input_tokens"] / traffic["requests"],
            "output_tokens": max(1, outputs["p50"]) if outputs else None,
            "requests_s": traffic["requests"] / span if span else None,
        }
        curve = None
        if reuse is not None:
            talks = reuse["conversations"]
            growth = talks["growth_tokens"]
            numbers["turns"] = max(1.0, traffic["requests"] / talks["number"]) if talks["number"] else 1.0
            if growth:
                numbers["new_tokens"] = max(
                    1, min(growth["p50"] - (numbers["output_tokens"] or 0), inputs["p50"])
                )
            curve = _curve(reuse)
            gap = _gap(reuse["gaps"])
            if gap is not None:
                numbers["gap_s"] = gap
                numbers["resume_h"] = gap / 3600 if gap >= 3600 else 0.0
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise MisconfiguredError(
            f"--trace: {name} is no document of this version's `kvferry analyze --json`: {error!r} is wrong"
        ) from error
    return Numbers(**numbers), curve, name


def _curve(reuse: dict[str, Any]) -> ReuseCurve | None:
    """LRU over the last half of the trace, by the tokens held; it never falls."""
    points: list[tuple[float, float]] = []
    best = 0.0
    for row in reuse["by_capacity"]:
        best = max(best, row["lru"]["last_half"] or 0.0)
        points.append((float(row["tokens"]), best))
    return ReuseCurve(tuple(points)) if points else None


def _gap(gaps: dict[str, Any] | None) -> float | None:
    """The shortest of the gaps within which nearly all reuse lies."""
    if gaps is None:
        return None
    for row in gaps["within"]:
        if row["share"] >= KEPT:
            return float(row["gap_s"])
    return float(gaps["longest_s"])
