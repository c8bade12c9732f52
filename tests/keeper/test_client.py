"""A node's side: every question is answered once and in time, whatever its keepers do."""

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from tests.keeper.asking import NOBODY, REFS, located, soon, staged, status
from tests.keeper.conftest import Connect, Serve
from tests.keeper.fleet import Answers, FakeKeeping
from tests.keeper.raw import RawKeeper, raw_keeper

from kvferry.keeper.access import KeeperAccess
from kvferry.keeper.client import Keepers
from kvferry.keeper.framing import encode
from kvferry.keeper.server import Admission
from kvferry.keeper.wire import (
    Locate,
    Located,
    Ping,
    Pong,
    Stage,
    Staged,
    ToKeeper,
    Where,
)
from kvferry.testing.expectations import WAIT_S, eventually
from kvferry.tiers.contract import Outcome


@pytest.mark.parametrize("count", [1, 3])
def test_a_question_is_shared_by_keepers_and_answered_as_one(
    serve: Serve, connect: Connect, count: int
) -> None:
    kept = dict.fromkeys(REFS[:30], Where.DISK) | dict.fromkeys(REFS[30:50], Where.OBJECTS)
    keepings = [FakeKeeping(where=kept) for _ in range(count)]
    servers = [serve(keeping, Admission(name=f"k{at}")) for at, keeping in enumerate(keepings)]
    keepers = connect([server.address for server in servers])
    assert located(keepers) == [kept.get(ref, Where.ABSENT) for ref in REFS]
    assert staged(keepers) == [Outcome.OK if ref in kept else Outcome.MISS for ref in REFS]
    shares = [list(keeping.stages[0].refs) for keeping in keepings]
    assert Counter(ref for share in shares for ref in share) == Counter(REFS)
    assert all([ref for ref in REFS if ref in share] == share for share in shares)  # in the order asked
    chunks = [{ref.key.chunk for ref in share} for share in shares]
    assert sum(map(len, chunks)) == 60  # a chunk's parts stay together
    totals = keepers.statistics().keepers
    assert sum(each.located_parts for each in totals) == 120
    assert sum(each.staged_parts for each in totals) == 50


