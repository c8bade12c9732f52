"""What stands between stored bytes and the pool: a checksum, or encryption. Specified in part-header.md.

A payload is checked, or decrypted, piece by piece while it is received: what the kernel has just copied
is still in the core's cache then, and the server goes on sending meanwhile.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import xxhash

from kvferry.errors import BrokenError, CorruptError
from kvferry.identity.header import (
    KEY_ID_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    SealedHeader,
    pack_header,
    pack_sealed_header,
    sealed_name,
    verify_header,
    verify_sealed_header,
)
from kvferry.identity.names import PartKey
from kvferry.identity.sealing import KeyRing, SealingKey
from kvferry.identity.stripes import Stripe, stripe_plan

PIECE_BYTES = 512 << 10
"""Small enough to stay in a core's cache between the copy and the check; larger than what a call costs."""
SEAL_BYTES = TAG_BYTES + KEY_ID_BYTES + NONCE_BYTES
"""What is needed beside an encrypted payload to store it again: tag, key id, nonce."""


class ValueName(NamedTuple):
    """Everything a stored value must say about itself."""

    key: PartKey
    part_bytes: int
    stripe: Stripe


class Received(NamedTuple):
    """checksum: XXH3-128 of the payload as it should be. intact: whether the payload in memory is that."""

    checksum: bytes
    intact: bool


class Outgoing(NamedTuple):
    """A value to send. intact: whether what was to be stored still had the checksum it was committed with."""

    header: bytes
    payload: memoryview
    intact: bool


class Intake(Protocol):
    """One payload on its way in."""

    def pieces(self) -> Iterator[memoryview]:
        """Where to receive the next bytes, in order; each must be full before the next is asked for."""
        ...

    def result(self) -> Received:
        """Once ``pieces`` has ended. Until then nothing of the payload may be used."""
        ...


class Guard(Protocol):
    """A protection's work on one connection. Used by one thread."""

    def receiving(self, header: bytes, name: ValueName, *, version: int, into: memoryview) -> Intake:
        """Verify the header (CorruptError) and be ready for its payload.

        version: index of the suffix under which the value was found.
        """
        ...

    def sending(self, name: ValueName, *, payload: memoryview, checksum: bytes) -> Outgoing:
        """Header and payload to store. They may be used until the next call.

        checksum: of the payload; empty where nobody has computed it.
        """
        ...


class Protection(Protocol):
    """How values are protected. suffixes: of their keys; all are read.

    description: for people, no secrets; empty for what goes without saying.
    """

    suffixes: tuple[bytes, ...]
    description: str

    def version(self, checksum: bytes) -> int:
        """Index of the suffix under which a value with that checksum is written."""
        ...

    def guard(self) -> Guard:
        """For one connection."""
        ...


class Checksums:
    """XXH3-128: finds damage, not forgery. It keeps no state, so one serves all connections."""

    suffixes: tuple[bytes, ...] = (b"",)
    description: str = ""

    def version(self, checksum: bytes) -> int:
        """See Protection."""
        del checksum
        return 0

    def guard(self) -> Guard:
        """See Protection."""
        return self

    def receiving(self, header: bytes, name: ValueName, *, version: int, into: memoryview) -> Intake:
        """See Guard."""
        del version
        return _Checked(verify_header(header, name.key, part_bytes=name.part_bytes, stripe=name.stripe), into)

    def sending(self, name: ValueName, *, payload: memoryview, checksum: bytes) -> Outgoing:
        """See Guard. The checksum travels along, so that damage until now shows when the value is read."""
        header = pack_header(
            name.key,
            part_bytes=name.part_bytes,
            stripe=name.stripe,
            stripe_count=len(stripe_plan(name.part_bytes)),
            checksum=checksum or xxhash.xxh3_128_digest(payload),
        )
        return Outgoing(header, payload, intact=True)


class _Checked:
    """Received where it belongs, and hashed there."""

    def __init__(self, expected: bytes, into: memoryview) -> None:
        self._expected = expected
        self._into = into
        self._hash = xxhash.xxh3_128()

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, self._into.nbytes, PIECE_BYTES):
            piece = self._into[start : start + PIECE_BYTES]
            yield piece
            self._hash.update(piece)

    def result(self) -> Received:
        return Received(self._expected, intact=self._hash.digest() == self._expected)


class Sealed:
    """AES-256-GCM under the keys of a ring. Each key's values have names of their own.

    So nodes with different keys, and nodes without any, never meet each other's values, and whatever else
    is found under such a name is damage or forgery.
    """

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring
        ids = [key.key_id.hex() for key in ring.keys]
        self.suffixes = tuple(f":{key_id}".encode() for key_id in ids)
        older = f" (reads {' '.join(ids[1:])} too)" if ids[1:] else ""
        self.description = f"AES-256-GCM by key {ids[0]}{older}"

    def version(self, checksum: bytes) -> int:
        """See Protection."""
        del checksum
        return 0

    def guard(self) -> Guard:
        """See Protection."""
        return _SealedGuard(self._ring.keys)


