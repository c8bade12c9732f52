"""What an engine's connector loads and saves, decided from numbers alone.

Everything an engine knows is counted in tokens and blocks, everything the node knows in chunks. This
module turns one into the other. No engine, no clock, no I/O: an engine's connector feeds it and acts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.errors import MisconfiguredError

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
    """Tokens per engine block and per chunk. Raises MisconfiguredError when they do not fit."""

    block_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise MisconfiguredError(f"block size {self.block_tokens}: must be at least 1 token")
        if self.chunk_tokens < self.block_tokens or self.chunk_tokens % self.block_tokens:
            nearest = max(1, round(self.chunk_tokens / self.block_tokens)) * self.block_tokens
            raise MisconfiguredError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}: use e.g. {nearest}"
            )

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


def plan_lookup(geometry: ChunkGeometry, *, prompt_tokens: int, local_tokens: int) -> LookupPlan | None:
    """What to look up for a prompt of which ``local_tokens`` are in the engine already; None for nothing."""
    chunks = min(geometry.reusable_chunks(prompt_tokens), MAX_CHUNKS_PER_PROMPT)
    first = local_tokens // geometry.chunk_tokens
    return LookupPlan(first, chunks) if chunks > first else None


class BlockSpan(NamedTuple):
    """Blocks ``start`` to ``stop`` (exclusive) of a chunk, counted inside the chunk."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a hit gives beyond the engine's own prefix.

    external_tokens: for the engine's accounting. chunks: how many of the answer's chunks are needed.
    first_span: the blocks of the first chunk that are missing (its head may be in the engine already).
    """

    external_tokens: int
    chunks: int
    first_span: BlockSpan


def plan_load(geometry: ChunkGeometry, *, first_chunk: int, count: int, local_tokens: int) -> LoadPlan | None:
    """Turn an answer of ``count`` chunks from ``first_chunk`` on into a load.

    None when the engine has as much itself, or when its own prefix has shrunk below the answer's first
    chunk since the lookup (its blocks were evicted), so that the answer no longer connects.
    """
    local_chunk = local_tokens // geometry.chunk_tokens
    end_chunk = first_chunk + count
    if local_chunk < first_chunk or local_chunk >= end_chunk:
        return None
    external = end_chunk * geometry.chunk_tokens - local_tokens
    head_blocks = (local_tokens - local_chunk * geometry.chunk_tokens) // geometry.block_tokens
    return LoadPlan(external, end_chunk - local_chunk, BlockSpan(head_blocks, geometry.blocks_per_chunk))


def plan_saves(
    geometry: ChunkGeometry, *, known_tokens: int, computed_tokens: int, first_unsaved: int
) -> range:
    """The chunks that become full with this step.

    known_tokens: token ids the scheduler knows. computed_tokens: positions whose KV exists after the
    step, drafts that may yet be rejected included. Only positions that are both count.
    """
    full = min(known_tokens, computed_tokens) // geometry.chunk_tokens
    return range(first_unsaved, max(first_unsaved, min(full, MAX_CHUNKS_PER_PROMPT)))


def chunk_blocks(geometry: ChunkGeometry, chunk: int, block_ids: Sequence[int]) -> tuple[int, ...]:
    """The engine blocks of a chunk, from the request's block table."""
    start = chunk * geometry.blocks_per_chunk
    return tuple(block_ids[start : start + geometry.blocks_per_chunk])


def external_blocks(block_ids: Sequence[int], *, external_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The blocks of a request that a load is to fill: the last of those it has when it is put to wait.

    Those before them are the engine's own prefix, which other requests may be reading.
    """
    count = -(-external_tokens // block_tokens)
    return tuple(block_ids[len(block_ids) - count :]) if count else ()


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
