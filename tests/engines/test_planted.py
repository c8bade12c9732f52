"""The connector contract over vLLM's connector fails where that is broken: it reaches what it checks."""

from pathlib import Path
from typing import Any

import pytest
from tests.engines.planting import Plant, demand

from kvferry.engines.vllm import transfers
from kvferry.engines.vllm.lookups import Lookups
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.requests import Tracked
from kvferry.engines.vllm.savebook import SaveBook
from kvferry.engines.vllm.scheduler import SchedulerSide
from kvferry.engines.vllm.worker import WorkerSide
from kvferry.errors import BrokenError

WRONG_BYTES = "reads another prefix's KV"
NEVER = "did not get there"


def nothing(*_: Any, **__: Any) -> None:
    pass


def pins_none(self: Pins, save_id: int, block_ids: Any) -> None:
    """Known, but holding no block."""
    pinned(self, save_id, ())


def raises(*_: Any, **__: Any) -> None:
    raise BrokenError("planted")


pinned = Pins.pin

PLANTED: dict[str, Plant] = {
    "failed blocks are not told": Plant(
        transfers,
        "failed_block_ids",
        lambda blocks, arrived: [],
        "test_a_damaged_part_is_recomputed_and_asked_for_once",
        WRONG_BYTES,
    ),
    "a copy is not verified": Plant(
        transfers.Loader,
        "_copy",
        lambda self, job, ready: (
            job.copier.load(
                ready.view,
                job.wanted.needed(ready.index - job.wanted.first_chunk)[1],
                first=job.wanted.needed(ready.index - job.wanted.first_chunk)[0],
                after=job.after,
            )
            or job.stream.copied(ready.index)
            or transfers.Reason.COMPLETE
        ),
        "test_a_damaged_part_is_recomputed_and_asked_for_once",
        WRONG_BYTES,
    ),
    "blocks are not pinned": Plant(
        Pins,
        "pin",
        pins_none,
        "test_blocks_of_a_preempted_request_are_not_reused_while_they_are_copied_out",
        WRONG_BYTES,
    ),
    "pins do not return": Plant(
        Pins,
        "_unpin",
        nothing,
        "test_an_engine_loads_what_another_computed",
        NEVER,
    ),
    "a preempted request is not looked up again": Plant(
        Tracked,
        "reopen_after_preemption",
        nothing,
        "test_a_preempted_request_comes_back_with_its_own_bytes",
        "0 instead of 40",
    ),
    "leases are not given back": Plant(
        Lookups,
        "_end",
        nothing,
        "test_an_engine_loads_what_another_computed",
        "loads 1 instead of 0",
    ),
    "a load's end is not told": Plant(
        WorkerSide,
        "finished_loads",
        lambda self: set(),
        "test_an_engine_loads_what_another_computed",
        NEVER,
    ),
    "what was stored is taken to be there for ever": Plant(
        SaveBook,
        "forget",
        nothing,
        "test_what_was_lost_is_stored_again",
        "0 instead of 40",
    ),
    "a hook raises": Plant(
        SchedulerSide,
        "absorb",
        raises,
        "test_an_engine_loads_what_another_computed",
        "planted",
    ),
}


@pytest.mark.parametrize("name", PLANTED, ids=lambda name: name.replace(" ", "-"))
def test_a_planted_defect_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demand(PLANTED[name], directory=tmp_path, monkeypatch=monkeypatch)
