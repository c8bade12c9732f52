"""Requests and hits become loads and saves: the arithmetic between tokens, blocks and chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.loadcap import LoadCap
from kvferry.engines.planning import (
    ChunkGeometry,
    external_blocks,
    failed_block_ids,
    part_blocks,
    plan_group_load,
    plan_load,
    plan_lookup,
    plan_saves,
    tokens_by_tier,
)
from kvferry.errors import MisconfiguredError

geometries = st.builds(
    lambda block, blocks: ChunkGeometry(block, block * blocks), st.integers(1, 64), st.integers(1, 9)
)


@pytest.mark.parametrize(("block", "chunk"), [(128, 100), (128, 200), (16, 8), (0, 16), (16, 0)])
def test_chunks_that_do_not_fit_blocks_are_refused_with_the_value(block: int, chunk: int) -> None:
    with pytest.raises(MisconfiguredError, match=str(chunk if block else block)):
        ChunkGeometry(block, chunk)


@given(geometries, st.integers(1, 5000))
def test_a_hit_always_leaves_a_token_to_compute(geometry: ChunkGeometry, tokens: int) -> None:
    reusable = geometry.reusable_chunks(tokens) * geometry.chunk_tokens
    assert reusable < tokens <= reusable + geometry.chunk_tokens


@given(geometries, st.integers(1, 5000), st.integers(0, 100))
def test_a_lookup_starts_with_the_first_chunk_that_is_not_whole(
    geometry: ChunkGeometry, tokens: int, local_blocks: int
) -> None:
    local = local_blocks * geometry.block_tokens
    plan = plan_lookup(geometry, prompt_tokens=tokens, local_tokens=local)
    if plan is None:
        assert geometry.reusable_chunks(tokens) * geometry.chunk_tokens < local + geometry.chunk_tokens
    else:
        assert plan.first_chunk * geometry.chunk_tokens <= local
        assert local < (plan.first_chunk + 1) * geometry.chunk_tokens
        assert plan.chunks > plan.first_chunk


@given(geometries, st.integers(1, 5000), st.integers(0, 100), st.integers(0, 5000))
def test_a_cap_ends_a_lookup_at_the_last_whole_chunk_within(
    geometry: ChunkGeometry, tokens: int, local_blocks: int, cap: int
) -> None:
    local = local_blocks * geometry.block_tokens
    free = plan_lookup(geometry, prompt_tokens=tokens, local_tokens=local)
    capped = plan_lookup(geometry, prompt_tokens=tokens, local_tokens=local, cap=LoadCap(cap))
    if free is None:
        assert capped is None
        return
    chunks = capped.chunks if capped else local // geometry.chunk_tokens
    assert chunks == free.chunks or (chunks + 1) * geometry.chunk_tokens > local + cap
    if capped is not None:
        assert capped.first_chunk == free.first_chunk < capped.chunks <= free.chunks
        assert capped.chunks * geometry.chunk_tokens - local <= cap


@given(geometries, st.integers(0, 20), st.integers(1, 20), st.integers(0, 200))
def test_a_load_covers_exactly_what_the_engine_lacks(
    geometry: ChunkGeometry, first: int, count: int, local_blocks: int
) -> None:
    local = local_blocks * geometry.block_tokens
    load = plan_load(geometry, first_chunk=first, count=count, local_tokens=local)
    end = (first + count) * geometry.chunk_tokens
    if load is None:
        assert local >= end or local < first * geometry.chunk_tokens
        return
    assert local + load.external_tokens == end
    assert (load.end_tokens, load.end_chunk) == (end, first + count)
    table = list(range(1000, 1000 + end // geometry.block_tokens))
    filled = plan_group_load(geometry, geometry.groups[0], load=load, table=table, null_block=0)
    assert filled is not None
    assert [block for blocks in filled.blocks for block in blocks] == table[local_blocks:]
    assert (filled.first_chunk, len(filled.blocks)) == (load.first_chunk, load.chunks)
    assert filled.first == local_blocks - load.first_chunk * geometry.blocks_per_chunk


@given(geometries, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 50))
def test_only_chunks_whose_tokens_are_known_and_computed_are_saved_once(
    geometry: ChunkGeometry, known: int, computed: int, first: int
) -> None:
    chunks = plan_saves(geometry, known_tokens=known, computed_tokens=computed, first_unsaved=first)
    assert all(first <= c and (c + 1) * geometry.chunk_tokens <= min(known, computed) for c in chunks)
    assert plan_saves(
        geometry, known_tokens=known, computed_tokens=computed, first_unsaved=chunks.stop
    ) == range(chunks.stop, chunks.stop)


@given(geometries, st.integers(1, 12))
def test_chunks_divide_a_block_table(geometry: ChunkGeometry, chunks: int) -> None:
    table = list(range(1000, 1000 + chunks * geometry.blocks_per_chunk))
    parts = [part_blocks(geometry, geometry.groups[0], chunk=c, table=table) for c in range(chunks)]
    assert [block for part in parts for block in part or ()] == table


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=4), max_size=8), st.data())
def test_everything_from_the_first_gap_on_has_failed(blocks: list[list[int]], data: st.DataObject) -> None:
    arrived = data.draw(st.sets(st.integers(0, max(0, len(blocks) - 1))))
    failed = failed_block_ids(blocks, arrived)
    usable = 0
    while usable in arrived and usable < len(blocks):
        usable += 1
    assert failed == [block for chunk in blocks[usable:] for block in chunk]


@given(geometries, st.lists(st.integers(0, 1), min_size=1, max_size=9), st.data())
def test_tiers_account_for_every_external_token(
    geometry: ChunkGeometry, tiers: list[int], data: st.DataObject
) -> None:
    most = len(tiers) * geometry.chunk_tokens
    external = data.draw(st.integers(most - geometry.chunk_tokens + 1, most))
    assert sum(tokens_by_tier(geometry, tiers=tiers, external_tokens=external).values()) == external


def test_a_load_that_cannot_be_made_fails_its_own_blocks_only() -> None:
    """The engine's own prefix before them may be in use by running requests."""
    assert external_blocks([7, 8, 9, 10], external_tokens=8, block_tokens=4) == (9, 10)
    assert external_blocks([7, 8, 9, 10], external_tokens=16, block_tokens=4) == (7, 8, 9, 10)
    assert external_blocks([7, 8], external_tokens=0, block_tokens=4) == ()


