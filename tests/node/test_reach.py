"""How far a prefix reaches when it is known of each part whether it is there, is not, or nobody knows."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.node.reach import Lack, memory_boundary, reach
from kvferry.node.state import Namespace
from kvferry.node.wire import Reason
from kvferry.pool.entries import Gap

CHUNKS = 6
there = st.sampled_from(["there", "there", "there", "gone", "unknown"])
tables = st.lists(st.lists(there, min_size=CHUNKS, max_size=CHUNKS), min_size=1, max_size=3)


def accepts(space: Namespace, table: list[list[str]], boundary: int, *, good: set[str]) -> bool:
    """All parts that the boundary needs are in one of these states."""
    return all(
        row[at] in good
        for part, row in enumerate(table)
        for at in range(boundary)
        if not space.trailing_of(part) or boundary - at <= space.trailing_of(part)
    )


@given(table=tables, trailing=st.lists(st.sampled_from([0, 1, 2, 4]), min_size=3, max_size=3))
def test_it_is_the_largest_boundary_that_every_part_accepts_and_a_failure_is_no_miss(
    *, table: list[list[str]], trailing: list[int]
) -> None:
    numbers = tuple(trailing[: len(table)])
    space = Namespace(bytes(16), (1,) * len(table), 16, "d", "", numbers if any(numbers) else ())
    lacks = [
        Lack(at, part, Reason.TIER_DOWN if row[at] == "unknown" else None)
        for at in range(CHUNKS)
        for part, row in enumerate(table)
        if row[at] != "there"
    ]
    found = reach(space, CHUNKS, lacks)
    known = [b for b in range(CHUNKS + 1) if accepts(space, table, b, good={"there"})]
    assert found.boundary == known[-1]
    assert [b for b in known if found.usable[b]] == known
    hoped = max(b for b in range(CHUNKS + 1) if accepts(space, table, b, good={"there", "unknown"}))
    if found.boundary == CHUNKS:
        assert (found.reason, found.missing) == (Reason.COMPLETE, None)
    else:
        assert found.missing in lacks
        if hoped > found.boundary:
            assert found.reason is Reason.TIER_DOWN
        if not any("unknown" in row for row in table):
            assert found.reason is Reason.ABSENT


@given(table=tables, trailing=st.lists(st.sampled_from([0, 1, 2, 4]), min_size=3, max_size=3))
def test_memory_alone_reaches_as_far_as_what_it_lacks_allows(
    *, table: list[list[str]], trailing: list[int]
) -> None:
    numbers = tuple(trailing[: len(table)])
    space = Namespace(bytes(16), (1,) * len(table), 16, "d", "", numbers if any(numbers) else ())
    lacking = [[part for part, row in enumerate(table) if row[at] != "there"] for at in range(CHUNKS)]
    gaps = [Gap(at, tuple(parts)) for at, parts in enumerate(lacking) if parts]
    assert memory_boundary(space, CHUNKS, gaps) == max(
        b for b in range(CHUNKS + 1) if accepts(space, table, b, good={"there"})
    )


def test_what_every_chunk_needs_is_named_before_what_only_an_end_needs() -> None:
    space = Namespace(bytes(16), (1, 1), 16, "d", "", (1, 0))
    everywhere = reach(space, 4, [Lack(2, 0, None), Lack(2, 1, None)])
    assert (everywhere.boundary, everywhere.missing) == (2, Lack(2, 1, None))
    state = reach(space, 4, [Lack(2, 0, None), Lack(3, 0, None)])
    assert (state.boundary, state.missing) == (2, Lack(3, 0, None))
    both = reach(space, 4, [Lack(1, 0, None), Lack(2, 1, None)])
    assert (both.boundary, both.missing) == (1, Lack(2, 1, None))
