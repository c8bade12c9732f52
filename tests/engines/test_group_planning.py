"""Several KV groups: what a load fills and a save stores, by the engine's own rules of what it keeps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.planning import (
    ChunkGeometry,
    GroupLoad,
    LoadPlan,
    owed_blocks,
    part_blocks,
    plan_group_load,
    plan_load,
)
from kvferry.identity.geometry import GroupKind, KvGroup

NULL = 0


def group(kind: GroupKind, block: int, window: int = 0) -> KvGroup:
    """Without layers."""
    return KvGroup(kind, block, stages=(), block_bytes=(), kv_heads=1, window_tokens=window)


groups = st.one_of(
    st.builds(lambda block: group(GroupKind.FULL, block), st.integers(1, 4)),
    st.builds(lambda block: group(GroupKind.STATE, block), st.integers(1, 6)),
    st.builds(
        lambda block, window: group(GroupKind.WINDOW, block, window), st.integers(1, 4), st.integers(1, 40)
    ),
)
geometries = st.builds(
    lambda made, times: ChunkGeometry(
        math.lcm(*(g.block_tokens for g in made)),
        math.lcm(*(g.block_tokens for g in made)) * times,
        tuple(made),
    ),
    st.lists(groups, min_size=1, max_size=4),
    st.integers(1, 4),
)


def seen_from(group: KvGroup, tokens: int) -> int:
    """The first token that is read when a request goes on after so many."""
    match group.kind:
        case GroupKind.FULL:
            return 0
        case GroupKind.WINDOW:
            return max(0, tokens - group.window_tokens + 1)
        case GroupKind.STATE:
            return max(0, tokens - 1)


def allocated(group: KvGroup, end: int) -> list[int]:
    """An engine's table for a request that goes on after ``end`` tokens: block numbers are unlike indices."""
    skipped = seen_from(group, end) // group.block_tokens
    return [NULL if index < skipped else 1000 + index for index in range(end // group.block_tokens)]


def filled(geometry: ChunkGeometry, group: KvGroup, load: GroupLoad) -> dict[int, int]:
    """By position in the table: what the parts say belongs there."""
    per_chunk, held = geometry.chunk_tokens // group.block_tokens, group.part_blocks(geometry.chunk_tokens)
    found: dict[int, int] = {}
    for position in range(len(load.blocks)):
        first, blocks = load.needed(position)
        chunk = load.first_chunk + position
        assert first + len(blocks) <= held
        found.update(enumerate(blocks, start=(chunk + 1) * per_chunk - held + first))
    return found


@given(geometries, st.integers(0, 6), st.integers(1, 6), st.integers(0, 24))
def test_a_load_fills_what_is_read_and_the_engine_lacks_and_nothing_else(
    geometry: ChunkGeometry, first: int, count: int, units: int
) -> None:
    local = units * geometry.block_tokens
    load = plan_load(geometry, first_chunk=first, count=count, local_tokens=local)
    if load is None:
        return
    for group in geometry.groups:
        table = allocated(group, load.end_tokens)
        found = plan_group_load(geometry, group, load=load, table=table, null_block=NULL)
        assert found is not None
        own = local // group.block_tokens
        wanted = {at: block for at, block in enumerate(table) if block != NULL and at >= own}
        assert filled(geometry, group, found) == wanted
        trailing = group.trailing_chunks(geometry.chunk_tokens)
        brought = range(max(first, load.end_chunk - trailing) if trailing else first, load.end_chunk)
        assert all(found.first_chunk + at in brought for at in range(len(found.blocks)))


@given(geometries, st.integers(1, 6), st.data())
def test_a_table_that_lacks_what_the_parts_hold_is_not_loaded_into(
    geometry: ChunkGeometry, count: int, data: st.DataObject
) -> None:
    """Whatever an engine allocates, a load fills blocks in one run up to the boundary, or is not made."""
    load = LoadPlan(0, count * geometry.chunk_tokens, 0, count)
    for group in geometry.groups:
        blocks = load.end_tokens // group.block_tokens
        table = [data.draw(st.sampled_from([NULL, 1000 + index])) for index in range(min(blocks, 12))] + list(
            range(1012, 1000 + blocks)
        )
        found = plan_group_load(geometry, group, load=load, table=table, null_block=NULL)
        if found is None:
            continue
        wanted = {at: block for at, block in enumerate(table) if block != NULL}
        assert filled(geometry, group, found) == wanted
        assert sorted(wanted) == list(range(blocks - len(wanted), blocks))


def test_a_table_that_ends_early_is_not_loaded_into() -> None:
    geometry = ChunkGeometry(4, 8)
    load = LoadPlan(0, 16, 0, 2)
    full = geometry.groups[0]
    assert plan_group_load(geometry, full, load=load, table=[1, 2, 3], null_block=NULL) is None


@given(geometries, st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 60))
def test_a_chunk_is_there_in_the_step_that_completes_it(
    geometry: ChunkGeometry, steps: list[int], unprocessed: int
) -> None:
    """An engine lets go of what lies behind the tokens it has processed, not of what it schedules.

    unprocessed: tokens of steps whose results are still to come.
    """
    computed = 0
    for tokens in steps:
        before, computed = computed, computed + tokens
        for group in geometry.groups:
            if group.kind is GroupKind.STATE:
                continue
            behind = seen_from(group, max(0, before - unprocessed)) // group.block_tokens
            table = [
                NULL if index < behind else 1000 + index
                for index in range(-(-computed // group.block_tokens))
            ]
            for chunk in range(before // geometry.chunk_tokens, computed // geometry.chunk_tokens):
                end = (chunk + 1) * geometry.chunk_tokens // group.block_tokens
                held = group.part_blocks(geometry.chunk_tokens)
                found = part_blocks(geometry, group, chunk=chunk, table=table, null_block=NULL)
                assert found == tuple(range(1000 + end - held, 1000 + end))


@given(geometries, st.integers(0, 6), st.integers(1, 6), st.integers(0, 24))
def test_with_drafts_the_last_block_of_a_hit_is_computed_anew_where_a_load_serves_in_part(
    geometry: ChunkGeometry, first: int, count: int, units: int
) -> None:
    """The engine does the same with its own hits. Other loads serve at their own boundary only."""
    drafts = ChunkGeometry(geometry.block_tokens, geometry.chunk_tokens, geometry.groups, drafts=True)
    local = units * geometry.block_tokens
    end = (first + count) * geometry.chunk_tokens
    load = plan_load(drafts, first_chunk=first, count=count, local_tokens=local)
    if not geometry.trailing:
        end -= geometry.block_tokens
    if load is None:
        assert local >= end or local < first * geometry.chunk_tokens
        return
    assert load.end_tokens == end
    for group in geometry.groups:
        table = allocated(group, end)
        found = plan_group_load(drafts, group, load=load, table=table, null_block=NULL)
        assert found is not None
        own = local // group.block_tokens
        wanted = {at: block for at, block in enumerate(table) if block != NULL and at >= own}
        assert filled(drafts, group, found) == wanted


@given(geometries, st.integers(1, 10))
def test_failures_are_told_by_block_for_one_group_of_full_attention_only(
    geometry: ChunkGeometry, chunks: int
) -> None:
    tokens = chunks * geometry.chunk_tokens
    tables = [allocated(group, tokens) for group in geometry.groups]
    owed = owed_blocks(geometry, tables, external_tokens=tokens)
    alone = [group.kind for group in geometry.groups] == [GroupKind.FULL]
    assert owed == (tuple(tables[0]) if alone else ())