def test_namesakes_are_told_apart_by_address_and_told_of_once(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the order in which a node has them, and whether all of them are up."""
    keepings = [FakeKeeping() for _ in range(3)]
    names = ("twin", "twin", "other")
    servers = [serve(one, Admission(name=name)) for one, name in zip(keepings, names, strict=True)]
    addresses = [server.address for server in servers]

    def shares(*order: int) -> list[set[bytes]]:
        for keeping in keepings:
            keeping.stages.clear()
        staged(connect([addresses[at] for at in order]))
        return [{ref.key.chunk for one in keeping.stages for ref in one.refs} for keeping in keepings]

    with caplog.at_level(logging.WARNING, "kvferry.keepers"):
        first = shares(0, 1, 2)
        assert all(first)
        assert sum(map(len, first)) == 60
        assert shares(2, 1, 0) == first
    told = [message for message in caplog.messages if "2 keepers are called 'twin'" in message]
    assert len(told) == 2, "once by each of the two nodes"
    assert all(str(address) in told[0] for address in addresses[:2])
    keepers = connect(addresses)
    servers[0].close()
    eventually(lambda: keepers.statistics().up == 2, "one is gone")
    for keeping in keepings:
        keeping.stages.clear()
    staged(keepers)
    left = {ref.key.chunk for one in keepings[2].stages for ref in one.refs}
    assert first[2] <= left, "only the share of the one that is gone has moved"


def test_parts_of_several_namespaces_are_answered_as_one(serve: Serve, connect: Connect) -> None:
    other = [ref._replace(key=ref.key._replace(namespace=b"o" * 16)) for ref in REFS[:5]]
    mixed = [REFS[0], other[0], REFS[1], other[1]]
    keeping = FakeKeeping(where={REFS[1]: Where.DISK, other[0]: Where.OBJECTS})
    keepers = connect([serve(keeping).address])
    answers = Answers()
    keepers.locate(mixed, deadline=soon(), done=answers)
    assert answers.wait() == [((Where.ABSENT, Where.OBJECTS, Where.DISK, Where.ABSENT),)]


def test_nobody_to_ask_is_known_at_once(stack: ExitStack, connect: Connect) -> None:
    for addresses in ([], [NOBODY]):
        keepers = connect(addresses, up=0)
        assert located(keepers) == [Where.UNKNOWN] * len(REFS)
        assert staged(keepers) == [Outcome.REFUSED] * len(REFS)
    eventually(lambda: "cannot connect" in status(keepers).error, "tried")
    assert status(keepers).state == "down"


def test_no_parts_and_no_time_are_answered_too(serve: Serve, connect: Connect) -> None:
    keeping = FakeKeeping()
    keepers = connect([serve(keeping).address])
    answers, outcomes = Answers(), Answers()
    keepers.locate([], deadline=soon(), done=answers)
    assert answers.wait() == [((),)]
    keepers.stage([], deadline=soon(), done=outcomes)
    assert staged(keepers, wait_s=-1.0) == [Outcome.LATE] * len(REFS)
    assert located(keepers, wait_s=-1.0) == [Where.UNKNOWN] * len(REFS)
    assert outcomes.calls == []
    assert keeping.stages == []


def test_a_deadline_ends_a_question_and_the_keepers_work(serve: Serve, connect: Connect) -> None:
    keeping = FakeKeeping(held=True)
    keepers = connect([serve(keeping).address])
    assert located(keepers, wait_s=0.1) == [Where.UNKNOWN] * len(REFS)
    answers = Answers()
    keepers.stage(REFS, deadline=time.monotonic() + 0.5, done=answers)
    eventually(lambda: keeping.stages, "asked")
    keeping.stages[0].done(3, Outcome.OK)
    calls = answers.wait(len(REFS))
    assert Counter(outcome for _, outcome in calls)[Outcome.LATE] >= len(REFS) - 1
    assert keeping.stages[0].cancelled.wait(WAIT_S)
    for index in range(len(REFS)):
        keeping.stages[0].done(index, Outcome.OK)  # too late
    keeping.locates[0][1]([Where.DISK] * len(REFS))
    keeping.held = False
    assert staged(keepers) == [Outcome.MISS] * len(REFS)
    assert len(answers.calls) == len(REFS)
    assert status(keepers).strange == 0
    assert status(keepers).state == "up"


def test_a_cancelled_stage_ends_and_what_was_there_counts(serve: Serve, connect: Connect) -> None:
    keeping = FakeKeeping(held=True)
    keepers = connect([serve(keeping).address])
    answers = Answers()
    transfer = keepers.stage(REFS, deadline=soon(), done=answers)
    eventually(lambda: keeping.stages, "asked")
    keeping.stages[0].done(5, Outcome.OK)
    assert answers.wait() == [(5, Outcome.OK)]
    transfer.cancel()
    transfer.cancel()
    calls = answers.wait(len(REFS))
    assert Counter(outcome for _, outcome in calls) == {Outcome.OK: 1, Outcome.LATE: len(REFS) - 1}
    assert keeping.stages[0].cancelled.wait(WAIT_S)


def test_a_keeper_that_dies_fails_what_it_had_not_staged(serve: Serve, connect: Connect) -> None:
    held, kept = FakeKeeping(held=True), FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))
    dying, other = serve(held, Admission(name="a")), serve(kept, Admission(name="b"))
    keepers = connect([dying.address, other.address])
    answers, where = Answers(), Answers()
    keepers.stage(REFS, deadline=soon(), done=answers)
    keepers.locate(REFS, deadline=soon(), done=where)
    eventually(lambda: held.stages and held.locates, "asked")
    share = set(held.stages[0].refs)
    held.stages[0].done(0, Outcome.OK)
    answers.wait(len(REFS) - len(share) + 1)
    dying.close()
    calls = answers.wait(len(REFS))
    assert Counter(outcome for _, outcome in calls) == {
        Outcome.OK: len(REFS) - len(share) + 1,
        Outcome.FAILED: len(share) - 1,
    }
    ((found,),) = where.wait()
    assert list(found) == [Where.UNKNOWN if ref in share else Where.DISK for ref in REFS]


def test_a_lost_keepers_share_moves_to_the_others_and_back_when_it_returns(
    serve: Serve, connect: Connect
) -> None:
    keepings = [FakeKeeping(where=dict.fromkeys(REFS, Where.DISK)) for _ in range(3)]
    servers = [serve(keeping, Admission(name=f"k{at}")) for at, keeping in enumerate(keepings)]
    keepers = connect([server.address for server in servers])
    staged(keepers)
    before = [set(keeping.stages[0].refs) for keeping in keepings]
    servers[1].close()
    eventually(lambda: keepers.statistics().up == 2, "lost")
    assert staged(keepers) == [Outcome.OK] * len(REFS)
    assert before[0] < set(keepings[0].stages[1].refs)
    assert before[2] < set(keepings[2].stages[1].refs)
    serve(keepings[1], Admission(name="k1"), port=servers[1].address.port)
    eventually(lambda: keepers.statistics().up == 3, "back")
    assert staged(keepers) == [Outcome.OK] * len(REFS)
    assert [set(keeping.stages[-1].refs) for keeping in keepings] == before
    assert status(keepers, 1).connects == 2


def _liar(message: ToKeeper) -> bytes:
    """Answers too much, too little, twice, and what nobody asked."""
    match message:
        case Locate(ticket=ticket, parts=parts):
            wrong = [Located(ticket + 100, b"\1"), Located(ticket, b"\1" * (len(parts) + 1))]
            last = Located(ticket, b"\1" * len(parts))
            return b"".join(map(encode, [*wrong, Staged(ticket, (0,), b"\0"), last, last]))
        case Stage(ticket=ticket, parts=parts):
            every = tuple(range(len(parts)))
            wrong_kinds = [Located(ticket, b"\1" * len(parts)), Staged(0, (0,), b"\0"), Pong()]
            outside = Staged(ticket, (len(parts), 16383), b"\0\0")
            some = Staged(ticket, (0, 0, 1), b"\0\1\0")
            rest = Staged(ticket, every, b"\1" * len(parts))
            return b"".join(map(encode, [*wrong_kinds, outside, some, rest, rest]))
        case Ping():
            return encode(Pong())
        case _:
            return b""


def test_a_keeper_that_lies_gets_one_answer_per_index_and_no_more(connect: Connect) -> None:
    with raw_keeper(_liar) as liar:
        keepers = connect([liar.address])
        for _ in range(3):
            assert located(keepers) == [Where.DISK] * len(REFS)
            assert staged(keepers) == [Outcome.OK, Outcome.OK] + [Outcome.MISS] * (len(REFS) - 2)
        assert status(keepers).state == "up"
        assert status(keepers).strange >= 3 * 5
        assert keepers.statistics().defects == 0


def test_answers_for_another_keepers_question_count_for_nothing(serve: Serve, connect: Connect) -> None:
    held = FakeKeeping(held=True)
    asked = threading.Event()

    def answer(message: ToKeeper) -> bytes:
        if isinstance(message, Stage):
            eventually(lambda: held.stages, "the other is asked too")
            asked.set()
            others = [Staged(ticket, (0,), b"\0") for ticket in range(1, 9) if ticket != message.ticket]
            every = tuple(range(len(message.parts)))
            return b"".join(map(encode, [*others, Staged(message.ticket, every, b"\1" * len(every))]))
        return encode(Pong()) if isinstance(message, Ping) else b""

    with raw_keeper(answer) as liar:
        keepers = connect([serve(held).address, liar.address])
        answers = Answers()
        keepers.stage(REFS, deadline=soon(), done=answers)
        assert asked.wait(WAIT_S)
        share = len(held.stages[0].refs)
        calls = answers.wait(len(REFS) - share)
        assert {outcome for _, outcome in calls} == {Outcome.MISS}
        for index in range(share):
            held.stages[0].done(index, Outcome.OK)
        assert Counter(outcome for _, outcome in answers.wait(len(REFS)))[Outcome.OK] == share


def test_garbage_in_the_middle_costs_the_questions_of_that_keeper(serve: Serve, connect: Connect) -> None:
    with raw_keeper(lambda message: b"\xff" * 100) as wrong:
        kept = FakeKeeping(where=dict.fromkeys(REFS, Where.DISK))
        keepers = connect([wrong.address, serve(kept).address])
        outcomes = Counter(staged(keepers))
        assert outcomes == {Outcome.OK: len(kept.stages[0].refs), Outcome.FAILED: outcomes[Outcome.FAILED]}
        assert outcomes[Outcome.FAILED]


def test_a_done_that_fails_costs_the_others_nothing(serve: Serve, connect: Connect) -> None:
    keepers = connect([serve(FakeKeeping()).address])
    seen: list[int] = []

    def done(index: int, outcome: Outcome) -> None:
        seen.append(index)
        if index == 3:
            raise ZeroDivisionError

    keepers.stage(REFS, deadline=soon(), done=done)
    eventually(lambda: sorted(seen) == list(range(len(REFS))), "all are told")
    eventually(lambda: keepers.statistics().defects == 1, "counted")


def test_closing_answers_everybody(serve: Serve, connect: Connect) -> None:
    keeping = FakeKeeping(held=True)
    keepers = connect([serve(keeping).address])
    answers, where = Answers(), Answers()
    keepers.stage(REFS, deadline=soon(), done=answers)
    keepers.locate(REFS, deadline=soon(), done=where)
    keepers.close()
    keepers.close()
    assert Counter(outcome for _, outcome in answers.calls) == {Outcome.LATE: len(REFS)}
    assert where.calls == [((Where.UNKNOWN,) * len(REFS),)]
    assert staged(keepers) == [Outcome.REFUSED] * len(REFS)
    assert located(keepers) == [Where.UNKNOWN] * len(REFS)
    keepers.used(REFS)
    assert keepers.statistics().dropped_parts == len(REFS)


def test_closing_waits_for_no_keeper(stack: ExitStack) -> None:
    silent = RawKeeper(welcome=b"")
    stack.callback(silent.close)
    keepers = Keepers([silent.address, NOBODY], access=KeeperAccess())
    eventually(lambda: silent.heard, "greeted")
    keepers.close()


def test_keepers_of_one_name_still_share_the_work(serve: Serve, connect: Connect) -> None:
    keepings = [FakeKeeping(), FakeKeeping()]
    keepers = connect([serve(keeping, Admission(name="same")).address for keeping in keepings])
    staged(keepers)
    assert all(keeping.stages for keeping in keepings)


def test_the_same_address_twice_is_one_keeper(serve: Serve, connect: Connect) -> None:
    address = serve(FakeKeeping()).address
    assert len(connect([address, address], up=1).statistics().keepers) == 1
