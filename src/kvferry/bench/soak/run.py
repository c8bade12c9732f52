"""One soak: traffic, and now and then something that ends or forgets; then everything must be back."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvferry.bench.soak.audit import Verdict, judge
from kvferry.bench.soak.fleet import SERVING, Size, SoakFleet
from kvferry.bench.soak.judging import Judge
from kvferry.bench.soak.traffic import Shape, Traffic
from kvferry.bench.soak.users import Tally, Users

TICK_S = 0.2
SAID_EVERY_S = 30.0


class Event(Enum):
    """What happens beside the traffic."""

    DROP = "the node's memory dropped"
    NODE = "node killed and restarted"
    FLUSH = "Valkey flushed"
    FORGET = "an engine's own cache reset"
    KILL = "an engine killed and restarted"
    STOP = "an engine stopped and restarted"


SHORT = (Event.DROP, Event.NODE, Event.FORGET, Event.FLUSH)
LONG = (*SHORT, Event.KILL, Event.DROP, Event.STOP, Event.NODE)


@dataclass(frozen=True, slots=True)
class Plan:
    """vocabulary: of the model. events: dealt one every pace_s, in an order of the seed."""

    model: Path
    vocabulary: int
    seconds: float
    seed: int
    users: int
    size: Size
    tie: float
    pace_s: float
    events: tuple[Event, ...]


@dataclass(slots=True)
class Outcome:
    """left: what was not given back. audit: of the loaded blocks. missing: what the soak did not try."""

    tally: Tally
    events: dict[Event, int] = field(default_factory=dict[Event, int])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    audit: Verdict = field(default_factory=Verdict)
    left: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """All that must not be."""
        return [
            *self.tally.problems,
            *self.audit.wrong,
            *self.left,
            *self.complaints,
            *(f"nothing was tried of: {what}" for what in self.missing),
        ]


def run(plan: Plan, *, say: Callable[[str], None], keep_logs: bool = False) -> Outcome:
    """Raises StoppedError, MisconfiguredError and RetryError for a fleet that does not start."""
    outcome = Outcome(Tally())
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-soak-") as notes,
        SoakFleet(plan.model, plan.size, notes=Path(notes), say=say) as fleet,
    ):
        fleet.start()
        begun = time.monotonic()
        users = Users(
            _traffic(plan),
            ask=fleet.ask,
            replicas=SERVING,
            judge=Judge(fleet.reference, plan.tie),
            tally=outcome.tally,
        )
        users.start()
        _let_happen(plan, fleet, outcome, say)
        users.stop()
        outcome.seconds = time.monotonic() - begun
        outcome.left = fleet.left_behind()
        outcome.complaints = fleet.complaints()
        outcome.counts = dict(fleet.counts) | {"valkey_evicted_values": fleet.valkey_evicted()}
        outcome.audit = judge(Path(notes))
        outcome.missing = _missing(outcome)
        fleet.fleet.keep_directory = keep_logs or bool(outcome.problems)
    return outcome


def _traffic(plan: Plan) -> list[Traffic]:
    shape = Shape(longest=plan.size.longest - 1)
    return [
        Traffic(f"{plan.seed}/{user}", vocabulary=plan.vocabulary, shape=shape) for user in range(plan.users)
    ]


def _let_happen(plan: Plan, fleet: SoakFleet, outcome: Outcome, say: Callable[[str], None]) -> None:
    rng = random.Random(f"events {plan.seed}")
    deck = _deck(plan.events, rng)
    end = time.monotonic() + plan.seconds
    due, told = time.monotonic() + plan.pace_s, time.monotonic()
    while (now := time.monotonic()) < end:
        if now >= due:
            event = next(deck)
            outcome.events[event] = outcome.events.get(event, 0) + 1
            say(event.value)
            _do(event, fleet, rng.choice(SERVING))
            due = time.monotonic() + plan.pace_s
        if now - told >= SAID_EVERY_S:
            told = now
            say(_progress(outcome.tally))
        time.sleep(TICK_S)


def _deck(events: tuple[Event, ...], rng: random.Random) -> Iterator[Event]:
    while True:
        cards = list(events)
        rng.shuffle(cards)
        yield from cards


def _do(event: Event, fleet: SoakFleet, replica: str) -> None:
    match event:
        case Event.DROP:
            fleet.drop_memory()
        case Event.NODE:
            fleet.restart_node()
        case Event.FLUSH:
            fleet.flush_valkey()
        case Event.FORGET:
            fleet.forget(replica)
        case Event.KILL | Event.STOP:
            fleet.restart_engine(replica, kill=event is Event.KILL)


def _missing(outcome: Outcome) -> list[str]:
    """A soak that did not happen proves nothing."""
    counts = outcome.counts
    happened = {
        "loads": counts.get("kvferry_loads", 0),
        "blocks compared": outcome.audit.blocks,
        "preemption": counts.get("num_preemptions", 0),
        "requests given up": outcome.tally.requests["given up"],
        "eviction": counts.get("node_evicted_parts", 0) + counts.get("valkey_evicted_values", 0),
        "answers judged": outcome.tally.findings.total(),
    }
    return [what for what, number in happened.items() if not number]


def _progress(tally: Tally) -> str:
    ended = ", ".join(f"{n} {how}" for how, n in sorted(tally.requests.items()))
    found = ", ".join(f"{n} {finding.value}" for finding, n in tally.findings.items())
    return f"{ended}; judged: {found or 'none'}; problems: {len(tally.problems)}"
