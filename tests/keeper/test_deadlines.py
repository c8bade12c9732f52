"""No question holds a keeper's memory for longer than questions may take."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.keeper.fleet import FakeKeeping, Staging, some_refs

from kvferry.identity.names import PartRef
from kvferry.keeper.requests import MAX_WAIT_S, Requests
from kvferry.keeper.wire import Locate, Located, Message, Parts, Role, Stage, Where
from kvferry.loop import MIN_TIMERS, Loop
from kvferry.tiers.contract import Outcome

(PARTS,) = Parts.of(some_refs(2))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(after_turn=lambda: None, clock=lambda: 0.0)
    yield made
    made.close()


class _Timed(FakeKeeping):
    """Notes deadlines."""

    def locate(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[Sequence[Where]], None]
    ) -> None:
        self.told.append(("locate", deadline))

    def stage(
        self, refs: Sequence[PartRef], *, deadline: float, done: Callable[[int, Outcome], None]
    ) -> Staging:
        self.told.append(("stage", deadline))
        return Staging(refs, done)


def test_a_question_waits_no_longer_than_it_may_whatever_it_says(loop: Loop) -> None:
    keeping = _Timed()
    asked = Requests(
        lambda message: None,
        keeping=keeping,
        loop=loop,
        status=lambda: b"{}",
        slowly=lambda work: None,
        clock=lambda: 1000.0,
    )
    for ticket, deadline_s in enumerate((5.0, 86400.0)):
        asked.message(Stage(ticket=2 * ticket, parts=PARTS, deadline_s=deadline_s), Role.NODE)
        asked.message(Locate(ticket=2 * ticket + 1, parts=PARTS, deadline_s=deadline_s), Role.NODE)
    longest = 1000.0 + MAX_WAIT_S
    assert keeping.told == [("stage", 1005.0), ("locate", 1005.0), ("stage", longest), ("locate", longest)]


def test_a_question_that_a_tier_never_answers_is_not_kept_beyond_its_deadline() -> None:
    """What is said of it later is not heard."""
    now = 0.0
    loop = Loop(after_turn=lambda: None, clock=lambda: now)
    sent: list[Message] = []
    keeping = FakeKeeping(held=True)
    asked = Requests(
        sent.append,
        keeping=keeping,
        loop=loop,
        status=lambda: b"{}",
        slowly=lambda work: None,
        clock=lambda: now,
    )
    try:
        for ticket in (1, 2):
            asked.message(Locate(ticket=ticket, parts=PARTS, deadline_s=5.0), Role.NODE)
        refs, answer = keeping.locates[1]
        answer([Where.DISK] * len(refs))
        loop.turn(0.0)
        assert sent == [Located(ticket=2, where=bytes([Where.DISK]) * 2)]
        now = 5.0
        loop.turn(0.0)
        assert len(asked) == 0
        refs, answer = keeping.locates[0]
        answer([Where.DISK] * len(refs))
        loop.turn(0.0)
        assert len(sent) == 1
    finally:
        loop.close()


def test_cancelled_timers_do_not_pile_up_until_their_time_comes(loop: Loop) -> None:
    rung: list[int] = []
    for number in range(100):
        loop.at(-1.0, lambda number=number: rung.append(number))
        for _ in range(100):
            loop.at(600.0, lambda: rung.append(-1)).cancel()
    assert len(loop._timers) <= MIN_TIMERS + 100
    loop.turn(0.0)
    assert rung == list(range(100))


def test_timers_that_are_wanted_are_kept_however_many_there_are(loop: Loop) -> None:
    rung: list[int] = []
    for number in range(5 * MIN_TIMERS):
        loop.at(-1.0, lambda number=number: rung.append(number))
    loop.turn(0.0)
    assert rung == list(range(5 * MIN_TIMERS))
