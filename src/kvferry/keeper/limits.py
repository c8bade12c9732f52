"""How a keeper behaves: every limit in one place."""

from dataclasses import dataclass

from kvferry.keeper.buffers import Use

MIN_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``docs/decisions/keeper.md`` has the reasons.

    buffer_bytes: memory that parts pass through. staged_parts: under way for all requests together.
    backlog_parts, backlog_bytes: that wait to be copied to the disk, and as many to objects; what is worth
    least is dropped. copy_bytes: read at a time for copies. copy_share: of the time spent reading them, at
    most. copy_s: longest for one to be read, or to be written to the disk; flush_s: to objects.
    retry_s: longest between two attempts while a tier fails. ask_s: longest for a question about what is
    there, where nobody waits. reused_parts: whose uses are remembered. close_s: how long ``close`` waits for
    what is under way.
    """

    buffer_bytes: int = 256 << 20
    staged_parts: int = 65536
    backlog_parts: int = 65536
    backlog_bytes: int = 64 << 30
    copy_bytes: int = 10 << 20
    copy_share: float = 0.5
    copy_s: float = 10.0
    flush_s: float = 120.0
    retry_s: float = 10.0
    ask_s: float = 5.0
    reused_parts: int = 1 << 17
    close_s: float = 10.0

    def shares(self, *, objects: bool) -> dict[Use, int]:
        """Of the buffers. Objects hold many parts at a time: they travel together and take long."""
        eighth = self.buffer_bytes // 8
        if not objects:
            return {Use.STAGE: 6 * eighth, Use.COPY: 2 * eighth, Use.FLUSH: 0}
        return {Use.STAGE: 3 * eighth, Use.COPY: eighth, Use.FLUSH: 4 * eighth}
