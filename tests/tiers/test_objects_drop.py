"""Drops of the objects tier that are taken out little by little, whatever else is done between two looks."""

import math
import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.runs import runs
from tests.tiers.objects import QUICK, ObjectStore

from kvferry.identity.names import PartKey, PartRef
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import Results, probe_all, some_bytes, store_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.objects import upkeep
from kvferry.tiers.objects.catalogue import Catalogue, Cut, Pack
from kvferry.tiers.objects.format import WHOLE_PACK, PackIndex, Removal, key_of
from kvferry.tiers.objects.names import new_id, time_of
from kvferry.tiers.objects.settings import ObjectSettings

pytestmark = pytest.mark.usefixtures("obstore")
NAMESPACES = (b"n" * 16, b"m" * 16)
EARLY_S, LATE_S, NOW_S = 1000.0, 2000.0, 3000.0
"""By the store's clock."""


def _ref(number: int, nbytes: int = 100) -> PartRef:
    """Even ones are of the one namespace, odd ones of the other."""
    return PartRef(PartKey(NAMESPACES[number % 2], number.to_bytes(32, "big"), 0), nbytes)


class DropLife(RuleBasedStateMachine):
    """A catalogue whose drops end some time: against a model in which they end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.now = 0.0
        self.packs: dict[bytes, dict[int, PartRef]] = {}  # what is to be found, by record
        self.used: dict[tuple[bytes, int], float] = {}
        self.under_way: dict[Cut, list[tuple[Pack, int]]] = {}  # and the records to be looked at
        self.told: set[Removal] = set()
        self.dropped: list[set[Removal]] = []

    @rule(
        parts=st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=4),
        odd=st.booleans(),
        stored_s=st.sampled_from([EARLY_S, LATE_S]),
    )
    def add(self, parts: list[int], stored_s: float, *, odd: bool) -> None:
        refs = [_ref(2 * n + odd) for n in parts]
        self.now += 1
        ident = new_id(stored_s)[:6] + int(self.now).to_bytes(10, "big")  # the same in each run
        index = PackIndex(ident, 1000, [*map(key_of, refs)], array("Q", range(len(refs))))
        assert self.catalogue.add(NAMESPACES[odd], index) is not None
        self.packs[ident] = dict(enumerate(refs))

    @rule(part=st.integers(0, 7))
    def use(self, part: int) -> None:
        self.now += 1
        places = [(i, n) for i, live in self.packs.items() for n, ref in live.items() if ref == _ref(part)]
        assert self.catalogue.use(_ref(part), self.now) == bool(places)
        self.used |= dict.fromkeys(places, self.now)

    @rule(part=st.integers(0, 7))
    def remove(self, part: int) -> None:
        found = {(record.pack.ident, record.record) for record in self.catalogue.remove(_ref(part))}
        assert found == {
            (i, n) for i, live in self.packs.items() for n, ref in live.items() if ref == _ref(part)
        }
        for ident, record in found:
            del self.packs[ident][record]

    @rule(oldest=st.booleans())
    @precondition(lambda self: self.packs)
    def forget(self, *, oldest: bool) -> None:
        ident = (min if oldest else max)(self.packs)
        self.catalogue.forget(ident)
        self.packs.pop(ident)

    @rule(
        namespace=st.sampled_from([None, *NAMESPACES]),
        stored_s=st.sampled_from([EARLY_S + 1, NOW_S, math.inf]),
        idle=st.sampled_from([-math.inf, 0, 1, 2, 5]),
    )
    def drop(self, namespace: bytes | None, stored_s: float, idle: float) -> None:
        used = self.now - idle + 0.5
        cut = self.catalogue.cut(namespace, stored_s, used)
        looked = [(p, n) for p in self.catalogue.packs_of(cut) for n in range(len(p.index.keys))]
        self.under_way[cut] = looked
        gone = {
            Removal(i, n)
            for i, live in self.packs.items()
            for n, ref in live.items()
            if namespace in (None, ref.key.namespace)
            and time_of(i) < stored_s
            and self.used.get((i, n), -math.inf) < used
        }
        for ident, record in gone:
            del self.packs[ident][record]
        self.dropped.append(gone)

    @rule(data=st.data(), most=st.integers(1, 3))
    @precondition(lambda self: self.under_way)
    def strike(self, data: st.DataObject, most: int) -> None:
        cut = data.draw(st.sampled_from([*self.under_way]))
        left = self.under_way[cut]
        pack = left[0][0] if left else None
        some = [n for p, n in left if p is pack][:most]
        if pack is not None:
            self.told.update(self.catalogue.strike_some(cut, pack, some))
        self.under_way[cut] = [(p, n) for p, n in left if p is not pack or n not in some]
        if not self.under_way[cut]:
            del self.under_way[cut]
            self.catalogue.uncut(cut)

    @invariant()
    def what_is_dropped_is_not_found_and_all_else_is(self) -> None:
        for part in range(8):
            copies = {
                (i, n) for i, live in self.packs.items() for n, ref in live.items() if ref == _ref(part)
            }
            places = {(record.pack.ident, record.record) for record in self.catalogue.places(_ref(part))}
            assert places == copies

    @invariant()
    def once_all_is_struck_the_catalogue_is_that_of_what_is_found_and_all_was_written_down(self) -> None:
        if self.under_way:
            return
        packs = self.catalogue.packs
        assert {i: p.live for i, p in packs.items() if p.live} == {
            i: len(live) for i, live in self.packs.items() if live
        }
        whole = {ident for ident, record in self.told if record == WHOLE_PACK}
        forgotten = {each for gone in self.dropped for each in gone if each.pack not in self.packs}
        for each in {each for gone in self.dropped for each in gone} - forgotten:
            assert each in self.told or each.pack in whole


TestDropLife = DropLife.TestCase
TestDropLife.settings = settings(max_examples=runs(60), stateful_step_count=30, deadline=None)


@pytest.fixture
def store(tmp_path: Path) -> Iterable[ObjectStore]:
    made = ObjectStore(ObjectSettings(f"file://{tmp_path}/objects", **QUICK))
    yield made
    made.close()


def test_whoever_drops_looks_at_no_part_itself_and_nobody_at_many_at_a_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; what is dropped is not found meanwhile."""
    tier = store.open()
    refs = [_ref(n) for n in range(40)]
    assert set(store_all(tier, [(ref, some_bytes(100, n)) for n, ref in enumerate(refs)])) == {Outcome.OK}
    looks: Counter[str] = Counter()
    at_once: list[int] = []
    covers, strike_some = Cut.covers, Catalogue.strike_some

    def counted(self: Cut, pack: Pack, record: int) -> bool:
        looks[threading.current_thread().name] += 1
        return covers(self, pack, record)

    def bounded(self: Catalogue, cut: Cut, pack: Pack, records: Iterable[int]) -> list[Removal]:
        before = looks.total()
        found = strike_some(self, cut, pack, records)
        at_once.append(looks.total() - before)
        return found

    monkeypatch.setattr(Cut, "covers", counted)
    monkeypatch.setattr(Catalogue, "strike_some", bounded)
    monkeypatch.setattr(upkeep, "RECORDS_AT_ONCE", 7)
    results = Results(1)
    tier.drop(namespace=NAMESPACES[0], done=lambda found: results.done(0, found))
    assert probe_all(tier, refs[:2]) == [Outcome.MISS, Outcome.OK]
    assert results.wait() == [Dropped(20, 2000)]
    assert looks[threading.current_thread().name] <= 2  # of the probe
    assert max(at_once) <= 7
    assert probe_all(tier, refs) == [Outcome.MISS, Outcome.OK] * 20


def test_drops_under_way_are_bounded_and_none_beyond_is_begun(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "MAX_DROPS", 0)
    tier = store.open()
    assert set(store_all(tier, [(_ref(0), some_bytes(100, 0))])) == {Outcome.OK}
    ended: list[Dropped] = []
    tier.drop(done=ended.append)
    eventually(lambda: ended == [Dropped(0, 0, Outcome.REFUSED)], "the refusal")
    assert probe_all(tier, [_ref(0)]) == [Outcome.OK]
