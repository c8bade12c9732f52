"""How an encrypted part is kept by one that has no key: its encrypted bytes, then the seal of each stripe.

    encrypted bytes of the part (nbytes) │ seal of stripe 0 (32 bytes) │ seal of stripe 1 │ ...

Below the keeper that is a part like any other, with checksums of its own and a name that no plain part and
no other key's has. Whoever decrypts it notices whatever happened to it (``docs/spec/part-header.md``). Pure.
"""

import hashlib
from collections.abc import Sequence

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.header import KEY_ID_BYTES, TAG_BYTES
from kvferry.identity.names import DIGEST_BYTES, PartRef
from kvferry.identity.stripes import stripe_plan
from kvferry.tiers.valkey.protection import SEAL_BYTES


def sealed_ref(ref: PartRef, key_id: bytes) -> PartRef:
    """Name and size under which it is kept. RefusedError when the part has a size that none can have.

    The size may be beyond what a tier stores, for parts of almost MAX_PART_BYTES.
    """
    if len(key_id) != KEY_ID_BYTES:
        raise BrokenError(f"a key id has {KEY_ID_BYTES} bytes, not {len(key_id)}")
    chunk = hashlib.blake2b(ref.key.chunk + key_id, digest_size=DIGEST_BYTES).digest()
    return PartRef(ref.key._replace(chunk=chunk), ref.nbytes + seals_bytes(ref))


def seals_bytes(ref: PartRef) -> int:
    """What the seals of a part take."""
    return SEAL_BYTES * len(stripe_plan(ref.nbytes))


def kept_key_id(seals: Sequence[bytes], key_ids: Sequence[bytes]) -> bytes:
    """By which of the keys a part is kept: the oldest that any stripe needs, so that whoever asks for it can
    read all of it. key_ids: newest first. CorruptError for a seal of another key."""
    places = [_place(seal, key_ids) for seal in seals]
    return key_ids[max(places, default=0)]


def write_seals(seals: Sequence[bytes], ref: PartRef, memory: memoryview) -> None:
    """Behind the part's bytes. memory: of ``sealed_ref(ref, ...).nbytes`` bytes."""
    if len(seals) != len(stripe_plan(ref.nbytes)) or any(len(seal) != SEAL_BYTES for seal in seals):
        raise BrokenError(f"{len(seals)} seals of a wrong number or length for {ref.nbytes} bytes")
    memory[ref.nbytes :] = b"".join(seals)


def read_seals(ref: PartRef, memory: memoryview, key_ids: Sequence[bytes]) -> tuple[bytes, ...]:
    """The seals behind the part's bytes. CorruptError for one of another key."""
    if memory.nbytes != ref.nbytes + seals_bytes(ref):
        raise BrokenError(f"{memory.nbytes} bytes do not hold a part of {ref.nbytes} and its seals")
    tail = bytes(memory[ref.nbytes :])
    seals = tuple(tail[at : at + SEAL_BYTES] for at in range(0, len(tail), SEAL_BYTES))
    for seal in seals:
        _place(seal, key_ids)
    return seals


def _place(seal: bytes, key_ids: Sequence[bytes]) -> int:
    key_id = seal[TAG_BYTES : TAG_BYTES + KEY_ID_BYTES]
    if len(seal) != SEAL_BYTES or key_id not in key_ids:
        raise CorruptError(f"a kept part is sealed by key {key_id.hex()}, which is none of this keeper's")
    return list(key_ids).index(key_id)
