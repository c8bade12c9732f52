"""What an engine's connector loads and saves, decided from numbers alone.

Everything an engine knows is counted in tokens and blocks, everything the node knows in chunks. This
module turns one into the other. No engine, no clock, no I/O: an engine's connector feeds it and acts.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.engines.loadcap import NO_CAP, LoadCap
from kvferry.errors import MisconfiguredError
from kvferry.identity.geometry import GroupKind, KvGroup

MAX_CHUNKS_PER_PROMPT = 65536


class Eligibility(StrEnum):
    """Whether a request takes part; everything but YES is neither a hit nor a miss."""

    YES = "yes"
    NO_PREFIX_READ = "no-prefix-read"  # prompt log-probabilities, an engine that only stores, a reset
    EMBEDS = "prompt-embeds"  # no token ids to name the prefix by
    MULTIMODAL = "multimodal-unknown"  # the tensors behind an item are not at hand, or not what its name says
    POOLING = "pooling"
    ADAPTER = "adapter-unknown"  # the adapter's content cannot be read, so its KV cannot be named
    SALT = "malformed-salt"
    TOKENS = "malformed-tokens"
    STREAMING = "streaming-input"  # its tokens may still change


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """Tokens per engine block and per chunk. Raises MisconfiguredError when they do not fit.

    block_tokens: the engine's own hits end at its multiples; of several groups the least common multiple.
    groups: the engine's KV groups, in its order, without stages. Empty: one of full attention.
    drafts: draft layers keep KV beside the model's. What they keep for a token depends on the one after it,
        so that of a hit's last token may have come from another continuation. It cannot change an answer,
        only how many drafts are accepted.
    """

    block_tokens: int
    chunk_tokens: int
    groups: tuple[KvGroup, ...] = ()
    drafts: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise MisconfiguredError(f"block size {self.block_tokens}: must be at least 1 token")
        if self.chunk_tokens < self.block_tokens or self.chunk_tokens % self.block_tokens:
            nearest = max(1, round(self.chunk_tokens / self.block_tokens)) * self.block_tokens
            raise MisconfiguredError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}: use e.g. {nearest}"
            )
        if not self.groups:
            full = KvGroup(GroupKind.FULL, self.block_tokens, stages=(), block_bytes=(), kv_heads=1)
            object.__setattr__(self, "groups", (full,))

    @property
    def by_block(self) -> bool:
        """Whether the head of a load is of use without its rest, so that a failure is told block by block.

        Not so with several groups, whose blocks an engine does not tell apart, nor with a group that keeps
        trailing chunks alone.
        """
        return len(self.groups) == 1 and not self.trailing

    @property
    def trailing(self) -> bool:
        """Whether some group needs only the last chunks before a boundary: a load then serves as a whole."""
        return any(group.trailing_chunks(self.chunk_tokens) for group in self.groups)

    @property
    def counted_group(self) -> int:
        """The first group of which every chunk has a part, if there is one."""
        full = (at for at, group in enumerate(self.groups) if group.kind is GroupKind.FULL)
        return next(full, 0)

    @property
    def blocks_per_chunk(self) -> int:
        """Engine blocks in one chunk."""
        return self.chunk_tokens // self.block_tokens

    def reusable_chunks(self, prompt_tokens: int) -> int:
        """Chunks of a prompt that may come from a cache: one token at least is always computed.

        The engine's own prefix cache stops at the same boundary, so that a hit here and an own hit
        recompute the same tokens.
        """
        return max(0, (prompt_tokens - 1) // self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """Ask for the chunks before ``chunks``, of which the engine has the first ``first_chunk`` itself."""

    first_chunk: int
    chunks: int


def plan_lookup(
    geometry: ChunkGeometry, *, prompt_tokens: int, local_tokens: int, cap: LoadCap = NO_CAP
) -> LookupPlan | None:
    """What to look up for a prompt of which ``local_tokens`` are in the engine already; None for nothing.

    A cap ends it at the last whole chunk within.
    """
    chunks = min(geometry.reusable_chunks(prompt_tokens), MAX_CHUNKS_PER_PROMPT)
    if cap.tokens is not None:
        chunks = min(chunks, (local_tokens + cap.tokens) // geometry.chunk_tokens)
    first = local_tokens // geometry.chunk_tokens
    return LookupPlan(first, chunks) if chunks > first else None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a hit gives beyond the engine's own prefix.

    external_tokens: for the engine's accounting, beyond ``local_tokens``. first_chunk, end_chunk: the chunks
    that hold them; of the first one the head, of the last one the tail may not be needed.
    """

    local_tokens: int
    external_tokens: int
    first_chunk: int
    end_chunk: int

    @property
    def chunks(self) -> int:
        """How many of the answer's chunks are needed: its last."""
        return self.end_chunk - self.first_chunk

    @property
    def end_tokens(self) -> int:
        """Where the request goes on computing."""
        return self.local_tokens + self.external_tokens


