"""The objects tier in ``kvferry bench tiers``, beside bare obstore against the same server in the same run.

The bare arm puts and gets whole objects as large as the tier's packs, as many at a time as the tier does, and
drops what it gets. Both take turns. The server is a real one on this host, so it shares the CPUs with both.
"""

import asyncio
import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.bench.tier_arms import WAIT_S, Parts, TierArm, parts_in_memory
from kvferry.errors import BrokenError
from kvferry.testing.s3 import running_s3
from kvferry.tiers.objects.bucket import Bucket, open_bucket
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier

LARGEST_PART_MIB = 16
LINGER_S = 0.02
"""The last pack of a turn should not wait for parts that do not come."""


@dataclass(frozen=True, slots=True)
class ObjectsRow:
    """One operation at one part size. cpu_s_gb: of this process. ratio: of the tier to bare obstore."""

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


class BareObjects:
    """obstore without a tier. ``get`` reads what the last ``set`` wrote; nothing is verified or kept."""

    name = "bare"

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._bucket: Bucket = open_bucket(settings)
        self._memory = mmap.mmap(-1, settings.pack_bytes)
        self._memory.write(os.urandom(settings.pack_bytes))
        self._loop = asyncio.new_event_loop()
        self._sizes: dict[str, int] = {}

    def prepare(self, parts: Parts) -> None:
        """See Arm."""
        self.set(parts)

    def set(self, parts: Parts) -> None:
        """See Arm."""
        whole, rest = divmod(parts.nbytes, self._settings.pack_bytes)
        sizes = [self._settings.pack_bytes] * whole + [rest] * (rest > 0)
        self._sizes = {f"bare/{number}": nbytes for number, nbytes in enumerate(sizes)}
        view = memoryview(self._memory)
        self._all(
            self._settings.uploads,
            lambda path, nbytes: self._bucket.put(path, view[:nbytes], limit_s=WAIT_S),
        )

    def get(self, parts: Parts) -> None:
        """See Arm."""
        self._all(
            self._settings.requests, lambda path, nbytes: self._bucket.get(path, 0, nbytes, limit_s=WAIT_S)
        )

    def forget(self, parts: Parts) -> None:
        """Delete what was put."""
        self._loop.run_until_complete(self._bucket.delete(list(self._sizes), limit_s=WAIT_S))

    def close(self) -> None:
        """See Arm."""
        self._loop.close()
        self._bucket.close()

    def _all(self, at_once: int, work: Callable[[str, int], Awaitable[object]]) -> None:
        gate = asyncio.Semaphore(at_once)

        async def one(path: str, nbytes: int) -> None:
            async with gate:
                await work(path, nbytes)

        async def everything() -> None:
            await asyncio.gather(*(one(*each) for each in self._sizes.items()))

        self._loop.run_until_complete(everything())


class ObjectsArm(TierArm):
    """The tier as a keeper uses it."""

    def __init__(self, tier: ObjectTier) -> None:
        super().__init__(tier)
        self._objects = tier

    def forget(self, parts: Parts) -> None:
        """Remove them, and wait until they are."""
        done = threading.Event()
        self._objects.remove(parts.refs, done=lambda outcomes: done.set())
        if not done.wait(WAIT_S):
            raise BrokenError(f"a removal did not end in {WAIT_S:.0f} s")


def measure_objects(part_mib: Sequence[float], rounds: int, sample_bytes: int) -> list[ObjectsRow]:
    """Writes and reads at each size up to LARGEST_PART_MIB. Raises MisconfiguredError where it cannot."""
    rows: list[ObjectsRow] = []
    with running_s3() as server:
        settings = server.settings("kvferry-bench/tiers", linger_s=LINGER_S)
        for mib in part_mib:
            if mib <= LARGEST_PART_MIB:
                with _arms(settings) as arms, parts_in_memory(int(mib * (1 << 20)), sample_bytes) as parts:
                    try:
                        rows += _compare(arms, parts, mib, rounds)
                    finally:
                        arms[1].close()  # joins the threads that may still read or fill the parts' memory
    return rows


def objects_lines(rows: Sequence[ObjectsRow], wanted_ratio: float) -> list[str]:
    """As text; what falls short is marked."""
    head = ("objects", "part MiB", "bare", "kvferry", "ratio", "quartiles", "CPU s/GB", "(bare)")
    lines = [_line(head)] if rows else []
    for row in rows:
        low, high = row.ratio_quartiles
        cells = [row.operation, f"{row.part_mib:g}", f"{row.bare_gb_s:.2f}", f"{row.tier_gb_s:.2f}"]
        cells += [f"{row.ratio:.2f}", f"{low:.2f}-{high:.2f}"]
        cells += [f"{row.tier_cpu_s_gb:.3f}", f"{row.bare_cpu_s_gb:.3f}"]
        lines.append(_line(cells) + ("  short" if row.ratio < wanted_ratio else ""))
    return [*lines, f"GB/s; wanted: ratio {wanted_ratio:.2f}", ""] if rows else []


@contextlib.contextmanager
def _arms(settings: ObjectSettings) -> Iterator[tuple[BareObjects, ObjectsArm]]:
    """The tier's ``close`` may be repeated."""
    with contextlib.ExitStack() as stack:
        bare = BareObjects(settings)
        stack.callback(bare.close)
        tier = ObjectsArm(ObjectTier.open(settings))
        stack.callback(tier.close)
        yield bare, tier


def _compare(
    arms: tuple[BareObjects, ObjectsArm], parts: Parts, part_mib: float, rounds: int
) -> list[ObjectsRow]:
    """The first round warms up and is not counted."""
    writes: list[list[_Turn]] = [[], []]
    reads: list[list[_Turn]] = [[], []]
    for number in range(rounds + 1):
        named = parts.renamed()
        order = (0, 1) if number % 2 else (1, 0)
        for index in order:
            writes[index].append(_turn(arms[index].set, named))
        for index in order:
            reads[index].append(_turn(arms[index].get, named))
        named.verify()
        for view in named.target:
            view[:8] = bytes(8)
        for arm in arms:
            arm.forget(named)
    return [
        _row("read", part_mib, *(turns[1:] for turns in reads)),
        _row("write", part_mib, *(turns[1:] for turns in writes)),
    ]


def _turn(work: Callable[[Parts], None], parts: Parts) -> _Turn:
    cpu_s, began = time.process_time(), time.perf_counter()
    work(parts)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    return _Turn(parts.nbytes / elapsed_s / 1e9, cpu_s / (parts.nbytes / 1e9))


def _row(operation: str, part_mib: float, bare: Sequence[_Turn], tier: Sequence[_Turn]) -> ObjectsRow:
    ratios = [ours.gb_s / limit.gb_s for limit, ours in zip(bare, tier, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return ObjectsRow(
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
    return "".join(f"{cell:>11}" if place else f"{cell:8}" for place, cell in enumerate(cells))
