"""A keeper over a real disk that is full, read-only, broken, hung, torn by a crash, or holds ciphertext."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.keeper.rig import EAGER, contents, fill, holds, idle, locate, prompt, stage
from tests.servers import Server
from tests.tiers.disks import DiskStore

from kvferry.identity.names import PartRef
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.keeper.forms import Sealed as SealedForm
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import Results, fetch_all, store_all
from kvferry.tiers.contract import Dropped, Outcome
from kvferry.tiers.disk.format import head_bytes
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.valkey.protection import AsStored, Sealed
from kvferry.tiers.valkey.tier import ValkeyTier

MIB = 1 << 20
PART_BYTES = MIB // 2


class Rig:
    """Valkey and objects in memory, the disk is one."""

    def __init__(self, directory: Path, *, stall_s: float = 60.0) -> None:
        self.store = DiskStore(
            DiskSettings(directory, 64 * MIB, segment_bytes=4 * MIB, stall_s=stall_s, close_s=60.0)
        )
        self.valkey, self.objects = MemoryTier("valkey"), MemoryTier("objects")
        self.open()

    def open(self) -> None:
        self.disk = self.store.open()
        self.keeper = Keeper(valkey=self.valkey, disk=self.disk, objects=self.objects, limits=EAGER)

    def restart(self) -> None:
        """Of the keeper; the other tiers go on."""
        self.keeper.close()
        parts = self.valkey.parts, self.objects.parts
        self.valkey, self.objects = MemoryTier("valkey"), MemoryTier("objects")
        self.valkey.parts.update(parts[0])
        self.objects.parts.update(parts[1])
        self.open()

    def keep(self, refs: Sequence[PartRef]) -> None:
        fill(self.valkey, refs)
        self.keeper.stored(refs, positions=range(len(refs)), likely=[True] * len(refs))

    def kept(self, refs: Sequence[PartRef]) -> bool:
        return all(ref in self.disk._books.log.records for ref in refs)

    def lose(self, *tiers: MemoryTier) -> None:
        """What they hold."""
        for tier in tiers:
            tier.parts.clear()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "disk")
    with contextlib.closing(made.keeper):
        yield made
    made.keeper.close()


def some(name: str, chunks: int) -> list[PartRef]:
    return prompt(name, chunks, nbytes=PART_BYTES)


def test_a_full_disk_takes_no_more_and_gives_what_it_has(rig: Rig) -> None:
    """And takes more when there is room again; what it could not take is in objects."""
    before, after = some("before", 8), some("after", 4)
    rig.keep(before)
    eventually(lambda: rig.kept(before), "copies on the disk")
    rig.store.troubles.write = errno.ENOSPC
    rig.keep(after)
    eventually(lambda: holds(rig.objects, after), "copies in objects")
    assert not any(rig.kept([ref]) for ref in after)
    rig.lose(rig.valkey)
    assert locate(rig.keeper, before + after) == [Where.DISK] * 8 + [Where.OBJECTS] * 4
    assert stage(rig.keeper, before + after) == [Outcome.OK] * 12
    assert holds(rig.valkey, before + after)
    rig.store.troubles.write = 0
    again = some("again", 4)

    def kept() -> bool:
        rig.keep(again)
        return rig.kept(again)

    eventually(kept, "copies on the disk again")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_until_it_is_well(rig: Rig, code: int) -> None:
    """What it holds is not said to be absent, and objects give what they have."""
    both, alone = some("both", 4), some("alone", 4)
    rig.keep(both + alone)
    eventually(lambda: rig.kept(both + alone) and holds(rig.objects, both + alone), "copies below")
    rig.lose(rig.valkey)
    for ref in alone:
        del rig.objects.parts[ref.key]
    rig.store.troubles.fail(code)
    rig.keep(some("more", 2))
    eventually(lambda: rig.disk.statistics().state == "down", "quarantine")
    assert locate(rig.keeper, both + alone) == [Where.OBJECTS] * 4 + [Where.UNKNOWN] * 4
    assert stage(rig.keeper, both) == [Outcome.OK] * 4
    assert set(stage(rig.keeper, alone)) <= {Outcome.REFUSED, Outcome.FAILED}
    rig.store.troubles.fail(0)
    eventually(lambda: rig.disk.statistics().state == "up", "the end of its quarantine")
    eventually(lambda: stage(rig.keeper, alone) == [Outcome.OK] * 4, "its parts")
    assert holds(rig.valkey, both + alone)


def test_what_a_crash_tore_is_absent_or_comes_from_objects_and_the_rest_from_the_disk(rig: Rig) -> None:
    refs = some("torn", 6)
    rig.keep(refs)
    eventually(lambda: rig.kept(refs) and holds(rig.objects, refs), "copies below")
    idle(rig.keeper)
    last = max(refs, key=lambda ref: rig.store.place(ref)[1:])
    other = min(refs, key=lambda ref: rig.store.place(ref)[1:])
    place = rig.store.place(last)
    rig.keeper.close()
    record = bytearray(rig.store.record(place, last))
    record[head_bytes(last.nbytes) + PART_BYTES // 2 :] = bytes(
        len(record) - head_bytes(last.nbytes) - PART_BYTES // 2
    )
    rig.store.put(place, bytes(record))
    rig.restart()
    rig.lose(rig.valkey)
    del rig.objects.parts[other.key]
    expected = {last: Where.OBJECTS}
    assert locate(rig.keeper, refs) == [expected.get(ref, Where.DISK) for ref in refs]
    del rig.objects.parts[last.key]
    assert stage(rig.keeper, refs) == [Outcome.MISS if ref == last else Outcome.OK for ref in refs]
    assert holds(rig.valkey, [ref for ref in refs if ref != last])


def test_a_hung_disk_holds_up_no_stage_beyond_its_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", stall_s=0.5)
    refs = some("hung", 8)

    def kept() -> bool:
        rig.keep(refs)
        return rig.kept(refs)

    eventually(kept, "copies on the disk")
    idle(rig.keeper)
    rig.lose(rig.valkey, rig.objects)
    with rig.store.troubles.hang():
        found = stage(rig.keeper, refs, within_s=2.0)
        assert set(found) <= {Outcome.LATE, Outcome.REFUSED, Outcome.FAILED}
    idle(rig.keeper)
    eventually(lambda: rig.disk.statistics().state == "up", "the end of its quarantine")
    eventually(lambda: stage(rig.keeper, refs) == [Outcome.OK] * 8, "its parts")
    assert holds(rig.valkey, refs)
    rig.keeper.close()


def test_a_namespace_that_is_dropped_is_gone_from_the_disk_also_after_a_restart(rig: Rig) -> None:
    ones, others = some("one", 6), prompt("two", 6, nbytes=PART_BYTES, namespace=b"o" * 16)
    rig.keep(ones + others)
    eventually(lambda: rig.kept(ones + others), "copies on the disk")
    idle(rig.keeper)
    dropped = Results(1)
    rig.keeper.drop(
        "disk", namespace=ones[0].key.namespace, older_than_s=None, done=lambda found: dropped.done(0, found)
    )
    assert dropped.wait() == [Dropped(6, 6 * PART_BYTES)]
    rig.lose(rig.valkey, rig.objects)
    assert locate(rig.keeper, ones + others) == [Where.ABSENT] * 6 + [Where.DISK] * 6
    rig.restart()
    assert locate(rig.keeper, ones + others) == [Where.ABSENT] * 6 + [Where.DISK] * 6


def test_ciphertext_goes_to_the_disk_and_comes_back_for_the_node_that_has_the_key(
    server: Server, tmp_path: Path
) -> None:
    """Through a restart of the keeper, which never has it; damage on the way is found by the node."""
    old, new = (SealingKey(bytes([number]) * 32) for number in (1, 2))
    ids = (new.key_id, old.key_id)
    refs = [*some("sealed", 3), *prompt("small", 3, nbytes=100)]
    store = DiskStore(DiskSettings(tmp_path / "disk", 64 * MIB, stall_s=60.0))
    with contextlib.ExitStack() as stack:

        def node(*keys: SealingKey) -> ValkeyTier:
            tier = ValkeyTier.connect(server.settings(protection=Sealed(KeyRing(keys))))
            stack.callback(tier.close)
            return tier

        def keeper() -> Keeper:
            made = Keeper(
                valkey=ValkeyTier.connect(server.settings(protection=AsStored(ids))),
                disk=store.open(),
                objects=None,
                limits=EAGER,
                form=SealedForm(ids),
            )
            stack.callback(made.close)
            return made

        before, current = node(old), node(new, old)
        for tier, some_of in ((before, refs[::2]), (current, refs[1::2])):
            assert set(store_all(tier, [(ref, contents(ref)) for ref in some_of])) == {Outcome.OK}
        first = keeper()
        first.stored(refs, positions=range(6), likely=[True] * 6)
        eventually(lambda: locate(first, refs) == [Where.DISK] * 6, "copies on the disk")
        idle(first)
        first.close()
        server.ask("FLUSHALL")
        second = keeper()
        assert stage(second, refs) == [Outcome.OK] * 6
        found = fetch_all(current, refs)
        assert [(result.outcome, memory) for result, memory in found] == [
            (Outcome.OK, contents(ref)) for ref in refs
        ]
        alone = fetch_all(before, refs)
        assert [result.outcome for result, _ in alone] == [Outcome.OK, Outcome.MISS] * 3
