"""An engine's memory: blocks of one chunk each, and the copies between them and the pool."""

from collections.abc import Sequence

from kvferry.bench.chaos.contents import MAX_CHUNKS, PART_BYTES, Contents
from kvferry.engines.vllm.copy import Fence

POISON = 0xEE


class Blocks:
    """One rank's blocks; ``engines.vllm.copy.BlockCopier`` over them. Users have blocks of their own."""

    def __init__(self, contents: Contents, *, part: int, users: int) -> None:
        self._contents = contents
        self._part = part
        self._blocks = [bytearray(PART_BYTES[part]) for _ in range(users * MAX_CHUNKS)]

    @property
    def block_bytes(self) -> int:
        """Of one block, which is one part."""
        return PART_BYTES[self._part]

    def fence(self) -> None:
        """Nothing is computed asynchronously here."""

    def load(self, part: memoryview, blocks: Sequence[int], *, first: int, after: Fence | None) -> None:
        """See ``BlockCopier``."""
        del first, after
        for block in blocks:
            self._blocks[block][:] = part

    def save(self, blocks: Sequence[int], part: memoryview, *, after: Fence | None) -> None:
        """See ``BlockCopier``."""
        del after
        for block in blocks:
            part[:] = self._blocks[block]

    def close(self) -> None:
        """Nothing was allocated for copying."""

    def poison(self, blocks: Sequence[int]) -> None:
        """Before a load: what is not overwritten must not look right by luck."""
        for block in blocks:
            self._blocks[block][:] = bytes([POISON]) * self.block_bytes

    def compute(self, block: int, digest: bytes) -> None:
        """What a prefill would do."""
        self._blocks[block][:] = self._contents.of(digest, self._part)

    def flip(self, block: int) -> None:
        """Damage one bit: the planted defect that shows whether checking finds anything."""
        self._blocks[block][self.block_bytes // 2] ^= 1

    def difference(self, block: int, digest: bytes) -> str:
        """Empty when every byte is right; else how many are wrong, and where the first is."""
        wanted, found = self._contents.of(digest, self._part), self._blocks[block]
        if found == wanted:
            return ""
        wrong = [at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        named = "poison" if found[:64] == bytes([POISON]) * 64 else found[:32].hex()
        return f"{len(wrong)} of {len(wanted)} bytes of part {self._part}, from {wrong[0]} on; holds {named}"
