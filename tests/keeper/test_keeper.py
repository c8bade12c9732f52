"""A keeper over tiers in memory: what goes down, what comes back, and what is told of it."""

import threading
from collections.abc import Iterator

import pytest
from tests.keeper.rig import Rig, contents, fill, holds, prompt, rigged

from kvferry.errors import RefusedError
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.tiers.contract import Dropped, Outcome


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as made:
        yield made


def test_what_is_likely_to_be_wanted_goes_to_the_disk_and_to_objects(rig: Rig) -> None:
    refs = prompt("a", 20)
    rig.tell_stored(refs)
    rig.idle()
    assert holds(rig.disk, refs)
    assert holds(rig.objects, refs)


def test_what_was_only_stored_goes_nowhere_until_it_is_used(rig: Rig) -> None:
    refs = prompt("a", 6)
    rig.tell_stored(refs, likely=False)
    rig.idle()
    assert not rig.disk.parts
    assert not rig.objects.parts
    rig.keeper.used(refs[:3])
    eventually(lambda: len(rig.objects.parts) == len(rig.disk.parts) == 3, "a copy of what was used")
    rig.idle()
    assert set(rig.disk.parts) == set(rig.objects.parts) == {ref.key for ref in refs[:3]}


def test_what_left_valkey_comes_back_from_the_disk(rig: Rig) -> None:
    refs = prompt("a", 30)
    fill(rig.disk, refs)
    assert rig.locate(refs) == [Where.DISK] * 30
    assert rig.stage(refs) == [Outcome.OK] * 30
    assert holds(rig.valkey, refs)


def test_what_only_objects_hold_comes_back_and_is_put_on_the_disk_too(rig: Rig) -> None:
    refs = prompt("a", 30)
    fill(rig.objects, refs)
    assert rig.locate(refs) == [Where.OBJECTS] * 30
    assert rig.stage(refs) == [Outcome.OK] * 30
    assert holds(rig.valkey, refs)
    rig.idle()
    assert holds(rig.disk, refs)
    assert rig.locate(refs) == [Where.DISK] * 30


def test_what_nobody_has_is_a_miss(rig: Rig) -> None:
    refs = prompt("a", 4)
    fill(rig.disk, refs[1:2])
    assert rig.locate(refs) == [Where.ABSENT, Where.DISK, Where.ABSENT, Where.ABSENT]
    assert rig.stage(refs) == [Outcome.MISS, Outcome.OK, Outcome.MISS, Outcome.MISS]
    assert rig.locate([]) == []
    assert rig.stage([]) == []


@pytest.mark.parametrize("lower", ["disk", "objects"])
def test_one_lower_tier_is_enough(lower: str) -> None:
    refs = prompt("a", 8)
    with rigged(disk=lower == "disk", objects=lower == "objects") as rig:
        rig.tell_stored(refs)
        rig.idle()
        assert holds(getattr(rig, lower), refs)
        rig.valkey.parts.clear()
        assert rig.stage(refs) == [Outcome.OK] * 8
        assert holds(rig.valkey, refs)


def test_what_is_removed_is_gone_from_every_tier(rig: Rig) -> None:
    refs = prompt("a", 8)
    rig.tell_stored(refs)
    rig.idle()
    gone = threading.Event()
    rig.keeper.remove(refs[:3], done=gone.set)
    assert gone.wait(30)
    left = {ref.key for ref in refs[3:]}
    assert set(rig.valkey.parts) == set(rig.disk.parts) == set(rig.objects.parts) == left
    assert rig.locate(refs[:4]) == [Where.ABSENT] * 3 + [Where.DISK]


def test_the_most_reused_come_first(rig: Rig) -> None:
    often, once = prompt("often", 3), prompt("once", 3)
    rig.keeper.used(often)
    rig.keeper.used(once)
    rig.keeper.used(often)
    found = rig.keeper.most_reused(within_s=3600, max_bytes=4 * often[0].nbytes, namespace=None)
    assert found == [*often, once[0]]
    assert rig.keeper.most_reused(within_s=3600, max_bytes=1 << 30, namespace=b"o" * 16) == []
    assert bytes(contents(often[0])) != bytes(contents(once[0]))


