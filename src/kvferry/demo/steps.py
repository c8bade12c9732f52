"""The outcome of one step of the demo: plain data for the table, the report and ``--json``."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.demo.ask import Reply
from kvferry.demo.verify import AnswerCheck, BlockCheck


class Source(enum.Enum):
    """Where the reused prefix came from."""

    COMPUTED = "computed"
    OWN = "own cache"
    MEMORY = "host memory"
    VALKEY = "Valkey"
    DISK = "NVMe"
    OBJECTS = "bucket"
    MIXED = "several tiers"


@dataclass(frozen=True, slots=True)
class Step:
    """reused_tokens: prompt tokens that were not computed. loaded_bytes: KV bytes that kvferry brought.

    allowed: the sources that make the step right. limit_s: the longest TTFT that does; None for no limit.
    reason: why the node's answer ended where it did, in its own word.
    """

    key: str
    title: str
    replica: str
    reply: Reply
    source: Source
    allowed: tuple[Source, ...]
    reused_tokens: int
    loaded_bytes: int
    reason: str = ""
    load_s: float = 0.0
    limit_s: float | None = None
    wanted_tokens: int | None = None
    blocks: BlockCheck | None = None
    answer: AnswerCheck | None = None
    note: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with it; empty when the step proves what it should."""
        found: list[str] = []
        if self.source not in self.allowed:
            wanted = " or ".join(source.value for source in self.allowed)
            why = f" ({self.reason})" if self.reason else ""
            found.append(f"prefix came from {self.source.value}{why}, expected {wanted}")
        if self.wanted_tokens is not None and self.reused_tokens != self.wanted_tokens:
            found.append(f"reused {self.reused_tokens} tokens, expected {self.wanted_tokens}")
        if self.limit_s is not None and self.reply.ttft_s > self.limit_s:
            found.append(f"took {self.reply.ttft_s:.2f} s, limit {self.limit_s:.2f} s")
        if self.blocks is not None and not self.blocks.passed:
            found.append(f"only {self.blocks.equal} of {self.blocks.wanted} blocks have the computed bytes")
        if self.answer is not None and not self.answer.passed:
            found.append(f"the answer differs from {self.answer.against}")
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "step": self.key,
            "title": self.title,
            "replica": self.replica,
            "request_id": self.reply.request_id,
            "ttft_s": round(self.reply.ttft_s, 4),
            "source": self.source.value,
            "prompt_tokens": self.reply.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "loaded_bytes": self.loaded_bytes,
            "load_s": round(self.load_s, 4),
            "reason": self.reason,
            "blocks_equal": self.blocks and self.blocks.equal,
            "blocks_wanted": self.blocks and self.blocks.wanted,
            "answer_equal": self.answer and self.answer.same_text,
            "answer_compared_with": self.answer and self.answer.against,
            "logprob_difference": self.answer and self.answer.largest_difference,
            "text": self.reply.text,
            "note": self.note,
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class Story:
    """What the node knows of one request. chunks, nbytes: loaded, by tier name.

    load_s is the node's time; engine_load_s and engine_bytes are the connector's own: until the last block
    was copied, on the slowest rank, and over all ranks. engine_lookup_s: how long the request waited in the
    scheduler for the node's answer.
    """

    chunks: dict[str, int]
    nbytes: dict[str, int]
    reason: str
    load_s: float
    chunk_tokens: int
    engine_load_s: float
    engine_bytes: int
    engine_lookup_s: float


NO_STORY = Story({}, {}, "", 0.0, 0, 0.0, 0, 0.0)


def story_of(records: Sequence[dict[str, Any]]) -> Story:
    """From the node's records of a request; ``NO_STORY`` when it knows nothing of it."""
    if not records:
        return NO_STORY
    record = records[0]
    seen = record.get("report") or {}
    reason = seen.get("reason") or record.get("load_reason") or record.get("reason") or ""
    return Story(
        {tier: int(n) for tier, n in record.get("reused_chunks", {}).items() if n},
        {tier: int(n) for tier, n in record.get("reused_bytes", {}).items() if n},
        str(reason),
        float(record.get("load_s") or 0.0),
        int(record.get("chunk_tokens") or 0),
        float(seen.get("load_s") or 0.0),
        int(seen.get("loaded_bytes") or 0),
        float(seen.get("lookup_s") or 0.0),
    )


def source_of(reply: Reply, story: Story) -> Source:
    """Nothing reused: computed. Reused, and the node loaded nothing: the engine's own cache."""
    if not reply.cached_tokens:
        return Source.COMPUTED
    tiers = [source for name, source in _TIERS.items() if story.chunks.get(name, 0)]
    if not tiers:
        return Source.OWN
    return tiers[0] if len(tiers) == 1 else Source.MIXED


_TIERS = {
    "memory": Source.MEMORY,
    "valkey": Source.VALKEY,
    "disk": Source.DISK,
    "objects": Source.OBJECTS,
}
