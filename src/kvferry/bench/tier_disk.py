"""The disk tier in ``kvferry bench tiers``, beside a loop that reads or writes one file with O_DIRECT.

Both work in a temporary directory ($TMPDIR) and take turns. Each goes through as many bytes of the disk as
the other before it writes over any: a disk, or a virtual one's host, may hold in memory what was written
last. Parts are removed after their turn, so that nothing is carried over: that is write amplification.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvferry.bench.tier_arms import WAIT_S, Parts, TierArm, parts_in_memory
from kvferry.bench.tier_beside import BesideRow, Turn, beside, take_turn
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

LARGEST_PART_MIB = 16
ROOM = 4
"""The tier's size in samples, so that it evicts while it is measured."""
LEAST_ROOM_BYTES = 1 << 30


class BareFile:
    """One file, one thread, a part at a time; nothing verified. ``get`` reads what the last ``set`` wrote."""

    name = "bare"

    def __init__(self, path: Path, nbytes: int) -> None:
        """Raises MisconfiguredError where the file system has no O_DIRECT, or no room."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MisconfiguredError(f"no O_DIRECT in {path.parent}: set TMPDIR to a disk") from error
        self._nbytes = nbytes
        self._start = self._end = 0
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            os.close(self._file)
            raise MisconfiguredError(f"no room in {path.parent}: {error.strerror}") from error

    def prepare(self, parts: Parts) -> None:
        """See Arm."""
        self.set(parts)

    def get(self, parts: Parts) -> None:
        """See Arm."""
        self._end = self._all(os.preadv, parts.target)

    def set(self, parts: Parts) -> None:
        """See Arm."""
        self._start = self._end if self._end + parts.nbytes <= self._nbytes else 0
        self._end = self._all(os.pwritev, parts.source)

    def close(self) -> None:
        """See Arm."""
        os.close(self._file)

    def _all(self, move: Callable[[int, list[memoryview], int], int], views: Sequence[memoryview]) -> int:
        offset = self._start
        for view in views:
            if move(self._file, [view], offset) != view.nbytes:
                raise BrokenError("a read or write of the bare file was cut short")
            offset += view.nbytes
        return offset


class DiskArm(TierArm):
    """The tier as the node uses it."""

    def __init__(self, tier: DiskTier) -> None:
        super().__init__(tier)
        self._disk = tier

    def forget(self, parts: Parts) -> None:
        """Remove them, and wait until they are."""
        done = threading.Event()
        self._disk.remove(parts.refs, done=lambda outcomes: done.set())
        if not done.wait(WAIT_S):
            raise BrokenError(f"a removal did not end in {WAIT_S:.0f} s")


def measure_disk(part_mib: Sequence[float], rounds: int, sample_bytes: int) -> list[BesideRow]:
    """Writes and reads at each size up to LARGEST_PART_MIB. Raises MisconfiguredError where it cannot."""
    rows: list[BesideRow] = []
    for mib in part_mib:
        if mib <= LARGEST_PART_MIB:
            with _arms(sample_bytes) as arms, parts_in_memory(_whole_pages(mib), sample_bytes) as parts:
                try:
                    rows += _compare(arms, parts, mib, rounds)
                finally:
                    arms[1].close()  # joins the threads that may still read or fill the parts' memory
    return rows


@contextlib.contextmanager
def _arms(sample_bytes: int) -> Iterator[tuple[BareFile, DiskArm]]:
    """The bare file and the tier. The tier's ``close`` may be repeated."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory, contextlib.ExitStack() as stack:
        size = max(ROOM * sample_bytes, LEAST_ROOM_BYTES)
        bare = BareFile(Path(directory) / "bare", size)
        stack.callback(bare.close)
        tier = DiskArm(DiskTier.open(DiskSettings(Path(directory) / "tier", size)))
        stack.callback(tier.close)
        yield bare, tier


def _whole_pages(mib: float) -> int:
    return max(1, int(mib * 256)) * 4096


def _compare(arms: tuple[BareFile, DiskArm], parts: Parts, part_mib: float, rounds: int) -> list[BesideRow]:
    """The first round warms up and is not counted."""
    writes: list[list[Turn]] = [[], []]
    reads: list[list[Turn]] = [[], []]
    for number in range(rounds + 1):
        named = parts.renamed()
        for index in (0, 1) if number % 2 else (1, 0):
            turn = take_turn(arms[index].set, named)
            if number:
                writes[index].append(turn)
        for index in (0, 1) if number % 2 else (1, 0):
            turn = take_turn(arms[index].get, named)
            named.verify()
            for view in named.target:
                view[:8] = bytes(8)
            if number:
                reads[index].append(turn)
        arms[1].forget(named)
    return [beside("read", part_mib, *reads), beside("write", part_mib, *writes)]
