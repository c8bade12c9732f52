"""A ticket begins at the first chunk that the load needs of its part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.messages import LookupAnswer, PartPlace, Reason
from kvferry.errors import RefusedError

FIRST = 3


def answer(count: int, trailing: tuple[int, ...] = ()) -> LookupAnswer:
    """Of two parts; a place's offset names its chunk, counted from the first, and its part."""
    parts = tuple(tuple(PartPlace(10 * at + part, b"") for part in (0, 1)) for at in range(count))
    return LookupAnswer(
        "r", 7, 1, count, FIRST, (0,) * count, parts, 1.0, 1.0, 9.0, Reason.COMPLETE, trailing
    )


@given(count=st.integers(1, 9), skip=st.integers(0, 10), trailing=st.integers(0, 12))
def test_a_ticket_holds_what_its_part_needs_and_the_engine_lacks(
    *, count: int, skip: int, trailing: int
) -> None:
    for part, last in enumerate((0, trailing)):
        ticket = answer(count, (0, trailing)).ticket(part, skip=skip)
        needed = [at for at in range(count) if at >= skip and (not last or at >= count - last)]
        assert [place.offset for place in ticket.places if place is not None] == [
            10 * at + part for at in needed
        ]
        assert ticket.first_chunk == FIRST + (needed[0] if needed else count)


def test_a_shorter_load_is_refused_where_it_would_end_at_another_boundary() -> None:
    assert len(answer(5).ticket(0, count=3).places) == 3
    assert not answer(5).all_or_nothing
    assert len(answer(5, (0, 1)).ticket(1, count=5).places) == 1
    assert answer(5, (0, 1)).all_or_nothing
    with pytest.raises(RefusedError, match="3"):
        answer(5, (0, 1)).ticket(0, count=3)
