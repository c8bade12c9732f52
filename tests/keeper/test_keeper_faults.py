"""What a keeper does when a tier is full, silent, wrong or gone, and when callers leave."""

import dataclasses
import time
from collections.abc import Iterator

import pytest
from tests.keeper.rig import EAGER, Rig, contents, fill, holds, idle, prompt, rigged

from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import Results
from kvferry.tiers.contract import Outcome

FAR_S = 120.0


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as made:
        yield made


def ask(rig: Rig, refs: list, *, within_s: float = FAR_S):  # type: ignore[no-untyped-def,type-arg]
    results = Results(len(refs))
    return rig.keeper.stage(refs, deadline=time.monotonic() + within_s, done=results.done), results


# ---- stages


def test_a_full_valkey_refuses_what_is_staged_and_the_rest_goes_on(rig: Rig) -> None:
    refs = prompt("a", 6)
    fill(rig.disk, refs)
    rig.valkey.fail(refs[2].key, Outcome.REFUSED)
    outcomes = rig.stage(refs)
    assert outcomes == [Outcome.REFUSED if at == 2 else Outcome.OK for at in range(6)]
    rig.idle()


def test_what_the_disk_cannot_give_comes_from_objects(rig: Rig) -> None:
    refs = prompt("a", 6)
    fill(rig.disk, refs)
    fill(rig.objects, refs)
    for ref, how in zip(refs, [Outcome.FAILED, Outcome.CORRUPT, Outcome.MISS, Outcome.REFUSED], strict=False):
        rig.disk.fail(ref.key, how)
    assert rig.stage(refs) == [Outcome.OK] * 6
    assert holds(rig.valkey, refs)
    staged = rig.keeper.statistics().stages.staged_parts
    assert staged == {"disk": 2, "objects": 4}


def test_damage_that_nobody_can_make_good_is_told_as_such_and_never_as_bytes(rig: Rig) -> None:
    refs = prompt("a", 3)
    fill(rig.disk, refs)
    data = bytearray(rig.disk.parts[refs[1].key])
    data[5] ^= 1
    rig.disk.parts[refs[1].key] = bytes(data)
    outcomes = rig.stage(refs)
    assert outcomes[0] is outcomes[2] is Outcome.OK
    assert outcomes[1] is not Outcome.OK
    assert refs[1].key not in rig.valkey.parts


def test_a_silent_disk_leaves_nobody_waiting_beyond_the_deadline_and_no_memory_in_use(rig: Rig) -> None:
    refs = prompt("a", 6)
    fill(rig.disk, refs)
    _, first = ask(rig, refs[:1])
    assert first.wait() == [Outcome.OK]
    rig.disk.hold()
    assert rig.stage(refs[1:], within_s=0.2) == [Outcome.LATE] * 5
    assert rig.locate(refs[1:], within_s=0.2) == [Where.UNKNOWN] * 5
    rig.disk.release()
    rig.idle()
    assert rig.stage(refs) == [Outcome.OK] * 6


def test_bytes_that_come_late_are_not_used_and_their_memory_is_free_only_then() -> None:
    """The tier below goes on writing into the buffer after the deadline; nobody else may get it."""
    with rigged(objects=False) as rig:
        refs = prompt("a", 4)
        fill(rig.disk, refs)
        rig.valkey.hold()
        _, results = ask(rig, refs, within_s=0.5)
        assert results.wait() == [Outcome.LATE] * 4
        rig.valkey.release()
        rig.idle()
        assert rig.stage(refs) == [Outcome.OK] * 4
        assert holds(rig.valkey, refs)


def test_many_who_want_one_prefix_share_one_stage(rig: Rig) -> None:
    refs = prompt("a", 10)
    fill(rig.disk, refs)
    rig.valkey.hold()
    asked = [ask(rig, refs)[1] for _ in range(8)]
    eventually(lambda: rig.keeper.statistics().stages.joined_parts == 70, "all wait")
    rig.valkey.release()
    for results in asked:
        assert results.wait() == [Outcome.OK] * 10
    assert rig.disk.statistics().fetched_parts == 10
    assert rig.keeper.statistics().stages.staged_parts == {"disk": 10}


