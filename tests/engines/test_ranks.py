"""Ranks that hold the same bytes, since the model has fewer KV heads: stored once, loaded by all."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.sides import SideFleet

from kvferry.engines.vllm.identity import rank_parts
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup
from kvferry.testing.connector_contract import Prompt
from kvferry.testing.fake_engine import FakeEngine

CHUNKS = 10
PROMPT = Prompt(42)


@pytest.fixture
def fleet(tmp_path: Path, stack: ExitStack) -> SideFleet:
    return SideFleet(tmp_path, stack, chunk_blocks=1)


def _stores(fleet: SideFleet, engine: FakeEngine) -> None:
    engine.complete(engine.add(PROMPT.request("a")))
    fleet.settle(engine)


def _loads(engine: FakeEngine) -> int:
    """Tokens; every block that is read is compared with what its rank should hold."""
    request = engine.add(PROMPT.request("b"))
    engine.complete(request)
    return request.external_tokens


def _parts(fleet: SideFleet) -> int:
    return fleet.node.statistics().catalogue.ready_parts


def test_four_ranks_of_two_heads_store_two_parts_of_a_chunk_and_load_them(fleet: SideFleet) -> None:
    first, second = (fleet.engine(ranks=4, kv_heads=2) for _ in range(2))
    _stores(fleet, first)
    assert _parts(fleet) == 2 * CHUNKS
    assert _loads(second) == 40
    fleet.settle(second)
    assert _parts(fleet) == 2 * CHUNKS
    fleet.at_rest()


def test_engines_of_other_sizes_share_what_their_ranks_hold_alike(fleet: SideFleet) -> None:
    _stores(fleet, fleet.engine(ranks=4, kv_heads=2))
    assert _loads(fleet.engine(ranks=2, kv_heads=2)) == 40
    fleet.at_rest()


def test_an_engine_whose_ranks_hold_more_reads_nothing_of_it(fleet: SideFleet) -> None:
    _stores(fleet, fleet.engine(ranks=2, kv_heads=2))
    assert _loads(fleet.engine(ranks=1, kv_heads=2)) == 0


def test_a_part_that_is_damaged_is_recomputed_by_every_rank(fleet: SideFleet) -> None:
    first, second = (fleet.engine(ranks=4, kv_heads=2) for _ in range(2))
    _stores(fleet, first)
    fleet.damage_node()
    _loads(second)
    assert second.recomputed == ["b"]
    fleet.settle(second)
    assert _parts(fleet) == 2 * CHUNKS


def test_every_part_is_held_by_the_ranks_of_one_stage_and_equal_ones_take_turns() -> None:
    full = KvGroup(GroupKind.FULL, 16, stages=(("l0",), ("l1",)), block_bytes=(64, 64), kv_heads=2)
    state = KvGroup(GroupKind.STATE, 16, stages=(("m0",), ()), block_bytes=(32, 0), kv_heads=0)
    geometry = Geometry((full, state), 16, tensor_ranks=4, pipeline_ranks=2)
    held = rank_parts(geometry)
    assert len(held) == 8
    attention = [parts[0] for parts in held]
    assert all(part is not None and part.replicas == 2 for part in attention)
    numbers = [part.number for part in attention if part is not None]
    assert numbers[::2] == numbers[1::2]
    assert len(set(numbers)) == 4
    states = [parts[1] for parts in held]
    assert states[4:] == [None] * 4  # the second stage has no such layers
    assert len({part.number for part in states[:4] if part is not None}) == 4
    assert all(geometry.part_bytes[number] for number in numbers)
