"""Client tests run against the same nodes as node tests."""

from tests.node.conftest import engine, node, node_process, stack, tier

__all__ = ["engine", "node", "node_process", "stack", "tier"]
