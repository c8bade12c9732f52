"""How an engine's KV cache divides into groups, shards and chunks, and how far a prefix reaches.

Pure arithmetic. A *group* is a set of layers that keep the same tokens; a *shard* is a share of a group
that some rank holds; a *part* is one shard of one group of one chunk.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.identity.names import MAX_PART_BYTES, MAX_PARTS

DEFAULT_GPU_CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 1 << 20


class GroupKind(enum.Enum):
    """Which chunks of a prefix a group needs before a request can go on from a boundary."""

    FULL = "full"  # every chunk before the boundary
    WINDOW = "window"  # the chunks that hold the last window_tokens - 1 tokens before it
    STATE = "state"  # the one that ends at it (recurrent state: Mamba, linear attention, short convolution)


class Device(enum.Enum):
    """Where the engine keeps its KV blocks; decides the default chunk size only."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV is kept for the same tokens and addressed by the same block numbers.

    kind: what a prefix boundary needs of this group.
    block_tokens: tokens that one engine block of this group stands for.
    stages: for each pipeline stage, the names of its layers in the order their bytes are stored. A stage
        may have none.
    block_bytes: for each pipeline stage, the bytes one rank holds for one block over all those layers.
    kv_heads: KV heads of the whole model in these layers; 1 where all ranks hold the same (MLA latents);
        0 where every tensor-parallel rank holds its own share whatever the heads (recurrent state).
    window_tokens: for WINDOW, the tokens a query sees, itself included; 0 otherwise. Attention that is
        chunked locally is a window of its chunk length: that asks for no less than it needs.
    """

    kind: GroupKind
    block_tokens: int
    stages: tuple[tuple[str, ...], ...]
    block_bytes: tuple[int, ...]
    kv_heads: int
    window_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise MisconfiguredError where the fields contradict each other."""
        if self.block_tokens < 1:
            raise MisconfiguredError(f"block_tokens is {self.block_tokens}: a block holds at least one token")
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens > 0) or self.window_tokens < 0:
            raise MisconfiguredError(
                f"window_tokens is {self.window_tokens} in a {self.kind.value} group: "
                "give a positive one to a window group and none to others"
            )
        if self.kv_heads < 0:
            raise MisconfiguredError(f"kv_heads is {self.kv_heads}: it cannot be negative")
        if len(self.stages) != len(self.block_bytes):
            raise MisconfiguredError(
                f"{len(self.stages)} pipeline stages of layers but {len(self.block_bytes)} of block bytes"
            )
        for layers, nbytes in zip(self.stages, self.block_bytes, strict=True):
            if nbytes < 0 or (nbytes > 0) != bool(layers):
                raise MisconfiguredError(f"{len(layers)} layers in a stage whose block has {nbytes} bytes")

    def needed_chunks(self, boundary: int, *, chunk_tokens: int) -> range:
        """The chunks of this group that a request continuing after ``boundary`` chunks reads."""
        if self.kind is GroupKind.FULL:
            return range(boundary)
        if self.kind is GroupKind.STATE:
            return range(max(0, boundary - 1), boundary)
        trailing = -(-(self.window_tokens - 1) // chunk_tokens)
        return range(max(0, boundary - trailing), boundary)

    def trailing_chunks(self, chunk_tokens: int) -> int:
        """How many of the chunks before a boundary it needs: the last so many, at least 1; 0 for all."""
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.STATE:
                return 1
            case GroupKind.WINDOW:
                return max(1, -(-(self.window_tokens - 1) // chunk_tokens))

    def part_blocks(self, chunk_tokens: int) -> int:
        """How many blocks of a chunk a part holds: the chunk's last.

        All of a FULL group. Of a WINDOW group those that a boundary at the chunk's end, or after it, can
        need. Of a STATE group one: the state exactly at the chunk's end.
        """
        blocks = chunk_tokens // self.block_tokens
        match self.kind:
            case GroupKind.FULL:
                return blocks
            case GroupKind.STATE:
                return 1
            case GroupKind.WINDOW:
                return min(blocks, max(1, -(-(self.window_tokens - 1) // self.block_tokens)))


@dataclass(frozen=True)
class Geometry:
    """The parts of one chunk: their number, their sizes, and which rank holds which.

    chunk_tokens: tokens per chunk, a multiple of every group's block_tokens.
    tensor_ranks, pipeline_ranks: the engine's parallel sizes. Data-parallel ranks are separate engines.

    The namespace holds ``tensor_shards``, not ``tensor_ranks``: engines whose ranks hold equal bytes (MLA,
    fewer KV heads than ranks) share parts whatever their number of ranks.
    """

    groups: tuple[KvGroup, ...]
    chunk_tokens: int
    tensor_ranks: int = field(default=1, metadata={"encoded_as": "tensor_shards"})
    pipeline_ranks: int = 1

    def __post_init__(self) -> None:
        """Raise MisconfiguredError for a geometry that cannot be cut into parts."""
        if not self.groups:
            raise MisconfiguredError("the model has no KV groups: there is nothing to share")
        if self.tensor_ranks < 1 or self.pipeline_ranks < 1:
            raise MisconfiguredError(
                f"parallel sizes are {self.tensor_ranks} x {self.pipeline_ranks}: at least 1 each"
            )
        check_chunk_tokens(self.chunk_tokens, [group.block_tokens for group in self.groups])
        for group in self.groups:
            if len(group.stages) != self.pipeline_ranks:
                raise MisconfiguredError(
                    f"a group lists {len(group.stages)} pipeline stages, the engine has {self.pipeline_ranks}"
                )
            self._tensor_shards(group)
        if self.part_count > MAX_PARTS:
            raise MisconfiguredError(f"{self.part_count} parts per chunk: at most {MAX_PARTS} are possible")
        if max(self.part_bytes) > MAX_PART_BYTES:
            raise MisconfiguredError(
                f"a part would have {max(self.part_bytes)} bytes, at most {MAX_PART_BYTES}: "
                "use smaller chunk_tokens"
            )

    def _tensor_shards(self, group: KvGroup) -> int:
        """How many different shares the tensor-parallel ranks hold of ``group``."""
        heads, ranks = group.kv_heads, self.tensor_ranks
        if heads == 0:
            return ranks
        if max(heads, ranks) % min(heads, ranks):
            raise MisconfiguredError(
                f"{heads} KV heads over {ranks} tensor-parallel ranks: one must divide the other"
            )
        return min(heads, ranks)

    @cached_property
    def tensor_shards(self) -> int:
        """Shards per group and pipeline stage: the largest of the groups'."""
        return max(self._tensor_shards(group) for group in self.groups)

    @cached_property
    def shards(self) -> int:
        """Shards per group, over all pipeline stages."""
        return self.tensor_shards * self.pipeline_ranks

    @cached_property
    def part_count(self) -> int:
        """Part numbers per chunk. Some may name parts of 0 bytes, which do not exist."""
        return len(self.groups) * self.shards

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """The bytes of each part, by part number; 0 for a part that does not exist."""
        sizes: list[int] = []
        for group in self.groups:
            blocks = group.part_blocks(self.chunk_tokens)
            present = self._tensor_shards(group)
            for stage_bytes in group.block_bytes:
                sizes += [blocks * stage_bytes] * present + [0] * (self.tensor_shards - present)
        return tuple(sizes)

    @cached_property
    def trailing(self) -> tuple[int, ...]:
        """Of each part, by part number, how many of the chunks before a boundary it needs: the last so many.

        0: all of them, or there is no such part.
        """
        needed = [
            group.trailing_chunks(self.chunk_tokens) for group in self.groups for _ in range(self.shards)
        ]
        return tuple(trailing if size else 0 for trailing, size in zip(needed, self.part_bytes, strict=True))

    def part(self, group: int, *, tensor_rank: int, pipeline_rank: int = 0) -> int:
        """The part that a rank holds of ``group``. Ranks with equal bytes get the same part."""
        return group * self.shards + pipeline_rank * self.tensor_shards + self._shard(group, tensor_rank)

    def _shard(self, group: int, tensor_rank: int) -> int:
        if not 0 <= tensor_rank < self.tensor_ranks:
            raise BrokenError(f"tensor rank {tensor_rank} of {self.tensor_ranks}")
        return tensor_rank // self._replicas(group)

    def _replicas(self, group: int) -> int:
        return self.tensor_ranks // self._tensor_shards(self.groups[group])

    def writes(self, group: int, *, tensor_rank: int, chunk_index: int) -> bool:
        """Whether this rank, of those that hold the part, is the one to write it for this chunk.

        The ranks take turns, so that no link carries all the writes. Not part of the stored format.
        """
        replicas = self._replicas(group)
        return tensor_rank % replicas == chunk_index % replicas


def check_chunk_tokens(chunk_tokens: int, block_tokens: Iterable[int]) -> None:
    """Raise MisconfiguredError unless ``chunk_tokens`` is a multiple of every block size."""
    step = math.lcm(*block_tokens)
    if step < 1 or not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS or chunk_tokens % step:
        raise MisconfiguredError(
            f"chunk_tokens is {chunk_tokens}: use a multiple of the engine's block size, {step}, "
            f"of at most {MAX_CHUNK_TOKENS}"
        )


def default_chunk_tokens(block_tokens: int | Iterable[int], device: Device) -> int:
    """One block on a CPU; on a GPU the smallest multiple of the block size that reaches 256 tokens.

    Several block sizes count as their least common multiple.
    """
    step = block_tokens if isinstance(block_tokens, int) else math.lcm(*block_tokens)
    if step < 1:
        raise MisconfiguredError(f"the engine's block size is {step}: a block holds at least one token")
    if device is Device.CPU:
        return step
    return -(-DEFAULT_GPU_CHUNK_TOKENS // step) * step


def usable_chunks(groups: Sequence[KvGroup], present: Sequence[Sequence[bool]], *, chunk_tokens: int) -> int:
    """The longest prefix, in chunks, after which every group can go on.

    ``present[g][c]`` says whether all existing parts of group ``g`` of chunk ``c`` are there. A full
    group needs every chunk of the prefix, a window group its trailing ones, a state group the last.
    BrokenError unless there is one equally long row per group.
    """
    if len(groups) != len(present) or len({len(row) for row in present}) != 1:
        raise BrokenError(f"{len(groups)} groups, but rows of {[len(row) for row in present]} chunks")
    usable = [True] * (len(present[0]) + 1)
    for group, row in zip(groups, present, strict=True):
        unbroken = 0  # present chunks in a row, ending just before the boundary
        for boundary in range(1, len(usable)):
            unbroken = unbroken + 1 if row[boundary - 1] else 0
            if unbroken < len(group.needed_chunks(boundary, chunk_tokens=chunk_tokens)):
                usable[boundary] = False
    return max(boundary for boundary, accepted in enumerate(usable) if accepted)
