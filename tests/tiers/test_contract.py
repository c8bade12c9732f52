"""The contract suite, over every tier there is."""

from collections.abc import Iterator

import pytest

from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_contract import TierContract
from kvferry.tiers.contract import Tier
from kvferry.tiers.valkey.tier import ValkeyTier


class TestValkeySingle(TierContract):
    @pytest.fixture
    def tier(self, tier: ValkeyTier) -> Tier:
        return tier


class TestValkeyCluster(TierContract):
    @pytest.fixture
    def tier(self, cluster_tier: ValkeyTier) -> Tier:
        return cluster_tier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        made = MemoryTier()
        yield made
        made.close()
