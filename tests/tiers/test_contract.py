"""The contract suite, over every tier there is."""

import pytest
from tests.servers import Cluster, Server
from tests.tiers.stores import ValkeyStore

from kvferry.testing.memory_tier import MemoryStore
from kvferry.testing.tier_contract import TierContract, TierStore


class TestValkeySingle(TierContract):
    @pytest.fixture
    def store(self, server: Server) -> TierStore:
        return ValkeyStore([server], server.settings)


class TestValkeyCluster(TierContract):
    @pytest.fixture
    def store(self, cluster: Cluster) -> TierStore:
        return ValkeyStore(cluster.servers, cluster.settings)


class TestMemoryTier(TierContract):
    @pytest.fixture
    def store(self) -> TierStore:
        return MemoryStore()
