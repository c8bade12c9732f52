"""Which boundaries are usable, and what they need, by part numbers alone."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.identity.boundaries import needed_spans, start_of, usable_boundaries
from kvferry.identity.geometry import Geometry, GroupKind, KvGroup, usable_chunks

trailing_numbers = st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=4)


def needs(boundary: int, trailing: int) -> set[int]:
    """Chunks, as the words say it."""
    return {chunk for chunk in range(boundary) if not trailing or boundary - chunk <= trailing}


@given(chunks=st.integers(0, 9), numbers=trailing_numbers, data=st.data())
def test_a_boundary_is_usable_when_everything_it_needs_is_there(
    *, chunks: int, numbers: list[int], data: st.DataObject
) -> None:
    row = st.lists(st.sampled_from([True, True, False]), min_size=chunks, max_size=chunks)
    present = {number: data.draw(row) for number in numbers}
    missing = {
        number: [chunk for chunk in range(chunks) if not there[chunk]] for number, there in present.items()
    }
    assert list(usable_boundaries(chunks, missing)) == [
        all(there[chunk] for number, there in present.items() for chunk in needs(boundary, number))
        for boundary in range(chunks + 1)
    ]


@given(boundary=st.integers(0, 9), numbers=trailing_numbers)
def test_spans_name_each_needed_part_once_and_nothing_else(*, boundary: int, numbers: list[int]) -> None:
    spans = needed_spans(boundary, range(len(numbers)), numbers)
    named = [(chunk, part) for span in spans for chunk in span.chunks for part in span.parts]
    assert sorted(named) == sorted(
        (chunk, part) for part, number in enumerate(numbers) for chunk in needs(boundary, number)
    )
    assert all(
        min(needs(boundary, number), default=boundary) == start_of(number, boundary) for number in numbers
    )
    assert needed_spans(boundary, range(len(numbers)), ()) == needed_spans(
        boundary, range(len(numbers)), [0] * len(numbers)
    )


@given(windows=st.lists(st.integers(2, 14), max_size=2), chunk_tokens=st.integers(1, 5), data=st.data())
def test_the_numbers_of_a_geometry_lead_to_the_boundary_that_its_groups_accept(
    *, windows: list[int], chunk_tokens: int, data: st.DataObject
) -> None:
    def group(kind: GroupKind, window: int = 0) -> KvGroup:
        return KvGroup(kind, 1, (("l",),), (64,), 8, window_tokens=window)

    groups = (
        group(GroupKind.FULL),
        group(GroupKind.STATE),
        *(group(GroupKind.WINDOW, window) for window in windows),
    )
    row = st.lists(st.booleans(), min_size=6, max_size=6)
    present = [data.draw(row) for _ in groups]
    missing: dict[int, list[int]] = {}
    for number, there in zip(Geometry(groups, chunk_tokens).trailing, present, strict=True):
        gone = {chunk for chunk in range(6) if not there[chunk]}
        missing[number] = sorted(gone | set(missing.get(number, ())))
    expected = usable_chunks(groups, present, chunk_tokens=chunk_tokens)
    assert usable_boundaries(6, missing).rfind(1) == expected
