"""Plants a defect into a connector and demands that the contract's test says so."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.engines.sides import SideFleet
from tests.testing.suites import failure

from kvferry.testing import connector_contract, expectations, fake_engine, holdings
from kvferry.testing.connector_contract import ConnectorContract

# How long the suite waits for what never comes. Longer only where a slow machine did not get there.
PATIENCE = ((5000, 1.0), (100_000, 20.0))  # steps, seconds


class Plant(NamedTuple):
    """What is put in place of ``owner.attribute``, and which test must then say what."""

    owner: Any
    attribute: str
    instead: Callable[..., Any]
    test: str
    says: str


def demand(
    plant: Plant,
    *,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    suite: type = ConnectorContract,
    chunk_blocks: int = 1,
    **fleet: Any,
) -> None:
    """Fails unless the defect is found. fleet: options of the ``SideFleet``."""
    monkeypatch.setattr(plant.owner, plant.attribute, plant.instead)
    found = []
    for number, (steps, seconds) in enumerate(PATIENCE):
        monkeypatch.setattr(fake_engine, "MAX_STEPS", steps)
        monkeypatch.setattr(connector_contract, "RECOVERY_S", seconds)
        monkeypatch.setattr(expectations, "WAIT_S", seconds)
        monkeypatch.setattr(holdings, "WAIT_S", seconds)
        home = directory / str(number)
        home.mkdir()
        with ExitStack() as stack:
            made = SideFleet(home, stack, chunk_blocks=chunk_blocks, **fleet)
            found.append(failure(suite, plant.test, fleet=made))
        if re.search(plant.says, found[-1]):
            return
    pytest.fail(f"{plant.test} says {found}")
