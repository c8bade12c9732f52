"""Servers shared by the tests of tiers: started once, emptied before each test that uses them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import Cluster, Server, running_cluster, running_server
from tests.tiers.admission import Refusing

from kvferry.testing.s3 import S3Server, running_s3, start_obstore
from kvferry.tiers.valkey.tier import ValkeyTier


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with running_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with running_cluster("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as cluster:
        yield cluster


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.ask("FLUSHALL")
    return shared_server


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    for server in shared_cluster.servers:
        server.ask("FLUSHALL")
    return shared_cluster


@pytest.fixture
def tier(server: Server) -> Iterator[ValkeyTier]:
    made = ValkeyTier.connect(server.settings())
    yield made
    made.close()


@pytest.fixture
def cluster_tier(cluster: Cluster) -> Iterator[ValkeyTier]:
    made = ValkeyTier.connect(cluster.settings())
    yield made
    made.close()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(tmp_path, capsys, monkeypatch)


@pytest.fixture(scope="session")
def obstore() -> None:
    """Before anything is counted."""
    start_obstore()


@pytest.fixture(scope="session")
def s3(obstore: None) -> Iterator[S3Server]:
    """Tests use places of their own."""
    with running_s3() as server:
        yield server
