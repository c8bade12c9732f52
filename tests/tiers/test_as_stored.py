"""Encrypted values kept by one without a key: they come back as they were, and only readers open them."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.servers import Server

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.names import PartRef
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import part_checksums, stripe_plan
from kvferry.keeper.sealed import kept_key_id, read_seals, sealed_ref, write_seals
from kvferry.testing.expectations import eventually
from kvferry.testing.tier_calls import empty_memory, fetch_all, some_bytes, some_ref, store_all
from kvferry.tiers.contract import Outcome
from kvferry.tiers.valkey.jobs import stripe_key
from kvferry.tiers.valkey.protection import SEAL_BYTES, AsStored, Protection, Sealed
from kvferry.tiers.valkey.tier import ValkeyTier

OLD, NEW, OTHER = (SealingKey(bytes([number]) * 32) for number in (1, 2, 3))
IDS = (NEW.key_id, OLD.key_id)
PART_BYTES = 6 << 20


class Fleet:
    """Tiers over one server: nodes with keys, and a keeper without."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.server = server
        self._stack = stack
        self.keeper = self._connect(AsStored(IDS))

    def node(self, *keys: SealingKey) -> ValkeyTier:
        return self._connect(Sealed(KeyRing(keys)))

    def _connect(self, protection: Protection) -> ValkeyTier:
        tier = ValkeyTier.connect(self.server.settings(protection=protection))
        self._stack.callback(tier.close)
        return tier

    def values(self) -> dict[bytes, object]:
        return {name: self.server.ask("GET", name) for name in self.server.key_names()}

    def keep(self, ref: PartRef) -> tuple[memoryview, tuple[bytes, ...]]:
        """What the keeper fetches."""
        (result, memory), *_ = fetch_all(self.keeper, [ref])
        assert result.outcome is Outcome.OK
        return memory, result.checksums

    def put_back(self, ref: PartRef, memory: memoryview, seals: tuple[bytes, ...]) -> Outcome:
        return store_all(self.keeper, [(ref, memory)], checksums=lambda _: seals)[0]


@pytest.fixture
def fleet(server: Server) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(server, stack)


def read(node: ValkeyTier, ref: PartRef, data: memoryview) -> Outcome:
    (result, memory), *_ = fetch_all(node, [ref])
    if result.outcome is Outcome.OK:
        assert memory == data, "wrong bytes passed as OK"
        assert result.checksums == part_checksums(data)
    return result.outcome


