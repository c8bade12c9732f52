"""A keeper over tiers that tests hold, fill and break, and calls to it that wait for their answers."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from kvferry.identity.names import DIGEST_BYTES, PartKey, PartRef
from kvferry.keeper.keeper import Keeper
from kvferry.keeper.limits import Limits
from kvferry.keeper.wire import Where
from kvferry.testing.expectations import eventually
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_calls import DEADLINE_S, Results, some_bytes, store_all
from kvferry.tiers.contract import Outcome, Tier

NAMESPACE = b"n" * 16
PART_BYTES = 10_000
EAGER = Limits(buffer_bytes=16 << 20, copy_share=1.0, retry_s=0.2, close_s=30.0)


def prompt(
    name: str, chunks: int, *, nbytes: int = PART_BYTES, namespace: bytes = NAMESPACE
) -> list[PartRef]:
    """The parts of a prompt's chunks, one each."""
    return [
        PartRef(PartKey(namespace, f"{name}-{n}".encode().ljust(DIGEST_BYTES, b"."), 0), nbytes)
        for n in range(chunks)
    ]


def contents(ref: PartRef) -> memoryview:
    """What such a part holds."""
    return some_bytes(ref.nbytes, int.from_bytes(ref.key.chunk[:12], "little") + ref.key.part)


def fill(tier: Tier, refs: Sequence[PartRef]) -> None:
    """Store them with their contents."""
    outcomes = store_all(tier, [(ref, contents(ref)) for ref in refs])
    assert outcomes == [Outcome.OK] * len(refs)


def holds(tier: MemoryTier, refs: Sequence[PartRef]) -> bool:
    """Whether the tier has all of them, with the right bytes."""
    return all(tier.parts.get(ref.key) == bytes(contents(ref)) for ref in refs)


class Rig:
    """A keeper over memory tiers."""

    def __init__(self, *, disk: bool = True, objects: bool = True, limits: Limits = EAGER) -> None:
        self.valkey = MemoryTier("valkey")
        self.disk = MemoryTier("disk") if disk else None
        self.objects = MemoryTier("objects") if objects else None
        self.keeper = Keeper(valkey=self.valkey, disk=self.disk, objects=self.objects, limits=limits)

    def tell_stored(self, refs: Sequence[PartRef], *, likely: bool = True) -> None:
        fill(self.valkey, refs)
        self.keeper.stored(refs, positions=range(len(refs)), likely=[likely] * len(refs))

    def locate(self, refs: Sequence[PartRef], *, within_s: float = DEADLINE_S) -> list[Where]:
        return locate(self.keeper, refs, within_s=within_s)

    def stage(self, refs: Sequence[PartRef], *, within_s: float = DEADLINE_S) -> list[Outcome]:
        return stage(self.keeper, refs, within_s=within_s)

    def idle(self) -> None:
        """Wait until nothing is under way or waits, and every buffer is back."""
        idle(self.keeper)

    def close(self) -> None:
        for tier in (self.valkey, self.disk, self.objects):
            if tier is not None:
                tier.release()
        self.keeper.close()


@contextlib.contextmanager
def rigged(*, disk: bool = True, objects: bool = True, limits: Limits = EAGER) -> Iterator[Rig]:
    rig = Rig(disk=disk, objects=objects, limits=limits)
    try:
        yield rig
    finally:
        rig.close()


def locate(keeper: Keeper, refs: Sequence[PartRef], *, within_s: float = DEADLINE_S) -> list[Where]:
    results = Results(1)
    keeper.locate(refs, deadline=time.monotonic() + within_s, done=lambda found: results.done(0, list(found)))
    found: list[Where] = results.wait()[0]
    return found


def stage(keeper: Keeper, refs: Sequence[PartRef], *, within_s: float = DEADLINE_S) -> list[Outcome]:
    results = Results(len(refs))
    keeper.stage(refs, deadline=time.monotonic() + within_s, done=results.done)
    return results.wait()


def idle(keeper: Keeper) -> None:
    def nothing_left() -> bool:
        now = keeper.statistics()
        lines = [line.parts for line in (now.keep, now.flush) if line is not None]
        return not (now.stages.parts or now.buffer_bytes or sum(lines))

    eventually(nothing_left, "an idle keeper")
