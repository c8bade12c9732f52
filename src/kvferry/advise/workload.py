"""What is asked of a fleet: lengths, turns, gaps and how much of it repeats; presets, and what follows.

All of it is of the whole fleet. A *conversation* is whatever comes back: a chat, an agent's session, a
document that is asked about several times.
"""

import enum
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvferry.advise.follow import GIVEN, fill
from kvferry.errors import MisconfiguredError


class Goal(enum.Enum):
    """What to favour where one costs the other."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Kind(enum.Enum):
    """What the requests are like."""

    CHAT = "chat"
    RAG = "rag"
    AGENT = "agent"
    ONE_SHOT = "one-shot"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a user may say of a workload. None: not said.

    context_p50, context_p99, context_mean: input tokens of a request, history included. new_tokens: of them,
    those that no earlier request had, after the first turn. output_tokens: of an answer. turns: of a
    conversation. gap_s: between its turns. conversations: that are going on at a time. requests_s: mean.
    reuse: share of input tokens that an unbounded cache finds. resume_h: for how many hours conversations are
    still taken up; resume_share: of what is reused, the part that is then.
    """

    context_p50: float | None = None
    context_p99: float | None = None
    context_mean: float | None = None
    new_tokens: float | None = None
    output_tokens: float | None = None
    turns: float | None = None
    gap_s: float | None = None
    conversations: float | None = None
    requests_s: float | None = None
    reuse: float | None = None
    resume_h: float | None = None
    resume_share: float | None = None


# Of as many GPUs as the fewest ranks that do, as far as conversations and requests go: a preset fleet is as
# busy whatever its size. Chat and RAG are made up; the agent follows published traces: 33 turns, 80K tokens
# by turn 30, 131:1.
PRESETS = {
    Kind.CHAT: Numbers(4096, 12_000, None, 250, 300, 12, 60, 100),
    Kind.RAG: Numbers(60_000, 110_000, None, 400, 400, 5, 120, 16),
    Kind.AGENT: Numbers(43_600, 110_000, None, 2300, 333, 33, 120, 30),
    Kind.ONE_SHOT: Numbers(2000, 6000, None, 1800, 300, 1, 0, 0, 2, 0.1),
}
GOALS = {Kind.CHAT: Goal.LATENCY}
NEEDED = ("context_p50", "output_tokens")


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """The share of input tokens found, by the tokens that a cache holds. points: both ascending."""

    points: tuple[tuple[float, float], ...]

    @property
    def most(self) -> float:
        """What an unbounded cache finds."""
        return self.points[-1][1]

    @property
    def enough_tokens(self) -> float:
        """The least capacity among the points that finds nearly all of it."""
        return next(tokens for tokens, share in self.points if share >= ENOUGH * self.most)

    def at(self, tokens: float) -> float:
        """Linear between points; from nothing up to the first."""
        if tokens >= self.points[-1][0]:
            return self.most
        place = bisect_left([point[0] for point in self.points], tokens)
        high, found = self.points[place]
        low, before = self.points[place - 1] if place else (0.0, 0.0)
        return before + (found - before) * (tokens - low) / (high - low)


ENOUGH = 0.97


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything about the requests, complete. See ``Numbers``; all of the fleet.

    first_tokens, grown_tokens: input of a conversation's first and last turn. origin: where each number is
    from: ``given``, a preset, a trace, or how it follows from the others.
    """

    kind: Kind
    goal: Goal
    context_p50: float
    context_p99: float
    context_mean: float
    new_tokens: float
    output_tokens: float
    turns: float
    gap_s: float
    conversations: float
    requests_s: float
    reuse: float
    resume_h: float
    resume_share: float
    first_tokens: float
    grown_tokens: float
    curve: ReuseCurve
    origin: Mapping[str, str]

    @property
    def return_hit(self) -> float:
        """Share of its input that a returning request finds at best."""
        return max(0.0, 1 - self.new_tokens / self.context_mean)


def complete(
    given: Numbers,
    *,
    kind: Kind,
    replicas: float,
    goal: Goal | None = None,
    measured: tuple[Numbers, ReuseCurve | None, str] | None = None,
    longest: int = 0,
) -> Workload:
    """What was said first, then what was measured in a trace, then the preset, then what follows.

    replicas: times a preset's conversations and requests. longest: what the model allows; a preset's lengths
    are cut to it. 0: any. Raises MisconfiguredError where something is missing or contradicts itself.
    """
    origin: dict[str, str] = {}
    known: dict[str, float] = {}
    preset = PRESETS.get(kind, Numbers())
    trace = measured[0] if measured else Numbers()
    for field in fields(Numbers):
        name = field.name
        for source, numbers in ((GIVEN, given), (measured[2] if measured else "", trace)):
            value = getattr(numbers, name)
            if value is not None and name not in known:
                known[name], origin[name] = value, source
        value = getattr(preset, name)
        if name not in known and value is not None:
            scale = replicas if name in ("conversations", "requests_s") else 1
            known[name] = value * scale
            per = f" x {replicas:g}, for each replica of the fewest ranks" if scale != 1 and value else ""
            origin[name] = f"preset {kind.value}{f': {value:g}{per}' if per else ''}"
    _check(known)
    _cut(known, origin, longest=longest)
    curve = measured[1] if measured else None
    if curve is not None and given.reuse is not None:
        raise MisconfiguredError(
            f"--reuse {given.reuse:g} beside --trace: the trace says what is found at each capacity; give one"
        )
    fill(known, origin, measured=measured is not None, curve=curve is not None)
    if curve is None:
        # At least one conversation, where any goes on; of single requests, only what they share.
        tokens = max(1.0, known["conversations"]) * known["grown_tokens"] if known["turns"] > 1 else 1.0
        curve = ReuseCurve(((tokens, known["reuse"]),))
    else:
        name = measured[2] if measured else ""
        known["reuse"], origin["reuse"] = curve.most, name
        times = known["requests_s"] / trace.requests_s if trace.requests_s else 1.0
        if not math.isclose(times, 1.0):
            # A fleet that is busier than its trace holds more before a prefix comes back, in proportion.
            curve = ReuseCurve(tuple((tokens * times, share) for tokens, share in curve.points))
            origin["reuse"] = f"{name}, its capacities x {times:.3g} as its requests"
    return Workload(
        kind=kind,
        goal=goal or GOALS.get(kind, Goal.THROUGHPUT),
        curve=curve,
        origin=origin,
        **{field.name: known[field.name] for field in fields(Workload) if field.name in known},
    )


def _cut(known: dict[str, float], origin: dict[str, str], *, longest: int) -> None:
    """A preset's lengths, in proportion, to what the model allows."""
    longest -= math.ceil(known["output_tokens"])
    p99 = known.get("context_p99", 0.0)
    if not 0 < longest < p99 or not origin["context_p99"].startswith("preset"):
        return
    for name in ("context_p50", "context_p99", "new_tokens"):
        if origin.get(name, "").startswith("preset"):
            known[name] = math.floor(known[name] * longest / p99) or 1
            origin[name] += f", cut to the model's {longest + math.ceil(known['output_tokens']):,}"


def _check(known: Mapping[str, float]) -> None:
    missing = [name for name in NEEDED if name not in known]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise MisconfiguredError(
            f"missing: {flags}; or take a preset (--workload chat, rag, agent, one-shot), or a trace "
            "(--trace)"
        )
