"""Parts brought up before they are asked for: from disk and objects into Valkey, and into a node's memory."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError, RefusedError
from kvferry.identity.names import PartRef

if TYPE_CHECKING:
    from kvferry.client.admin import AdminClient
    from kvferry.keeper.admin import Fleet

BATCH_BYTES = 256 << 20
BATCH_PARTS = 1024
WITHIN_S = 60.0
POOL_DIVISOR = 8  # of a node's pool, a batch at most
VALKEY, MEMORY = "valkey", "memory"
FULL = "pool-full"


@dataclass(slots=True)
class Step:
    """What became of the parts in one tier. there: they were there before. failed: parts by reason."""

    tier: str
    parts: int = 0
    nbytes: int = 0
    there: int = 0
    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])

    def document(self) -> dict[str, object]:
        """For programs."""
        return {
            "tier": self.tier,
            "parts": self.parts,
            "bytes": self.nbytes,
            "there_parts": self.there,
            "seconds": self.seconds,
            "failed": dict(self.failed),
            "errors": self.errors,
        }


@dataclass(frozen=True, slots=True)
class Sources:
    """Who brings parts up. fleet: None where there are no keepers. node: None where memory is not wanted."""

    fleet: "Fleet | None"
    node: "AdminClient | None"


def bring(
    refs: Sequence[PartRef], sources: Sources, *, progress: Callable[[int, Sequence[Step]], None]
) -> list[Step]:
    """All of them, a batch at a time, in this order. progress: hears how many are done."""
    staging = Step(VALKEY) if sources.fleet is not None else None
    fetching = Step(MEMORY) if sources.node is not None else None
    steps = [step for step in (staging, fetching) if step is not None]
    batch_bytes, mark, done = BATCH_BYTES, 0, 0
    if sources.node is not None:
        batch_bytes = min(batch_bytes, sources.node.welcome.pool_bytes // POOL_DIVISOR)
    for batch in batches(refs, batch_bytes):
        wanted = batch
        if staging is not None and sources.fleet is not None:
            wanted = _stage(batch, sources.fleet, staging, last=fetching is None)
        if fetching is not None and sources.node is not None:
            mark = _fetch(wanted, sources.node, fetching, mark)
            if FULL in fetching.failed:
                break  # whatever follows is worth less than what is there now
        done += len(batch)
        progress(done, steps)
    return steps


def batches(refs: Sequence[PartRef], batch_bytes: int) -> Iterator[list[PartRef]]:
    """Of one namespace each; a part that is larger alone."""
    batch: list[PartRef] = []
    nbytes = 0
    for ref in refs:
        full = len(batch) >= BATCH_PARTS or nbytes + ref.nbytes > batch_bytes
        if batch and (full or ref.key.namespace != batch[-1].key.namespace):
            yield batch
            batch, nbytes = [], 0
        batch.append(ref)
        nbytes += ref.nbytes
    if batch:
        yield batch


def _stage(batch: Sequence[PartRef], fleet: "Fleet", step: Step, *, last: bool) -> list[PartRef]:
    """Into Valkey. Returns what may be there: keepers do not have what Valkey alone has."""
    began = time.monotonic()
    said = fleet.stage(batch, within_s=WITHIN_S)
    step.seconds += time.monotonic() - began
    step.parts += len(said.staged)
    step.nbytes += sum(ref.nbytes for ref in said.staged)
    step.failed.update(said.failed)
    if last:
        step.failed["absent"] += len(said.absent)
        step.failed += Counter()  # without what is 0
    there = {*said.staged, *said.absent}
    return [ref for ref in batch if ref in there]


def _fetch(batch: Sequence[PartRef], node: "AdminClient", step: Step, mark: int) -> int:
    """Into the node's memory. Returns the mark for the next batch."""
    if not batch:
        return mark
    began = time.monotonic()
    try:
        answer = node.fetch(
            batch[0].key.namespace,
            b"".join(ref.key.chunk for ref in batch),
            tuple(ref.key.part for ref in batch),
            within_s=WITHIN_S,
            mark=mark,
        )
    except RefusedError as error:
        step.failed["refused"] += len(batch)
        if str(error) not in step.errors:
            step.errors.append(str(error))
        return mark
    finally:
        step.seconds += time.monotonic() - began
    try:
        step.parts += int(answer["fetched_parts"])
        step.nbytes += int(answer["fetched_bytes"])
        step.there += int(answer["there_parts"])
        step.failed.update({str(reason): int(count) for reason, count in answer["failed"].items()})
        return int(answer["mark"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvferryError(f"the node's answer about what it fetched does not fit ({error})") from error
