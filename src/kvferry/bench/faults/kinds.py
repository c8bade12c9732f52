"""The faults: how each is made, mended, and what a request then may and may not do."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from signal import SIGCONT, SIGSTOP

from kvferry.bench.faults.stage import LOADS_FROM, Stage


class Moment(Enum):
    """When something breaks."""

    BEFORE = "before"
    DURING = "during"


def _nothing(stage: Stage) -> None:
    del stage


@dataclass(frozen=True, slots=True)
class Kind:
    """breaks, mends: act on the stage. harmless: the load goes on, or the next one does.

    own: the replica that asked is what died; the other one is asked instead.
    """

    name: str
    breaks: Callable[[Stage], None]
    mends: Callable[[Stage], None] = _nothing
    harmless: bool = False
    own: bool = False


def _restart_node(stage: Stage) -> None:
    stage.fleet.kill_node()
    stage.fleet.start_node()


def _continue_valkey(stage: Stage) -> None:
    stage.fleet.valkey.send_signal(SIGCONT)
    stage.tier_is_up()


def _corrupt(stage: Stage) -> None:
    stage.corrupt_values(after_bytes=1 << 20)


KINDS = (
    Kind("node killed", lambda stage: stage.fleet.kill_node(), lambda stage: stage.fleet.start_node()),
    Kind(
        "node stopped",
        lambda stage: stage.fleet.node.send_signal(SIGSTOP),
        lambda stage: stage.fleet.node.send_signal(SIGCONT),
    ),
    Kind("node restarted", _restart_node),
    Kind("Valkey stopped", lambda stage: stage.fleet.valkey.send_signal(SIGSTOP), _continue_valkey),
    Kind("Valkey refused", Stage.kill_valkey, Stage.restart_valkey),
    Kind("Valkey full", Stage.fill_valkey, Stage.empty_valkey, harmless=True),
    Kind("Valkey corrupted", _corrupt, lambda stage: stage.proxy.heal()),
    Kind(
        "engine killed",
        lambda stage: stage.fleet.kill_replica(LOADS_FROM),
        lambda stage: stage.fleet.start_replicas([LOADS_FROM]),
        own=True,
    ),
)
