"""What a keeper tells of itself: one frozen snapshot, ready for JSON and metrics."""

from dataclasses import dataclass

from kvferry.keeper.keeping import Line
from kvferry.tiers.contract import TierStatistics


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """Copies to one place. parts, nbytes, oldest_s: that wait or are under way now; the rest since start.

    there: were there already. gone: left Valkey before. dropped: the backlog was full. failed: attempts, by
    cause. paused: the last attempt failed, and nothing succeeded since.
    """

    parts: int
    nbytes: int
    oldest_s: float
    running: int
    paused: bool
    copied_parts: int
    copied_bytes: int
    there_parts: int
    gone_parts: int
    dropped_parts: int
    failed: dict[str, int]


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """requests, parts, running: now. asked: requests since start; joined: their parts that were on the way.

    staged_parts, staged_bytes: by tier. outcomes: of all parts asked for. promoted: put on the disk again.
    """

    requests: int
    parts: int
    running: int
    asked: int
    joined_parts: int
    promoted_parts: int
    staged_parts: dict[str, int]
    staged_bytes: dict[str, int]
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScanStatistics:
    """The search in Valkey for what nobody told of. keys: looked at since start. found: parts worth a copy.

    last_pass_s: how long the last pass took; 0 before the first. error: why it does not go on now; or empty.
    """

    passes: int = 0
    keys: int = 0
    found_parts: int = 0
    last_pass_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class KeeperStatistics:
    """keep: to the disk. flush: to objects. None: no such tier. located: parts asked for, by where they were.

    told_dropped_parts: of what nodes told, because too much waited. tiers: Valkey first. buffer_bytes: in use
    now, of buffer_limit_bytes.
    """

    stages: StageStatistics
    keep: LineStatistics | None
    flush: LineStatistics | None
    scan: ScanStatistics | None
    located: dict[str, int]
    told_stored_parts: int
    told_likely_parts: int
    told_used_parts: int
    removed_parts: int
    told_dropped_parts: int
    reused_parts: int
    buffer_bytes: int
    buffer_limit_bytes: int
    defects: int
    tiers: tuple[TierStatistics, ...]


def line_statistics(line: Line | None, now: float) -> LineStatistics | None:
    """Of one line, if there is one."""
    if line is None:
        return None
    counts = line.counts
    return LineStatistics(
        parts=line.parts,
        nbytes=line.nbytes,
        oldest_s=line.oldest_s(now),
        running=line.running,
        paused=line.paused,
        copied_parts=counts.parts,
        copied_bytes=counts.nbytes,
        there_parts=counts.there,
        gone_parts=counts.gone,
        dropped_parts=counts.dropped,
        failed=dict(counts.failed),
    )
