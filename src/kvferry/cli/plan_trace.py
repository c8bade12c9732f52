"""A trace as a workload: from the document that ``kvferry analyze --json`` wrote, or from a log itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.advise.workload import Numbers, ReuseCurve
from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.findings import CAPACITIES
from kvferry.traces.formats import Clock
from kvferry.traces.policies import Policy
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile

MAX_DOCUMENT_BYTES = 64 << 20
MAX_NUMBER = 1e15
DATES_FROM_S = 9e8
KEPT = 0.95  # of the reuse lies within the gap that counts as the reuse window
APART, JUMP = 4.0, 0.1  # capacities further apart, with so much more found, leave too much between
REACHED = 0.97  # of what is found without limit, that the largest capacity must find
AGAIN = "make it again without --capacities, or give the log itself"
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
        numbers = _numbers(found["traffic"], found["reuse"])
        curve = None
        if found["reuse"] is not None:
            curve = _curve(found["reuse"], _number(found["block_tokens"]), most=_most(numbers), name=name)
        if curve is not None:
            new = _new(found["traffic"], numbers, reuse=curve.most)
            numbers = replace(numbers, reuse=curve.most, new_tokens=new)
        if curve is not None and found["traffic"]["span_s"] is None:
            # Sessions with clocks of their own were replayed one by one: a capacity of that means nothing.
            return numbers, None, name
        return numbers, curve, name
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MisconfiguredError(
            f"--trace: {name} is no document of this version's `kvferry analyze --json`: {error!r} is wrong"
        ) from error


def _number(value: object, *, most: float = MAX_NUMBER) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(value)
    return float(value)


def _numbers(traffic: dict[str, Any], reuse: dict[str, Any] | None) -> Numbers:
    inputs, outputs = traffic["input_quantiles"], traffic["output_quantiles"]
    requests, span = _number(traffic["requests"]), traffic["span_s"]
    middle = max(1.0, _number(inputs["p50"]))
    mean = max(1.0, _number(traffic["input_tokens"]) / max(1.0, requests))
    numbers: dict[str, float | None] = {
        "context_p50": middle,
        "context_p99": max(middle, _number(inputs["p99"])),
        "context_mean": mean,
        "output_tokens": max(1.0, _number(outputs["p50"])) if outputs else None,
        "requests_s": requests / _number(span) if span and requests else None,
    }
    if reuse is None:
        return Numbers(**numbers)
    talks = reuse["conversations"]
    count, growth = _number(talks["number"]), talks["growth_tokens"]
    numbers["turns"] = max(1.0, requests / count) if count else 1.0
    if growth:
        new = _number(growth["p50"]) - (numbers["output_tokens"] or 0.0)
        numbers["new_tokens"] = max(1.0, min(new, middle, mean))
    window = _window(reuse["gaps"])
    if window is not None:
        turns = numbers["turns"] or 1.0
        kept = _mean_gap(reuse["gaps"]["within"], window) * (turns - 1) / turns + window / turns
        numbers |= {"gap_s": kept, "resume_h": window / 3600 if window >= 3600 else 0.0}
    return Numbers(**numbers)


def _most(numbers: Numbers) -> float:
    """The highest share of the input that can be found: an engine computes a token of every request."""
    return 1 - 1 / max(2.0, numbers.context_mean or 0.0)


def _new(traffic: dict[str, Any], numbers: Numbers, *, reuse: float) -> float:
    """New in a turn: what conversations grow by, and no more than what is not found of a request.

    Where prompts share content across conversations, that is less than they grow by. reuse: of the trace's
    last half.
    """
    half = traffic["last_half"]
    requests = max(1.0, _number(traffic["requests"]) - _number(half["first_request"]))
    unseen = max(1.0, _number(half["input_tokens"]) / requests * (1 - reuse))
    unseen = min(unseen, numbers.context_p50 or 1.0, numbers.context_mean or 1.0)
    return unseen if numbers.new_tokens is None else min(numbers.new_tokens, unseen)


def _curve(reuse: dict[str, Any], block_tokens: float, *, most: float, name: str) -> ReuseCurve | None:
    """LRU over the last half of the trace, by the tokens held; it never falls.

    Raises MisconfiguredError where the capacities end before what can be found, or lie so far apart that
    what is found between them is a guess.
    """
    rows = reuse["by_capacity"]
    points: list[tuple[float, float]] = []
    before = (block_tokens, 0.0) if len(rows) < CAPACITIES else None
    for row in rows:
        share = min(most, _number(row["lru"]["last_half"] or 0.0, most=1.0))
        tokens = _number(row["tokens"])
        if tokens <= (points[-1][0] if points else 0.0):
            raise ValueError(tokens)
        held, found = points[-1] if points else before or (tokens, share)
        if tokens > APART * held and share > found + JUMP:
            raise MisconfiguredError(
                f"--trace: {name} says what is found with {held:,.0f} and with {tokens:,.0f} tokens held, "
                f"{100 * found:.1f}% and {100 * share:.1f}%, and nothing between; {AGAIN}"
            )
        points.append((tokens, max(share, found if points else 0.0)))
    without = min(most, _number(reuse["hit_rate"]["last_half"] or 0.0, most=1.0))
    reached = points[-1][1] if points else 0.0
    if points and reached < REACHED * without:
        raise MisconfiguredError(
            f"--trace: {name} ends with {points[-1][0]:,.0f} tokens held, which find {100 * reached:.1f}% of "
            f"the input, and without limit {100 * without:.1f}% are found; {AGAIN}"
        )
    return ReuseCurve(tuple(points)) if points else None


def _mean_gap(within: list[dict[str, Any]], window: float) -> float:
    """Seconds until a conversation goes on, or until it is dropped after ``window``: gaps lie evenly between
    those that are known."""
    total = before = 0.0
    waiting = 1.0
    for row in within:
        gap, left = _number(row["gap_s"]), 1 - _number(row["share"], most=1.0)
        if gap > window:
            break
        total += (gap - before) * (waiting + left) / 2
        before, waiting = gap, left
    return total + max(0.0, window - before) * waiting


def _window(gaps: dict[str, Any] | None) -> float | None:
    """The shortest of the gaps within which nearly all reuse lies."""
    if gaps is None:
        return None
    for row in gaps["within"]:
        if _number(row["share"], most=1.0) >= KEPT:
            return _number(row["gap_s"])
    return _number(gaps["longest_s"])