@pytest.mark.parametrize("nbytes", [1, 4096, 200_000, PART_BYTES])
def test_what_a_keeper_puts_back_is_the_very_value_that_it_fetched(fleet: Fleet, nbytes: int) -> None:
    """And it sees nothing of what was encrypted."""
    ref, data = (
        some_ref(nbytes, 1),
        memoryview(bytearray(b"kvferry plain text " * (nbytes // 19 + 1))[:nbytes]),
    )
    node = fleet.node(NEW)
    assert store_all(node, [(ref, data)]) == [Outcome.OK]
    before = fleet.values()
    memory, seals = fleet.keep(ref)
    assert [len(seal) for seal in seals] == [SEAL_BYTES] * len(stripe_plan(nbytes))
    assert nbytes < 16 or b"kvferry plain" not in bytes(memory)
    fleet.server.ask("FLUSHALL")
    assert read(node, ref, data) is Outcome.MISS
    assert fleet.put_back(ref, memory, seals) is Outcome.OK
    assert fleet.values() == before
    assert read(node, ref, data) is Outcome.OK


def test_damage_while_it_was_kept_is_found_by_the_node(fleet: Fleet) -> None:
    """In the payload, or in the seal."""
    node = fleet.node(NEW)
    for number in range(3):
        ref, data = some_ref(300_000, number), some_bytes(300_000, number)
        store_all(node, [(ref, data)])
        memory, seals = fleet.keep(ref)
        fleet.server.ask("FLUSHALL")
        if number == 0:
            memory[299_999] ^= 1
        else:
            at = (0, 31)[number - 1]  # tag, nonce
            seals = (seals[0][:at] + bytes([seals[0][at] ^ 1]) + seals[0][at + 1 :], *seals[1:])
        assert fleet.put_back(ref, memory, seals) is Outcome.OK
        assert read(node, ref, data) is Outcome.CORRUPT
        assert read(node, ref, data) is Outcome.MISS, "it was not removed"


def test_a_value_whose_header_is_wrong_is_not_kept(fleet: Fleet) -> None:
    """It is another part's, another key's, or damaged; it is removed as by any reader."""
    node = fleet.node(NEW)
    ref, other = some_ref(1000, 1), some_ref(1000, 2)
    store_all(node, [(ref, some_bytes(1000, 1)), (other, some_bytes(1000, 2))])
    name = stripe_key(ref.key, 0, f":{NEW.key_id.hex()}".encode())
    wrong = stripe_key(other.key, 0, f":{NEW.key_id.hex()}".encode())
    older = stripe_key(ref.key, 0, f":{OLD.key_id.hex()}".encode())
    fleet.server.ask("COPY", wrong, name, "REPLACE")
    assert fetch_all(fleet.keeper, [ref])[0][0].outcome is Outcome.CORRUPT
    fleet.server.ask("COPY", wrong, older)
    assert fetch_all(fleet.keeper, [ref])[0][0].outcome is Outcome.CORRUPT
    assert fleet.server.key_names() == [wrong]


def test_each_value_goes_back_under_the_name_of_its_own_key(fleet: Fleet) -> None:
    """Also of a part whose stripes are of two keys; readers of both read it, of one do not."""
    ref, data = some_ref(PART_BYTES, 5), some_bytes(PART_BYTES, 5)
    store_all(fleet.node(OLD), [(ref, data)])
    first = stripe_key(ref.key, 0, f":{OLD.key_id.hex()}".encode())
    assert kept_key_id(fleet.keep(ref)[1], IDS) == OLD.key_id
    fleet.server.ask("DEL", first)
    both, old = fleet.node(NEW, OLD), fleet.node(OLD)
    assert store_all(both, [(ref, data)]) == [Outcome.OK]  # the stripe that was missing, by the new key
    before = fleet.values()
    assert len({name.rsplit(b":", 1)[-1] for name in before}) == 2
    memory, seals = fleet.keep(ref)
    assert kept_key_id(seals, IDS) == OLD.key_id
    fleet.server.ask("FLUSHALL")
    assert fleet.put_back(ref, memory, seals) is Outcome.OK
    assert fleet.values() == before
    assert read(both, ref, data) is Outcome.OK
    assert read(old, ref, data) is Outcome.MISS


def test_a_store_that_fails_half_way_removes_what_it_wrote_under_each_key(fleet: Fleet) -> None:
    ref, data = some_ref(PART_BYTES, 6), some_bytes(PART_BYTES, 6)
    store_all(fleet.node(OLD), [(ref, data)])
    memory, seals = fleet.keep(ref)
    fleet.server.ask("FLUSHALL")
    broken = (*seals[:-1], b"no seal")
    assert fleet.put_back(ref, memory, broken) is Outcome.REFUSED
    eventually(lambda: not fleet.server.key_names(), "the removal of what was written")
    assert fleet.put_back(ref, memory, ()) is Outcome.REFUSED


def test_a_part_and_its_seals_are_kept_as_one_part(fleet: Fleet) -> None:
    ref, data = some_ref(PART_BYTES, 7), some_bytes(PART_BYTES, 7)
    node = fleet.node(NEW)
    store_all(node, [(ref, data)])
    memory, seals = fleet.keep(ref)
    kept = sealed_ref(ref, kept_key_id(seals, IDS))
    room = empty_memory(kept.nbytes)
    room[: ref.nbytes] = memory
    write_seals(seals, ref, room)
    assert read_seals(ref, room, IDS) == seals
    fleet.server.ask("FLUSHALL")
    assert fleet.put_back(ref, room[: ref.nbytes], read_seals(ref, room, IDS)) is Outcome.OK
    assert read(node, ref, data) is Outcome.OK
    with pytest.raises(CorruptError, match="none of this keeper's"):
        read_seals(ref, room, [OTHER.key_id])
    with pytest.raises(CorruptError, match="none of this keeper's"):
        kept_key_id(seals, [OTHER.key_id])


def test_kept_names_differ_by_key_and_from_plain_ones() -> None:
    """And nothing but the chunk and the size changes."""
    ref = some_ref(PART_BYTES, 8)
    names = [ref, *(sealed_ref(ref, key.key_id) for key in (OLD, NEW, OTHER))]
    assert len({name.key.chunk for name in names}) == 4
    assert {(name.key.namespace, name.key.part) for name in names} == {(ref.key.namespace, ref.key.part)}
    assert {name.nbytes for name in names[1:]} == {PART_BYTES + SEAL_BYTES * len(stripe_plan(PART_BYTES))}


def test_key_ids_of_a_wrong_length_or_twice_are_refused() -> None:
    for wrong in ([], [b"123"], [b"1234", b"1234"]):
        with pytest.raises(BrokenError):
            AsStored(wrong)
    with pytest.raises(BrokenError):
        sealed_ref(some_ref(1, 1), b"")