class _SealedGuard:
    """Memory grows with the first value each way: one piece for reading, a whole stripe for writing."""

    def __init__(self, keys: tuple[SealingKey, ...]) -> None:
        self._keys = keys
        self._scratch = memoryview(bytearray())

    def receiving(self, header: bytes, name: ValueName, *, version: int, into: memoryview) -> Intake:
        key = self._keys[version]
        found = verify_sealed_header(
            header, name.key, part_bytes=name.part_bytes, stripe=name.stripe, key_id=key.key_id
        )
        return _Opened(key, found, scratch=self._room(min(into.nbytes, PIECE_BYTES)), into=into)

    def sending(self, name: ValueName, *, payload: memoryview, checksum: bytes) -> Outgoing:
        """The tag would also cover damage that came before it, so the payload is hashed too.

        That happens behind the encryption: damage between the two shows, damage after them hurts nobody.
        """
        key, nonce, room = self._keys[0], os.urandom(NONCE_BYTES), self._room(payload.nbytes)
        stripe_count = len(stripe_plan(name.part_bytes))
        named = sealed_name(
            name.key, part_bytes=name.part_bytes, stripe=name.stripe, stripe_count=stripe_count
        )
        sealing, hashed = key.sealing(named, nonce), xxhash.xxh3_128()
        for start in range(0, payload.nbytes, PIECE_BYTES):
            piece = payload[start : start + PIECE_BYTES]
            sealing.update_into(piece, room[start : start + piece.nbytes])
            hashed.update(piece)
        sealing.finalize()
        header = pack_sealed_header(named, key_id=key.key_id, nonce=nonce, tag=sealing.tag)
        return Outgoing(header, room, intact=not checksum or hashed.digest() == checksum)

    def _room(self, nbytes: int) -> memoryview:
        """The pool's own memory is never encrypted in place: others read it."""
        if self._scratch.nbytes < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]


class _Opened:
    """Received beside the pool and decrypted into it: the pool sees no encrypted byte."""

    def __init__(
        self, key: SealingKey, header: SealedHeader, *, scratch: memoryview, into: memoryview
    ) -> None:
        self._opening = key.opening(header)
        self._scratch = scratch
        self._into = into
        self._hash = xxhash.xxh3_128()

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, self._into.nbytes, PIECE_BYTES):
            target = self._into[start : start + PIECE_BYTES]
            piece = self._scratch[: target.nbytes]
            yield piece
            self._opening.piece(piece, target)
            self._hash.update(target)

    def result(self) -> Received:
        try:
            self._opening.finish()
        except CorruptError:
            return Received(b"", intact=False)
        return Received(self._hash.digest(), intact=True)


class AsStored:
    """Encrypted values as they are, for one that keeps them and has no key. Keeps no state.

    What stands for a checksum is a seal: tag, key id and nonce. With the payload it makes the very same
    value again, under the name of its own key. A header is verified but for its tag; damage to a payload
    shows where it is decrypted.
    """

    def __init__(self, key_ids: Sequence[bytes]) -> None:
        """key_ids: of the keys whose values are read, in the order in which nodes use them."""
        if (
            not key_ids
            or len(set(key_ids)) != len(key_ids)
            or {len(each) for each in key_ids} != {KEY_ID_BYTES}
        ):
            raise BrokenError(f"{len(key_ids)} key ids, which must differ and have {KEY_ID_BYTES} bytes each")
        self._key_ids = tuple(key_ids)
        self.suffixes = tuple(f":{key_id.hex()}".encode() for key_id in key_ids)
        self.description = f"encrypted by key {' '.join(key_id.hex() for key_id in key_ids)}, kept as it is"

    def version(self, checksum: bytes) -> int:
        """See Protection. Of a seal that is not of these keys nothing is written (``sending``)."""
        key_id = _key_id(checksum)
        return self._key_ids.index(key_id) if key_id in self._key_ids else 0

    def guard(self) -> Guard:
        """See Protection."""
        return self

    def receiving(self, header: bytes, name: ValueName, *, version: int, into: memoryview) -> Intake:
        """See Guard."""
        key_id = self._key_ids[version]
        found = verify_sealed_header(
            header, name.key, part_bytes=name.part_bytes, stripe=name.stripe, key_id=key_id
        )
        return _Kept(found.tag + key_id + found.nonce, into)

    def sending(self, name: ValueName, *, payload: memoryview, checksum: bytes) -> Outgoing:
        """See Guard. checksum: the seal that was received with the payload."""
        key_id = _key_id(checksum)
        if len(checksum) != SEAL_BYTES or key_id not in self._key_ids:
            return Outgoing(b"", payload, intact=False)
        stripe_count = len(stripe_plan(name.part_bytes))
        named = sealed_name(
            name.key, part_bytes=name.part_bytes, stripe=name.stripe, stripe_count=stripe_count
        )
        tag, nonce = checksum[:TAG_BYTES], checksum[TAG_BYTES + KEY_ID_BYTES :]
        header = pack_sealed_header(named, key_id=key_id, nonce=nonce, tag=tag)
        return Outgoing(header, payload, intact=True)


def _key_id(seal: bytes) -> bytes:
    return seal[TAG_BYTES : TAG_BYTES + KEY_ID_BYTES]


class _Kept:
    """Received where it belongs."""

    def __init__(self, seal: bytes, into: memoryview) -> None:
        self._seal = seal
        self._into = into

    def pieces(self) -> Iterator[memoryview]:
        yield self._into

    def result(self) -> Received:
        return Received(self._seal, intact=True)