def test_named_parts_are_dropped_from_one_tier_alone(rig: Rig) -> None:
    refs = prompt("a", 6)
    rig.tell_stored(refs)
    rig.idle()
    found: list[Dropped] = []
    ready = threading.Event()

    def done(dropped: Dropped) -> None:
        found.append(dropped)
        ready.set()

    rig.keeper.drop("disk", namespace=None, older_than_s=None, parts=refs[:2], done=done)
    assert ready.wait(30)
    assert found == [Dropped(2, 2 * refs[0].nbytes)]
    assert rig.locate(refs) == [Where.OBJECTS] * 2 + [Where.DISK] * 4
    assert holds(rig.valkey, refs)


def dropped(rig: Rig, tier: str, *, namespace: bytes | None, older_than_s: float | None = None) -> Dropped:
    found: list[Dropped] = []
    ready = threading.Event()

    def done(result: Dropped) -> None:
        found.append(result)
        ready.set()

    rig.keeper.drop(tier, namespace=namespace, older_than_s=older_than_s, done=done)
    assert ready.wait(30)
    return found[0]


def test_what_is_dropped_from_one_tier_does_not_come_back_from_another(rig: Rig) -> None:
    """Meanwhile nodes ask for it and tell of it, as they do while a fleet's drop goes tier by tier."""
    mine, theirs = prompt("a", 6), prompt("b", 6, namespace=b"o" * 16)
    rig.tell_stored(mine)
    rig.tell_stored(theirs)
    rig.idle()
    for tier in ("objects", "disk"):
        assert dropped(rig, tier, namespace=mine[0].key.namespace) == Dropped(6, 6 * mine[0].nbytes)
        rig.keeper.used(mine)
        rig.keeper.stored(mine, positions=range(6), likely=[True] * 6)
        assert rig.locate([mine[0], theirs[0], mine[1]]) == [Where.ABSENT, Where.DISK, Where.ABSENT]
        assert rig.stage([mine[0], theirs[0], mine[1]]) == [Outcome.MISS, Outcome.OK, Outcome.MISS]
    rig.idle()
    assert set(rig.disk.parts) == set(rig.objects.parts) == {ref.key for ref in theirs}
    assert rig.keeper.most_reused(within_s=60, max_bytes=1 << 30, namespace=mine[0].key.namespace) == []


def test_what_is_stored_after_a_drop_has_ended_is_kept(rig: Rig) -> None:
    refs = prompt("a", 6)
    rig.tell_stored(refs)
    rig.idle()
    for tier in ("objects", "disk"):
        dropped(rig, tier, namespace=refs[0].key.namespace)
    rig.keeper.drop_ended(refs[0].key.namespace)
    rig.tell_stored(refs)
    rig.idle()
    assert rig.locate(refs) == [Where.DISK] * 6


def test_what_was_used_lately_is_not_old(rig: Rig) -> None:
    refs = prompt("a", 4)
    rig.tell_stored(refs)
    rig.idle()
    assert dropped(rig, "disk", namespace=None, older_than_s=3600.0) == Dropped(0, 0)
    assert rig.locate(refs) == [Where.DISK] * 4


def test_a_tier_that_there_is_not_is_named(rig: Rig) -> None:
    for tier in ("valkey", "tape"):  # without a way to look through its keys, Valkey's cannot be found
        with pytest.raises(RefusedError, match=tier):
            rig.keeper.drop(tier, namespace=None, older_than_s=None, done=lambda dropped: None)
    with rigged(disk=False) as other, pytest.raises(RefusedError, match="disk"):
        other.keeper.drop("disk", namespace=None, older_than_s=None, parts=[], done=lambda dropped: None)
