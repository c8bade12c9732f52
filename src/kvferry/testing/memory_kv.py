"""A dictionary that engines of one host share, and the names of what is in it."""

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from kvferry.identity.stripes import checksum

BLOCK_TOKENS = 4
MAX_SALT_CHARACTERS = 256


class KvStore:
    """What engines of one host share: a block's bytes by rank and digest, with a checksum.

    epoch: counts its starts. leases: loads that engines have under way. loads, saves: gates that hold them.
    Threads of several engines call it: what looks at more than one block, or changes one it looked at, holds
    the lock.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bytes], tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()
        self.up = True
        self.epoch = 1
        self.leases = 0
        self.loads = threading.Event()
        self.saves = threading.Event()
        for gate in (self.loads, self.saves):
            gate.set()

    def present(self, digests: Sequence[bytes], *, ranks: int) -> int:
        """How many of these, from the first on, every rank has."""
        with self._lock:
            for count, digest in enumerate(digests):
                if not self.up or any((rank, digest) not in self._blocks for rank in range(ranks)):
                    return count
            return len(digests)

    def read(self, rank: int, digest: bytes) -> bytes | None:
        """The bytes, if they are there and right. Damaged ones are removed."""
        with self._lock:
            data, wanted = self._blocks.get((rank, digest), (b"", b"")) if self.up else (b"", b"")
            if checksum(data) == wanted:
                return data
            self._blocks.pop((rank, digest), None)
            return None

    def write(self, rank: int, digest: bytes, data: bytes) -> None:
        """Publish a block."""
        with self._lock:
            if self.up:
                self._blocks.setdefault((rank, digest), (data, checksum(data)))

    def damage(self, *, rank: int | None) -> None:
        """One byte of every block, or of every block of one rank."""
        with self._lock:
            for key, (data, wanted) in list(self._blocks.items()):
                if rank in (None, key[0]):
                    self._blocks[key] = (bytes([data[0] ^ 1]) + data[1:], wanted)

    def stop(self) -> None:
        """Gone, with all it held."""
        with self._lock:
            self.up = False
            self._blocks.clear()

    def restart(self) -> None:
        """There again, empty, under a new epoch."""
        self.stop()
        self.epoch += 1
        self.up = True


def digests_of(request: Any, count: int) -> tuple[bytes, ...]:
    """A chain over salt and tokens of the first ``count`` blocks; none for a salt that is no short text."""
    salt = request.cache_salt
    try:
        text = "" if salt is None else str.encode(salt, "utf-8").hex()
    except (TypeError, UnicodeEncodeError):
        return ()
    if len(text) > 2 * MAX_SALT_CHARACTERS:
        return ()
    found: list[bytes] = []
    last = hashlib.blake2b(text.encode(), digest_size=32).digest()
    for index in range(count):
        tokens = request.all_token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        last = hashlib.blake2b(last + repr(tokens).encode(), digest_size=32).digest()
        found.append(last)
    return tuple(found)
