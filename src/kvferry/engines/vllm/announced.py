"""Loads that vLLM was told of and that no plan carries yet: if they cannot be made, they must be failed.

A request that waits for a load nobody makes would wait for ever. So what was announced is remembered
apart from everything that may break, until a plan carries either the load or its failure.
"""

from collections.abc import Sequence


class Announced:
    """Requests and the blocks that were to be loaded. Single-threaded."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[int, ...]] = {}

    def add(self, request_id: str, block_ids: Sequence[int]) -> None:
        """vLLM has put the request to wait."""
        self._loads[request_id] = tuple(block_ids)

    def sent(self, request_id: str) -> None:
        """The load goes out with the next plan."""
        self._loads.pop(request_id, None)

    def take(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Those that must be failed; they are handed out once."""
        taken = tuple(self._loads.items())
        self._loads.clear()
        return taken