def test_who_can_wait_longer_is_not_late_with_the_first(rig: Rig) -> None:
    refs = prompt("a", 3)
    fill(rig.disk, refs)
    rig.valkey.hold()
    _, hasty = ask(rig, refs, within_s=0.3)
    _, patient = ask(rig, refs)
    assert hasty.wait() == [Outcome.LATE] * 3
    rig.valkey.release()
    assert patient.wait() == [Outcome.OK] * 3


def test_who_leaves_is_answered_and_others_get_theirs(rig: Rig) -> None:
    refs = prompt("a", 5)
    fill(rig.disk, refs)
    rig.valkey.hold()
    leaving, left = ask(rig, refs)
    _, staying = ask(rig, refs[2:])
    leaving.cancel()
    assert left.wait() == [Outcome.LATE] * 5
    rig.valkey.release()
    assert staying.wait() == [Outcome.OK] * 3
    leaving.cancel()
    rig.idle()


def test_more_than_fits_into_memory_passes_through_it() -> None:
    with rigged(limits=Limits(buffer_bytes=16 << 20, close_s=30.0)) as rig:
        refs = prompt("a", 60, nbytes=1 << 20)
        fill(rig.disk, refs)
        assert rig.stage(refs) == [Outcome.OK] * 60
        assert holds(rig.valkey, refs)


def test_a_part_larger_than_all_memory_is_refused_and_in_nobodys_way() -> None:
    with rigged(limits=Limits(buffer_bytes=16 << 20, copy_share=1.0, close_s=30.0)) as rig:
        huge, small = prompt("huge", 1, nbytes=17 << 20), prompt("small", 2)
        fill(rig.disk, [*huge, *small])
        assert rig.stage([*huge, *small]) == [Outcome.REFUSED, Outcome.OK, Outcome.OK]
        rig.tell_stored([*prompt("other", 1, nbytes=17 << 20), *prompt("last", 1)])
        eventually(lambda: holds(rig.disk, prompt("last", 1)), "the small one's copy")
        assert rig.keeper.statistics().keep.failed == {"too_large": 1}


# ---- copies


def test_what_left_valkey_before_its_copy_is_counted_and_forgotten(rig: Rig) -> None:
    refs = prompt("a", 4)
    fill(rig.valkey, refs[2:])
    rig.keeper.stored(refs, positions=range(4), likely=[True] * 4)
    eventually(lambda: holds(rig.disk, refs[2:]), "copies of what is there")
    rig.idle()
    keep = rig.keeper.statistics().keep
    assert (keep.gone_parts, keep.copied_parts) == (2, 2)


def test_a_damaged_part_is_copied_nowhere(rig: Rig) -> None:
    refs = prompt("a", 3)
    fill(rig.valkey, refs)
    data = bytearray(contents(refs[0]))
    data[0] ^= 1
    rig.valkey.parts[refs[0].key] = bytes(data)
    rig.keeper.stored(refs, positions=range(3), likely=[True] * 3)
    eventually(lambda: holds(rig.disk, refs[1:]), "the others")
    rig.idle()
    assert refs[0].key not in rig.disk.parts
    assert refs[0].key not in rig.objects.parts


def test_a_dead_disk_keeps_nothing_from_objects_and_is_used_again_later(rig: Rig) -> None:
    early, late = prompt("early", 4), prompt("late", 4)
    for ref in early:
        rig.disk.fail(ref.key, Outcome.REFUSED)
    rig.tell_stored(early)
    eventually(lambda: holds(rig.objects, early), "objects have it")
    assert rig.stage(early) == [Outcome.OK] * 4
    assert not rig.disk.parts
    rig.disk.mend()
    rig.tell_stored(late)
    eventually(lambda: holds(rig.disk, [*early, *late]), "the disk has caught up")


def test_dead_objects_cost_a_bounded_backlog_that_drains_when_they_return() -> None:
    limits = dataclasses.replace(EAGER, backlog_parts=10, flush_s=0.2)
    with rigged(limits=limits) as rig:
        refs = prompt("a", 40)
        rig.objects.hold()
        for ref in refs:
            rig.tell_stored([ref])
            eventually(lambda ref=ref: holds(rig.disk, [ref]), "the disk goes on")  # type: ignore[misc]
        eventually(lambda: rig.keeper.statistics().flush.paused, "a pause")
        eventually(lambda: rig.keeper.statistics().flush.dropped_parts, "a full backlog")
        flush = rig.keeper.statistics().flush
        assert flush.parts - flush.running <= 10
        assert flush.oldest_s > 0
        assert rig.stage(refs) == [Outcome.OK] * 40
        rig.objects.release()
        eventually(lambda: rig.keeper.statistics().flush.parts == 0, "drained")
        assert rig.objects.parts
        assert rig.keeper.statistics().flush.oldest_s == 0


