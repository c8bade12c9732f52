"""Client tests run against the same nodes as node tests."""

import pytest
from tests.node.conftest import engine, node, node_process, stack, tier
from tests.node.fleet import LOOKUP_WAIT_S

__all__ = ["engine", "node", "node_process", "stack", "tier"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reservation fails for a busy host."""
    monkeypatch.setattr("kvferry.client.copying.RESERVE_S", LOOKUP_WAIT_S)
