"""What may go wrong with several KV groups, planted into vLLM's connector, is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines import test_groups
from tests.engines.planting import Plant, demand

from kvferry.client.messages import Reason
from kvferry.engines import planning
from kvferry.engines.planning import GroupLoad, LoadPlan
from kvferry.engines.vllm import loading, saving
from kvferry.engines.vllm.messages import LoadResult
from kvferry.engines.vllm.tally import LoadTally
from kvferry.identity.geometry import GroupKind, KvGroup
from kvferry.testing.connector_contract import BLOCK_TOKENS

LOADS = "test_an_engine_loads_what_another_computed"
WRONG_BYTES = "reads another prefix's KV"

Filled = GroupLoad | None


def block_before(geometry: Any, group: KvGroup, *, chunk: int, table: Any, null_block: Any = None) -> Any:
    """A window's part holds the block before the one that is its."""
    if group.kind is GroupKind.WINDOW:
        chunk = max(0, chunk - 1)
    return planning.part_blocks(geometry, group, chunk=chunk, table=table, null_block=null_block)


def boundary_before(states: Callable[..., Any]) -> Callable[..., Any]:
    """A state is stored as that of the chunk before."""

    def instead(self: Any, digests: Sequence[bytes], handed: Any) -> Any:
        return states(self, digests, [(at, block, tokens - BLOCK_TOKENS) for at, block, tokens in handed])

    return instead


def into_the_null_block(
    geometry: Any, group: KvGroup, *, load: LoadPlan, table: Sequence[int], null_block: int | None
) -> Filled:
    """The first block of a window goes where the engine keeps nothing."""
    found = planning.plan_group_load(geometry, group, load=load, table=table, null_block=null_block)
    if found is None or group.kind is not GroupKind.WINDOW or null_block is None:
        return found
    return found._replace(blocks=((null_block, *found.blocks[0][1:]), *found.blocks[1:]))


def over_a_local_hit(
    geometry: Any, group: KvGroup, *, load: LoadPlan, table: Sequence[int], null_block: int | None
) -> Filled:
    """One block of the engine's own is filled as well."""
    own = min(BLOCK_TOKENS, load.local_tokens) if group.kind is GroupKind.FULL else 0
    more = replace(
        load,
        local_tokens=load.local_tokens - own,
        external_tokens=load.external_tokens + own,
    )
    return planning.plan_group_load(geometry, group, load=more, table=table, null_block=null_block)


def some_is_all(tally: Callable[..., Any]) -> Callable[..., Any]:
    """A load of which some parts failed is reported as if all had come."""

    def instead(self: LoadTally) -> tuple[LoadResult, list[int]]:
        result, _ = tally(self)
        return result._replace(reason=str(Reason.COMPLETE), chunks=self._spec.chunks), []

    return instead


PLANTED = {
    "a window's wrong block is stored": Plant(saving, "part_blocks", block_before, LOADS, WRONG_BYTES),
    "a state of another boundary is stored": Plant(
        saving.SavePlanner, "_states", boundary_before(saving.SavePlanner._states), LOADS, WRONG_BYTES
    ),
    "a load goes into a null block": Plant(
        loading, "plan_group_load", into_the_null_block, LOADS, "into the null block"
    ),
    "some of a load is reported as all": Plant(
        LoadTally,
        "result",
        some_is_all(LoadTally.result),
        "test_a_damaged_part_is_recomputed_and_asked_for_once",
        WRONG_BYTES,
    ),
}


@pytest.mark.parametrize("name", PLANTED, ids=lambda name: name.replace(" ", "-"))
def test_a_planted_defect_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demand(
        PLANTED[name],
        directory=tmp_path,
        monkeypatch=monkeypatch,
        suite=test_groups.TestGroups,
        groups=test_groups.HYBRID,
    )


def test_a_load_over_a_local_hit_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = "test_a_chunk_of_which_the_engine_has_the_head_is_loaded_by_its_tail"
    demand(
        Plant(loading, "plan_group_load", over_a_local_hit, test, "bytes of a load"),
        directory=tmp_path,
        monkeypatch=monkeypatch,
        suite=test_groups.TestGroupsInLargeChunks,
        chunk_blocks=2,
        groups=test_groups.LARGE,
    )