def test_valkey_that_is_away_loses_no_wish(rig: Rig) -> None:
    refs = prompt("a", 4)
    fill(rig.valkey, refs)
    for ref in refs:
        rig.valkey.fail(ref.key, Outcome.FAILED)
    rig.keeper.stored(refs, positions=range(4), likely=[True] * 4)
    eventually(lambda: rig.keeper.statistics().keep.failed.get("read_failed", 0) >= 4, "failures")
    rig.valkey.mend()
    eventually(lambda: holds(rig.disk, refs), "the copies")


def test_what_is_removed_while_it_is_copied_is_nowhere_afterwards(rig: Rig) -> None:
    refs = prompt("a", 6)
    fill(rig.valkey, refs)
    rig.disk.hold()
    rig.keeper.stored(refs, positions=range(6), likely=[True] * 6)
    eventually(lambda: rig.keeper.statistics().keep.running, "copies under way")
    rig.keeper.remove(refs)
    rig.disk.release()
    eventually(lambda: not rig.keeper.statistics().keep.parts, "the end of the copies")
    rig.idle()
    eventually(lambda: not (rig.disk.parts or rig.objects.parts or rig.valkey.parts), "gone")


# ---- the end


@pytest.mark.parametrize("held", ["valkey", "disk", "objects"])
def test_closing_answers_everybody_whichever_tier_is_silent(held: str) -> None:
    limits = Limits(buffer_bytes=16 << 20, copy_share=1.0, close_s=0.2)
    rig = Rig(limits=limits)
    refs, more = prompt("a", 5), prompt("b", 5)
    fill(rig.disk, refs)
    fill(rig.valkey, more)
    getattr(rig, held).hold()
    rig.keeper.stored(more, positions=range(5), likely=[True] * 5)
    _, results = ask(rig, refs)
    gone = []
    rig.keeper.remove(more[:1], done=lambda: gone.append(True))
    rig.keeper.close()
    assert all(outcome in (Outcome.OK, Outcome.LATE) for outcome in results.wait())
    assert rig.stage(refs) == [Outcome.LATE] * 5
    assert gone
    rig.keeper.used(more)
    rig.keeper.stored(more, positions=range(5), likely=[True] * 5)
    assert rig.locate(refs, within_s=0.2)
    assert rig.keeper.statistics().buffer_bytes == 0
    rig.close()


def test_defaults_leave_room_for_every_kind_of_work() -> None:
    for objects in (True, False):
        shares = Limits().shares(objects=objects)
        assert sum(shares.values()) == Limits().buffer_bytes
        assert EAGER.shares(objects=objects).keys() == shares.keys()


class _Counting(MemoryTier):
    """Counts what was cancelled before it ended."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.calls: list = []  # type: ignore[type-arg]

    def probe(self, refs, *, deadline, done):  # type: ignore[no-untyped-def]
        """Knows without asking, as a disk does."""
        done([self._presence(ref) for ref in refs])

    def fetch(self, items, *, deadline, done):  # type: ignore[no-untyped-def]
        self.calls.append(super().fetch(items, deadline=deadline, done=done))
        return self.calls[-1]


def test_what_nobody_waits_for_any_more_is_asked_to_end_and_nothing_else() -> None:
    disk = _Counting()
    keeper = Keeper(valkey=MemoryTier("valkey"), disk=disk, objects=None, limits=EAGER)
    try:
        refs = prompt("a", 6)
        fill(disk, refs)
        disk.hold()
        both, mine = Results(6), Results(6)
        far = time.monotonic() + FAR_S
        first = keeper.stage(refs, deadline=far, done=both.done)
        eventually(lambda: disk.calls, "the call to the disk")
        second = keeper.stage(refs[3:], deadline=far, done=mine.done)
        eventually(lambda: keeper.statistics().stages.joined_parts == 3, "joined")
        first.cancel()
        assert both.wait() == [Outcome.LATE] * 6
        assert not disk.calls[0].cancelled
        second.cancel()
        eventually(lambda: disk.calls[0].cancelled, "the end of the call")
        disk.release()
        idle(keeper)
    finally:
        disk.release()
        keeper.close()
