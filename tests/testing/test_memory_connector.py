"""The smallest connector keeps the contract: what a defect is planted in is right without it."""

from collections.abc import Iterator

import pytest

from kvferry.testing.connector_contract import ConnectorContract
from kvferry.testing.memory_connector import MemoryFleet


class TestMemoryConnector(ConnectorContract):
    @pytest.fixture
    def fleet(self) -> Iterator[MemoryFleet]:
        made = MemoryFleet()
        yield made
        made.close()
