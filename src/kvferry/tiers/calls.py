"""What a tier checks of what it is handed, and in which form it tells how that ended."""

from collections.abc import Callable, Sequence

from kvferry.errors import BrokenError
from kvferry.identity.names import DIGEST_BYTES, MAX_PART_BYTES, MAX_PARTS, NAMESPACE_BYTES, PartRef
from kvferry.identity.stripes import CHECKSUM_BYTES, stripe_plan
from kvferry.tiers.contract import FetchResult, Outcome, StoreItem


def exactly(memory: memoryview, ref: PartRef) -> memoryview:
    """The memory as bytes. BrokenError unless it is contiguous and as large as the part."""
    if memory.nbytes != ref.nbytes or not memory.contiguous:
        raise BrokenError(f"memory of {memory.nbytes} bytes for a part of {ref.nbytes}")
    return memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")


def possible(ref: PartRef) -> bool:
    """Whether a part may have that size."""
    return 1 <= ref.nbytes <= MAX_PART_BYTES


def storable(item: StoreItem) -> memoryview:
    """Its memory. BrokenError for a name or checksums of no part: what was stored could not be read."""
    ref = item.ref
    namespace, chunk, part = ref.key
    if (len(namespace), len(chunk)) != (NAMESPACE_BYTES, DIGEST_BYTES) or not 0 <= part < MAX_PARTS:
        raise BrokenError(f"no part has the name {ref.key!r}")
    if item.checksums and {len(each) for each in item.checksums} != {CHECKSUM_BYTES}:
        raise BrokenError(f"checksums have {CHECKSUM_BYTES} bytes each")
    if item.checksums and possible(ref) and len(item.checksums) != len(stripe_plan(ref.nbytes)):
        raise BrokenError(f"{len(item.checksums)} checksums for a part of {ref.nbytes} bytes")
    return exactly(item.data, ref)


def fetched(
    done: Callable[[int, FetchResult], None], index: int, outcome: Outcome, checksums: tuple[bytes, ...]
) -> None:
    """Tell of one item of a fetch."""
    done(index, FetchResult(outcome, checksums))


def stored(
    done: Callable[[int, Outcome], None], index: int, outcome: Outcome, checksums: tuple[bytes, ...]
) -> None:
    """Tell of one item of a store."""
    del checksums
    done(index, outcome)


def removal(done: Callable[[Sequence[Outcome]], None], outcomes: Sequence[Outcome], ending: Outcome) -> None:
    """Tell of a removal. ending: how writing it down went; unless OK, that of every part."""
    done(outcomes if ending is Outcome.OK else [ending] * len(outcomes))
