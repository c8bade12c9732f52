"""What new settings change in a router that runs, and what they can only change in the next one. Pure."""

from dataclasses import dataclass, fields, replace

from kvferry.router.settings import RouterSettings, WorkerAddress

LIVE = frozenset(
    ("workers", "trust", "trust_secret", "split", "mirror")  # and what the files they name hold
)


@dataclass(frozen=True, slots=True)
class Plan:
    """settings: what counts from now on. drain, add: workers. later: fields that need a new start."""

    settings: RouterSettings
    drain: tuple[str, ...]
    add: tuple[WorkerAddress, ...]
    later: tuple[str, ...]


def plan(old: RouterSettings, new: RouterSettings) -> Plan:
    """Between two settings. A worker that was added by hand is in neither, and stays.

    A worker in another pool than before is drained from the one and added to the other.
    """
    before, after = dict(old.workers), dict(new.workers)
    later = tuple(
        field.name
        for field in fields(RouterSettings)
        if field.name not in LIVE and getattr(old, field.name) != getattr(new, field.name)
    )
    return Plan(
        settings=replace(old, **{name: getattr(new, name) for name in LIVE}),
        drain=tuple(url for url, pool in before.items() if after.get(url) != pool),
        add=tuple(worker for worker in new.workers if before.get(worker.url) != worker.pool),
        later=later,
    )
