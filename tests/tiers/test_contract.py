"""The contract suite, over every tier there is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
from tests.servers import Cluster, Server, must
from tests.tiers.stores import ValkeyStore

from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.testing.memory_tier import MemoryStore
from kvferry.testing.servers import running_tls_server
from kvferry.testing.tier_contract import TierContract, TierStore
from kvferry.tiers.valkey.protection import Sealed
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.url import parse_url

# While keys are being changed: what is absent under the first is asked for under the second.
ENCRYPTED = Sealed(KeyRing([SealingKey(bytes([1]) * 32), SealingKey(bytes([2]) * 32)]))


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[Server, str]]:
    """A server that speaks TLS, and its URL."""
    with running_tls_server() as started:
        yield started


@contextmanager
def expiring(servers: Sequence[Server]) -> Iterator[None]:
    """Servers that evict what expires first, so that values have expiries."""
    for server in servers:
        must(server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"))
    yield
    for server in servers:
        must(server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))


class TestValkeySingle(TierContract):
    @pytest.fixture
    def store(self, server: Server) -> TierStore:
        return ValkeyStore([server], server.settings)


class TestValkeyCluster(TierContract):
    @pytest.fixture
    def store(self, cluster: Cluster) -> TierStore:
        return ValkeyStore(cluster.servers, cluster.settings)


class TestValkeyEncryptedAndExpiring(TierContract):
    @pytest.fixture
    def store(self, server: Server) -> Iterator[TierStore]:
        with expiring([server]):
            yield ValkeyStore([server], partial(server.settings, protection=ENCRYPTED))


class TestValkeyClusterEncryptedAndExpiring(TierContract):
    @pytest.fixture
    def store(self, cluster: Cluster) -> Iterator[TierStore]:
        with expiring(cluster.servers):
            yield ValkeyStore(cluster.servers, partial(cluster.settings, protection=ENCRYPTED))


class TestValkeyOverTls(TierContract):
    @pytest.fixture
    def store(self, secure: tuple[Server, str]) -> TierStore:
        server, url = secure
        server.ask("FLUSHALL")
        return ValkeyStore([server], partial(ValkeySettings, parse_url(url)))


class TestMemoryTier(TierContract):
    @pytest.fixture
    def store(self) -> TierStore:
        return MemoryStore()
