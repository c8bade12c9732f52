"""Fixtures of node and client tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.fleet import Engine, NodeProcess, settings

from kvferry.node.node import Node
from kvferry.testing.memory_tier import MemoryTier


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, last first."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def tier() -> MemoryTier:
    """What lies behind host memory; the node closes it."""
    return MemoryTier("valkey")


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack, tier: MemoryTier) -> Node:
    """A node with a tier."""
    started = Node(settings(tmp_path), tier=tier)
    stack.callback(started.close)
    started.start()
    return started


@pytest.fixture
def engine(node: Node, stack: ExitStack) -> Engine:
    """A connected engine with one rank."""
    return make_engine(node.settings.socket_path, stack)


@pytest.fixture
def node_process(tmp_path: Path, stack: ExitStack) -> Callable[[], NodeProcess]:
    """Starts a memory-only node as a process, always at the same socket."""

    def start() -> NodeProcess:
        process = NodeProcess(tmp_path / "node.sock")
        stack.callback(process.close)
        return process

    return start


def make_engine(socket_path: Path, stack: ExitStack, name: str = "engine") -> Engine:
    """A connected engine that the stack closes."""
    engine = Engine(socket_path, name=name)
    stack.callback(engine.close)
    return engine.connected()
