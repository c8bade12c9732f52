"""A run's outcome as text and as JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvferry.bench.chaos.faults import KILLS, Fault
from kvferry.bench.chaos.run import Outcome
from kvferry.bench.chaos.soak import Trend
from kvferry.bench.chaos.tally import GRACE_S
from kvferry.cli.table import count, duration, table

SHOWN_LATE = 5


def document(outcome: Outcome) -> dict[str, Any]:
    """For ``--json``."""
    tally = outcome.tally
    return {
        "seed": outcome.plan.seed,
        "seconds": round(outcome.seconds, 1),
        "kills": sum(fault.kind in KILLS for fault in outcome.faults),
        "wrong_bytes": tally.wrong,
        "valkey_at_the_end": asdict(outcome.audit),
        "leaks": outcome.leaks,
        "died": outcome.died,
        "logs": outcome.logs,
        "defects": tally.defects,
        "notes": tally.notes,
        "operations": {kind: dict(outcomes) for kind, outcomes in tally.operations.items()},
        "loaded_chunks": dict(tally.chunks),
        "lateness": {kind: asdict(lateness) for kind, lateness in tally.lateness.items()},
        "latest": [{**asdict(late), "beyond_s": late.beyond_s} for late in tally.latest],
        "host_longest_gap_s": tally.host.longest_s(),
        "census": {
            name: {"before": before and asdict(before), "after": after and asdict(after)}
            for name, (before, after) in outcome.census.items()
        },
        "faults": [
            {**asdict(fault), "alone": stood_alone(fault, outcome.faults)} for fault in outcome.faults
        ],
    }


def trends_document(trends: Sequence[Trend]) -> dict[str, Any]:
    """For ``--json`` of a soak."""
    return {"flat": all(trend.flat for trend in trends), "trends": [asdict(trend) for trend in trends]}


def render(outcome: Outcome, trends: Sequence[Trend] = ()) -> str:
    """For people. trends: of a soak."""
    tally = outcome.tally
    parts = [_operations(outcome), _faults(outcome.faults), _lateness(outcome)]
    if outcome.tally.latest:
        parts.append(_latest(outcome))
    parts.append(_held(outcome))
    if trends:
        parts.append(_trends(trends))
    bad = [*tally.notes, *outcome.audit.wrong, *outcome.died, *(f"leak: {leak}" for leak in outcome.leaks)]
    bad += [f"{name} wrote last:\n{text}" for name, text in outcome.logs.items()]
    if bad:
        parts.append("\n".join(bad))
    parts.append(
        f"{tally.wrong} parts with wrong bytes, {len(outcome.leaks)} leaks, {len(outcome.died)} processes "
        f"that ended by themselves, {tally.defects} defects; "
        f"{outcome.seconds:.0f} s, seed {outcome.plan.seed}"
    )
    return "\n\n".join(parts)


def _operations(outcome: Outcome) -> str:
    rows = [
        (kind, name, count(number))
        for kind, outcomes in outcome.tally.operations.items()
        for name, number in outcomes.most_common()
    ]
    loaded = ", ".join(f"{count(number)} from {tier}" for tier, number in outcome.tally.chunks.items())
    audit = outcome.audit
    return (
        table(("operation", "outcome", "number"), rows)
        + f"\nparts loaded: {loaded or 'none'}"
        + f"\nin Valkey at the end: {count(audit.right)} values right, {count(audit.damaged)} damaged that a "
        f"reader would refuse, {count(len(audit.wrong))} wrong"
    )


def _faults(faults: Sequence[Fault]) -> str:
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of = [fault for fault in faults if fault.kind is kind]
        times = [fault.reuse_s for fault in of if fault.reuse_s is not None]
        alone = [fault.reuse_s for fault in of if fault.reuse_s is not None and stood_alone(fault, faults)]
        rows.append(
            (
                kind.value,
                count(len(of)),
                duration(statistics.median(times)) if times else "-",
                duration(max(times)) if times else "-",
                duration(max(alone)) if alone else "-",
                str(len(of) - len(times) or "-"),
            )
        )
    return table(("fault", "number", "reuse after", "at most", "at most, alone", "not seen"), rows)


def stood_alone(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Whether, until reuse was back, nothing else was wrong with any node or engine."""
    if fault.lifted is None or fault.reuse_s is None:
        return False
    back = fault.lifted + fault.reuse_s
    return not any(
        other is not fault
        and (other.node is not None or other.engine is not None)
        and other.began < back
        and (other.ended is None or other.ended > fault.lifted)
        for other in faults
    )


def _lateness(outcome: Outcome) -> str:
    rows = [
        (
            kind,
            count(of.answers),
            duration(of.slowest_s),
            duration(of.worst_late_s),
            count(of.over),
            duration(of.worst_beyond_s),
            count(of.over_beyond),
            count(of.over_stopped),
        )
        for kind, of in outcome.tally.lateness.items()
    ]
    over = f"over {GRACE_S * 1000:.0f} ms"
    head = ("answer", "number", "slowest", "past its bound", over, "less time lost", over, "stopped")
    return table(head, rows) + (
        "\nTime lost: the engine's process, or this one, was ready to run and did not. Stopped: answers over "
        f"{GRACE_S * 1000:.0f} ms late to an engine that was stopped meanwhile, counted here alone."
    )


def _latest(outcome: Outcome) -> str:
    rows = [
        (
            late.kind,
            late.outcome,
            duration(late.bound_s),
            duration(late.late_s),
            duration(late.lost_s),
            duration(late.host_s),
            ", ".join(late.during) or "-",
        )
        for late in outcome.tally.latest[:SHOWN_LATE]
    ]
    return table(("latest", "outcome", "bound", "late", "lost", "lost here", "during"), rows)


def _held(outcome: Outcome) -> str:
    rows = []
    for name, (before, after) in outcome.census.items():
        if before and after:
            rows.append(
                (
                    name,
                    f"{before.descriptors} / {after.descriptors}",
                    f"{before.threads} / {after.threads}",
                    f"{before.anonymous_kb >> 10} / {after.anonymous_kb >> 10}",
                )
            )
    return table(("at rest, before / after", "descriptors", "threads", "MB"), rows)


def _trends(trends: Sequence[Trend]) -> str:
    rows = [
        (
            trend.process,
            trend.figure.replace("_", " "),
            count(trend.first),
            count(trend.last),
            f"{trend.slope_h:+,.1f}",
            "flat" if trend.flat else "GROWS",
        )
        for trend in trends
    ]
    return table(("over time", "figure", "first quarter", "last quarter", "per hour", ""), rows)
