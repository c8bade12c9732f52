"""The connector contract, held by both sides of the vLLM connector over a real node."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sides import SideFleet

from kvferry.testing.connector_contract import BLOCK_TOKENS, ConnectorContract, Prompt


class TestBlockSizedChunks(ConnectorContract):
    """One block per chunk, as on a CPU."""

    @pytest.fixture
    def fleet(self, tmp_path: Path, stack: ExitStack) -> SideFleet:
        return SideFleet(tmp_path, stack, chunk_blocks=1)

    def test_a_reset_with_the_connector_hides_what_was_stored_before(self, fleet: SideFleet) -> None:
        first = fleet.engine()
        self._store(fleet, first, Prompt(42))
        fleet.scheduler(first).reset(b"g" * 16)
        assert first.pool.reset()
        request = first.add(Prompt(42).request("again"))
        first.complete(request)
        assert request.external_tokens == 0

    def test_counts_tell_hits_from_misses(self, fleet: SideFleet) -> None:
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        second.complete(second.add(Prompt(42).request("b")))
        fleet.settle(second)
        assert fleet.scheduler(first).counts.take()["misses"] == 1
        counts = fleet.scheduler(second).counts.take()
        assert (counts["hits"], counts["loaded_tokens"], counts.get("misses", 0)) == (1, 40, 0)


class TestLargeChunks(ConnectorContract):
    """Several blocks per chunk, as on a GPU: prompts here are multiples of it where it matters."""

    @pytest.fixture
    def fleet(self, tmp_path: Path, stack: ExitStack) -> SideFleet:
        return SideFleet(tmp_path, stack, chunk_blocks=2)

    def test_a_half_present_chunk_is_completed(self, fleet: SideFleet) -> None:
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        second.complete(second.add(Prompt(3 * BLOCK_TOKENS + 1).request("short")))
        request = second.add(Prompt(42).request("long"))
        second.complete(request)
        assert request.external_tokens == 40 - 12