class Decoding:
    """One request's decode with drafts, ``depth`` steps planned before the first result is seen.

    The engine plans as if every draft will be accepted and takes the rejected ones back with the result;
    the worker goes on from what was accepted in truth. ``right[i]``: position i holds its final token's KV.
    """

    def __init__(self, geometry: ChunkGeometry, *, prompt: int, depth: int) -> None:
        self.geometry, self.depth = geometry, depth
        self.known, self.computed, self.first_unsaved = prompt + 1, prompt, 0
        self.truth = prompt  # positions that the worker has computed for good
        self.right = [True] * prompt
        self.saved = 0
        self.flight: list[tuple[int, int]] = []

    def step(self, drafts: int, accepted: int) -> None:
        """Plan, compute, and see the result of the oldest step that is over."""
        accepted = min(drafts, accepted)
        chunks = plan_saves(
            self.geometry,
            known_tokens=self.known,
            computed_tokens=self.computed + 1 + drafts,
            first_unsaved=self.first_unsaved,
        )
        self.computed += 1 + drafts
        self.first_unsaved = chunks.stop
        del self.right[self.truth :]
        self.right += [True] * (1 + accepted) + [False] * (drafts - accepted)
        self.truth += 1 + accepted
        if chunks:
            self.saved = chunks.stop * self.geometry.chunk_tokens
        self.flight.append((drafts - accepted, 1 + accepted))
        if len(self.flight) > self.depth:
            rejected, new = self.flight.pop(0)
            self.computed -= rejected
            self.known += new


@given(
    geometries,
    st.integers(1, 40),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=120),
)
def test_drafts_and_steps_in_flight_never_enter_a_stored_chunk(
    geometry: ChunkGeometry, prompt: int, depth: int, steps: list[tuple[int, int]]
) -> None:
    """Neither when it is planned nor with any later step, while it may still be being copied."""
    decoding = Decoding(geometry, prompt=prompt, depth=depth)
    for drafts, accepted in steps:
        decoding.step(drafts, accepted)
        assert all(decoding.right[: decoding.saved])
        assert len(decoding.right) >= decoding.saved
