"""Two real engines whose model has several KV groups, over one node and a Valkey.

Gemma-3: one layer of full attention, five of a window of 256 tokens, each a group of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.fault_rig import BLOCK, CHUNKS, Found, Rig
from tests.engines.test_vllm_faults import FAULTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

WINDOWS, WINDOW_BLOCKS = 5, 2
PAGE_BYTES = 64 << 10
NEEDED = (CHUNKS + WINDOWS * WINDOW_BLOCKS) * PAGE_BYTES


@pytest.fixture(scope="module")
def rig(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with ExitStack() as stack:
        made = Rig(tmp_path_factory.mktemp("rig"), models / "gemma", stack, groups=1 + WINDOWS)
        yield made


def test_the_other_replicas_prefix_answers_as_an_own_hit(rig: Rig) -> None:
    """Out of Valkey; of every window no byte but those that the next token sees."""
    asked = rig.stored()
    own = rig.a.generate(asked)
    found = rig.ask(asked)
    assert own["cached"] == found.loaded_chunks * BLOCK == CHUNKS * BLOCK
    assert found.tokens == own["tokens"]
    assert found.loaded_bytes == NEEDED


def test_a_load_goes_on_from_what_the_engine_has_itself(rig: Rig) -> None:
    asked = rig.stored()
    rig.b.generate(asked[: 3 * BLOCK + 1])
    found = rig.ask(asked)
    assert found.loaded_chunks == CHUNKS - 3
    assert found.loaded_bytes == NEEDED - 3 * PAGE_BYTES
    assert found.tokens == rig.a.generate(asked)["tokens"]


@pytest.mark.parametrize("name", ["node killed", "Valkey corrupted"])
def test_a_part_that_breaks_before_a_load_has_all_of_it_recomputed(rig: Rig, name: str) -> None:
    """Nothing of a load is of use without the rest; what was loaded is not used by half."""
    fault = FAULTS[name]
    try:
        asked, found = rig.ask_before(fault)
        assert found.loaded_chunks == 0
        _recomputed(rig, asked, found)
    finally:
        fault.mends(rig)
    rig.until_reused(asked)


def test_a_node_killed_during_a_load_has_all_of_it_recomputed(rig: Rig) -> None:
    fault = FAULTS["node killed"]
    try:
        asked, found = rig.ask_during(fault)
        assert (found.loads, found.loaded_chunks) == (1, 0)
        _recomputed(rig, asked, found)
    finally:
        fault.mends(rig)
    rig.until_reused(asked)


def _recomputed(rig: Rig, asked: list[int], found: Found) -> None:
    assert set(found.failures)
    assert rig.right(asked, found)
