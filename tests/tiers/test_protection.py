"""Payloads on their way in and out, piece by piece: every byte of them is checked, at every size."""

import pytest

from kvferry.errors import CorruptError
from kvferry.identity.header import HEADER_BYTES
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import checksum, stripe_plan
from kvferry.testing.tier_contract import empty_memory, some_bytes, some_ref
from kvferry.tiers.valkey.protection import (
    PIECE_BYTES,
    Checksums,
    Protection,
    Received,
    Sealed,
    ValueName,
)

SIZES = (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES - 192)
RING = KeyRing([SealingKey(bytes([1]) * 32), SealingKey(bytes([2]) * 32)])
PROTECTIONS: tuple[Protection, ...] = (Checksums(), Sealed(RING))


def a_stripe(nbytes: int) -> ValueName:
    """The first stripe, of about that size, of some part."""
    return next(
        ValueName(some_ref(part, 1).key, part, stripe_plan(part)[0])
        for part in range(nbytes, 2 * nbytes + 1000, 64)
        if stripe_plan(part)[0].nbytes >= nbytes
    )


def take_in(
    protection: Protection, name: ValueName, value: bytes, *, version: int = 0
) -> tuple[Received, memoryview]:
    """Receive a value as a connection does."""
    into = empty_memory(name.stripe.nbytes)
    header, rest = value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
    intake = protection.guard().receiving(header, name, version=version, into=into)
    for piece in intake.pieces():
        assert piece.nbytes <= PIECE_BYTES
        piece[:] = rest[: piece.nbytes]
        rest = rest[piece.nbytes :]
    assert not rest.nbytes
    return intake.result(), into


def value_of(protection: Protection, name: ValueName, payload: memoryview) -> bytes:
    made = protection.guard().sending(name, payload=payload, checksum=checksum(payload))
    assert made.intact
    return made.header + bytes(made.payload)


@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_goes_out_comes_in_and_damage_anywhere_shows(protection: Protection, nbytes: int) -> None:
    name = a_stripe(nbytes)
    payload = some_bytes(name.stripe.nbytes, 1)
    value = value_of(protection, name, payload)
    assert len(value) == HEADER_BYTES + name.stripe.nbytes
    assert take_in(protection, name, value) == (Received(checksum(payload), intact=True), payload)
    last = name.stripe.nbytes - 1
    for place in sorted({0, last // 2, min(PIECE_BYTES, last), last}):
        damaged = bytearray(value)
        damaged[HEADER_BYTES + place] ^= 0x80
        assert not take_in(protection, name, bytes(damaged))[0].intact


def test_a_guard_serves_values_of_different_sizes_one_after_the_other() -> None:
    guard = Sealed(RING).guard()
    for nbytes in (5, 3 * PIECE_BYTES, 1, PIECE_BYTES, 3 * PIECE_BYTES):
        name = a_stripe(nbytes)
        payload = some_bytes(name.stripe.nbytes, nbytes)
        made = guard.sending(name, payload=payload, checksum=checksum(payload))
        value = made.header + bytes(made.payload)
        assert take_in(Sealed(RING), name, value)[1] == payload


def test_the_same_payload_is_never_encrypted_to_the_same_bytes() -> None:
    name = a_stripe(1000)
    payload = some_bytes(name.stripe.nbytes, 1)
    values = {value_of(Sealed(RING), name, payload) for _ in range(8)}
    assert len(values) == 8
    assert len({value[108:120] for value in values}) == 8  # nonces


def test_a_value_opens_only_as_of_the_key_whose_name_it_has() -> None:
    name = a_stripe(1000)
    value = value_of(Sealed(RING), name, some_bytes(name.stripe.nbytes, 1))
    with pytest.raises(CorruptError, match="cipher"):
        take_in(Sealed(RING), name, value, version=1)


def test_encryption_leaves_the_pool_as_it_is_and_notices_what_changed_there() -> None:
    name = a_stripe(2 * PIECE_BYTES)
    payload = some_bytes(name.stripe.nbytes, 1)
    before, committed = bytes(payload), checksum(payload)
    guard = Sealed(RING).guard()
    assert guard.sending(name, payload=payload.toreadonly(), checksum=committed).intact
    assert payload == before
    payload[-1] ^= 1
    assert not guard.sending(name, payload=payload, checksum=committed).intact
