"""The connector contract, held by engines with several KV groups over a real node."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sides import FULL, STATE, SideFleet, extents, window

from kvferry.testing.connector_contract import ConnectorContract, Prompt
from kvferry.testing.expectations import equal

LARGE = (*FULL, window(3), window(10))
HYBRID = (*FULL, window(10), STATE)
"""Full attention, a window of three blocks, recurrent state."""


class TestGroups(ConnectorContract):
    """One block per chunk."""

    @pytest.fixture
    def fleet(self, tmp_path: Path, stack: ExitStack) -> SideFleet:
        return SideFleet(tmp_path, stack, chunk_blocks=1, groups=HYBRID)

    def test_a_load_brings_no_byte_more_than_is_read(self, fleet: SideFleet) -> None:
        """Of full attention what the engine lacks, of a window what its next token sees, and one state."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        second.complete(second.add(Prompt(17).request("short")))
        fleet.settle(second)
        fleet.scheduler(second).counts.take()
        self._loads(second, Prompt(42), 40 - 16)
        full, seen, state = (layers * nbytes for layers, nbytes in extents(HYBRID))
        wanted = 6 * full + 3 * seen + state
        equal(fleet.scheduler(second).counts.take()["loaded_bytes"], wanted, "bytes of a load of 24 tokens")
        self._end(fleet, first, second)

    def test_a_chunk_counts_once_whatever_its_groups(self, fleet: SideFleet) -> None:
        engine = fleet.engine()
        self._store(fleet, engine, Prompt(42))
        equal(fleet.scheduler(engine).counts.take()["stored_chunks"], 10, "chunks stored of 42 tokens")
        self._end(fleet, engine)

    def test_a_boundary_without_its_state_is_passed_over(self, fleet: SideFleet) -> None:
        """Here the engine left states at 20 and 24 tokens only."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(24))
        self._loads(second, Prompt(24), 20)
        self._loads(second, Prompt(20), 0)
        self._end(fleet, first, second)


class TestGroupsInLargeChunks(ConnectorContract):
    """Two blocks per chunk, of which one window needs one, the other both of the last two."""

    @pytest.fixture
    def fleet(self, tmp_path: Path, stack: ExitStack) -> SideFleet:
        return SideFleet(tmp_path, stack, chunk_blocks=2, groups=LARGE)

    def test_a_chunk_of_which_the_engine_has_the_head_is_loaded_by_its_tail(self, fleet: SideFleet) -> None:
        """Its own blocks may be in use by other requests."""
        first, second = fleet.engine(), fleet.engine()
        self._store(fleet, first, Prompt(42))
        second.complete(second.add(Prompt(13).request("short")))
        fleet.settle(second)
        fleet.scheduler(second).counts.take()
        self._loads(second, Prompt(42), 40 - 12)
        full, short, long = (layers * nbytes for layers, nbytes in extents(LARGE))
        wanted = 7 * full + short + 3 * long
        equal(fleet.scheduler(second).counts.take()["loaded_bytes"], wanted, "bytes of a load of 28 tokens")
        self._end(fleet, first, second)


class TestWindowAlone(ConnectorContract):
    """One group, of which the tail alone is kept."""

    @pytest.fixture
    def fleet(self, tmp_path: Path, stack: ExitStack) -> SideFleet:
        return SideFleet(tmp_path, stack, chunk_blocks=1, groups=(window(10),))
