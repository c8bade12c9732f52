"""Whatever keepers answer, and in whatever order: each index once, and nothing after that."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvferry.keeper.questions import Asked, Calls, Locating, Staging
from kvferry.keeper.wire import Parts, Where
from kvferry.tiers.contract import Outcome

OUTCOMES = st.sampled_from(list(Outcome))
NONE = Parts(b"test" + b"n" * 12, b"", (), ())


def _run(calls: Calls) -> None:
    for call in calls:
        call()


@st.composite
def shares(draw: st.DrawFn) -> list[list[int]]:
    """The places of a question, each asked of one of some keepers."""
    owners = draw(st.lists(st.integers(0, 3), max_size=12))
    return [[place for place, owner in enumerate(owners) if owner == keeper] for keeper in range(4)]


@given(shares(), st.data())
def test_a_stage_is_answered_once_per_index(asked_of: list[list[int]], data: st.DataObject) -> None:
    told: list[tuple[int, Outcome]] = []
    question = Staging(sum(map(len, asked_of)), lambda index, outcome: told.append((index, outcome)))
    asked = [Asked(None, question, places, parts=NONE, at=0.0) for places in asked_of if places]
    wanted: dict[int, Outcome] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        if not asked:
            break
        one, outcome = data.draw(st.sampled_from(asked)), data.draw(OUTCOMES)
        if data.draw(st.integers(0, 9)) == 0:
            for place in one.places:
                wanted.setdefault(place, outcome)
            _run(one.give_up(outcome))
            assert one.answered
            continue
        index = data.draw(st.integers(-1, len(one.places)))
        fresh = 0 <= index < len(one.places) and one.places[index] not in wanted
        assert one.take(index) == fresh
        if fresh:
            wanted[one.places[index]] = outcome
            _run(question.give_up([one.places[index]], outcome))
    assert dict(told) == wanted
    assert question.over == (len(wanted) == sum(map(len, asked_of)))
    _run(question.end(Outcome.LATE))
    _run(question.end(Outcome.LATE))
    assert question.over
    assert Counter(index for index, _ in told) == Counter(range(sum(map(len, asked_of))))
    assert dict(told) == {place: wanted.get(place, Outcome.LATE) for place in dict(told)}


@given(shares(), st.data())
def test_a_locate_is_answered_once_when_nothing_is_missing(
    asked_of: list[list[int]], data: st.DataObject
) -> None:
    told: list[tuple[Where, ...]] = []
    count = sum(map(len, asked_of))
    question = Locating(count, lambda where: told.append(tuple(where)))
    wanted: dict[int, Where] = {}
    for places in data.draw(st.permutations(asked_of)):
        for _ in range(data.draw(st.integers(0, 2))):  # some answer never, some twice
            where = data.draw(
                st.lists(st.sampled_from(list(Where)), min_size=len(places), max_size=len(places))
            )
            given_up = data.draw(st.booleans())
            for place, found in zip(places, where, strict=True):
                wanted.setdefault(place, Where.UNKNOWN if given_up else found)
            _run(question.give_up(places, Outcome.FAILED) if given_up else question.located(places, where))
    assert bool(told) == question.over
    if count:
        assert question.over == (len(wanted) == count)
    _run(question.end(Outcome.LATE))
    _run(question.end(Outcome.LATE))
    assert told == [tuple(wanted.get(place, Where.UNKNOWN) for place in range(count))]
