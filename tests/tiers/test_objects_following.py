"""What a process finds by listings that take a while, during which others store and remove."""

import asyncio
import time
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.runs import runs
from tests.tiers.objects import MemoryBucket

from kvferry.identity.names import PartKey, PartRef
from kvferry.tiers.objects.books import Books
from kvferry.tiers.objects.engine import Engine
from kvferry.tiers.objects.following import Follower
from kvferry.tiers.objects.format import (
    WHOLE_PACK,
    PackIndex,
    Removal,
    key_of,
    pack_removed,
    pack_tail,
    record_bytes,
    tail_bytes,
)
from kvferry.tiers.objects.health import StoreClock
from kvferry.tiers.objects.manifests import Manifests
from kvferry.tiers.objects.names import ID_BYTES, Kind, Name, read_name
from kvferry.tiers.objects.removals import Removals
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.upkeep import Upkeep

NAMESPACE = b"n" * 16
PARTS = [PartRef(PartKey(NAMESPACE, bytes([n]) * 32, n), 100) for n in range(4)]
NUMBERS = st.integers(0, 3)
NOBODY = Engine.__new__(Engine)
"""No request is sent but those that a test makes itself."""


def pack_of(ident: bytes, refs: list[PartRef]) -> tuple[bytes, PackIndex]:
    """The object, with nothing in its records, and its index."""
    keys = [key_of(ref) for ref in refs]
    offsets = array("Q", [record_bytes(100) * n for n in range(len(refs))])
    index = PackIndex(ident, record_bytes(100) * len(refs) + tail_bytes(len(refs)), keys, offsets)
    return bytes(record_bytes(100) * len(refs)) + pack_tail(NAMESPACE, keys, offsets), index


