"""vLLM's own KV events, as events of a feed: which blocks an engine's cache holds. Pure.

vLLM names blocks by hashes that begin with a number of its process: two workers call the same block by
different names. But its events carry the tokens, so blocks are named here, by a chain over them and what else
is in vLLM's key (a salt, an adapter): the same for all workers, and for a prompt whose tokens are known.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from kvferry.errors import RefusedError
from kvferry.feed.wire import AnyEvent, Cleared, EngineUp, Gone, Held, Level, Space
from kvferry.identity.names import DIGEST_BYTES, NAMESPACE_BYTES

MAX_BLOCKS = 1 << 18
"""Of one worker, some 50 MiB: a larger cache is known in part."""
MAX_EVENTS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 16
MAX_TOKEN = (1 << 32) - 1
GPU = "GPU"
SPACE = ENGINE = 1

Hash = bytes | int


class BlockStored(msgspec.Struct, tag=True):
    """As vLLM has it; what it adds in later versions is left out."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks were evicted."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache was reset."""


class EventBatch(msgspec.Struct, array_like=True):
    """What one step of the engine changed."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises RefusedError for anything else."""
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"no KV events of vLLM: {error}") from error
    if len(batch.events) > MAX_EVENTS:
        raise RefusedError(f"{len(batch.events)} KV events at once")
    return batch


def chain(tokens: Sequence[int], block_tokens: int, *, salt: str = "") -> Iterator[bytes]:
    """The names of a prompt's whole blocks. Raises RefusedError for what are no tokens."""
    parent = _root(block_tokens)
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = _name(parent, tokens[at : at + block_tokens], [salt] if salt and not at else None)
        yield parent


def _root(block_tokens: int) -> bytes:
    return block_tokens.to_bytes(DIGEST_BYTES, "little")


def _name(parent: bytes, tokens: Sequence[int], extra: Sequence[object] | None) -> bytes:
    try:
        said = b"".join(token.to_bytes(4, "little") for token in tokens)
    except (OverflowError, AttributeError, TypeError) as error:
        raise RefusedError(f"no token ids: {error}") from error
    key = msgspec.msgpack.encode(extra) if extra else b""
    return blake2b(parent + said + key, digest_size=DIGEST_BYTES).digest()


class Blocks:
    """Of one worker. max_blocks: what is remembered; of the blocks before, nothing more is told."""

    def __init__(self, name: str, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = 0
        self.orphans = 0  # blocks that cannot be named, as those that follow one that is not known
        self._name = name
        self._max_blocks = max_blocks
        self._names: OrderedDict[Hash, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def forget(self) -> None:
        """The engine is another one now."""
        self._names.clear()
        self.block_tokens = 0

    def take(self, batch: EventBatch) -> list[AnyEvent]:
        """What it means. Raises RefusedError for what makes no sense."""
        told: list[AnyEvent] = []
        for event in batch.events:
            match event:
                case BlockStored():
                    if _counts(event):
                        told += self._stored(event)
                case BlockRemoved():
                    if _counts(event):
                        gone = [self._names.pop(name, b"") for name in event.block_hashes]
                        if any(gone):
                            told.append(Gone(Level.ENGINE, ENGINE, SPACE, b"".join(gone)))
                case AllBlocksCleared():
                    self._names.clear()
                    told.append(Cleared(Level.ENGINE, ENGINE))
        return told

    def _stored(self, event: BlockStored) -> list[AnyEvent]:
        size, count = event.block_size, len(event.block_hashes)
        if not 0 < size <= MAX_BLOCK_TOKENS or len(event.token_ids) < size * count:
            raise RefusedError(f"{count} blocks of {size} tokens with {len(event.token_ids)} tokens")
        if size < self.block_tokens or len(event.token_ids) > size * count:
            self.orphans += count  # a block that is not full yet, or blocks with others left out between them
            return []
        told = [] if size == self.block_tokens else self._begin(size)
        parent = _root(size) if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None:
            self.orphans += count
            return told
        extras = event.extra_keys or []
        held = []
        for at, block in enumerate(event.block_hashes):
            tokens = event.token_ids[at * size : (at + 1) * size]
            parent = _name(parent, tokens, extras[at] if at < len(extras) else None)
            self._names[block] = parent
            held.append(parent)
        told.append(Held(Level.ENGINE, ENGINE, SPACE, b"".join(held)))
        if (over := len(self._names) - self._max_blocks) > 0:
            forgotten = [self._names.popitem(last=False)[1] for _ in range(over)]
            told.append(Gone(Level.ENGINE, ENGINE, SPACE, b"".join(forgotten)))
        return told

    def _begin(self, block_tokens: int) -> list[AnyEvent]:
        """The largest block says how large they are."""
        self._names.clear()
        self.block_tokens = block_tokens
        namespace = blake2b(b"vllm" + block_tokens.to_bytes(4, "little"), digest_size=NAMESPACE_BYTES)
        return [
            Space(SPACE, namespace.digest(), "vllm", block_tokens, 0),
            EngineUp(ENGINE, self._name, SPACE),
            Cleared(Level.ENGINE, ENGINE),
        ]


def _counts(event: BlockStored | BlockRemoved) -> bool:
    """Whether it is about the engine's own cache, and of the groups the first: all prefixes have that."""
    return event.medium in (None, GPU) and event.group_idx in (None, 0)
