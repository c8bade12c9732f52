"""What new settings change in a router that runs, and what they can only change in the next one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from kvferry.errors import MisconfiguredError
from kvferry.router.settings import ROUTER_SETTINGS, RouterSettings, WorkerAddress

LIVE = frozenset(
    ("workers", "trust", "trust_secret", "split", "mirror")  # and what the files they name hold
)
_NAMES = {setting.target: setting.name for setting in reversed(ROUTER_SETTINGS)}


@dataclass(frozen=True, slots=True)
class Plan:
    """settings: what counts from now on. drain, add: workers. changed: settings that count at once, but for
    workers; later: settings that need a new start."""

    settings: RouterSettings
    drain: tuple[str, ...]
    add: tuple[WorkerAddress, ...]
    changed: tuple[str, ...]
    later: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """For whoever asked for it."""
        return {
            "added": [str(worker) for worker in self.add],
            "drains": list(self.drain),
            "changed": list(self.changed),
            "needs_new_start": list(self.later),
        }


def plan(
    old: RouterSettings, new: RouterSettings, *, running: Mapping[str, str], led: Mapping[str, str]
) -> Plan:
    """From what runs to what the new settings say: what was added or removed by hand in between is undone.

    running: workers that get requests, and their pools; led: the same of those that names lead to now.
    A worker in another pool than before is drained from the one and added to the other.
    Raises MisconfiguredError where no worker would be left.
    """
    wanted = {**led, **dict(new.workers)}
    if "" not in {*wanted.values(), *(name.pool for name in old.names)}:
        raise MisconfiguredError("no worker would be left; another worker_dns counts after a new start")
    other = [
        field.name for field in fields(RouterSettings) if getattr(old, field.name) != getattr(new, field.name)
    ]
    return Plan(
        settings=replace(old, **{name: getattr(new, name) for name in LIVE}),
        drain=tuple(url for url, pool in running.items() if wanted.get(url) != pool),
        add=tuple(WorkerAddress(url, pool) for url, pool in wanted.items() if running.get(url) != pool),
        changed=tuple(_NAMES[name] for name in other if name in LIVE and name != "workers"),
        later=tuple(_NAMES[name] for name in other if name not in LIVE),
    )
