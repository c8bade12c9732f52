"""Parts, shards and boundaries follow from the groups alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.identity.examples import HARD

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.geometry import (
    Device,
    Geometry,
    GroupKind,
    KvGroup,
    check_chunk_tokens,
    default_chunk_tokens,
    usable_chunks,
)


def _group(
    kind: GroupKind = GroupKind.FULL, *, kv_heads: int = 8, window: int = 0, block: int = 1
) -> KvGroup:
    return KvGroup(kind, block, (("l",),), (64,), kv_heads, window_tokens=window)


groups = st.lists(
    st.one_of(
        st.just(_group()),
        st.just(_group(GroupKind.STATE)),
        st.integers(1, 14).map(lambda window: _group(GroupKind.WINDOW, window=window)),
    ),
    min_size=1,
    max_size=3,
)


def _accepts(group: KvGroup, row: list[bool], boundary: int, chunk_tokens: int) -> bool:
    """By tokens: what the next token, at position ``boundary * chunk_tokens``, reads of this group."""
    position = boundary * chunk_tokens
    match group.kind:
        case GroupKind.FULL:
            read = range(position)
        case GroupKind.WINDOW:
            read = range(max(0, position - group.window_tokens + 1), position)
        case GroupKind.STATE:
            read = range(max(0, position - 1), position)
    return all(row[token // chunk_tokens] for token in read)


@given(groups=groups, chunks=st.integers(0, 8), chunk_tokens=st.integers(1, 5), data=st.data())
def test_usable_chunks_is_the_longest_boundary_whose_tokens_are_all_there(
    *, groups: list[KvGroup], chunks: int, chunk_tokens: int, data: st.DataObject
) -> None:
    row = st.lists(st.sampled_from([True, True, True, False]), min_size=chunks, max_size=chunks)
    present = [data.draw(row) for _ in groups]
    expected = max(
        boundary
        for boundary in range(chunks + 1)
        if all(_accepts(g, r, boundary, chunk_tokens) for g, r in zip(groups, present, strict=True))
    )
    assert usable_chunks(groups, present, chunk_tokens=chunk_tokens) == expected


@given(groups=groups, chunk_tokens=st.integers(1, 9), boundary=st.integers(0, 12))
def test_needed_chunks_alone_make_a_boundary_usable(
    *, groups: list[KvGroup], chunk_tokens: int, boundary: int
) -> None:
    present = [
        [c in group.needed_chunks(boundary, chunk_tokens=chunk_tokens) for c in range(boundary)]
        for group in groups
    ]
    assert usable_chunks(groups, present, chunk_tokens=chunk_tokens) == boundary


@pytest.mark.parametrize(
    ("window", "needed"),
    [(1, []), (2, [9]), (17, [9]), (18, [8, 9]), (33, [8, 9]), (10_000, list(range(10)))],
)
def test_a_window_counts_the_token_that_looks_through_it(window: int, needed: list[int]) -> None:
    group = _group(GroupKind.WINDOW, window=window)
    assert list(group.needed_chunks(10, chunk_tokens=16)) == needed


@given(groups=groups, chunk_tokens=st.integers(1, 9), boundary=st.integers(1, 12))
def test_the_trailing_chunks_are_those_that_a_boundary_needs(
    *, groups: list[KvGroup], chunk_tokens: int, boundary: int
) -> None:
    for group in groups:
        needed = group.needed_chunks(boundary, chunk_tokens=chunk_tokens)
        trailing = group.trailing_chunks(chunk_tokens) or boundary
        # A window of one token needs nothing; 0 would say that it needs all.
        assert len(needed) in (min(trailing, boundary), 0)
        assert needed or group.window_tokens == 1


@given(block=st.integers(1, 4), blocks=st.integers(1, 6), window=st.integers(2, 30))
def test_a_part_of_a_window_holds_the_blocks_that_its_chunk_end_needs(
    *, block: int, blocks: int, window: int
) -> None:
    group = _group(GroupKind.WINDOW, window=window, block=block)
    end = blocks * block
    needed = {token // block for token in range(max(0, end - window + 1), end)}
    assert group.part_blocks(end) == len(needed)


def test_a_part_is_trailing_by_its_group_and_exists_by_its_layers() -> None:
    groups = (
        KvGroup(GroupKind.FULL, 16, (("a",), ("b",)), (64, 64), 2),
        KvGroup(GroupKind.WINDOW, 16, (("c",), ()), (8, 0), 2, window_tokens=40),
        KvGroup(GroupKind.STATE, 32, ((), ("d",)), (0, 100), 0),
    )
    geometry = Geometry(groups, 32, tensor_ranks=1, pipeline_ranks=2)
    assert geometry.part_bytes == (128, 128, 16, 0, 0, 100)
    assert geometry.trailing == (0, 0, 2, 0, 0, 1)


def test_rows_that_do_not_fit_the_groups_are_an_error() -> None:
    with pytest.raises(BrokenError):
        usable_chunks([_group()], [], chunk_tokens=16)
    with pytest.raises(BrokenError):
        usable_chunks([_group(), _group()], [[True], [True, True]], chunk_tokens=16)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "parts"),
    [
        (8, 1, [0]),
        (8, 4, [0, 1, 2, 3]),
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),  # fewer heads than ranks: neighbours hold the same head
        (1, 4, [0, 0, 0, 0]),  # MLA, or one head
        (0, 4, [0, 1, 2, 3]),  # recurrent state
    ],
)
def test_ranks_with_equal_bytes_share_a_part(kv_heads: int, ranks: int, parts: list[int]) -> None:
    geometry = Geometry((_group(kv_heads=kv_heads),), 16, tensor_ranks=ranks)
    assert [geometry.part(0, tensor_rank=rank) for rank in range(ranks)] == parts
    assert geometry.part_count == len(set(parts)) == len(geometry.part_bytes)


def test_of_the_ranks_that_share_a_part_exactly_one_writes_each_chunk() -> None:
    geometry = HARD.geometry
    for group in range(len(geometry.groups)):
        for chunk_index in range(8):
            writers = [
                geometry.part(group, tensor_rank=rank)
                for rank in range(geometry.tensor_ranks)
                if geometry.writes(group, tensor_rank=rank, chunk_index=chunk_index)
            ]
            held = {geometry.part(group, tensor_rank=rank) for rank in range(geometry.tensor_ranks)}
            assert sorted(writers) == sorted(held)


def test_every_existing_part_is_held_by_a_rank_and_parts_of_stages_and_groups_differ() -> None:
    geometry = HARD.geometry
    holders: dict[int, set[tuple[int, int]]] = {}
    for group in range(len(geometry.groups)):
        for pipeline_rank in range(geometry.pipeline_ranks):
            for tensor_rank in range(geometry.tensor_ranks):
                part = geometry.part(group, tensor_rank=tensor_rank, pipeline_rank=pipeline_rank)
                holders.setdefault(part, set()).add((group, pipeline_rank))
    assert all(len(places) == 1 for places in holders.values())
    existing = {part for part, nbytes in enumerate(geometry.part_bytes) if nbytes}
    assert existing <= set(holders)


def test_a_state_part_is_one_block_and_others_are_all_blocks_of_the_chunk() -> None:
    geometry = HARD.geometry
    sizes = geometry.part_bytes
    assert sizes[geometry.part(0, tensor_rank=0)] == 3136 // 16 * 16384
    assert sizes[geometry.part(2, tensor_rank=0, pipeline_rank=1)] == 1048576
    assert sizes[geometry.part(2, tensor_rank=0, pipeline_rank=0)] == 0  # no such layers in that stage


@pytest.mark.parametrize(
    ("block", "device", "expected"),
    [
        (128, Device.CPU, 128),
        (16, Device.GPU, 256),
        (64, Device.GPU, 256),
        (784, Device.GPU, 784),
        (48, Device.GPU, 288),
        ([16, 784], Device.GPU, 784),
        ([16, 24], Device.CPU, 48),
    ],
)
def test_the_default_chunk_is_a_multiple_of_every_block(
    block: int | list[int], device: Device, expected: int
) -> None:
    assert default_chunk_tokens(block, device) == expected
    check_chunk_tokens(expected, [block] if isinstance(block, int) else block)


@pytest.mark.parametrize(
    ("chunk", "blocks"), [(100, [16]), (0, [16]), (16, [16, 24]), (-16, [16]), (16, [0])]
)
def test_a_chunk_that_blocks_do_not_divide_is_refused_with_the_step(chunk: int, blocks: list[int]) -> None:
    with pytest.raises(MisconfiguredError, match=str(chunk)):
        check_chunk_tokens(chunk, blocks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KvGroup(GroupKind.FULL, 0, (("l",),), (1,), 1), "block_tokens"),
        (lambda: KvGroup(GroupKind.FULL, 16, (("l",),), (1,), 1, window_tokens=4), "window_tokens"),
        (lambda: KvGroup(GroupKind.WINDOW, 16, (("l",),), (1,), 1), "window_tokens"),
        (lambda: KvGroup(GroupKind.FULL, 16, (("l",),), (1,), -1), "kv_heads"),
        (lambda: KvGroup(GroupKind.FULL, 16, (("l",),), (1, 2), 1), "stages"),
        (lambda: KvGroup(GroupKind.FULL, 16, (("l",),), (0,), 1), "layers"),
        (lambda: Geometry((), 16), "no KV groups"),
        (lambda: Geometry((_group(),), 16, tensor_ranks=0), "parallel"),
        (lambda: Geometry((_group(kv_heads=6),), 16, tensor_ranks=4), "heads"),
        (lambda: Geometry((_group(),), 16, pipeline_ranks=2), "stages"),
        (lambda: Geometry((_group(kv_heads=0),), 16, tensor_ranks=5000), "parts"),
        (lambda: Geometry((KvGroup(GroupKind.FULL, 1, (("l",),), (1 << 20,), 1),), 2048), "smaller"),
    ],
)
def test_a_contradiction_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MisconfiguredError, match=message):
        make()
