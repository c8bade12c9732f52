"""For how long what is being dropped may not come back."""

from tests.keeper.rig import prompt

from kvferry.keeper.admin import DROP_S
from kvferry.keeper.deletion import GRACE_S, Drops

REFS = prompt("p", 24, nbytes=100)


def test_a_drop_covers_its_namespace_until_its_grace_is_over() -> None:
    now = [100.0]
    drops = Drops(lambda: now[0])
    mine, theirs = REFS[0], prompt("x", 1, namespace=b"o" * 16)[0]
    space = mine.key.namespace
    assert drops.among([mine, theirs]) == frozenset()
    drops.begin(space)
    drops.begin(space)
    drops.end(space)
    now[0] += 100 * GRACE_S
    assert drops.among([mine, theirs]) == {mine}
    drops.end(space)
    assert drops.among([mine, theirs]) == {mine}
    now[0] += GRACE_S
    assert drops.among([mine, theirs]) == frozenset()
    drops.begin(None)
    assert drops.among([mine, theirs]) == {mine, theirs}


def test_a_drop_covers_its_namespace_while_other_keepers_are_waited_for_and_not_once_all_have_ended() -> None:
    now = [100.0]
    drops = Drops(lambda: now[0])
    space = REFS[0].key.namespace
    drops.begin(space)
    drops.end(space)
    now[0] += DROP_S
    assert drops.among(REFS) == frozenset(REFS)
    drops.ended(None)
    assert drops.among(REFS) == frozenset(REFS)
    drops.begin(space)
    drops.ended(space)
    assert drops.among(REFS) == frozenset(REFS), "another one runs"
    drops.end(space)
    drops.ended(space)
    assert drops.among(REFS) == frozenset()


def test_what_one_tier_alone_lost_may_come_back_at_once() -> None:
    now = [100.0]
    drops = Drops(lambda: now[0])
    drops.begin(None)
    drops.end(None, grace_s=0.0)
    assert drops.among(REFS) == frozenset()
