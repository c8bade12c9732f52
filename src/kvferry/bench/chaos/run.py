"""One run: everything is started, broken by a seeded schedule, brought to rest, counted and stopped."""

import random
import time
from dataclasses import dataclass, field

from kvferry.bench.chaos import leaks
from kvferry.bench.chaos.audit import Audit, audit
from kvferry.bench.chaos.contents import Contents
from kvferry.bench.chaos.driver import Driver, Progress, Rest, decks
from kvferry.bench.chaos.faults import Fault
from kvferry.bench.chaos.fleet import Fleet, Plan, running_fleet
from kvferry.bench.chaos.processes import Census
from kvferry.bench.chaos.tally import Tally

LOG_LINES = 60


@dataclass(slots=True)
class Outcome:
    """What a run found out. logs: how those of leaking processes end. census: at rest, before and after."""

    plan: Plan
    tally: Tally
    faults: list[Fault] = field(default_factory=list[Fault])
    leaks: list[str] = field(default_factory=list[str])
    died: list[str] = field(default_factory=list[str])
    audit: Audit = field(default_factory=Audit)
    logs: dict[str, str] = field(default_factory=dict[str, str])
    census: dict[str, tuple[Census | None, Census | None]] = field(
        default_factory=dict[str, tuple[Census | None, Census | None]]
    )
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """No wrong byte, no leak, no death of its own, no defect."""
        return not (self.tally.wrong or self.audit.wrong or self.leaks or self.died or self.tally.defects)


def run(plan: Plan, *, progress: Progress = lambda line: None) -> Outcome:
    """Do it all. Raises StoppedError and MisconfiguredError; nothing is left running."""
    shared = leaks.shared_memory()
    with running_fleet(plan) as fleet:
        outcome = Outcome(plan, fleet.tally, faults=fleet.faults, died=fleet.died)
        driver = Driver(fleet, plan, progress)
        driver.start()
        driver.warm_up()
        before = driver.rest()
        fleet.resume()
        driver.break_things(decks(plan.kills, random.Random(f"decks {plan.seed}")))
        driver.heal()
        conclude(outcome, fleet, before, driver.rest())
    outcome.leaks += [f"/dev/shm/{name}" for name in leaks.shared_memory() - shared if "kvferry" in name]
    return outcome


def conclude(outcome: Outcome, fleet: Fleet, before: Rest, after: Rest) -> None:
    """Compare the fleet at rest before the faults and after them; forgets all that its nodes hold."""
    outcome.audit = audit(fleet.cluster, Contents(outcome.plan.seed))
    outcome.leaks += before.held + after.held
    for process in fleet.processes:
        name = process.name
        outcome.census[name] = (before.census[name], after.census[name])
        outcome.leaks += leaks.beyond(name, *outcome.census[name])
    for node in fleet.nodes:
        outcome.leaks += leaks.unaccounted(node)
    outcome.logs = {
        process.name: process.child.tail(LOG_LINES)
        for process in fleet.processes
        if process.child is not None and any(leak.startswith(process.name) for leak in outcome.leaks)
    }
    outcome.seconds = time.monotonic() - fleet.started
