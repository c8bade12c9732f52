"""Engines with connectors over one node, as the connector contract drives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.testing.fake_engine import FakeEngine, FakeRequest

BLOCK_TOKENS = 4


class ConnectorFleet(Protocol):
    """Engines of one host. All of their memory is made and released by it."""

    def engine(self, *, blocks: int = 64, ranks: int = 1, tokens_per_step: int = 64) -> FakeEngine:
        """A new engine with a connector of its own, attached to the shared node."""
        ...

    def settle(self, engine: FakeEngine) -> None:
        """Step the idle engine until its connector holds nothing any more; fail when it never does."""

    def stop_node(self) -> None:
        """The node goes away without a word."""

    def restart_node(self) -> None:
        """The node goes away without a word and is there again, empty."""

    def damage_node(self, *, rank: int | None = None) -> None:
        """Every part that is stored now, or every one of that rank, changes under its checksum."""

    def hold_loads(self) -> Callable[[], None]:
        """Loads get no further until the returned function is called."""
        ...

    def hold_saves(self) -> Callable[[], None]:
        """Saves get no further until the returned function is called."""
        ...

    def kill_engine(self, engine: FakeEngine) -> None:
        """The engine's process is gone, whatever its connector was doing. The engine is not used again."""

    def at_rest(self) -> None:
        """Fail when the node, if it runs, goes on holding anything for an engine."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: of the prompt, a function of ``seed``."""

    tokens: int
    seed: int = 0

    def request(self, name: str, *, output_tokens: int = 1) -> FakeRequest:
        """A request for it."""
        ids = [(self.seed * 7919 + i * 31) % 50000 for i in range(self.tokens)]
        return FakeRequest(name, ids, output_tokens=output_tokens)
