"""The disk tier in ``kvferry bench tiers``, beside a loop that reads or writes one file with O_DIRECT.

Both work in a temporary directory ($TMPDIR) and take turns. Each goes through as many bytes of the disk as
the other before it writes over any: a disk, or a virtual one's host, may hold in memory what was written
last. Parts are removed after their turn, so that nothing is carried over: that is write amplification.
"""

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.tier_arms import WAIT_S, Parts, TierArm, parts_in_memory
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.tiers.disk.settings import DiskSettings
from kvferry.tiers.disk.tier import DiskTier

LARGEST_PART_MIB = 16
ROOM = 4
"""The tier's size in samples, so that it evicts while it is measured."""
LEAST_ROOM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DiskRow:
    """One operation at one part size. cpu_s_gb: of this process. ratio: of the tier to the bare loop."""

    operation: str
    part_mib: float
    bare_gb_s: float
    tier_gb_s: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    bare_cpu_s_gb: float
    tier_cpu_s_gb: float


@dataclass(frozen=True, slots=True)
class _Turn:
    gb_s: float
    cpu_s_gb: float


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


def measure_disk(part_mib: Sequence[float], rounds: int, sample_bytes: int) -> list[DiskRow]:
    """Writes and reads at each size up to LARGEST_PART_MIB. Raises MisconfiguredError where it cannot."""
    rows: list[DiskRow] = []
    for mib in part_mib:
        if mib <= LARGEST_PART_MIB:
            with _arms(sample_bytes) as arms, parts_in_memory(_whole_pages(mib), sample_bytes) as parts:
                try:
                    rows += _compare(arms, parts, mib, rounds)
                finally:
                    arms[1].close()  # joins the threads that may still read or fill the parts' memory
    return rows


def disk_lines(rows: Sequence[DiskRow], wanted_ratio: float) -> list[str]:
    """As text; what falls short is marked."""
    head = ("disk", "part MiB", "bare", "kvferry", "ratio", "quartiles", "CPU s/GB", "(bare)")
    lines = [_line(head)] if rows else []
    for row in rows:
        low, high = row.ratio_quartiles
        cells = [row.operation, f"{row.part_mib:g}", f"{row.bare_gb_s:.2f}", f"{row.tier_gb_s:.2f}"]
        cells += [f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}"]
        cells += [f"{row.tier_cpu_s_gb:.3f}", f"{row.bare_cpu_s_gb:.3f}"]
        lines.append(_line(cells) + ("  short" if row.ratio < wanted_ratio else ""))
    return [*lines, f"GB/s; wanted: ratio {wanted_ratio:.2f}", ""] if rows else []


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


def _compare(arms: tuple[BareFile, DiskArm], parts: Parts, part_mib: float, rounds: int) -> list[DiskRow]:
    """The first round warms up and is not counted."""
    writes: list[list[_Turn]] = [[], []]
    reads: list[list[_Turn]] = [[], []]
    for number in range(rounds + 1):
        named = parts.renamed()
        for index in (0, 1) if number % 2 else (1, 0):
            turn = _turn(arms[index].set, named)
            if number:
                writes[index].append(turn)
        for index in (0, 1) if number % 2 else (1, 0):
            turn = _turn(arms[index].get, named)
            named.verify()
            for view in named.target:
                view[:8] = bytes(8)
            if number:
                reads[index].append(turn)
        arms[1].forget(named)
    return [_row("read", part_mib, *reads), _row("write", part_mib, *writes)]


def _turn(work: Callable[[Parts], None], parts: Parts) -> _Turn:
    cpu_s, began = time.process_time(), time.perf_counter()
    work(parts)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return _Turn(parts.nbytes / elapsed_s / 1e9, cpu_s / (parts.nbytes / 1e9))


def _row(operation: str, part_mib: float, bare: Sequence[_Turn], tier: Sequence[_Turn]) -> DiskRow:
    ratios = [ours.gb_s / limit.gb_s for limit, ours in zip(bare, tier, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return DiskRow(
        operation=operation,
        part_mib=part_mib,
        bare_gb_s=statistics.median(turn.gb_s for turn in bare),
        tier_gb_s=statistics.median(turn.gb_s for turn in tier),
        ratio=statistics.median(ratios),
        ratio_quartiles=(quartiles[0], quartiles[2]),
        bare_cpu_s_gb=statistics.median(turn.cpu_s_gb for turn in bare),
        tier_cpu_s_gb=statistics.median(turn.cpu_s_gb for turn in tier),
    )


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>11}" if place else f"{cell:5}" for place, cell in enumerate(cells))
