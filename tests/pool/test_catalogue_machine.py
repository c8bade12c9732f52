"""The catalogue against a dict model: an answer is a miss, or exactly the bytes that were committed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.runs import runs

from kvferry.errors import BrokenError
from kvferry.identity.names import PartKey
from kvferry.pool.catalogue import Catalogue
from kvferry.pool.entries import Declined, DeclineReason, EntryState, Slot
from kvferry.pool.slots import SlotAllocator

pytestmark = pytest.mark.long

PAGE = 4096
SLAB = 4 * PAGE
POOL = 5 * SLAB
SPACES = {b"a" * 16: (PAGE, 2 * PAGE), b"b" * 16: (3 * PAGE - 5,), b"c" * 16: (PAGE - 9, PAGE, 5 * PAGE)}
TRAILING = {b"c" * 16: (0, 2, 1)}  # which chunks a boundary needs of each part; of others all
DIGESTS = [bytes([index]) * 32 for index in range(7)]
KEYS = [
    PartKey(space, digest, part)
    for space, sizes in SPACES.items()
    for digest in DIGESTS
    for part in range(len(sizes))
]
keys = st.sampled_from(KEYS)
owners = st.integers(1, 3)
prefixes = st.lists(st.sampled_from(DIGESTS), unique=True, max_size=len(DIGESTS))


def is_needed(space: bytes, part: int, *, before: int) -> bool:
    """Whether a boundary needs that part of the chunk that many chunks before it."""
    trailing = TRAILING[space][part] if space in TRAILING else 0
    return before > 0 and (not trailing or before <= trailing)


class CatalogueMachine(RuleBasedStateMachine):
    """Every slot given out is written with its own marker; a pinned slot must keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue(SlotAllocator(POOL, SLAB))
        for space, sizes in SPACES.items():
            self.catalogue.register(space, sizes, "default", trailing=TRAILING.get(space, ()))
        self.memory = bytearray(POOL)
        self.serial = 0
        self.ready: dict[PartKey, bytes] = {}  # visible content
        self.filling: dict[PartKey, tuple[int, bytes]] = {}  # owner, content
        self.doomed: set[PartKey] = set()  # unlinked while filling
        self.retired: dict[int, tuple[int, bytes]] = {}  # offset -> owner, content
        self.offsets: dict[PartKey, int] = {}  # of every slot given out last for a key
        self.pins: list[tuple[PartKey, int, Slot, bytes]] = []  # every pin, with the bytes seen
        self.stamps: dict[PartKey, int] = {}  # when a visible part was stamped last, in marks
        self.marks: list[int] = []  # as the catalogue gave them

    def forget_evicted(self, spare_from: int) -> None:
        pinned = {pin[0] for pin in self.pins}
        for key in self.catalogue.take_evicted():
            assert key not in pinned
            assert self.stamps[key] < spare_from
            del self.ready[key]  # KeyError: evicted something that was not visible

    def publish(self, key: PartKey, content: bytes) -> None:
        """It is visible now, unless it was unlinked meanwhile."""
        if key in self.doomed:
            self.doomed.remove(key)
        else:
            self.ready[key] = content
            self.stamps[key] = len(self.marks)

    @rule(key=keys, owner=owners, spare=st.integers(0, 5))
    def reserve(self, key: PartKey, owner: int, spare: int) -> None:
        nbytes = SPACES[key.namespace][key.part]
        used_before = self.catalogue.statistics().used_bytes
        spared = len(self.marks) - spare if 0 < spare <= len(self.marks) else None
        mark = None if spared is None else self.marks[spared]
        answer = self.catalogue.reserve(key, nbytes, owner, spare_from=mark)
        if isinstance(answer, Declined):
            reason = answer.reason
            assert (reason is DeclineReason.FILLING) == (key in self.filling and key not in self.doomed)
            assert (reason is DeclineReason.EXISTS) == (key in self.ready)
            if reason is DeclineReason.UNLINKED:
                assert key in self.doomed or any(pin[0] == key for pin in self.pins)
            if reason is DeclineReason.FULL:
                assert self.pins or self.filling or self.retired or spared is not None
            assert reason is not DeclineReason.TOO_LARGE
            assert self.catalogue.statistics().used_bytes <= used_before
        else:
            assert key not in self.ready and key not in self.filling
            self.serial += 1
            content = (self.serial.to_bytes(4, "big") * nbytes)[:nbytes]
            self.memory[answer.slot.offset : answer.slot.offset + nbytes] = content
            self.filling[key] = (owner, content)
            self.offsets[key] = answer.slot.offset
        self.forget_evicted(len(self.marks) + 1 if spared is None else spared + 1)

    def finish(self, key: PartKey, owner: int) -> bytes | None:
        """The content when the owner may finish the reservation."""
        held = self.filling.get(key)
        if held is None or held[0] != owner:
            return None
        del self.filling[key]
        return held[1]

    def holds(self, offset: int, content: bytes) -> bool:
        # Not compared in the assertion: with CI set, pytest takes minutes to show how two such values differ.
        return self.memory[offset : offset + len(content)] == content

    def checksums(self, content: bytes) -> tuple[bytes, ...]:
        return (content[:16],)

    @rule(key=keys, owner=owners)
    def commit(self, key: PartKey, owner: int) -> None:
        content = self.finish(key, owner)
        try:
            self.catalogue.commit(key, owner, self.checksums(content or b""))
        except BrokenError:
            assert content is None
            return
        assert content is not None
        self.publish(key, content)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit_one(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.filling)))
        self.commit(key, self.filling[key][0])

    @rule(space=st.sampled_from(list(SPACES)), prefix=prefixes, owner=owners, sparse=st.booleans())
    def store(self, space: bytes, prefix: list[bytes], owner: int, sparse: bool) -> None:
        """As engines do: whole chunks. sparse: only what a boundary after them needs."""
        for at, digest in enumerate(prefix):
            for part in range(len(SPACES[space])):
                if sparse and not is_needed(space, part, before=len(prefix) - at):
                    continue
                key = PartKey(space, digest, part)
                self.reserve(key, owner, 0)
                if key in self.filling and key not in self.doomed:
                    self.commit(key, self.filling[key][0])

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit_pinned(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.filling)))
        owner, content = self.filling.pop(key)
        slot = self.catalogue.commit_pinned(key, owner, self.checksums(content))
        self.pins.append((key, owner, slot, content))
        self.publish(key, content)

    @rule(key=keys, owner=owners)
    def abandon(self, key: PartKey, owner: int) -> None:
        content = self.finish(key, owner)
        try:
            self.catalogue.abandon(key, owner)
        except BrokenError:
            assert content is None
            return
        assert content is not None
        self.doomed.discard(key)

    @rule(key=keys, owner=owners)
    def retire(self, key: PartKey, owner: int) -> None:
        content = self.finish(key, owner)
        try:
            offset = self.catalogue.retire(key, owner)
        except BrokenError:
            assert content is None
            return
        assert content is not None
        assert offset == self.offsets[key]
        self.doomed.discard(key)
        self.retired[offset] = (owner, content)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def retire_one(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.filling)))
        self.retire(key, self.filling[key][0])

    @precondition(lambda self: self.retired)
    @rule(data=st.data(), owner=owners)
    def reclaim(self, data: st.DataObject, owner: int) -> None:
        offset = data.draw(st.sampled_from(list(self.retired)))
        try:
            self.catalogue.reclaim(offset, owner)
        except BrokenError:
            assert self.retired[offset][0] != owner
            return
        assert self.retired.pop(offset)[0] == owner

    @rule(key=keys, owner=owners)
    def pin(self, key: PartKey, owner: int) -> None:
        slot = self.catalogue.pin(key, owner)
        content = self.ready.get(key)
        assert (slot is None) == (content is None)
        if slot is not None and content is not None:
            assert self.holds(slot.offset, content)
            assert slot.checksums == self.checksums(content)
            self.pins.append((key, owner, slot, content))

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), owner=owners)
    def pin_one(self, data: st.DataObject, owner: int) -> None:
        self.pin(data.draw(st.sampled_from(list(self.ready))), owner)

    @rule(key=keys, owner=owners)
    def unpin(self, key: PartKey, owner: int) -> None:
        held = next((pin for pin in self.pins if pin[:2] == (key, owner)), None)
        try:
            self.catalogue.unpin(key, owner)
        except BrokenError:
            assert held is None
            return
        assert held is not None
        self.pins.remove(held)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin_one(self, data: st.DataObject) -> None:
        key, owner, _, _ = data.draw(st.sampled_from(self.pins))
        self.unpin(key, owner)

    @rule(key=keys)
    def unlink(self, key: PartKey) -> None:
        self.catalogue.unlink(key)
        self.ready.pop(key, None)
        if key in self.filling:
            self.doomed.add(key)

    @precondition(lambda self: self.pins or self.filling)
    @rule(data=st.data())
    def unlink_what_is_held(self, data: st.DataObject) -> None:
        self.unlink(data.draw(st.sampled_from([*(pin[0] for pin in self.pins), *self.filling])))

    @rule(space=st.sampled_from(list(SPACES)), prefix=prefixes)
    def touch(self, space: bytes, prefix: list[bytes]) -> None:
        self.stamp(self.catalogue.touch(space, prefix), space, prefix)

    @rule(space=st.sampled_from(list(SPACES)), prefix=prefixes, new=st.sampled_from([0, 0, 1, 9]))
    def refresh(self, space: bytes, prefix: list[bytes], new: int) -> None:
        new = min(new, len(prefix))
        self.stamp(self.catalogue.refresh(space, prefix, new=new), space, prefix, new=new)

    def stamp(self, mark: int, space: bytes, prefix: list[bytes], *, new: int = 0) -> None:
        """What is visible of a prefix, and needed after it, has been stamped since that mark; nothing else.

        Or after one of the last ``new`` chunks of it, or before them.
        """
        self.marks.append(mark)
        for key, entry in ((key, self.catalogue._find(key)) for key in self.ready):
            named = key.namespace == space and key.chunk in prefix
            before = len(prefix) - prefix.index(key.chunk) if named else 0
            needed = named and any(
                is_needed(space, key.part, before=before - shorter) for shorter in range(new + 1)
            )
            assert entry is not None
            assert (entry.stamp >= mark) == needed
            if needed:
                self.stamps[key] = len(self.marks)

    @rule(space=st.sampled_from([None, *SPACES]))
    def drop(self, space: bytes | None) -> None:
        self.catalogue.drop(space)
        pinned = {pin[0] for pin in self.pins}
        for key in list(self.ready):
            if key not in pinned and space in (None, key.namespace):
                del self.ready[key]

    @rule(owner=owners)
    def release_owner(self, owner: int) -> None:
        self.catalogue.release_owner(owner)
        self.pins = [pin for pin in self.pins if pin[1] != owner]
        for key in [key for key, held in self.filling.items() if held[0] == owner]:
            del self.filling[key]
            self.doomed.discard(key)
        self.retired = {offset: held for offset, held in self.retired.items() if held[0] != owner}

    @invariant()
    def a_retired_slot_is_nobodys(self) -> None:
        for offset, (_, content) in self.retired.items():
            assert self.holds(offset, content)

    @invariant()
    def the_books_balance(self) -> None:
        self.catalogue.check()
        statistics = self.catalogue.statistics()
        assert statistics.pins == len(self.pins)
        assert statistics.ready_parts == len(self.ready)
        assert statistics.filling_parts == len(self.filling) + len(self.retired)

    @invariant()
    def pinned_bytes_never_change(self) -> None:
        for _, _, slot, content in self.pins:
            assert self.holds(slot.offset, content)

    @invariant()
    def only_complete_parts_are_seen(self) -> None:
        for key in KEYS:
            state = self.catalogue.state(key)
            if key in self.ready:
                assert state is EntryState.READY
            elif key in self.filling and key not in self.doomed:
                assert state is EntryState.FILLING
            else:
                assert state is EntryState.ABSENT

    @invariant()
    def the_gaps_are_what_is_missing(self) -> None:
        for space, sizes in SPACES.items():
            lacking = [
                tuple(part for part in range(len(sizes)) if PartKey(space, digest, part) not in self.ready)
                for digest in DIGESTS
            ]
            expected = [(at, parts) for at, parts in enumerate(lacking) if parts]
            assert list(self.catalogue.gaps(space, DIGESTS)) == expected

    def teardown(self) -> None:
        for owner in range(1, 4):
            self.catalogue.release_owner(owner)
        self.catalogue.drop()
        assert self.catalogue.statistics().used_bytes == 0
        self.catalogue.check()


STEPS = settings(max_examples=runs(100), stateful_step_count=60, deadline=None, print_blob=True)
CatalogueMachine.TestCase.settings = STEPS
TestCatalogue = CatalogueMachine.TestCase