class FollowingLife(RuleBasedStateMachine):
    """Others write and remove while this process lists: packs first, what was removed later.

    told: what it has been told of, by a list that it listed or by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bucket = MemoryBucket()
        self.books = Books(ObjectSettings("s3://bucket"))
        removals = Removals(self.books, self.bucket, NOBODY, StoreClock())
        self.follower = Follower(self.books, self.bucket, removals, Manifests(self.books))
        self.made = 0
        self.packs: dict[bytes, list[PartRef]] = {}  # in the bucket
        self.lists: dict[Name, list[Removal]] = {}
        self.told: set[Removal] = set()
        self.listed: dict[Name, int] | None = None  # so far, with sizes
        self.began = 0.0

    def _ident(self) -> bytes:
        self.made += 1
        return self.made.to_bytes(ID_BYTES, "big")

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3, unique=True), own=st.booleans())
    def store(self, numbers: list[int], own: bool) -> None:
        """Another does, or this process."""
        refs, ident = [PARTS[n] for n in numbers], self._ident()
        data, index = pack_of(ident, refs)
        self.bucket.objects[Name(Kind.PACK, NAMESPACE, ident).path] = data
        self.packs[ident] = refs
        if own:
            with self.books.lock:
                assert self.books.catalogue.add(NAMESPACE, index) is not None
                self.follower.wrote(ident)

    @rule(number=NUMBERS)
    def another_removes(self, number: int) -> None:
        """From all packs that are there; also what was on its way a moment ago."""
        found = [
            Removal(ident, record)
            for ident, refs in self.packs.items()
            for record, ref in enumerate(refs)
            if ref == PARTS[number]
        ]
        name = Name(Kind.REMOVED, NAMESPACE, self._ident())
        self.bucket.objects[name.path] = pack_removed(found)
        self.lists[name] = found

    @precondition(lambda self: self.packs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """This process drops a pack that it knows, and cannot delete it yet."""
        ident = data.draw(st.sampled_from(sorted(self.packs)))
        if ident in self.books.catalogue.packs:
            self.books.catalogue.apply([Removal(ident, WHOLE_PACK)])
            self.told.add(Removal(ident, WHOLE_PACK))

    @precondition(lambda self: self.packs)
    @rule(data=st.data())
    def another_deletes(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(sorted(self.packs)))
        del self.packs[ident], self.bucket.objects[Name(Kind.PACK, NAMESPACE, ident).path]

    @precondition(lambda self: self.listed is None)
    @rule()
    def list_packs(self) -> None:
        self.began = time.monotonic()
        self.listed = self._list(Kind.PACK)

    @precondition(lambda self: self.listed is not None)
    @rule()
    def list_the_rest_and_follow(self) -> None:
        assert self.listed is not None
        names = self.listed | self._list(Kind.REMOVED)
        self.told.update(removal for name in names for removal in self.lists.get(name, ()))
        self.listed = None
        asyncio.run(self.follower.follow(names, self.began))

    @precondition(lambda self: self.listed is None)
    @rule()
    def follow_while_nothing_changes(self) -> None:
        self.list_packs()
        self.list_the_rest_and_follow()
        there = {Removal(ident, n) for ident, refs in self.packs.items() for n in range(len(refs))}
        dropped = {pack for pack, record in self.told if record == WHOLE_PACK}
        assert self._found() == {one for one in there - self.told if one.pack not in dropped}

    @invariant()
    def nothing_is_found_that_was_removed(self) -> None:
        found = self._found()
        assert not found & self.told
        assert not {Removal(one.pack, WHOLE_PACK) for one in found} & self.told

    def _list(self, kind: Kind) -> dict[Name, int]:
        named = ((read_name(path), len(data)) for path, data in self.bucket.objects.items())
        return {name: nbytes for name, nbytes in named if name is not None and name.kind is kind}

    def _found(self) -> set[Removal]:
        return {record.removal for ref in PARTS for record in self.books.catalogue.places(ref)}


TestFollowingLife = FollowingLife.TestCase
TestFollowingLife.settings = settings(max_examples=runs(100), stateful_step_count=25, deadline=None)


def test_a_removal_read_before_its_pack_is_listed_is_remembered() -> None:
    """A listing passes the packs, then another stores a pack and removes a part of it."""
    life = FollowingLife()
    life.list_packs()
    life.store([0, 1], own=False)
    life.another_removes(0)
    life.list_the_rest_and_follow()
    life.follow_while_nothing_changes()
    (ident,) = life.packs
    assert life._found() == {Removal(ident, 1)}


def test_a_pack_dropped_while_an_older_listing_is_followed_stays_dropped() -> None:
    life = FollowingLife()
    life.list_packs()
    life.store([0], own=True)
    (ident,) = life.packs
    life.books.catalogue.apply([Removal(ident, WHOLE_PACK)])
    life.told.add(Removal(ident, WHOLE_PACK))
    life.list_the_rest_and_follow()
    life.follow_while_nothing_changes()
    assert life._found() == set()


class _Counted(bytes):
    """Counts comparisons."""

    compared = 0

    def __lt__(self, other: bytes) -> bool:
        _Counted.compared += 1
        return bytes.__lt__(self, other)


def test_a_pack_that_goes_costs_a_few_comparisons_and_not_a_look_at_all_of_them() -> None:
    count = 1000
    bucket = MemoryBucket()
    nbytes = pack_of(bytes(16), PARTS[:1])[1].nbytes
    books = Books(ObjectSettings("s3://bucket", max_bytes=count * nbytes))
    upkeep = Upkeep(books, bucket, NOBODY)
    for n in range(count):
        books.catalogue.add(NAMESPACE, pack_of(_Counted(n.to_bytes(16, "big")), PARTS[:1])[1])
    _Counted.compared = 0
    for n in range(count, count + 100):
        books.catalogue.add(NAMESPACE, pack_of(_Counted(n.to_bytes(16, "big")), PARTS[:1])[1])
        asyncio.run(upkeep.retire())
    compared = _Counted.compared
    assert sorted(books.catalogue.packs) == [n.to_bytes(16, "big") for n in range(100, count + 100)]
    assert books.counts.deleted_packs == 100
    assert compared < 100 * 2 * 11  # a sort would compare each with the next, every time
