"""Servers shared by the tests of the LMCache adapter, emptied before each test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.servers import Cluster, Server, running_cluster, running_server

ROOM = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Server]:
    with running_server(*ROOM) as server:
        yield server


@pytest.fixture(scope="session")
def shared_valkey_cluster() -> Iterator[Cluster]:
    with running_cluster(*ROOM) as cluster:
        yield cluster


@pytest.fixture
def valkey(shared_valkey: Server) -> Server:
    shared_valkey.ask("FLUSHALL")
    return shared_valkey


@pytest.fixture
def valkey_cluster(shared_valkey_cluster: Cluster) -> Cluster:
    for server in shared_valkey_cluster.servers:
        server.ask("FLUSHALL")
    return shared_valkey_cluster


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens adapters, which are closed when the test ends."""
    from tests.engines.lmcache import rig

    with ExitStack() as stack:

        def open_one(servers: Any, **params: Any) -> Any:
            made = rig.loaded(servers, **params)
            stack.callback(made.close)
            return made

        yield open_one
