"""Named parts are deleted without a look at all that waits, and what nodes tell is bounded."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keeper.rig import Rig, fill, prompt, rigged

from kvferry.identity.names import PartRef
from kvferry.keeper import buffers, keeper
from kvferry.keeper.backlog import Backlog, Wanted
from kvferry.keeper.below import NOWHERE
from kvferry.keeper.buffers import GRAIN_BYTES, Buffers, Use
from kvferry.keeper.bykey import ByKey
from kvferry.keeper.copies import Copies
from kvferry.keeper.keeping import Line
from kvferry.keeper.reuse import ReuseTable
from kvferry.keeper.stager import Stager
from kvferry.keeper.staging import StageTable
from kvferry.testing.expectations import WAIT_S, eventually

REFS = prompt("p", 6, nbytes=100)
SIZES = [PartRef(ref.key, ref.nbytes + more) for ref in REFS[:3] for more in range(3)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as made:
        yield made


def _busy(rig: Rig) -> threading.Event:
    """The keeper's thread does nothing until the event is set."""
    begun, release = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        release.wait(WAIT_S)

    rig.keeper._post(wait)
    assert begun.wait(WAIT_S)
    return release


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES)), max_size=30))
def test_what_has_a_key_is_found_whatever_its_size(steps: list[tuple[bool, PartRef]]) -> None:
    index, there = ByKey(), set[PartRef]()
    for comes, ref in steps:
        (index.add if comes else index.discard)(ref)
        (there.add if comes else there.discard)(ref)
    for ref in REFS:
        assert set(index.of([ref.key])) == {each for each in there if each.key == ref.key}
    assert set(index.of({ref.key for ref in REFS})) == there
    assert len(index._found) == len({ref.key for ref in there})


def test_a_stage_of_a_removed_part_does_not_arrive_whatever_size_it_was_asked_with() -> None:
    table = StageTable(max_parts=10)
    request = table.open(SIZES[:4], 1.0)
    assert all(table.enqueue(request, at, 0, NOWHERE) for at in range(4))
    table.remove_named([SIZES[0].key])
    stages = []
    while (stage := table.peek()) is not None:
        table.begin(stage)
        stages.append(stage)
    assert [stage.removed for stage in stages] == [True, True, True, False]


def test_a_request_that_leaves_names_each_running_stage_once() -> None:
    table = StageTable(max_parts=10)
    request = table.open([REFS[0], REFS[1], REFS[0]], 1.0)
    for at in range(3):
        table.enqueue(request, at, 0, NOWHERE)
    running = []
    while (stage := table.peek()) is not None:
        table.begin(stage)
        running.append(stage)
    assert table.close(request) == ([0, 1, 2], running)


def test_removals_that_wait_are_one_and_look_at_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scanned(*_: object, **__: object) -> None:
        raise AssertionError("all that waits was looked at")

    joined: list[int] = []
    named = Stager.forget_named
    monkeypatch.setattr(Copies, "forget", scanned)
    monkeypatch.setattr(Stager, "forget", scanned)
    monkeypatch.setattr(
        Stager, "forget_named", lambda self, keys: joined.append(len(keys)) or named(self, keys)
    )
    refs = prompt("a", 12)
    for tier in (rig.valkey, rig.disk, rig.objects):
        fill(tier, refs)
    release = _busy(rig)
    ended = [threading.Event() for _ in refs]
    for ref, each in zip(refs, ended, strict=True):
        rig.keeper.remove([ref], done=each.set)
    release.set()
    assert all(each.wait(WAIT_S) for each in ended)
    assert joined == [12]
    assert not rig.valkey.parts
    assert not rig.disk.parts
    assert not rig.objects.parts
    assert rig.keeper.statistics().defects == 0


def test_what_nodes_tell_is_dropped_and_counted_while_too_much_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MAX_TOLD_PARTS", 20)
    refs = prompt("a", 10)
    fill(rig.valkey, refs)
    release = _busy(rig)
    ended: list[int] = []
    for number in range(5):
        rig.keeper.stored(refs, positions=range(10), likely=[True] * 10)
        rig.keeper.used(refs)
        rig.keeper.remove(refs, done=lambda number=number: ended.append(number))
    assert ended == [2, 3, 4]
    release.set()
    eventually(lambda: len(ended) == 5, "answered")
    rig.idle()
    assert rig.keeper.statistics().told_dropped_parts == 3 * 3 * 10
    fill(rig.valkey, refs)
    rig.keeper.stored(refs, positions=range(10), likely=[True] * 10)
    rig.keeper.used(refs)
    rig.idle()
    assert rig.keeper.statistics().told_dropped_parts == 3 * 3 * 10
    assert len(rig.disk.parts) == 10


def test_the_oldest_wish_is_known_without_a_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = Backlog(max_parts=5000, max_bytes=1 << 40)
    refs = prompt("many", 4000)
    for at, ref in enumerate(refs):
        backlog.offer(Wanted(ref, at % 5, float(at)))
        backlog.offer(Wanted(ref, 0, float(at)))
    for ref in refs[:3000]:
        backlog.take(ref)
    monkeypatch.setattr(Backlog, "__iter__", None)
    assert backlog.oldest_since() == 3000.0
    assert len(backlog._ages) <= 4000


def test_the_uses_are_sorted_while_others_may_use_the_table(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = keeper.most_used

    def sorting(*uses: object, **within: object) -> list[PartRef]:
        assert not rig.keeper._lock.locked()
        return chosen(*uses, **within)

    monkeypatch.setattr(keeper, "most_used", sorting)
    rig.keeper.used(REFS)
    assert rig.keeper.most_reused(within_s=60, max_bytes=1 << 30, namespace=None) == REFS
    assert ReuseTable(3).all() == []


def test_memory_that_the_host_does_not_give_is_not_counted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Buffers({Use.STAGE: 2 * GRAIN_BYTES, Use.COPY: 0, Use.FLUSH: 0})
    given_by_host = buffers._map

    def none_left(nbytes: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(buffers, "_map", none_left)
    assert [pool.take(1, Use.STAGE) for _ in range(5)] == [None] * 5
    monkeypatch.setattr(buffers, "_map", given_by_host)
    assert pool.take(1, Use.STAGE) is not None
    assert pool.take(1, Use.STAGE) is not None


def test_what_was_taken_before_memory_failed_waits_on() -> None:
    line = Line(Backlog(max_parts=9, max_bytes=1 << 20), batch_bytes=900, share=1.0, pause_s=1.0)
    for ref in REFS:
        line.want(ref, 0, 0.0)
    asked: list[PartRef] = []

    def reserve(ref: PartRef) -> bool:
        asked.append(ref)
        if len(asked) == 3:
            raise MemoryError
        return True

    with pytest.raises(MemoryError):
        line.take(1.0, waited_for=False, reserve=reserve)
    assert (line.running, line.parts) == (0, len(REFS))
    assert len(line.take(2.0, waited_for=False, reserve=lambda ref: True)) == len(REFS)