def plan_load(geometry: ChunkGeometry, *, first_chunk: int, count: int, local_tokens: int) -> LoadPlan | None:
    """Turn an answer of ``count`` chunks from ``first_chunk`` on into a load.

    None when the engine has as much itself, or when its own prefix has shrunk below the answer's first
    chunk since the lookup (its blocks were evicted), so that the answer no longer connects.

    With drafts the last block is computed anew, as with a hit of the engine's own; where a load serves as a
    whole only, it is not.
    """
    local_chunk = local_tokens // geometry.chunk_tokens
    end_tokens = (first_chunk + count) * geometry.chunk_tokens
    if geometry.drafts and not geometry.trailing:
        end_tokens -= geometry.block_tokens
    if local_chunk < first_chunk or local_tokens >= end_tokens:
        return None
    return LoadPlan(
        local_tokens, end_tokens - local_tokens, local_chunk, -(-end_tokens // geometry.chunk_tokens)
    )


class GroupLoad(NamedTuple):
    """The blocks of one KV group that a load fills.

    first_chunk: the first chunk that one of them belongs to. blocks: per chunk from there on. first: which
    block of the first chunk's part they begin with; of the other chunks' parts it is the first.
    """

    first_chunk: int
    first: int
    blocks: tuple[tuple[int, ...], ...]

    def needed(self, position: int) -> tuple[int, tuple[int, ...]]:
        """For the chunk at ``position``: the first block of its part to read, and the blocks to fill."""
        return (0 if position else self.first), self.blocks[position]


def plan_group_load(
    geometry: ChunkGeometry, group: KvGroup, *, load: LoadPlan, table: Sequence[int], null_block: int | None
) -> GroupLoad | None:
    """What a load fills of one group, from the request's block table once the engine has allocated.

    The engine's own blocks before ``load.local_tokens`` are never filled: other requests may be reading them.
    Nor is ``null_block``, which stands for positions that the engine will not read. None when the engine
    expects blocks that the group's parts do not hold.
    """
    per_chunk, held = geometry.chunk_tokens // group.block_tokens, group.part_blocks(geometry.chunk_tokens)
    own, end = load.local_tokens // group.block_tokens, load.end_tokens // group.block_tokens
    if len(table) < end:
        return None
    span = table[own:end]
    nulls = 0
    if null_block is not None and null_block in span:
        nulls = len(span) - list(reversed(span)).index(null_block)
        if group.kind is GroupKind.FULL or span[:nulls].count(null_block) != nulls:
            return None
    start = own + nulls
    if start == end:
        return GroupLoad(load.end_chunk, 0, ())
    chunk = start // per_chunk
    first = start - (chunk + 1) * per_chunk + held
    trailing = group.trailing_chunks(geometry.chunk_tokens)
    if first < 0 or (trailing and chunk < load.end_chunk - trailing):
        return None
    if held < per_chunk and chunk < load.end_chunk - 1:
        return None
    bounds = [start, *range((chunk + 1) * per_chunk, end, per_chunk), end]
    blocks = tuple(tuple(table[a:b]) for a, b in itertools.pairwise(bounds))
    return GroupLoad(chunk, first, blocks)


def plan_saves(
    geometry: ChunkGeometry, *, known_tokens: int, computed_tokens: int, first_unsaved: int
) -> range:
    """The chunks that become full with this step.

    known_tokens: token ids the scheduler knows. computed_tokens: positions whose KV exists after the
    step, drafts that may yet be rejected included. Only positions that are both count.
    """
    full = min(known_tokens, computed_tokens) // geometry.chunk_tokens
    return range(first_unsaved, max(first_unsaved, min(full, MAX_CHUNKS_PER_PROMPT)))


def part_blocks(
    geometry: ChunkGeometry,
    group: KvGroup,
    *,
    chunk: int,
    table: Sequence[int],
    null_block: int | None = None,
) -> tuple[int, ...] | None:
    """The engine blocks of a chunk's part, from the request's block table.

    None where the engine has let go of one of them.
    """
    end = (chunk + 1) * (geometry.chunk_tokens // group.block_tokens)
    blocks = tuple(table[end - group.part_blocks(geometry.chunk_tokens) : end])
    return None if null_block in blocks else blocks


def external_blocks(block_ids: Sequence[int], *, external_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The blocks of a request that a load is to fill: the last of those it has when it is put to wait.

    Those before them are the engine's own prefix, which other requests may be reading.
    """
    count = -(-external_tokens // block_tokens)
    return tuple(block_ids[len(block_ids) - count :]) if count else ()


def owed_blocks(
    geometry: ChunkGeometry, tables: Sequence[Sequence[int]], *, external_tokens: int
) -> tuple[int, ...]:
    """What must be told as failed where a load cannot be made: none where failures are told by request."""
    if not geometry.by_block:
        return ()
    return external_blocks(tables[0], external_tokens=external_tokens, block_tokens=geometry.block_tokens)


def failed_block_ids(load_blocks: Sequence[Sequence[int]], arrived: Collection[int]) -> list[int]:
    """Blocks from the first chunk that did not arrive on: what follows a gap cannot be used.

    load_blocks: blocks per chunk of the load. arrived: positions of the chunks that are in place.
    """
    for position in range(len(load_blocks)):
        if position not in arrived:
            return [block for blocks in load_blocks[position:] for block in blocks]
    return []


def tokens_by_tier(geometry: ChunkGeometry, *, tiers: Sequence[int], external_tokens: int) -> dict[int, int]:
    """Split ``external_tokens`` over the tiers of a load's chunks; the first chunk may count in part."""
    split: dict[int, int] = {}
    left = external_tokens
    for tier in reversed(tiers):
        take = min(left, geometry.chunk_tokens)
        if take:
            split[tier] = split.get(tier, 0) + take
        left -= take
    return split
