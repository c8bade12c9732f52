"""Every test must leave the process as it found it; those that start an engine run last."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from tests.patience import LOOKUP_S, valkey_defaults

from kvferry.node import node

pytest_plugins = ["kvferry.testing.leaks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick ones should report first."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    for item in items:
        if item.get_closest_marker("engine") is not None:
            # An engine inside the process keeps its own threads; those tests check what is ours.
            item.add_marker(pytest.mark.may_leak("an engine keeps threads of its own"))


@pytest.fixture(scope="session", autouse=True)
def patient_statistics() -> Iterator[None]:
    """A busy host may keep a node's loop from answering for longer than an operator wants to wait."""
    with patch.object(node, "STATISTICS_WAIT_S", 60.0):
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_greeting() -> Iterator[None]:
    """Nor is a Valkey that such a host is slow to greet one that does not answer."""
    with valkey_defaults(connect_s=LOOKUP_S):
        yield
