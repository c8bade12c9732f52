"""The block tables of a fake engine's requests, by KV group, as vLLM's managers keep them.

A group of full attention keeps a block for every position; a window lets go of what lies behind it; a group
of recurrent state keeps the state that is computed on, and leaves one behind where a step ends at a boundary.
All groups take their blocks from one pool, and a block belongs to one of them at a time.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from kvferry.errors import BrokenError
from kvferry.identity.geometry import GroupKind, KvGroup
from kvferry.testing.engine_books import BlockPool, FakeRequest, Kv


def full_attention(block_tokens: int) -> KvGroup:
    """The one group of most engines."""
    return KvGroup(GroupKind.FULL, block_tokens, stages=(), block_bytes=(), kv_heads=1)


class Tables:
    """memories: of each rank, (layers, blocks, bytes); the last block is the null block.

    extents: how many of the layers, and of a block's bytes in each, a group uses; None for all.
    shards: which share of the KV each rank holds; equal ones hold equal bytes. None: each one of its own.
    handed: states left behind since they were last taken, by request: group, block, tokens before it.
    """

    def __init__(
        self,
        memories: Sequence[Kv],
        groups: Sequence[KvGroup],
        *,
        extents: Sequence[tuple[int, int]] | None = None,
        shards: Sequence[int] | None = None,
    ) -> None:
        layers, _, nbytes = memories[0].shape
        self._extents = extents or [(layers, nbytes)] * len(groups)
        self.pool = BlockPool(memories[0].shape[1] - 1)
        self.unit = math.lcm(*(group.block_tokens for group in groups))
        self.handed: dict[str, list[tuple[int, int, int]]] = {}
        self._memories = memories
        self._shards = shards if shards is not None else range(len(memories))
        self.groups = groups
        self._groups = list(enumerate(groups))
        self._null = self.pool.null_block.block_id

    @property
    def has_states(self) -> bool:
        """Whether some group keeps recurrent state."""
        return any(group.kind is GroupKind.STATE for _, group in self._groups)

    # -- prefix cache ------------------------------------------------------------------------------

    def local_hit(self, request: FakeRequest) -> int:
        """The longest prefix that every group can go on from; one token is left to compute."""
        if request.skip_reading_prefix_cache:
            return 0
        longest = (request.num_tokens - 1) // self.unit * self.unit
        there = [
            [self._cached(request, at, index) is not None for index in range(longest // group.block_tokens)]
            for at, group in self._groups
        ]
        return next(
            tokens
            for tokens in range(longest, -1, -self.unit)
            if all(
                all(there[at][_skipped(group, tokens) : tokens // group.block_tokens])
                for at, group in self._groups
            )
        )

    def _cached(self, request: FakeRequest, at: int, index: int) -> int | None:
        return self.pool.cached.get(self.name(request, at, index))

    def cache(self, request: FakeRequest, tokens: int) -> None:
        """What lies in blocks that are complete after ``tokens`` tokens may be found by others."""
        for at, group in self._groups:
            table, whole = request.tables[at], tokens // group.block_tokens
            first = whole - 1 if group.kind is GroupKind.STATE else 0
            if group.kind is GroupKind.STATE and (tokens % group.block_tokens or not tokens):
                continue
            for index in range(first, whole):
                if table[index] == self._null:
                    continue
                block, name = self.pool.blocks[table[index]], self.name(request, at, index)
                if block.name is None and name not in self.pool.cached:
                    block.name = name
                    self.pool.cached[name] = block.block_id
                    if group.kind is GroupKind.STATE:
                        entry = (at, block.block_id, tokens)
                        self.handed.setdefault(request.request_id, []).append(entry)

    def take_handed(self) -> dict[str, list[tuple[int, int, int]]]:
        """Offered to the connector once, in the step that computes them."""
        handed, self.handed = self.handed, {}
        return handed

    # -- blocks ------------------------------------------------------------------------------------

    def allocate(self, request: FakeRequest, *, local: int, external: int) -> bool:
        """Blocks for a hit: those of the engine itself, and new ones for the rest."""
        end = local + external
        held: list[list[int]] = []
        new = []
        for at, group in self._groups:
            skipped, own = _skipped(group, end), local // group.block_tokens
            kept = [self._cached(request, at, index) for index in range(skipped, own)]
            if None in kept:
                raise BrokenError("a hit of the engine's own is gone")
            held.append([self._null] * skipped + [block for block in kept if block is not None])
            new.append(max(0, end // group.block_tokens - len(held[-1])) if external else 0)
        touched = [self.pool.blocks[b] for table in held for b in table if b != self._null]
        self.pool.touch(touched)
        taken = self.pool.take(sum(new))
        if taken is None:
            self.pool.free_blocks(touched)
            return False
        for table, count in zip(held, new, strict=True):
            table += [taken.pop(0) for _ in range(count)]
        request.tables = held
        return True

    def grow(self, request: FakeRequest, tokens: int) -> bool:
        """Room for ``tokens`` tokens; what the computed ones do not need any more is let go of first."""
        computed = request.num_computed_tokens
        wanted = []
        for at, group in self._groups:
            table = request.tables[at]
            for index in range(min(_behind(group, computed), len(table))):
                if table[index] != self._null:
                    self.pool.free_blocks([self.pool.blocks[table[index]]])
                    table[index] = self._null
            wanted.append(max(0, -(-tokens // group.block_tokens) - len(table)))
        states = [group.kind is GroupKind.STATE for _, group in self._groups]
        new = [min(count, 1) if state else count for count, state in zip(wanted, states, strict=True)]
        taken = self.pool.take(sum(new))
        if taken is None:
            return False
        for at, _ in self._groups:
            nulls = wanted[at] - new[at]
            request.tables[at] += [self._null] * nulls + [taken.pop(0) for _ in range(new[at])]
        return True

    def free(self, request: FakeRequest) -> None:
        """All of a request's blocks; what it was to hand over goes with them."""
        self.handed.pop(request.request_id, None)
        for table in request.tables:
            blocks = [self.pool.blocks[number] for number in reversed(table) if number != self._null]
            self.pool.free_blocks(blocks)
        request.tables = [[] for _ in self._groups]

    # -- bytes -------------------------------------------------------------------------------------

    def forward(self, rank: int, request: FakeRequest, *, end: int) -> None:
        """Read what the computed tokens left, then write what the tokens up to ``end`` leave."""
        start = request.num_computed_tokens
        if self._memories[rank][:, self._null].any():
            raise BrokenError("something was copied into the null block")
        for at, group in self._groups:
            table, size = request.tables[at], group.block_tokens
            for index in range(_skipped(group, start), -(-start // size) if start else 0):
                whole = (index + 1) * size <= start
                if whole or group.kind is GroupKind.STATE:
                    self._check(rank, request, at, index, tokens=start if not whole else 0)
            if group.kind is GroupKind.STATE:
                self._write(rank, request, at, -(-end // size) - 1, tokens=end if end % size else 0)
                continue
            for index in range(start // size, end // size):
                if table[index] != self._null:
                    self._write(rank, request, at, index)

    def _check(self, rank: int, request: FakeRequest, at: int, index: int, *, tokens: int = 0) -> None:
        block = request.tables[at][index]
        if block == self._null:
            raise BrokenError(f"{request.request_id} reads a null block, {index} of group {at}")
        layers, nbytes = self._extents[at]
        found = self._memories[rank][:layers, block, :nbytes]
        if not np.array_equal(found, self._content(rank, at, self.name(request, at, index, tokens=tokens))):
            raise BrokenError(
                f"{request.request_id} reads another prefix's KV in its block {index} of group {at}"
            )

    def _write(self, rank: int, request: FakeRequest, at: int, index: int, *, tokens: int = 0) -> None:
        layers, nbytes = self._extents[at]
        content = self._content(rank, at, self.name(request, at, index, tokens=tokens))
        self._memories[rank][:layers, request.tables[at][index], :nbytes] = content

    def name(self, request: FakeRequest, at: int, index: int, *, tokens: int = 0) -> bytes:
        """Of a block's content: a function of the prefix that ends with it, or of so many tokens."""
        size = tokens or (index + 1) * self._groups[at][1].block_tokens
        adapter = request.lora_request.lora_path if request.lora_request is not None else None
        text = repr((at, request.all_token_ids[:size], str(request.cache_salt), adapter))
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()

    def _content(self, rank: int, at: int, name: bytes) -> Kv:
        named = hashlib.blake2b(name + bytes([self._shards[rank]]), digest_size=8)
        seed = int.from_bytes(named.digest(), "little")
        return np.random.default_rng(seed).integers(0, 256, self._extents[at], dtype=np.uint8)


def _skipped(group: KvGroup, tokens: int) -> int:
    """Blocks, from the first, that a request going on after a hit of ``tokens`` tokens does not read."""
    match group.kind:
        case GroupKind.FULL:
            return 0
        case GroupKind.WINDOW:
            return max(0, tokens - group.window_tokens + 1) // group.block_tokens
        case GroupKind.STATE:
            return max(0, tokens - 1) // group.block_tokens


def _behind(group: KvGroup, computed: int) -> int:
    """Blocks, from the first, that are let go of once so many tokens are computed."""
    return _skipped(group, computed) if computed else 0
