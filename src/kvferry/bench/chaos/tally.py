"""What the engines reported, added up: operations, wrong bytes, lateness, and when reuse came back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.bench.chaos.faults import Fault, FaultKind
from kvferry.bench.chaos.heartbeat import Heartbeat
from kvferry.bench.chaos.journal import Kind, Operation

GRACE_S = 0.25  # past its bound, an answer counts as late
KEPT_LATE = 20
KEPT_NOTES = 20
COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Late:
    """One late answer. lost_s: of its process, host_s: of the driver's, both inside the answer's time.

    stopped: its engine was stopped by us meanwhile.
    """

    kind: str
    outcome: str
    bound_s: float
    late_s: float
    lost_s: float
    host_s: float
    stopped: bool
    during: tuple[str, ...]

    @property
    def beyond_s(self) -> float:
        """Lateness that the machine's not running the engine does not explain."""
        return max(0.0, self.late_s - max(self.lost_s, self.host_s))


@dataclass(slots=True)
class Lateness:
    """Of one kind of operation. over: answers past bound and grace; over_beyond: less the time lost.

    Answers to an engine that was stopped meanwhile count in over_stopped alone.
    """

    answers: int = 0
    slowest_s: float = 0.0
    worst_late_s: float = 0.0
    worst_beyond_s: float = 0.0
    over: int = 0
    over_stopped: int = 0
    over_beyond: int = 0


@dataclass(slots=True)
class Tally:
    """Fed by the driver alone."""

    host: Heartbeat
    operations: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    chunks: Counter[str] = field(default_factory=Counter[str])
    wrong: int = 0
    notes: list[str] = field(default_factory=list[str])
    defects: int = 0
    lateness: dict[str, Lateness] = field(default_factory=dict[str, Lateness])
    latest: list[Late] = field(default_factory=list[Late])

    @property
    def total(self) -> int:
        """Operations with an outcome."""
        return sum(sum(of.values()) for of in self.operations.values())

    def add(self, operation: Operation, *, engine: int, node: int, faults: Sequence[Fault]) -> None:
        """One line of an engine's journal. faults: all so far."""
        match operation.kind:
            case Kind.IDLE:
                return
            case Kind.WRONG:
                self.wrong += 1
                self._remember(f"wrong bytes: {operation.note}")
                return
            case Kind.DEFECT:
                self.defects += 1
                self._remember(f"engine-{engine}: {operation.outcome}: {operation.note}")
                return
            case Kind.CALL:
                pass
            case _:
                outcomes = self.operations.setdefault(operation.kind.value, Counter())
                outcomes[operation.outcome] += 1
        if operation.kind is Kind.LOAD:
            self.chunks[operation.tier] += operation.chunks
            if operation.outcome == COMPLETE:
                _reused(operation, engine, node, faults)
        if operation.bound_s:
            self._judge(operation, engine, faults)

    def _judge(self, operation: Operation, engine: int, faults: Sequence[Fault]) -> None:
        kind = operation.kind.value
        of = self.lateness.setdefault(kind, Lateness())
        of.answers += 1
        if not operation.late_s:
            of.slowest_s = max(of.slowest_s, operation.took_s)
            return
        ended = operation.began + operation.took_s
        meanwhile = [
            fault
            for fault in faults
            if fault.began < ended and (fault.ended is None or fault.ended > operation.began)
        ]
        late = Late(
            kind,
            operation.outcome,
            operation.bound_s,
            operation.late_s,
            operation.lost_s,
            self.host.lost_s(operation.began, ended),
            any(fault.kind is FaultKind.ENGINE_STOP and fault.engine == engine for fault in meanwhile),
            tuple(f"{fault.kind} {fault.target}" for fault in meanwhile),
        )
        if late.stopped:
            of.over_stopped += late.late_s > GRACE_S
            return
        of.slowest_s = max(of.slowest_s, operation.took_s)
        of.worst_late_s = max(of.worst_late_s, late.late_s)
        of.worst_beyond_s = max(of.worst_beyond_s, late.beyond_s)
        of.over += late.late_s > GRACE_S
        of.over_beyond += late.beyond_s > GRACE_S
        self.latest.append(late)
        self.latest.sort(key=lambda entry: (-entry.beyond_s, -entry.late_s))
        del self.latest[KEPT_LATE:]

    def _remember(self, note: str) -> None:
        if len(self.notes) < KEPT_NOTES:
            self.notes.append(note)


def _reused(operation: Operation, engine: int, node: int, faults: Sequence[Fault]) -> None:
    """A load has brought everything: whose reuse does that show?"""
    ended = operation.began + operation.took_s
    for fault in faults:
        if fault.reuse_s is not None or fault.lifted is None or operation.began < fault.lifted:
            continue
        if fault.engine is not None:
            back = fault.engine == engine
        elif fault.node is not None:
            back = fault.node == node
        else:
            back = operation.tier == "valkey"
        if back:
            fault.reuse_s = ended - fault.lifted
