"""A keeper that lives and answers no questions costs a few requests their wait until it answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keeper.asking import REFS, located, staged, status
from tests.keeper.conftest import Connect, Serve
from tests.keeper.fleet import FakeKeeping

from kvferry.keeper import answering
from kvferry.keeper.answering import HESITANT_S, MAX_WAIT_S, TRIAL_S, Answering
from kvferry.keeper.wire import Locate, Message, Parts, Where
from kvferry.loop import Loop
from kvferry.testing.expectations import eventually
from kvferry.tiers.contract import Outcome

PARTS = Parts.of(REFS)[0]


@settings(max_examples=40, deadline=None)
@given(
    wait_s=st.floats(HESITANT_S, 2.0),
    every_s=st.floats(0.05, 1.0),
    spells=st.lists(st.tuples(st.booleans(), st.floats(0.0, 30.0)), max_size=4),
)
def test_each_outage_costs_three_requests_their_wait_at_most_and_ends_by_itself(
    wait_s: float, every_s: float, spells: list[tuple[bool, float]]
) -> None:
    """Requests one after another, of which those wait that ask it while it does not answer."""
    now = 0.0
    asked: list[Locate] = []
    tickets = iter(range(1, 1 << 30))

    def ask(message: Message) -> None:
        assert isinstance(message, Locate)
        assert len(message.parts) == 1
        asked.append(message)

    loop = Loop(after_turn=lambda: None, clock=lambda: now)
    try:
        keeper = Answering(loop, ask=ask, ticket=lambda: next(tickets))
        in_vain = 0
        for works, lasts_s in [*spells, (True, MAX_WAIT_S + TRIAL_S + 5.0)]:
            in_vain = in_vain if not works else 0
            until = now + lasts_s
            while now < until:
                loop.turn(0.0)
                if works and asked:
                    keeper.settles(asked[-1].ticket)
                if not keeper.fails and works:
                    keeper.answered()
                    in_vain = 0
                elif not keeper.fails:
                    now += wait_s
                    in_vain += 1
                    keeper.unanswered(PARTS, wait_s)
                assert in_vain <= 3
                now += every_s
        loop.turn(0.0)
        if asked:
            keeper.settles(asked[-1].ticket)
        assert not keeper.fails
        sent = len(asked)
        now += 100.0
        loop.turn(0.0)
        assert len(asked) == sent, "nothing is tried of a keeper that answers"
    finally:
        loop.close()


def test_a_keeper_that_lives_and_locates_nothing_is_not_asked_until_a_trial_is_answered(
    connect: Connect, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "TRIAL_S", 0.1)
    keeping = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK), held=True)
    keepers = connect([serve(keeping).address])
    assert located(keepers, wait_s=0.3) == [Where.UNKNOWN] * len(REFS)
    eventually(lambda: status(keepers).state == "silent", "noticed")
    for _ in range(50):  # each would take its wait, were it asked
        assert located(keepers) == [Where.UNKNOWN] * len(REFS)
        assert staged(keepers) == [Outcome.REFUSED] * len(REFS)
    eventually(lambda: len(keeping.locates) >= 3, "trials")
    assert all(len(refs) == 1 for refs, _ in keeping.locates[1:])
    keeping.held = False
    eventually(lambda: status(keepers).state == "up", "answers")
    assert located(keepers) == [Where.DISK] * len(REFS)
    assert (status(keepers).connects, status(keepers).strange) == (1, 0)


def test_the_others_take_its_share_meanwhile(connect: Connect, serve: Serve) -> None:
    kept = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))
    hangs = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK), held=True)
    keepers = connect([serve(hangs).address, serve(kept).address])
    first = located(keepers, wait_s=0.3)
    assert {*first} == {Where.UNKNOWN, Where.DISK}
    eventually(lambda: status(keepers).state == "silent", "noticed")
    assert located(keepers) == [Where.DISK] * len(REFS)


def test_an_answer_that_comes_after_its_time_is_none(connect: Connect, serve: Serve) -> None:
    """Nor is it taken for the answer to another question."""
    keeping = FakeKeeping(held=True)
    keepers = connect([serve(keeping).address])
    assert located(keepers, wait_s=0.3) == [Where.UNKNOWN] * len(REFS)
    eventually(lambda: len(keeping.locates) >= 2, "a trial")
    refs, done = keeping.locates[0]
    done([Where.DISK] * len(refs))
    keeping.held = False
    eventually(lambda: located(keepers) == [Where.ABSENT] * len(REFS), "asked again")
