"""What a part is called below Valkey, and how its bytes get there and back: as they are, or still sealed."""

from collections.abc import Sequence
from typing import Protocol

from kvferry.errors import CorruptError
from kvferry.identity.names import PartRef
from kvferry.keeper.sealed import kept_key_id, read_seals, sealed_ref, seals_bytes, write_seals


class Form(Protocol):
    """A part is ``ref`` in Valkey and at nodes; below it may have other names and be larger."""

    def below_bytes(self, ref: PartRef) -> int:
        """Its size below."""
        ...

    def names(self, ref: PartRef) -> Sequence[PartRef]:
        """What it may be called below, best first; at least one."""
        ...

    def down(
        self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]
    ) -> tuple[PartRef, tuple[bytes, ...]] | None:
        """Its name and checksums below, after Valkey gave these; None if it has no place there.

        memory: of ``below_bytes``, its first ``ref.nbytes`` as Valkey gave them; may be completed.
        """
        ...

    def up(self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Its checksums for Valkey, after a tier below gave these together with ``memory``.

        memory: of ``below_bytes``. Raises CorruptError if it does not hold what it should.
        """
        ...


class Plain:
    """As it is."""

    def below_bytes(self, ref: PartRef) -> int:
        """See Form."""
        return ref.nbytes

    def names(self, ref: PartRef) -> Sequence[PartRef]:
        """See Form."""
        return (ref,)

    def down(
        self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]
    ) -> tuple[PartRef, tuple[bytes, ...]] | None:
        """See Form."""
        del memory
        return ref, checksums

    def up(self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """See Form."""
        del ref, memory
        return checksums


class Sealed:
    """Encrypted, by one that has no key: seals travel behind the bytes. See ``sealed``."""

    def __init__(self, key_ids: Sequence[bytes]) -> None:
        """key_ids: of the keys that nodes use, newest first."""
        self._key_ids = tuple(key_ids)

    def below_bytes(self, ref: PartRef) -> int:
        """See Form."""
        return ref.nbytes + seals_bytes(ref)

    def names(self, ref: PartRef) -> Sequence[PartRef]:
        """See Form."""
        return [sealed_ref(ref, key_id) for key_id in self._key_ids]

    def down(
        self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]
    ) -> tuple[PartRef, tuple[bytes, ...]] | None:
        """See Form. The tier computes checksums: Valkey's are seals."""
        try:
            key_id = kept_key_id(checksums, self._key_ids)
        except CorruptError:
            return None
        write_seals(checksums, ref, memory)
        return sealed_ref(ref, key_id), ()

    def up(self, ref: PartRef, memory: memoryview, checksums: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """See Form."""
        del checksums
        return read_seals(ref, memory, self._key_ids)
